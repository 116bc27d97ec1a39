"""Recaptioning of rows with low similarity, with captioners whose captions are known."""

import random
from pathlib import Path

import numpy as np
import pytest
from loguru import logger

from dj2mgm.data.formats import build_dj_text
from dj2mgm.errors import InputError
from dj2mgm.juicer.operators.captioners import CANDIDATES_KEY, LOG_LIKELIHOODS, find_text_problem
from dj2mgm.juicer.patched_data_juicer import OPERATORS, Fields, Mapper, load_ops
from dj2mgm.storage.files import read_jsonl
from tiny_captioners import recaption, write_pairs
from tiny_clip import save_tiny_clip

RECAPTION, SIMILARITY = "low_similarity_recaption_mapper", "image_text_similarity_filter"
CAPTIONS = ["a red cat", "two dogs", "the sea", "a long road at night", "snow", "no one"]
EVERYTHING, NOTHING = 10.0, -10.0  # limits below and above all similarities


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return str(save_tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list]:
    """Return six rows with an image each, as Data-Juicer's columns."""
    data = write_pairs(tmp_path_factory.mktemp("pairs"), CAPTIONS)
    read = list(read_jsonl(data))
    images = [[str(data.parent / image) for image in row["images"]] for row in read]
    return {"id": [row["id"] for row in read], "text": [row["text"] for row in read], "images": images}


@pytest.fixture
def known_captioner(monkeypatch):
    """Return a function that registers a captioner with given candidates and, optionally, log-likelihoods."""

    def register(by_name: dict[str, list], likelihoods: dict[str, list] | None = None) -> dict:
        class KnownCaptioningMapper(Mapper):
            _batched_op = True
            stems: list[str] = []

            def process_batched(self, samples):
                for row, [image] in enumerate(samples["images"]):
                    self.stems.append(Path(image).stem)
                    candidates = by_name[Path(image).stem]
                    samples["text"][row] = build_dj_text(candidates[0])
                    if likelihoods is not None:
                        samples[Fields.meta][row][CANDIDATES_KEY] = np.array(candidates)
                        samples[Fields.meta][row][LOG_LIKELIHOODS] = np.array(likelihoods[Path(image).stem])
                return samples

        KnownCaptioningMapper._name = "known_captioning_mapper"
        monkeypatch.setitem(OPERATORS.modules, "known_captioning_mapper", KnownCaptioningMapper)
        return {"known_captioning_mapper": {"batch_size": 4}}

    return register


def similarity(clip: str, caption: str, image: str) -> float:
    """Return similarities of Data-Juicer's own filter."""
    [operator] = load_ops([{SIMILARITY: {"hf_clip": clip}}])
    sample = {"text": build_dj_text(caption), "images": [image], Fields.stats: {}}
    return float(operator.compute_stats_single(sample)[Fields.stats]["image_text_similarity"][0])


def original_similarities(clip: str, rows: dict[str, list]) -> list[float]:
    return [similarity(clip, caption, image) for caption, [image] in zip(CAPTIONS, rows["images"], strict=True)]


CANDIDATES_OF = {str(number): [f"{number} one", f"the {number} two", "three"] for number in range(6)}


def test_rows_below_get_the_jointly_most_likely_caption(clip, rows, known_captioner):
    rng = np.random.default_rng(1)
    likelihoods = {name: list(-20 * rng.random(3)) for name in CANDIDATES_OF}
    before = original_similarities(clip, rows)
    limit = float(np.mean(sorted(before)[2:4]))
    captioner = known_captioner(CANDIDATES_OF, likelihoods)
    recaptioned, report = recaption(rows, hf_clip=clip, min_similarity=limit, captioner=captioner)
    assert report == {"below": 3, "captioned": 3, "cached": 0, "unusable": {}, "min_similarity": limit}
    chosen = []
    for number, row in enumerate(recaptioned):
        if before[number] >= limit:
            assert row["text"] == rows["text"][number]
            assert row[Fields.meta]["recaption"] is None
            assert row[Fields.stats]["image_text_similarity"] == pytest.approx([before[number]], abs=1e-6)
            assert row[Fields.stats]["caption_log_likelihood"] == []
            continue
        [image] = rows["images"][number]
        scores = [similarity(clip, caption, image) for caption in CANDIDATES_OF[str(number)]]
        joint = [100 * score + value for score, value in zip(scores, likelihoods[str(number)], strict=True)]
        best = int(np.argmax(joint))
        chosen.append((best, int(np.argmax(scores)), int(np.argmax(likelihoods[str(number)]))))
        caption, value = CANDIDATES_OF[str(number)][best], likelihoods[str(number)][best]
        assert row["text"] == build_dj_text(caption)
        assert row[Fields.stats]["caption_log_likelihood"] == [value]
        assert row[Fields.stats]["image_text_similarity"] == pytest.approx([scores[best]], abs=1e-6)
        assert row[Fields.meta]["recaption"] == {
            "original": CAPTIONS[number],
            "original_similarity": pytest.approx(before[number], abs=1e-6),
            "caption": caption,
            "similarity": pytest.approx(scores[best], abs=1e-6),
            "log_likelihood": value,
            "problem": None,
        }
    assert len(chosen) == 3 and any(len(set(indices)) > 1 for indices in chosen), "the two models must differ somewhere"


def test_a_row_without_a_caption_is_recaptioned_at_any_limit(clip, rows, known_captioner):
    captioner = known_captioner({name: texts[:1] for name, texts in CANDIDATES_OF.items()})
    uncaptioned = rows | {"text": [build_dj_text(""), *rows["text"][1:]]}
    recaptioned, report = recaption(uncaptioned, hf_clip=clip, min_similarity=NOTHING, captioner=captioner)
    assert [row["text"] for row in recaptioned] == [build_dj_text("0 one"), *rows["text"][1:]]
    assert report["below"] == 1


def test_random_captions_depend_on_seed_and_images_only(clip, rows, monkeypatch, tmp_path):
    class DrawingCaptioningMapper(Mapper):
        _batched_op = True
        calls = 0

        def process_batched(self, samples):
            DrawingCaptioningMapper.calls += 1
            return samples | {"text": [build_dj_text(f"number {random.random()}") for _ in samples["text"]]}

    monkeypatch.setitem(OPERATORS.modules, "drawing_captioning_mapper", DrawingCaptioningMapper)

    def drawn(folder: str, **limit) -> list[str]:
        arguments = {"hf_clip": clip, "captioner": {"drawing_captioning_mapper": {"batch_size": 2}}}
        recaptioned, _ = recaption(rows, **arguments, captions_folder=str(tmp_path / folder), **limit)
        return [row["text"] for row in recaptioned]

    alone = drawn("alone", min_similarity=EVERYTHING)
    drawn("shared", keep_fraction=0.5)
    assert drawn("shared", min_similarity=EVERYTHING) == alone and len(set(alone)) == 6
    calls = DrawingCaptioningMapper.calls
    assert drawn("shared", min_similarity=EVERYTHING) == alone and DrawingCaptioningMapper.calls == calls
    [file] = (tmp_path / "alone").rglob("*.jsonl")
    # like after a kill in the middle of a batch
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:3]))
    assert drawn("alone", min_similarity=EVERYTHING) == alone and DrawingCaptioningMapper.calls == calls + 2


@pytest.mark.parametrize(("fraction", "count"), [(0.01, 1), (1.0, 6), (0.34, 2)])
def test_a_fraction_keeps_its_most_similar_rows(clip, rows, known_captioner, fraction, count):
    before = original_similarities(clip, rows)
    recaptioned, report = recaption(
        rows, hf_clip=clip, keep_fraction=fraction, captioner=known_captioner(CANDIDATES_OF)
    )
    untouched = [number for number, row in enumerate(recaptioned) if row["text"] == rows["text"][number]]
    assert untouched == sorted(np.argsort(before)[::-1][:count].tolist())
    assert report["min_similarity"] == pytest.approx(sorted(before, reverse=True)[count - 1], abs=2e-6)


def test_ties_with_the_last_kept_row_are_kept(clip, rows, known_captioner):
    same = {key: [values[2]] * 4 + values[:2] for key, values in rows.items()} | {"id": [f"t{i}" for i in range(6)]}
    before = original_similarities(clip, rows)
    assert (before[2] > before[0]) or (before[2] > before[1])
    recaptioned, report = recaption(same, hf_clip=clip, keep_fraction=0.5, captioner=known_captioner(CANDIDATES_OF))
    is_unchanged = [row["text"] == text for row, text in zip(recaptioned, same["text"], strict=True)]
    assert is_unchanged[:4] == [True] * 4 and report["below"] == is_unchanged.count(False)


def test_rows_without_exactly_one_image_are_not_changed(clip, rows, known_captioner):
    odd = {key: values[:3] for key, values in rows.items()}
    odd["images"] = [[], rows["images"][1] * 2, rows["images"][2]]
    odd["text"] = ["no image", build_dj_text("a") + build_dj_text("b"), rows["text"][2]]
    recaptioned, report = recaption(
        odd, hf_clip=clip, min_similarity=EVERYTHING, captioner=known_captioner(CANDIDATES_OF)
    )
    assert [row["text"] for row in recaptioned] == ["no image", odd["text"][1], build_dj_text("2 one")]
    assert report["below"] == 1


@pytest.mark.parametrize(
    ("caption", "problem"),
    [
        ("a red cat", None),
        ("", "empty"),
        ("x" * 21, "too long"),
        ("a <|endoftext|> b", "control token"),
        ("a <__dj__image> b", "control token"),
        ("one\ntwo", "control character"),
        ("a <b>cat</b>", "markup"),
        ("a **cat**", "markup"),
        ("it. ASSISTANT: no", "control token"),
        ("3 < 4 | 5 > 2", None),
    ],
)
def test_reasons_why_a_caption_is_unusable(caption, problem):
    assert find_text_problem(caption, max_length=20) == problem


def test_unusable_candidates_are_skipped_and_counted(clip, rows, known_captioner):
    candidates = dict(CANDIDATES_OF) | {"0": ["", "good"], "1": ["", "y" * 30], "2": ["y" * 30], "3": ["<s> x"]}
    captioner = known_captioner(candidates, {name: [-1.0] * len(texts) for name, texts in candidates.items()})
    warnings: list[str] = []
    sink = logger.add(warnings.append, level="WARNING", format="{message}")
    recaptioned, report = recaption(
        rows, hf_clip=clip, min_similarity=EVERYTHING, captioner=captioner, max_caption_length=20
    )
    logger.remove(sink)
    assert report["unusable"] == {"control token": 1, "empty": 1, "too long": 1}
    assert "3 of 6 images got no usable caption (1 control token, 1 empty, 1 too long)" in warnings[0]
    assert recaptioned[0]["text"] == build_dj_text("good")
    for number, problem in ((1, "empty"), (2, "too long"), (3, "control token")):
        assert recaptioned[number]["text"] == rows["text"][number]
        record = recaptioned[number][Fields.meta]["recaption"]
        assert (record["caption"], record["similarity"], record["problem"]) == (None, None, problem)
        assert recaptioned[number][Fields.stats]["image_text_similarity"] == [record["original_similarity"]]


def test_a_captioner_without_usable_captions_is_an_error(clip, rows, known_captioner):
    captioner = known_captioner({name: ["z" * 600] for name in CANDIDATES_OF})
    with pytest.raises(InputError, match="known_captioning_mapper: 6 of 6 .*6 too long.*'zzz.*name another one"):
        recaption(rows, hf_clip=clip, min_similarity=EVERYTHING, captioner=captioner)
    odd = rows | {"text": [rows["text"][0], *["no image"] * 5]}
    recaptioned, report = recaption(odd, hf_clip=clip, min_similarity=EVERYTHING, captioner=captioner)
    assert report["unusable"] == {"too long": 1} and report["below"] == 1, "one image decides nothing"
    assert [row["text"] for row in recaptioned] == odd["text"]


def test_a_captioner_that_adds_rows_is_an_error(clip, rows, monkeypatch):
    class TwiceMapper(Mapper):
        _batched_op = True

        def process_batched(self, samples):
            return {key: values * 2 for key, values in samples.items()}

    monkeypatch.setitem(OPERATORS.modules, "twice_mapper", TwiceMapper)
    with pytest.raises(InputError, match="twice_mapper returned 8 rows for 4.*keep_original_sample: false"):
        recaption(rows, hf_clip=clip, min_similarity=EVERYTHING, captioner={"twice_mapper": {"batch_size": 4}})
