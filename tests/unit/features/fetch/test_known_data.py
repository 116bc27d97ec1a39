"""`fetch.py` for datasets and benchmarks in config/hub, with small files in the layout of the real repositories."""

import csv
import io
import json
import shutil
import zipfile
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dj2mgm.data.sources.parquet import read_parquet
from dj2mgm.data.sources.source import Source, read_llava_files
from dj2mgm.dataset_resolution.experiment_dataset import find_hub_dataset, resolve_dataset
from dj2mgm.errors import InputError
from dj2mgm.features.challenge.benchmarks import load_benchmark, read_questions
from dj2mgm.features.fetch.known_data import _read_entry, _write_parquet, find_hub_benchmark
from dj2mgm.settings.config_files import list_config_names
from hub_scripts import run_fetch
from hub_server import HubServer, Repository

ROWS = 30
LLAVA, FINEVISION = "datasets/liuhaotian/LLaVA-Pretrain", "datasets/HuggingFaceM4/FineVision"


def image(seed: int, kind: str = "JPEG") -> bytes:
    content = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def encode_parquet(rows: list[dict]) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), content, row_group_size=4)
    return content.getvalue()


def llava_pretrain(compression: int = zipfile.ZIP_STORED) -> dict[str, bytes]:
    rows, archive = [], io.BytesIO()
    with zipfile.ZipFile(archive, "w", compression) as file:
        for number in range(ROWS):
            name = f"{number % 3:05d}/{number:09d}.jpg"
            file.writestr(name, image(number))
            turns = [
                {"from": "human", "value": "Render a clear and concise summary of the photo.\n<image>"},
                {"from": "gpt", "value": f"photo number {number}"},
            ]
            rows.append({"id": f"{number:09d}", "image": name, "conversations": turns})
    meta = b"[]"
    return {
        "README.md": b"---\nlicense: other\n---\n",
        "blip_laion_cc_sbu_558k.json": json.dumps(rows[::-1]).encode(),
        "blip_laion_cc_sbu_558k_meta.json": meta,
        "images.zip": archive.getvalue(),
    }


def finevision() -> dict[str, bytes]:
    rows = [
        {
            "images": [{"bytes": image(number, "PNG"), "path": None}],
            "texts": [{"user": f"What is number {number}?", "assistant": f"It is {number}."}],
            "source": "chartqa",
            "relevance_min": 4,
        }
        for number in range(ROWS)
    ]
    parts = {f"chartqa/train-{part:05d}-of-00003.parquet": encode_parquet(rows[part * 10 :][:10]) for part in range(3)}
    return {"README.md": b"---\n", "vqav2/train-00000-of-00001.parquet": b"other", **parts}


def textvqa() -> dict[str, bytes]:
    rows = [
        {
            "image_id": f"{number // 2:016x}",
            "question_id": 34602 + number,
            "question": f"what is brand {number}?",
            "image": {"bytes": image(number // 2, ("JPEG", "WEBP")[number // 2 % 2]), "path": None},
            "answers": ["nous les gosses"] * 9 + ["dakota"],
            "ocr_tokens": ["DAKOTA", "two\nlines"],
            "set_name": "val",
        }
        for number in range(8)
    ]
    names = [f"data/validation-{part:05d}-of-00002.parquet" for part in range(2)]
    others = {"data/train-00000-of-00020.parquet": b"others", "data/test-00000-of-00004.parquet": b"others"}
    return others | {name: encode_parquet(rows[part * 4 :][:4]) for part, name in enumerate(names)}


def mmbench() -> dict[str, bytes]:
    rows = []
    for index in (241, 252):
        for rotation in range(2):
            rows.append(
                {
                    "index": index + 1_000_000 * rotation,
                    "question": 'Which "one"\tis\nright?',
                    "hint": "nan",
                    "answer": "AB"[rotation],
                    "A": ["right", "wrong"][rotation],
                    "B": ["wrong", "right"][rotation],
                    "C": "nan",
                    "D": "nan",
                    "category": "object_localization",
                    "image": {"bytes": image(index), "path": None},
                    "source": "nan",
                    "L2-category": "finegrained_perception",
                    "comment": "nan",
                    "split": "dev",
                }
            )
    return {"en/dev-00000-of-00001.parquet": encode_parquet(rows), "cn/dev-00000-of-00001.parquet": b"other"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with HubServer() as hub:
        for name, files in {
            LLAVA: llava_pretrain(),
            FINEVISION: finevision(),
            "datasets/lmms-lab/textvqa": textvqa(),
            "datasets/lmms-lab/MMBench": mmbench(),
        }.items():
            hub.repositories[name] = Repository(False, files)
        yield hub


@pytest.fixture
def fetch(tmp_path):
    return partial(run_fetch, tmp_path)


def test_only_images_of_the_requested_rows_are_fetched(hub, fetch, tmp_path):
    with pytest.raises(InputError, match="run `snakemake fetch --config dataset=llava-pretrain` first.*license other"):
        resolve_dataset("llava-pretrain")
    done = fetch(hub.url, dataset="llava-pretrain", fetch={"rows": 7})
    assert done.returncode == 0, done.stderr
    assert "license other" in done.stdout and "images of 7 rows from images.zip" in done.stdout
    requests = sum(1 for method, file, _ in hub.sent if method == "GET" and file == "images.zip")
    assert requests < 7 + 6
    folder = tmp_path / "downloads/llava-pretrain"
    assert {path.name for path in folder.rglob("*.jpg")} == {f"{number:09d}.jpg" for number in range(ROWS - 7, ROWS)}
    assert (folder / "00002/000000029.jpg").read_bytes() == image(29)
    dataset = resolve_dataset("llava-pretrain")
    [source] = dataset.settings.sources.values()
    assert (source.format, dataset.name, source.images) == ("llava", "llava-pretrain", "downloads/llava-pretrain")
    assert dataset.settings.licenses == {"captions": "other"} and "license" not in str(dataset.settings.file_content())
    rows = list(read_llava_files(Source("x", (folder / "rows.json",), folder)))
    assert [row["conversations"][1]["value"] for row in rows] == [f"photo number {29 - number}" for number in range(7)]
    assert {file for _, file, _ in hub.sent} == {"images.zip", "blip_laion_cc_sbu_558k.json"}


def test_an_interrupted_download_of_images_continues(hub, fetch, tmp_path):
    hub.repositories[LLAVA].files = llava_pretrain(zipfile.ZIP_DEFLATED)
    hub.fails = lambda path, number: 400 if path.endswith("images.zip") and number > 5 else None
    done = fetch(hub.url, dataset="llava-pretrain", fetch={"rows": 20})
    assert done.returncode and "run the same command again" in done.stderr and "Traceback" not in done.stderr
    with pytest.raises(InputError, match="is not on this machine"):
        resolve_dataset("llava-pretrain")
    hub.fails = lambda path, number: None
    before = len(list((tmp_path / "downloads").rglob("*.jpg")))
    hub.sent.clear()
    assert fetch(hub.url, dataset="llava-pretrain", fetch={"rows": 20}).returncode == 0
    assert (
        0 < before < 20
        and len([request for request in hub.sent if request[:2] == ("GET", "images.zip")]) < 20 - before + 6
    )
    hub.requests.clear()
    assert "nothing to fetch" in fetch(hub.url, dataset="llava-pretrain", fetch={"rows": 20}).stdout
    assert hub.requests == []


def test_damaged_or_impossible_images_are_refused(hub, fetch, tmp_path):
    files = hub.repositories[LLAVA].files
    good = files["images.zip"]
    at = good.index(image(29))
    files["images.zip"] = good[: at + 50] + b"\0\0\0\0" + good[at + 54 :]
    done = fetch(hub.url, dataset="llava-pretrain", fetch={"rows": 3})
    assert done.returncode and "000000029.jpg differs from its checksum" in done.stderr
    offset = good.rindex(b"PK\x01\x02") + 42  # in the entry of the first row's image, which is the last one
    files["images.zip"] = good[:offset] + (2**31).to_bytes(4, "little") + good[offset + 4 :]
    done = fetch(hub.url, dataset="llava-pretrain", fetch={"rows": 3})
    assert done.returncode == 2 and "000000029.jpg lies outside of the zip file" in done.stderr
    rows = json.loads(files["blip_laion_cc_sbu_558k.json"])
    rows[0]["image"] = "../../mine.jpg"
    hub.repositories[LLAVA].files = files | {"blip_laion_cc_sbu_558k.json": json.dumps(rows).encode()}
    shutil.rmtree(tmp_path / "home")
    done = fetch(hub.url, dataset="llava-pretrain", fetch={"rows": 3})
    assert done.returncode == 2 and "../../mine.jpg is not a path of an image" in done.stderr


def test_entries_with_a_wrong_size_are_refused():
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.jpg", bytes(2**20))
        [entry] = file.infolist()
    content, entry.file_size = archive.getvalue(), 0
    for read in (lambda start, end: content[start:end], lambda *_: b"PK", lambda start, end: b"\xff" * (end - start)):
        with pytest.raises(ValueError, match="checksum|cut off|damaged"):
            _read_entry(read, entry)


def test_an_endless_or_slow_answer_is_refused(hub, fetch):
    hub.endless.add("images.zip")
    done = fetch(hub.url, dataset="llava-pretrain", fetch={"rows": 3})
    assert done.returncode == 2 and "the answer has more than the expected" in done.stderr
    hub.endless.clear()
    hub.repositories[LLAVA].files["images.zip"] = bytes(2000)
    hub.trickling.add("images.zip")
    done = fetch(hub.url, timeout=1, dataset="llava-pretrain", fetch={"rows": 3})
    assert done.returncode == 2 and "is too slow" in done.stderr and "Traceback" not in done.stderr


def test_parts_with_different_schemas_are_merged_or_refused(tmp_path):
    first, second = tmp_path / "0.parquet", tmp_path / "1.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "number": pa.array([1, 2], pa.int64())}), first)
    words = pa.array(["c", "d"]).dictionary_encode()
    pq.write_table(pa.table({"number": pa.array([3, 4], pa.int32()), "more": [0, 0], "text": words}), second)
    assert _write_parquet([first, second], 3, tmp_path / "all.parquet") == 3
    assert pq.read_table(tmp_path / "all.parquet").to_pydict() == {"text": ["a", "b", "c"], "number": [1, 2, 3]}
    for other in ({"text": ["c"]}, {"text": ["c"], "number": ["three"]}):
        pq.write_table(pa.table(other), second)
        with pytest.raises(InputError, match="1.parquet cannot be joined to the dataset's first part"):
            _write_parquet([first, second], None, tmp_path / "all.parquet")


def test_few_files_with_the_requested_rows_are_fetched(hub, fetch, tmp_path):
    done = fetch(hub.url, dataset="finevision/chartqa", fetch={"rows": 15})
    assert done.returncode == 0, done.stderr
    assert "in 2 files" in done.stdout and "to downloads/finevision/chartqa" in done.stdout
    assert not any("00002-of" in path or "vqav2" in path for path in hub.requests if "resolve" in path)
    dataset = resolve_dataset("finevision/chartqa")
    [source] = dataset.settings.sources.values()
    assert (dataset.name, source.format) == ("chartqa", "parquet")
    [file] = (tmp_path / "downloads/finevision/chartqa").glob("*.parquet")
    rows = list(read_parquet(Source("x", (file,), file.parent, output=tmp_path / "copied")))
    assert [row["conversations"][1]["value"] for row in rows] == [f"It is {number}." for number in range(15)]


def test_the_evaluation_reads_fetched_benchmarks(hub, fetch, tmp_path):
    done = fetch(hub.url, fetch={"benchmarks": ["textvqa", "mmbench"]})
    assert done.returncode == 0, done.stderr
    assert "dataset lmms-lab/textvqa: license cc-by-4.0" in done.stdout and "license apache-2.0" in done.stdout
    assert "{textvqa: {questions: downloads/textvqa/questions.jsonl, answers: " in done.stdout
    folder = tmp_path / "downloads/textvqa"
    questions = list(read_questions("textvqa", {key: folder / name for key, name in TEXTVQA.items()}))
    assert [row["id"] for row in questions] == [str(34602 + number) for number in range(8)]
    lines = ["What is brand 0?", "Reference OCR token: DAKOTA, two lines"]
    assert questions[0]["prompt"].split("\n")[:2] == lines and questions[0]["variant"] == "ocr_tokens"
    images = sorted((folder / "images").iterdir())
    assert [path.suffix for path in images] == [".jpg", ".webp", ".jpg", ".webp"]
    answered = [row | {"prediction": "nous les gosses"} for row in questions]
    assert load_benchmark("textvqa").measure(answered)["score"].values == pytest.approx(100)

    table = tmp_path / "downloads/mmbench/questions.tsv"
    questions = list(read_questions("mmbench", {"questions": table}))
    assert {row["variant"] for row in questions} == {"circular"} and len({row["image_id"] for row in questions}) == 2
    assert questions[0]["question"] == 'Which "one"\tis\nright?' and questions[0]["options"] == {
        "A": "right",
        "B": "wrong",
    }
    assert load_benchmark("mmbench").measure([row | {"prediction": row["answer"]} for row in questions])[
        "score"
    ].values == pytest.approx(100)
    with open(table, newline="") as file:
        assert [row["image"] for row in csv.DictReader(file, dialect="excel-tab")][1] == "241"


TEXTVQA = {"questions": "questions.jsonl", "answers": "answers.json", "images": "images"}


def test_an_unknown_subset_and_missing_rows_are_reported(hub, fetch):
    done = fetch(hub.url, dataset="finevision/nonsense")
    assert done.returncode == 2 and "has no files nonsense/train-*.parquet; correct the subset's name" in done.stderr
    assert hub.sent == []
    done = fetch(hub.url, dataset="finevision/chartqa", fetch={"rows": 40})
    assert done.returncode == 0, done.stderr
    assert f"HuggingFaceM4/FineVision has only {ROWS} of the 40 requested rows" in done.stdout


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (find_hub_dataset, "finevision", "name one of its subsets, dataset=finevision/<subset>"),
        (find_hub_dataset, "llava-pretrain/x", "it has no subsets; write dataset=llava-pretrain"),
        (find_hub_dataset, "textvqa", "textvqa is a benchmark; fetch it with --config 'fetch={benchmarks: [textvqa]}'"),
        (find_hub_benchmark, "textqva", "did you mean 'textvqa'?"),
    ],
)
def test_wrong_names_are_refused(find, name, message):
    with pytest.raises(InputError) as error:
        find(name)
    assert message in str(error.value)


def test_known_hub_names_are_not_names_of_datasets():
    assert not set(list_config_names("hub")) & {*list_config_names("datasets"), *list_config_names("models")}
