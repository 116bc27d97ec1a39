"""The check of a dataset: counts of the dataset stage, problems with their remedy, lengths, power of a comparison."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from PIL import Image

import check_dataset
import make_dataset
from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.images import BadImageError, load_image, locate_image
from dj2mgm.dataset_resolution.experiment_dataset import Dataset, resolve_dataset
from dj2mgm.features.check.check_page import (
    iterate_sentences,
    list_power_sentences,
    write_check_page,
    write_console_text,
)
from dj2mgm.features.check.dataset_check import IMAGE_PROBLEMS, CheckSettings, DatasetCheck, LeftOut
from dj2mgm.features.check.dataset_check import check_dataset as check_folder
from dj2mgm.reporting.verdicts.decision_cost import TYPICAL_NOISE, Noise, compute_expected_contrast
from dj2mgm.settings.training_stages import FinetuneSection, describe_steps
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl, write_text, write_yaml
from paths import PROJECT
from run_main import run_main
from source_files import CAPTIONS, IMAGES, WRITERS, png, write_tar

TOKENIZER = PROJECT / "config/foundation/tiny/language_model/tokenizer.json"


def build_settings(dataset: Dataset, **changes) -> dict:
    power = {"headline": "answer_probability", "experiment": "dj_synth", "images": 500, "images_are_known": False}
    return {
        "dataset": dataset.name,
        "note": dataset.note,
        "keys": {"dataset": "mine", "model": "qwen3-vl-2b"},
        "fetches_model": True,
        "images": dataset.images,
        "model": "tiny",
        "tokenizer": str(TOKENIZER),
        "stages": {},
        "max_samples": 10_000,
        "max_length": 256,
        "refuses_bad_rows": True,
        "report": {},
        "power": power | {"seeds": 1, "finished": {}},
    } | changes


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Return a function that makes a dataset, and checks it."""
    monkeypatch.chdir(tmp_path)

    def check(name: str, **changes) -> DatasetCheck:
        # absolute, because resolved folders of images are cached
        dataset = resolve_dataset(name if Path(f"config/datasets/{name}.yaml").is_file() else str(tmp_path / name))
        folder = Path("results/datasets", dataset.name)
        write_yaml(folder / "config.yaml", dataset.settings.file_content())
        done = run_main(make_dataset, "--config", f"{folder}/config.yaml", "--output-dir", str(folder), capture=capsys)
        assert done.status == 0, done.stderr
        write_yaml(folder / "check/config.yaml", build_settings(dataset, **changes))
        return check_folder(CheckSettings.model_validate(build_settings(dataset, **changes)), folder)

    return check


def write_pairs(folder: Path, captions: dict[str, str]) -> None:
    folder.mkdir()
    for number, name in enumerate(captions):
        (folder / f"{name}.png").write_bytes(png(number % 24) + name.encode())  # all differ
    rows = ({"id": name, "text": build_dj_text(text), "images": [f"{name}.png"]} for name, text in captions.items())
    write_jsonl(folder / "rows.jsonl", rows)


def damage_table(folder: Path) -> None:
    (folder / "005.png").unlink()
    (folder / "006.png").write_bytes(b"")


def damage_folder(folder: Path) -> None:
    for name in ("001", "002", "003", "004"):
        (folder / f"{name}.txt").unlink()
    (folder / "005.png").write_bytes(IMAGES["005"][:40])
    (folder / "photo.heic").touch()


def damage_webdataset(folder: Path) -> None:
    write_tar(folder / "00002.tar", [("a.png", png(30)), ("b.png", b"no image"), ("b.txt", b"a caption")])


DAMAGES = {"table": damage_table, "folder": damage_folder, "webdataset": damage_webdataset}


def is_unreadable(root: str, image: str) -> bool:
    try:
        load_image(locate_image(root, image))
    except BadImageError:
        return True
    return False


@pytest.mark.parametrize("form", DAMAGES)
def test_counts_are_those_of_the_dataset_stage(check, tmp_path, form):
    WRITERS[form](tmp_path / "mine")
    DAMAGES[form](tmp_path / "mine")
    [pairs] = (result := check("mine")).splits
    folder = tmp_path / "results/datasets/mine"
    summary = read_json(folder / "summary.json")
    assert (pairs.written, result.held_out) == (summary["pretrain"], summary["evaluation"])
    uncaptioned = summary["sources"]["captions"].get("uncaptioned", 0)
    assert pairs.rows == pairs.trained + sum(part.count for part in (*pairs.left_out, *pairs.bad))
    assert pairs.rows == summary["sources"]["captions"]["rows"] + uncaptioned
    bad = [
        row for row in read_jsonl(folder / "pretrain.jsonl") if is_unreadable(f"{folder}/sources.json", *row["images"])
    ]
    assert sum(part.count for part in pairs.bad) == len(bad) == {"table": 2}.get(form, 1)
    text = write_console_text(result, Path("check.html"))
    assert f"Pairs: {pairs.written - len(bad)} of {pairs.rows} rows to train on; unusable: " in (" ".join(text.split()))
    assert not any("+" in name for part in pairs.bad for name in part.examples), "names in tar files"
    assert text.index("unusable") < text.index("held-out images"), "faults first"


def test_reasons_have_up_to_three_names(check, tmp_path):
    WRITERS["folder"](tmp_path / "mine")
    damage_folder(tmp_path / "mine")
    (tmp_path / "mine/lost.txt").write_text("a caption")
    (tmp_path / "link").symlink_to("mine")
    result = check("link")  # names are relative to the folder
    [pairs] = result.splits
    left_out = {part.reason: part for part in pairs.left_out}
    assert left_out["without a caption"].count == 4
    assert left_out["without a caption"].examples == ("001.png", "002.png", "003.png")
    assert list(left_out) == ["without a caption", "about held-out images"], "faults first"
    assert left_out["about held-out images"].examples == ()
    [unread] = result.not_read
    assert (unread.count, unread.examples) == (2, ("lost.txt", "photo.heic"))
    assert unread.reason == "1 .heic, 1 .txt without an image that can be read"
    assert [part.examples for part in pairs.bad] == [("005.png",)]


@pytest.mark.parametrize("form", ["arrow", "webdataset"])
def test_images_in_shards_and_tables_have_their_file_names(check, tmp_path, form):
    WRITERS[form](tmp_path / "mine")
    result = check("mine")
    assert {row.name for row in result.shown} <= {f"{key}.png" for key in IMAGES}


def test_shown_rows_are_spread_and_have_small_images(check, tmp_path):
    write_pairs(tmp_path / "mine", {f"{number:03d}": f"a caption {number}" for number in range(60)})
    shown = check("mine").shown
    positions = [int(row.name.removesuffix(".png")) for row in shown]
    assert len(shown) == 10 and positions[0] < 6 and positions[-1] > 50 and positions == sorted(positions)
    assert all(row.image.startswith("data:image/webp;base64,") and len(row.image) < 20_000 for row in shown)
    assert shown[0].text == f"a caption {positions[0]}"


def test_a_problem_names_the_file_that_corrects_it(check, tmp_path):
    WRITERS["table"](tmp_path / "photos")
    (tmp_path / "elsewhere").mkdir()
    for name in list(CAPTIONS)[4:]:
        (tmp_path / "photos" / f"{name}.png").rename(tmp_path / "elsewhere" / f"{name}.png")
    problem = check("photos").problem
    assert "with a missing image" in problem and f"photos: 20 of {len(CAPTIONS)} rows" in problem, "of the user's rows"
    [description] = re.findall("`({.*})`", problem)
    [file] = re.findall(r"save this as (\S+),", problem)
    for name in list(CAPTIONS)[:4]:
        (tmp_path / "photos" / f"{name}.png").rename(tmp_path / "elsewhere" / f"{name}.png")
    write_text(file, description.replace("<folder of the images>", "elsewhere"))
    assert yaml.safe_load(description)["sources"]["captions"]["format"] == "table"
    corrected = check(Path(file).stem)
    assert corrected.problem == "" and corrected.splits[0].rows == len(CAPTIONS)


def test_empty_captions_are_a_problem(check, tmp_path):
    captions = {f"{number:03d}": "" if number % 2 else "a caption" for number in range(30)}
    write_pairs(tmp_path / "mine", captions)
    result = check("mine")
    assert "captions are empty; the first is that of" in result.problem
    [[name, *_]] = [part.examples for part in result.splits[0].bad]
    assert (tmp_path / "mine" / name).is_file() and name in result.problem
    assert "15 of 30 captions" in result.problem, "of the user's rows, as on the page"


def test_lengths_are_counted_in_words_and_tokens(check, tmp_path):
    write_pairs(tmp_path / "mine", {f"{number:03d}": "a " * (number + 1) for number in range(100)})
    [pairs] = check("mine", max_length=50).splits
    assert pairs.words.longest in range(95, 101) and pairs.words.median in range(45, 56)
    assert pairs.tokens.longest >= pairs.words.longest and pairs.measured == pairs.written
    assert 40 <= pairs.cut <= 55
    result = check("mine", tokenizer="")
    assert result.splits[0].tokens is None
    text = " ".join(write_console_text(result, Path("check.html")).split())
    assert "not on this machine; `snakemake fetch --config model=qwen3-vl-2b` downloads it." in text


def test_few_photos_are_passed_over_many_times_as_plan_states(check, tmp_path):
    steps = {"epochs": 1, "max_steps": None, "min_steps": 30, "lr_scheduler": "constant", "warmup_ratio": 0}
    write_pairs(tmp_path / "mine", {f"{number:03d}": "a caption" for number in range(240)})
    result = check("mine", stages={"finetune": steps | {"global_batch_size": 128}})
    text = describe_steps("finetune", FinetuneSection(global_batch_size=128, **steps), 216)
    assert result.steps == [f"{text}."] and "15 passes over the same 216 rows may memorize them" in text
    assert text in " ".join(write_console_text(result, Path("check.html")).split())
    two = {"pretrain": steps | {"global_batch_size": 1}, "finetune": steps | {"global_batch_size": 128}}
    assert len(check("mine", stages=two).steps) == 1


def test_power_is_that_of_the_deciding_score(check, tmp_path):
    write_pairs(tmp_path / "mine", {f"{number:03d}": "a caption" for number in range(240)})
    result = check("mine")
    [captions] = result.power
    printed = write_console_text(result, Path("check.html"))
    answer = " ".join(printed[printed.index("Enough for a verdict?") : printed.index("Thumbnails")].split())
    assert re.findall(r"\d\.\d+", answer) == [size.difference for size in captions.sizes]
    assert answer.startswith("Enough for a verdict? Yes, for differences of at least 0.129 in the log-likelihood of ")
    assert "50 % of what dj_synth gains" in answer and "500 held-out images (5,000 photos)" in answer
    noise = TYPICAL_NOISE["caption_log_likelihood"]
    smallest = compute_expected_contrast(Noise(noise, noise / 500**0.5, ("", "")), 24, 3).compute_detectable()
    assert (captions.sizes[0].images, captions.sizes[0].difference) == (24, f"{smallest:.3f}")
    assert captions.sizes[0].share == pytest.approx(smallest / 0.256)
    assert captions.sizes[1].images == 500 and float(captions.sizes[1].difference) < smallest / 2
    questions = [{"type": "x", "question": "What?", "answer": "a"}]
    rows = ({"id": f"e{n}", "image": f"{n:03d}.png", "captions": ["a"], "questions": questions} for n in range(9))
    write_jsonl(tmp_path / "mine/evaluation.jsonl", rows)
    metrics = check("mine").power
    assert [metric.title for metric in metrics] == ["probability of the right answer", "VQA accuracy"]
    assert all(metric.sizes[0].difference.endswith(" points") for metric in metrics)


def test_the_verdict_is_no_if_only_large_differences_are_found(check, tmp_path):
    write_pairs(tmp_path / "mine", {f"{number:03d}": "a caption" for number in range(240)})
    result = check("mine")
    [captions] = result.power
    [now, more] = captions.sizes
    for share, start in (
        (9.51, "No: only differences of at least 2.426 in the "),
        (None, "For differences of at least "),
    ):
        sizes = [replace(now, difference="2.426", share=share), more]
        changed = replace(result, power=[replace(captions, sizes=sizes)])
        [answer, _] = list_power_sentences(changed)
        assert answer.startswith(start) and ("951 % of what" in answer) == (share is not None)
        assert "A comparison with 3 seeds finds a difference of this size in four of five cases." in answer
    few = replace(result, power=[replace(captions, sizes=[more])])
    assert list_power_sentences(few)[0].startswith("No. With 500 held-out images")


def test_console_fits_80_columns_and_fails_with_the_problem(check, tmp_path, capsys):
    write_pairs(tmp_path / "mine", {f"{number:03d}": "<b>\u202ea caption" if number else "" for number in range(30)})
    result = check("mine")
    text = write_console_text(result, Path("check.html"))
    assert (
        all(len(line) <= 80 or " " not in line.strip() for line in text.partition("Train on")[0].splitlines())
        and "fetch --config model=qwen3-vl-2b && snakemake baseline --config dataset=mine model=qwen3-vl-2b" in text
        and "26 of 30 rows to train on" in text
        and "1 with an empty caption" in " ".join(text.split())
    )
    sample = replace(result.splits[0], written=1000, opened=10, bad=[LeftOut(IMAGE_PROBLEMS["undecodable"], 2)])
    assert "Of all rows, about 200 may have a damaged image." in iterate_sentences(sample, result)
    for name in range(20):
        (tmp_path / f"mine/{name:03d}.png").unlink()
    check("mine")
    folder = "results/datasets/mine"
    arguments = ["--config", f"{folder}/check/config.yaml", "--dataset", folder, "--output-dir", f"{folder}/check"]
    assert run_main(check_dataset, *arguments, capture=capsys).status == 0
    [line] = (tmp_path / folder / "check/check.txt").read_text(encoding="utf-8").splitlines()
    assert line.startswith("error: mine: ") and line.endswith("check/check.html") and "snakemake baseline" not in line
    page = (tmp_path / folder / "check/check.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;" in page and "<b>" not in page and "\u202e" not in page and "http" not in page
    assert "cannot be used" in page and "Enough for a verdict" not in page and "snakemake baseline" not in page


def test_the_page_has_commands_without_backticks(check, tmp_path):
    write_pairs(tmp_path / "mine", {f"{number:03d}": "a <i> caption" for number in range(30)})
    write_check_page(replace(check("mine"), problem="run `a <b>`"), tmp_path / "check.html")
    page = (tmp_path / "check.html").read_text(encoding="utf-8")
    assert "<code>a &lt;b&gt;</code>" in page and "a &lt;i&gt; caption" in page and "`" not in page


def test_photos_in_other_formats_are_a_problem(check, tmp_path):
    write_pairs(tmp_path / "photos", {f"{number:03}": "a red circle" for number in range(24)})
    (tmp_path / "photos/rows.jsonl").unlink()
    for path in list((tmp_path / "photos").iterdir()):
        path.with_suffix(".txt").write_text("a red circle")
    for number in range(3):
        (tmp_path / f"photos/{number}.HEIC").write_bytes(b"x")
        (tmp_path / f"photos/{number}.txt").write_text("a blue square")
    problem = check("photos").problem
    assert "3 photos cannot be read (.heic); convert" in problem and "*.[hH][eE][iI][cC]`" in problem


@pytest.mark.parametrize("brand", ["heic", "avif"])
def test_renamed_heif_is_converted_and_not_restored(check, tmp_path, brand):
    write_pairs(tmp_path / "photos", {f"{number:03}": "a red circle" for number in range(24)})
    for number in range(12):
        (tmp_path / f"photos/{number:03}.png").write_bytes(b"\0\0\0\x18ftyp" + brand.encode() + b"0" * number)
    (tmp_path / "photos/000.png").write_bytes(b"damaged")
    (tmp_path / "photos/001.png").write_bytes(b"damaged, too")
    problem = check("photos").problem
    assert re.search(r"the first image is 0(0[2-9]|1[01])\.png", problem), "one of the named format"
    assert "in the format HEIF or AVIF" in problem and "convert the photos to JPEG" in problem
    assert "Restore" not in problem and "right value" not in problem


def test_large_images_are_named_for_models_that_keep_their_size(check, tmp_path):
    write_pairs(tmp_path / "photos", {f"{number:03}": "a red circle" for number in range(24)})
    Image.new("RGB", (2400, 1000)).save(tmp_path / "photos/011.png")
    Image.new("RGB", (1000, 1000)).save(tmp_path / "photos/012.png")
    text = " ".join(write_console_text(check("photos"), Path("check.html")).split())
    assert "The largest opened image has 2400 × 1000 pixels." in text and "about 2,343 tokens" in text
