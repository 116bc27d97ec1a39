"""`dataset=<folder or file>` gives the same rows for every format, and offers choices instead of guessing."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store

import make_dataset
from dj2mgm.data.formats import build_dj_text, extract_caption, read_evaluation, read_pairs
from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.dataset_resolution.experiment_dataset import (
    Dataset,
    list_image_path_files,
    resolve_amounts,
    resolve_dataset,
)
from dj2mgm.dataset_resolution.file_samples import read_sample
from dj2mgm.errors import InputError
from dj2mgm.features.publish.exports import WRITERS as EXPORTS
from dj2mgm.features.publish.exports import Sample
from dj2mgm.settings.dataset_files import FilesDataset
from dj2mgm.storage.files import read_jsonl, write_json, write_json_list, write_jsonl, write_yaml
from dj2mgm.storage.fingerprints import Fingerprints
from dj2mgm.storage.image_files import advise_unpacking_images, read_file
from run_main import run_main
from source_files import (
    CAPTIONS,
    IMAGES,
    WRITERS,
    data_juicer,
    llava,
    parquet,
    png,
    table,
    webdataset,
    write_loose,
    write_tar,
)
from source_files import folder as captioned_images


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    """Make an empty current folder and an empty cache of the hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def export(kind: str):
    def write(folder: Path) -> Path:
        write_loose(folder.parent / "loose")
        folder.mkdir()
        texts = {"question": "", "original_caption": "an earlier caption", "source": "web"}
        rows = [
            Sample(key, folder.parent / f"loose/{key}.png", text, **texts, scores={"clip": 0.5})
            for key, text in CAPTIONS.items()
        ]
        EXPORTS[kind](rows, folder)
        (folder / "README.md").write_text("# A card\n")
        return folder

    return write


def tsv(folder: Path) -> Path:
    return table(folder, "tsv", "\t")


def semicolons(folder: Path) -> Path:
    return table(folder, "csv", ";")


def csv_with_tabs(folder: Path) -> Path:
    return table(folder, "csv", "\t")


def metadata(folder: Path, suffix: str = "jsonl") -> Path:
    """Write the images and the list of Hugging Face's ImageFolder."""
    write_loose(folder)
    write_rows = write_jsonl if suffix == "jsonl" else write_json_list
    write_rows(folder / f"rows.{suffix}", ({"file_name": f"{key}.png", "text": text} for key, text in CAPTIONS.items()))
    return folder / f"rows.{suffix}"


def json_table(folder: Path) -> Path:
    return metadata(folder, "json")


def excel(folder: Path) -> Path:
    """Write a table whose first line states its separator."""
    path = table(folder, "csv", ";")
    path.write_text("sep=;\r\n" + path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    return path


def indexed(folder: Path) -> Path:
    """Write a table with pandas' index, a column of words without a name."""
    path = table(folder)
    index = [f"photo {number}" for number in range(len(CAPTIONS))]
    pd.read_csv(path).rename(columns={"caption": "words"}).set_index(pd.Index(index)).to_csv(path)
    return path


def data_juicer_list(folder: Path) -> Path:
    path = data_juicer(folder)
    write_json_list(path.with_suffix(".json"), list(read_jsonl(path)))
    path.unlink()
    return path.with_suffix(".json")


def openai(folder: Path) -> Path:
    write_loose(folder)
    parts = [[{"type": "image_url", "image_url": {"url": f"{key}.png"}}] for key in CAPTIONS]
    answers = [{"role": "assistant", "content": text} for text in CAPTIONS.values()]
    turns = ([{"role": "user", "content": part}, answer] for part, answer in zip(parts, answers, strict=True))
    write_json_list(folder / "rows.json", ({"messages": messages} for messages in turns))
    return folder / "rows.json"


def make_pairs(dataset: Dataset, output: Path, capsys) -> list[dict]:
    """Write the dataset as its rule does, and return its pairs."""
    write_yaml(output / "config.yaml", dataset.settings.file_content())
    done = run_main(make_dataset, "--config", f"{output}/config.yaml", "--output-dir", str(output), capture=capsys)
    assert not done.status, done.stderr
    return list(read_pairs(output / "pretrain.jsonl"))


def write_dataset(dataset: Dataset, output: Path, capsys) -> list[tuple[str, bytes]]:
    """Write the dataset as its rule does; return caption and image of each pair, sorted."""
    root, rows = dataset.images["pretrain"], make_pairs(dataset, output, capsys)
    return sorted((extract_caption(row["text"]), read_file(locate_image(root, row["images"][0]))) for row in rows)


COMMIT = "0" * 40  # of a repository in the hub's cache
FORMS = (
    WRITERS
    | {writer.__name__: writer for writer in (tsv, semicolons, csv_with_tabs, metadata, json_table)}
    | {writer.__name__: writer for writer in (excel, indexed, data_juicer_list, openai)}
    | {f"export of {kind}": export(kind) for kind in EXPORTS}
)


@pytest.mark.parametrize("form", FORMS)
def test_all_formats_of_the_same_photos_give_the_same_rows(here, form, capsys):
    FORMS[form](here / "photos")
    for number, key in enumerate("ab"):  # held out in every form
        (here / f"photos/{key}.bin").write_bytes(png(30 + number))
    rows = [{"id": key, "image": f"{key}.bin", "captions": ["x"]} for key in "ab"]
    write_jsonl(here / "photos/evaluation.jsonl", rows)
    dataset = resolve_dataset(str(here / "photos"))
    pairs = write_dataset(dataset, here / "results/datasets/photos", capsys)
    assert pairs == sorted((text, IMAGES[key]) for key, text in CAPTIONS.items())

    if form in ("data_juicer", "llava", "tsv", "metadata"):  # a file is a dataset with the file's name
        (here / "photos/evaluation.jsonl").unlink()
        alone = resolve_dataset(str(next((here / "photos").glob("rows.*"))))
        assert alone.name == "rows" and alone.settings == resolve_dataset(str(here / "photos")).settings
        write_jsonl(here / "photos/evaluation.jsonl", rows)

    # the printed lines are an equivalent dataset file
    lines = [line for line in dataset.note.splitlines() if line.startswith("  ")]
    (here / "config/datasets").mkdir(parents=True)
    (here / "config/datasets/mine.yaml").write_text("\n".join(lines), encoding="utf-8")
    assert resolve_dataset("mine").settings == dataset.settings


def describe(path: str | Path) -> dict:
    return yaml.safe_load("\n".join(resolve_dataset(str(path)).note.splitlines()[2:]).split("\nNot read")[0])


def test_each_split_of_a_folder_is_found(here):
    folder = here / "meine Fotos ä"
    data_juicer(folder)
    llava(here / "other").rename(folder / "talks.json")
    (folder / "evaluation.jsonl").touch()
    resolved = resolve_dataset(str(folder))
    assert resolved.name == "meine Fotos ä" and isinstance(resolved.settings, FilesDataset)
    assert "save these lines as config/datasets/meine_Fotos_a.yaml" in resolved.note
    assert {split: files.file for split, files in resolved.settings.splits.items()} == {
        "pretrain": str(folder / "rows.jsonl"),
        "finetune": str(folder / "talks.json"),
        "evaluation": str(folder / "evaluation.jsonl"),
    }


def test_conversations_with_several_turns_are_for_stage_2(here):
    captions = table(here / "photos").rename(here / "photos/captions.csv")
    turns = [{"role": role, "content": "text"} for role in ("user", "assistant") * 2]
    write_jsonl(here / "photos/talks.jsonl", [{"image": "000.png", "messages": turns}])
    assert describe("photos")["sources"] == {
        "captions": {
            "format": "table",
            "path": "photos/captions.csv",
            "images": "photos",
            "columns": {"image": "image", "text": "caption"},
        },
        "instructions": {"format": "sharegpt", "path": "photos/talks.jsonl", "images": "photos", "split": "finetune"},
    }
    captions.unlink()
    with pytest.raises(InputError, match=r"talks.jsonl has conversations with several questions.*add pairs"):
        resolve_dataset("photos")


@pytest.mark.parametrize(
    ("names", "path", "held_out", "unread"),
    [
        ("train/0 train/1 val/0", "photos/train", "photos/val/0.tar", ""),
        ("data/train-0 data/train-1 data/test-0", "photos/data/train-*.tar", "photos/data/test-0.tar", ""),
        ("a/train-0 b/train-0 b/test-0", "photos/*/train-*.tar", "photos/b/test-0.tar", ""),
        ("train dev-0 dev-1 test", "photos/train.tar", "photos/dev-*.tar", "test.tar (webdataset)"),
        ("test", "photos/test.tar", None, ""),
        ("[a]/train-0 [a]/train-1 [a]/val", "photos/[[]a]/train-*.tar", "photos/[a]/val.tar", ""),
    ],
)
def test_validation_or_test_files_are_held_out(here, names, path, held_out, unread):
    for name in names.split():
        (here / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        write_tar(here / f"photos/{name}.tar", [("a.png", png(1)), ("a.txt", b"a")])
    sources = describe("photos")["sources"]
    assert (sources["captions"]["path"], sources.get("held_out", {}).get("path")) == (path, held_out)
    assert ("\nNot read: " in resolve_dataset("photos").note) == bool(unread)
    assert unread in resolve_dataset("photos").note


def test_a_validation_split_becomes_the_evaluation(here, capsys):
    """Captions of one image are merged, and its training row is left out."""
    data_juicer(here / "train").rename(here / "train/train.jsonl")
    (here / "train/held.png").write_bytes(png(40))
    lines = [("a", "held.png", "one"), ("b", "held.png", "two"), ("c", "000.png", "three")]
    rows = [{"id": key, "text": build_dj_text(text), "images": [image]} for key, image, text in lines]
    write_jsonl(here / "train/val.jsonl", rows)
    write_jsonl(here / "train/test_1.jsonl", rows)
    dataset = resolve_dataset(str(here / "train"))
    assert dataset.note.endswith("Not read: test_1.jsonl (data_juicer).")
    output = here / "results/datasets/train"
    pairs = write_dataset(dataset, output, capsys)
    assert pairs == sorted((text, IMAGES[key]) for key, text in CAPTIONS.items() if key != "000")
    captions = {row["image"]: row["captions"] for row in read_evaluation(output / "evaluation.jsonl")}
    assert captions == {"held_out/held.png": ["one", "two"], "held_out/000.png": ["three"]}
    assert dataset.settings.licenses == {"captions": None} and resolve_amounts(dataset, {}) == {"captions": 1.0}
    with pytest.raises(InputError, match="has no source 'held_out'"):
        resolve_amounts(dataset, {"held_out": 2.0})


def test_captioned_images_of_a_test_folder_are_held_out(here):
    for name in ("train/cats", "train/dogs", "test"):
        captioned_images(here / "photos" / name)
    assert describe("photos")["sources"] == {
        "captions": {"format": "folder", "path": "photos/train"},
        "held_out": {"format": "folder", "path": "photos/test", "split": "evaluation"},
    }
    (here / "photos/train/cats").rename(here / "photos/cats")
    (here / "photos/train/dogs").rename(here / "photos/dogs")
    with pytest.raises(InputError, match="photos/cats and of photos/test, which is not trained on; name one folder"):
        resolve_dataset("photos")


COLUMNS = {
    "usual": (["image", "caption"], ("image", "caption", None)),
    "other": (["id", "Photo path", "description"], ("Photo path", "description", None)),
    "questions": (["img", "question", "answer"], ("img", "answer", "question")),
    "of no telling names": (["number", "pic", "words"], ("pic", "words", None)),
    "an export's": (["image", "caption", "question", "original_caption"], ("image", "caption", "question")),
}
CELLS = {"number": "5", "pic": "000.png", "image": "000.png", "Photo path": "000.png", "img": "000.png", "id": "17"}


@pytest.mark.parametrize("names", COLUMNS)
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_are_found_by_name_and_contents(here, names, kind):
    columns, expected = COLUMNS[names]
    write_loose(here / "photos")
    if kind == "csv":
        (here / "photos/rows.csv").write_text(
            f"{','.join(columns)}\n{','.join(CELLS.get(n, 'words') for n in columns)}"
        )
    else:
        cells = {name: [png(1)] if CELLS.get(name) == "000.png" else ["words"] for name in columns}
        pq.write_table(pa.table(cells | {"size": [1]}), here / "photos/rows.parquet")
    if (names, kind) == ("of no telling names", "parquet"):  # its contents are not read
        with pytest.raises(InputError, match="no column is recognized as the captions"):
            resolve_dataset("photos")
        return
    recognized = describe("photos")["sources"]["captions"]["columns"]
    assert tuple(recognized.get(key) for key in ("image", "text", "question")) == expected


def test_conversations_in_parquet_come_before_captions(here):
    turns = pa.array([[{"user": "What?", "assistant": "A."}]])
    (here / "photos").mkdir()
    images = pa.array([[{"bytes": png(1), "path": None}]])
    pq.write_table(pa.table({"images": images, "texts": turns, "source": ["a"]}), here / "photos/rows.parquet")
    columns = describe("photos")["sources"]["captions"]["columns"]
    assert columns == {"image": "images", "conversations": "texts"}


@pytest.mark.parametrize(
    ("row", "columns"),
    [({"caption": "a", "url": "https://x/y"}, {"text": "caption"}), ({"prompt": 1, "description": ["a"]}, None)],
)
def test_a_shard_whose_captions_are_json_is_recognized(here, row, columns):
    (here / "photos").mkdir()
    write_tar(here / "photos/0.tar", [("a.jpg", png(1)), ("a.json", json.dumps(row).encode())])
    assert describe("photos")["sources"]["captions"]["columns"] == (columns or {"text": "description"})


@pytest.mark.parametrize("images_folder", ["photos", "photos/images", "photos/pictures of 2024"])
def test_the_folder_of_the_images_is_found(here, images_folder):
    write_loose(here / images_folder)
    (here / "photos/annotations").mkdir()
    (here / "photos/empty").mkdir()
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A."}]
    rows = [{"image": f"{key}.png", "messages": turns} for key in CAPTIONS]
    write_json_list(here / "photos/annotations/rows.json", rows)
    assert describe("photos")["sources"]["captions"]["images"] == images_folder
    (here / "photos/copies").mkdir()
    if images_folder != "photos":
        shutil.copytree(here / images_folder, here / "photos/copies", dirs_exist_ok=True)
        with pytest.raises(
            InputError, match=r"rows.json: its images may be in photos/copies or photos.*Save the right"
        ):
            resolve_dataset("photos")


def write_rows(kind: str, file: Path, prefix: str) -> None:
    """Write rows whose image paths begin with a prefix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "data_juicer":
        rows = (
            {"id": key, "text": build_dj_text(text), "images": [f"{prefix}{key}.png"]} for key, text in CAPTIONS.items()
        )
    elif kind == "llava":
        rows = (
            {
                "id": key,
                "image": f"{prefix}{key}.png",
                "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": text}],
            }
            for key, text in CAPTIONS.items()
        )
    else:
        rows = ({"file_name": f"{prefix}{key}.png", "text": text} for key, text in CAPTIONS.items())
    write_jsonl(file, rows)


@pytest.mark.parametrize(
    ("kind", "folder", "prefix"),
    [("data_juicer", "a", "../images/"), ("llava", "a/b", "../../images/"), ("table", "a", "{here}/images/")],
)
def test_images_next_to_the_folder_of_the_rows_are_found(here, capsys, kind, folder, prefix):
    write_loose(here / "photos/images")
    write_rows(kind, here / f"photos/{folder}/rows.jsonl", prefix.format(here=here / "photos"))
    dataset = resolve_dataset("photos")
    pairs = write_dataset(dataset, here / "results/datasets/photos", capsys)
    assert len(pairs) == len(CAPTIONS) - 2 and {*pairs} < {(text, IMAGES[key]) for key, text in CAPTIONS.items()}
    files = Fingerprints(here / "digests.json")
    before = files.hash_images(list_image_path_files(dataset.settings))
    (here / "photos/images/000.png").write_bytes(png(50))
    changed = Fingerprints(here / "digests.json").hash_images(list_image_path_files(dataset.settings))
    assert changed != before


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("data_juicer", "../images/"),
        ("llava", "../../elsewhere/images/"),
        ("table", "{here}/images/"),
        ("table", "photos/../images/"),
    ],
)
def test_the_error_about_outside_images_has_the_file(here, capsys, kind, prefix):
    here = here / "elsewhere"
    write_loose(here / "images")
    (here / "photos/photos").mkdir(parents=True)
    write_rows(kind, here / "photos/rows.jsonl", prefix.format(here=here))
    with pytest.raises(InputError, match=f"in {here}(/images)?. Only images inside of .*photos are read") as error:
        resolve_dataset(str(here / "photos"))
    assert len(error.value.lines) == 4
    Path("config/datasets").mkdir(parents=True)
    Path("config/datasets/photos.yaml").write_text(str(error.value).split("`")[1])
    pairs = write_dataset(resolve_dataset("photos"), Path("results/datasets/photos"), capsys)
    assert len(pairs) == len(CAPTIONS) - 2


def test_a_folder_of_several_datasets_is_refused_in_five_lines(here):
    for name in "abcd":
        write_loose(here / f"photos/{name}/images")
        write_rows("table", here / f"photos/{name}/{name}.jsonl", "images/")
        (here / f"photos/{name}/{name}.csv").write_text(f"image,{name}_caption\n")
    with pytest.raises(InputError) as error:
        resolve_dataset("photos")
    lines = error.value.lines
    assert (
        len(lines) <= 5 and "or name one, as in dataset=photos/" in lines[1] and all(len(line) < 300 for line in lines)
    )


def test_a_checked_path_is_no_name(here):
    write_yaml(Path("results/datasets/pictures/config.yaml"), {"pretrain": {"file": "a/pictures/rows.jsonl"}})
    with pytest.raises(InputError, match="results/datasets/pictures was made from a/pictures: name this path again"):
        resolve_dataset("pictures")


def test_rows_that_leave_the_data_later_are_left_out(here, capsys):
    """The first rows decide about the folder; each later path is checked by itself."""
    write_loose(here / "photos/images")
    write_rows("table", here / "photos/a/rows.jsonl", "../images/")
    (here / "secret.png").write_bytes(png(60))
    (here / "photos/images/link.png").symlink_to(here / "secret.png")
    rows = list(read_jsonl(here / "photos/a/rows.jsonl"))
    leaving = ["../../secret.png", "../images/link.png", f"{here}/secret.png", "../../photos/../secret.png"]
    write_jsonl(here / "photos/a/rows.jsonl", rows + [{"file_name": path, "text": "a"} for path in leaving])
    dataset = resolve_dataset("photos")
    pairs = make_pairs(dataset, here / "results/datasets/photos", capsys)
    written = [row["images"][0] for row in pairs if row["text"] == build_dj_text("a")]
    assert len(written) == len(leaving)
    for path in written:
        with pytest.raises(BadImageError, match="outside"):
            locate_image(dataset.images["pretrain"], path)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_an_imagefolder_may_have_a_list_in_each_split(here, suffix):
    for split in ("train", "test"):
        write_loose(here / f"photos/{split}")
        rows = [{"file_name": f"{key}.png", "text": text} for key, text in CAPTIONS.items()]
        if suffix == "jsonl":
            write_jsonl(here / f"photos/{split}/metadata.jsonl", rows)
        else:
            pd.DataFrame(rows).to_csv(here / f"photos/{split}/metadata.csv", index=False)
    sources = describe("photos")["sources"].values()
    assert [(source["images"], source.get("split")) for source in sources] == [
        ("photos/train", None),
        ("photos/test", "evaluation"),
    ]


def write_classes(here: Path, suffix: str = "jsonl", classes: int = 3) -> None:
    """Write a list of images in each of several folders, whose images have the same names."""
    for number, (key, text) in enumerate(CAPTIONS.items()):
        folder = here / f"photos/{number % classes}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{number // classes}.png"
        (folder / name).write_bytes(IMAGES[key])
        with open(folder / f"metadata.{suffix}", "a", encoding="utf-8") as file:
            head = "" if suffix == "jsonl" or file.tell() else "file_name,text\n"
            row = json.dumps({"file_name": name, "text": text}) if suffix == "jsonl" else f'{name},"{text}"'
            file.write(f"{head}{row}\n")


@pytest.mark.parametrize(("suffix", "classes"), [("csv", 2), ("jsonl", 24)])
def test_a_list_in_each_folder_of_images_is_one_source(here, capsys, suffix, classes):
    write_classes(here, suffix, classes)
    dataset = resolve_dataset("photos")
    pairs = write_dataset(dataset, here / "results/datasets/photos", capsys)
    assert len(pairs) == len(CAPTIONS) - 2 and {*pairs} < {(text, IMAGES[key]) for key, text in CAPTIONS.items()}
    before = Fingerprints(here / "digests.json").hash_images(list_image_path_files(dataset.settings))
    (here / "photos/0/0.png").write_bytes(png(50))
    assert Fingerprints(here / "digests.json").hash_images(list_image_path_files(dataset.settings)) != before


def test_lists_with_the_same_content_are_a_choice(here):
    write_classes(here)
    shutil.copytree(here / "photos/0", here / "photos/backup")
    with pytest.raises(InputError, match=r"photos holds .*metadata.jsonl \(table\) and .*, and each may be the data"):
        resolve_dataset("photos")


def test_parquet_with_paths_coco_and_archives_have_a_command(here, capsys):
    """Run the command of each message, and read the dataset that it names."""
    for name in ("coco", "mapped"):
        captioned_images(here / name / "images")
        for text in (here / name / "images").glob("*.txt"):
            text.unlink()
        names = {f"{key}.png": text for key, text in CAPTIONS.items()}
        images = [{"id": number, "file_name": image} for number, image in enumerate(names)]
        captions = [{"image_id": number, "caption": text} for number, text in enumerate(names.values())]
        if name == "coco":
            write_json(here / "coco/annotations/captions.json", {"annotations": captions, "images": images})
        else:
            write_json(here / "mapped/captions.json", names)
    captioned_images(here / "loose")
    write_loose(here / "my photos")
    paths = [f"{key}.png" for key in CAPTIONS]
    columns = {"image": paths, "caption": list(CAPTIONS.values())}
    pq.write_table(pa.table(columns), here / "my photos/rows.parquet")
    shutil.make_archive(str(here / "zipped"), "zip", here / "loose")
    shutil.make_archive(str(here / "packed"), "gztar", here / "loose")
    for name in ("my photos", "zipped.zip", "packed.tar.gz", "coco", "mapped"):
        with pytest.raises(InputError) as error:
            resolve_dataset(name)
        command = re.findall("`(.+)`", str(error.value))[0].replace("python ", f"{sys.executable} ", 1)
        subprocess.run(["bash", "-c", command], check=True)
        [argument] = shlex.split(str(error.value).split("and use ")[1])
        dataset = resolve_dataset(argument.removeprefix("dataset="))
        assert len(write_dataset(dataset, here / "results/datasets" / dataset.name, capsys)) == len(CAPTIONS) - 2


def both(*writers):
    """Return a writer of several forms into one folder."""

    def write(folder: Path) -> None:
        for number, writer in enumerate(writers):
            path = writer(folder.parent / str(number))
            shutil.copytree(path if path.is_dir() else path.parent, folder, dirs_exist_ok=True)

    return write


def write_columns(kind: str, **cells):
    def write(folder: Path) -> None:
        write_loose(folder)
        if kind == "parquet":
            pq.write_table(pa.table({name: [value] for name, value in cells.items()}), folder / "rows.parquet")
        else:
            (folder / "rows.csv").write_text(",".join(cells) + "\n" + ",".join(map(str, cells.values())))

    return write


def renamed(writer, *names: str):
    """Return a writer of a file and copies of it under other names."""

    def write(folder: Path) -> None:
        file = writer(folder)
        for name in names:
            shutil.copy(file, folder / name)

    return write


@pytest.mark.parametrize(
    ("write", "question", "choices"),
    [
        (
            write_columns("csv", image="000.png", caption="a", text="b"),
            "photos/rows.csv: its captions may be in the column caption or text",
            [{"text": "caption"}, {"text": "text"}],
        ),
        (
            write_columns("parquet", image=png(1), question="a?", caption="b", answer="c"),
            "rows.parquet: its captions may be in the column caption or answer",
            [{"text": "caption"}, {"text": "answer"}],
        ),
        (
            write_columns("csv", first_photo="000.png", second_photo="001.png", caption="b"),
            "its images may be in the column first_photo or second_photo",
            [{"image": "first_photo"}, {"image": "second_photo"}],
        ),
        (both(table, captioned_images), "holds images .folder. and rows.csv .table.", ["folder", "table"]),
        (both(parquet, webdataset), r"00000.tar and 1 more .webdataset. and part.parquet", ["webdataset", "parquet"]),
        (renamed(data_juicer, "more.jsonl"), "more.jsonl .data_juicer. and rows.jsonl", ["more.jsonl", "rows.jsonl"]),
    ],
    ids=["captions", "answers", "images", "table or .txt", "parquet or tar", "two files"],
)
def test_two_possible_descriptions_are_offered(here, write, question, choices):
    """Each offered text is a complete file that gives one dataset."""
    write(here / "photos")
    with pytest.raises(InputError, match=f"{question}.*Save the right one as config/datasets/photos.yaml") as error:
        resolve_dataset("photos")
    offered = str(error.value).split("`")[1::2]
    assert len(offered) == len(choices) == len(error.value.lines) - 2
    (here / "config/datasets").mkdir(parents=True)
    for text, choice in zip(offered, choices, strict=True):
        (here / "config/datasets/photos.yaml").write_text(text)
        settings = resolve_dataset("photos").settings
        if isinstance(settings, FilesDataset):
            assert settings.pretrain.file == f"photos/{choice}"
        else:
            source = settings.sources["captions"]
            columns = source.columns.model_dump(exclude_unset=True)
            assert source.format == choice or choice.items() <= columns.items()


def test_each_offered_file_has_the_other_splits(here):
    data_juicer(here / "photos")
    turns = [{"role": role, "content": "text"} for role in ("user", "assistant") * 2]
    for name in ("chat.jsonl", "talks.jsonl"):
        write_jsonl(here / "photos" / name, [{"image": "000.png", "messages": turns}])
    with pytest.raises(InputError, match="holds chat.jsonl .sharegpt. and talks.jsonl .sharegpt., and each") as error:
        resolve_dataset("photos")
    (here / "config/datasets").mkdir(parents=True)
    for text, name in zip(str(error.value).split("`")[1::2], ("chat.jsonl", "talks.jsonl"), strict=True):
        (here / "config/datasets/photos.yaml").write_text(text)
        sources = resolve_dataset("photos").settings.sources
        assert [Path(source.path).name for source in sources.values()] == ["rows.jsonl", name]


def test_an_unreadable_folder_is_named(here, monkeypatch):
    (here / "photos").mkdir()
    refuse = PermissionError(13, "Permission denied")
    monkeypatch.setattr("os.scandir", lambda *_: (_ for _ in ()).throw(refuse))
    with pytest.raises(InputError, match="photos cannot be read .Permission denied.; allow it"):
        resolve_dataset("photos")


def content(name: str, text: str | bytes):
    def write(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


def shard(*names: str):
    def write(folder: Path) -> None:
        folder.mkdir()
        write_tar(folder / "a.tar", [(name, b"a") for name in names])

    return write


def link_out(folder: Path) -> None:
    folder.mkdir()
    data_juicer(folder.parent / "elsewhere")
    (folder / "rows.jsonl").symlink_to("../elsewhere/rows.jsonl")


def pipe(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "rows.jsonl")


def test_pairs_may_have_a_null_image(here, capsys):
    rows = json.loads(llava(here / "photos").read_text(encoding="utf-8"))
    write_json_list(here / "photos/rows.json", [rows[0] | {"image": None}, *rows[1:]])
    dataset = resolve_dataset("photos")
    assert dataset.settings.sources["captions"].split == "pretrain"
    pairs = make_pairs(dataset, here / "results/datasets/photos", capsys)
    images = {row["id"]: row["images"] for row in pairs}
    assert images["captions/000"] == ["captions/"]  # missing, so the filters drop and count the row


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}] * 2}, "several questions"),
        ({"images": ["000.png", "001.png"]}, "several images"),
        ({"images": []} | {"messages": None}, "no image"),
    ],
)
def test_the_reason_why_conversations_are_no_pairs_is_named(here, changes, reason):
    write_loose(here / "photos")
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A"}]
    row = {"images": ["000.png"], "conversations": turns} | changes
    if reason == "no image":
        del row["images"]
    write_jsonl(here / "photos/rows.jsonl", [row] * 2)
    with pytest.raises(InputError, match=f"rows.jsonl has conversations with {reason}, which only stage 2"):
        resolve_dataset("photos")


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (Path.mkdir, "dataset: photos is empty; put rows or images there"),
        (write_loose, "photos holds images without captions. Write the caption of each image to a .txt file"),
        (content("notes.md", "x"), "photos holds notes.md, but no files of a known format .*docs/data.md"),
        (content("a.HEIC", "x"), "but no files of a known format .*convert .heic and .heif to JPEG, because Pillow"),
        (content("a.jsonl", ""), "a.jsonl has no rows; add some"),
        (
            content("a.jsonl", '{"id": "1"}\n'),
            "photos/a.jsonl: no column is recognized as the images; the columns are id. Name",
        ),
        (content("a.jsonl", '{"a": "' + "x" * 2**21), "a.jsonl, line 1: not read in the first 1048576 bytes"),
        (content("a.jsonl", "[" * 200_000), "a.jsonl, line 1: not one JSON object .maximum recursion depth"),
        (content("a.json", '{"a": 1}'), "a.json: it is a JSON object, not a list of rows"),
        (content("a.json", "[" + " " * 2**21), "a.json, row 1: not read in the first 1048576 bytes"),
        (
            content("a.csv", "name,size\nx,1\n"),
            "the columns are name, size. Name its columns in config/datasets/photos.yaml: `{sources:",
        ),
        (content("a.csv", ",caption\n000.png,a b\n"), "a.csv: the column of its images has no name; write one"),
        (content("a.csv", "a,b" * 2**20), "a.csv, line 1: not read in the first 1048576 bytes"),
        (
            content("a.csv", "image,caption\nhttps://x/a.jpg,a\n"),
            "names images by addresses .https.*nothing is downloaded",
        ),
        (write_columns("parquet", url="x", caption="a"), "rows.parquet: it has no column of images as bytes"),
        (content("a.tar", b"no archive"), "a.tar is damaged or not a plain tar file"),
        (shard("a.txt"), "a.tar: it holds no images, and its files end with .txt"),
        (link_out, "rows.jsonl is a link out of its folder"),
        # without column names, the first row would be lost
        (
            write_columns("csv", **{"000.png": "001.png", "a red cat": "a blue dog"}),
            r"first line is a row \(000.png, a red cat\); add a line with names",
        ),
        (pipe, "rows.jsonl is not a regular file but a pipe"),
        (
            content("{a}.jsonl", '{"id": "1", "text": "", "images": [""]}'),
            "pretrain.file: must be a path without braces",
        ),
    ],
)
def test_unusable_data_is_named_in_one_sentence(here, write, sentence):
    write(here / "photos")
    with pytest.raises(InputError, match=sentence) as error:
        resolve_dataset("photos")
    assert len(str(error.value)) < 500 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"step": 0, "loss": NaN}\n{"step": 1, "loss": 2.1}\n'),
        ("metrics.json", '[{"step": 0, "loss": Infinity}]'),
        ("metrics.json", '[{"title": "\\ud800"}]'),
        ("settings.json", " " * 2000 + '{"step": 0}'),
    ],
)
def test_strict_json_is_not_needed_of_files_next_to_the_data(here, name, text):
    captioned_images(here / "photos")
    content(name, text)(here / "photos")
    assert resolve_dataset("photos").settings.sources["captions"].format == "folder"


def test_a_nan_in_the_only_candidate_is_named_with_its_line(here, capsys):
    path = metadata(here / "photos")
    path.write_text('{"file_name": "000.png", "text": "a", "score": NaN}\n' + path.read_text(encoding="utf-8"))
    dataset = resolve_dataset("photos")
    write_yaml(here / "out/config.yaml", dataset.settings.file_content())
    done = run_main(make_dataset, "--config", "out/config.yaml", "--output-dir", "out", capture=capsys)
    assert done.status and "rows.jsonl, line 1: a number is NaN" in done.stderr


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_the_sample_of_a_file_has_a_mebibyte(here, suffix):
    """Rows of a few MiB would otherwise take seconds and gigabytes at each start of Snakemake."""
    rows = [{"file_name": "000.png", "text": "x" * 400_000} for _ in range(20)]
    path = here / f"rows.{suffix}"
    if suffix == "csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        (write_jsonl if suffix == "jsonl" else write_json_list)(path, rows)
    sample = read_sample(path, here)
    assert sample.names == ("file_name", "text") and len(sample.rows) == 2
    assert sample.rows[0] == rows[0]


def test_only_some_of_many_unknown_files_are_read(here):
    (here / "photos").mkdir()
    for number in range(100):
        content("x" * number + "y.json", "{}")(here / "photos")
    with pytest.raises(InputError, match="photos holds files with more than 64 kinds of names; name one of the files"):
        resolve_dataset("photos")


def test_files_about_single_images_are_not_rows(here, capsys):
    """Use the layout of img2dataset."""
    captioned_images(here / "photos/00000")
    for key in CAPTIONS:
        content(f"{key}.json", '{"caption": "x"}')(here / "photos/00000")
    content("00000_stats.json", "{}")(here / "photos")
    pq.write_table(pa.table({"url": ["x"], "caption": ["x"]}), here / "photos/00000.parquet")
    assert describe("photos")["sources"]["captions"] == {"format": "folder", "path": "photos/00000"}


@pytest.mark.parametrize("form", ["data_juicer", "parquet", "webdataset"])
def test_a_dataset_in_the_hubs_cache_is_found_by_its_id(here, form, capsys):
    """Its snapshot consists of links to blobs, some of which link to blobs shared by all repositories."""
    path = FORMS[form](here / "photos")
    repository = here / "hub/datasets--me--photos"
    (repository / "blobs").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    folder = path if path.is_dir() else path.parent
    for number, file in enumerate(file for file in sorted(folder.rglob("*")) if file.is_file()):
        link = repository / "snapshots" / COMMIT / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = file.rename(repository / f"blobs/{number:040d}")
        link.symlink_to(os.path.relpath(blob, link.parent))
        if number % 2 == 0:
            shared = {"xet_hash": f"{number:064x}", "cache_dir": here / "hub", "expected_size": blob.stat().st_size}
            assert publish_blob_to_shared_store(blob_path=blob, **shared) and blob.is_symlink()
    dataset = resolve_dataset("me/photos")
    assert dataset.name == "photos"
    pairs = write_dataset(dataset, here / "results/datasets/photos", capsys)
    assert len(pairs) == len(CAPTIONS) - 2 and set(pairs) <= {(text, IMAGES[key]) for key, text in CAPTIONS.items()}


def test_circular_links_are_not_followed(here):
    write_table = write_columns("csv", image="000.png", caption="a cat")
    write_table(here / "photos")
    (here / "photos/again").symlink_to("again")
    assert describe("photos")["sources"]["captions"]["columns"] == {"image": "image", "text": "caption"}


@pytest.mark.parametrize("cells", [{"split": "train"}, {"question": "what is it?", "question_type": "open"}])
def test_a_column_of_metadata_is_not_used_as_captions(here, cells):
    write_columns("csv", image="000.png", **cells)(here / "photos")
    with pytest.raises(InputError, match="no column is recognized as the captions"):
        resolve_dataset("photos")


def test_a_likely_column_without_captions_is_named(here):
    write_columns("csv", image="000.png", description="")(here / "photos")
    with pytest.raises(InputError, match="image, description; description has no text in its first rows"):
        resolve_dataset("photos")


def test_a_missing_hub_id_names_the_command(here):
    with pytest.raises(InputError, match="run `snakemake fetch --config dataset=somebody/their-photos` first"):
        resolve_dataset("somebody/their-photos")


def test_an_archive_of_images_next_to_rows_has_a_command(tmp_path):
    packed = tmp_path / "images.tar.zst"
    packed.touch()
    advice = advise_unpacking_images(tmp_path / "0/1.jpg")
    assert f"tar --zstd --extract --file {packed} --directory {tmp_path}`" in advice and "program zstd" in advice
    packed.unlink()
    assert advise_unpacking_images(tmp_path / "0/1.jpg") is None
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.writestr("1.jpg", b"image")
    assert f"{tmp_path}/images.zip {tmp_path}`" in advise_unpacking_images(tmp_path / "1.jpg")
    assert f"{tmp_path}/images.zip {tmp_path}/images`" in advise_unpacking_images(tmp_path / "images/1.jpg")
