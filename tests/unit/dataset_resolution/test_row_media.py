"""Media of conversations under the keys and marks of common trainers: read, or a reason not to train on the row."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dj2mgm.data.formats import build_dj_text, list_images, read_llava, read_pairs
from dj2mgm.data.instruction_rows import is_single_question
from dj2mgm.data.merged_sources import READERS
from dj2mgm.data.sources.source import Source
from dj2mgm.data.training_jsonl import _check_text
from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset
from dj2mgm.dataset_resolution.row_media import UNREAD_MEDIA, find_media_mark
from dj2mgm.errors import InputError
from dj2mgm.storage.files import write_jsonl
from sample_rules import build_sample_rules
from source_files import png, write_tar


def llava(question: str = "<image>\nWhat?", answer: str = "A cat.", **keys) -> dict:
    return {"id": "1", "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]} | keys


def openai(*parts: dict | str, **keys) -> dict:
    content = [*parts, {"type": "text", "text": "What?"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}]} | keys


def read(tmp_path, row: dict) -> dict:
    """Return the row as a reader of its kind of turns yields it."""
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, [row])
    if "conversations" in row and "from" in row["conversations"][0]:
        return next(read_llava(file))
    return next(READERS["sharegpt"](Source("a", (file,), tmp_path)))


@pytest.mark.parametrize(
    ("row", "images"),
    [
        (llava(image_path="a.png"), ["a.png"]),
        (llava(imagePath="a.png", source="coco"), ["a.png"]),
        (llava("<image><image>\nWhich?", img_paths=["a.png", "b.png"]), ["a.png", "b.png"]),
        (llava("Picture 1: <img>a.png</img>\nWhat?"), ["a.png"]),
        (llava(image="a.png", image_url="https://x/b.png", video_id="v", frame=3), ["a.png"]),
        (llava(image="a.png", images=["a.png"], image_path="/data/a.png", picture_source="coco"), ["a.png"]),
        (openai({"type": "image", "text": None, "index": 0}, images=["a.png"]), ["a.png"]),
        (openai({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}), ["a.png"]),
        (openai({"type": "image", "image": "file:///data/a.png"}), ["/data/a.png"]),
        (openai({"type": "image", "path": "a.png"}, {"type": "image", "url": "b.png"}), ["a.png", "b.png"]),
        (openai({"image": "a.png"}), ["a.png"]),
        (openai({"type": "image", "image": "a.png"}, images=["a.png"]), ["a.png"]),
        (openai({"type": "text", "text": "Q", "cache_control": {"type": "ephemeral"}}, image="a.png"), ["a.png"]),
        (openai(image=[{"path": "a.png", "bytes": None}]), ["a.png"]),
        (openai(images=[None]), [""]),
        (llava("What is it?", source="alpaca", url="https://x.org/page", images=[], videos=[], audio=None), []),
        (llava("Write a page.", "<video>, <img> and <audio> are tags of HTML."), []),
    ],
)
def test_images_are_read_wherever_there_is_one_reading(tmp_path, row, images):
    read_row = read(tmp_path, row)
    assert list_images(read_row) == images and _check_text(read_row, build_sample_rules(several_images=True)) is None


MARKS = ["<video>", "<speech>", "<Img>", "<image 1>", "<ImageHere>", "<IMG_CONTEXT>", "<image_placeholder>"]
MARKS += ["<image_soft_token>", "<start_of_image>", "<im_patch>", "[IMG]", "<__dj__video>", "<|image_1|>"]


@pytest.mark.parametrize(
    "row",
    [
        llava("<video>\nWhat?", video="a.mp4"),
        llava(image="a.png", image2="b.png"),
        llava(image="a.png", clip_path="b.mp4"),
        llava(image="a.png", depth={"maps": ["b.npy"]}),
        llava(image="x/a.png", images=["y/a.png"]),
        llava("![x](data:image/png;base64,AAAA) What?"),
        llava("<img alt='x' src='a.png'> What?"),
        llava("What?", videos=["a.mp4"]),
        llava("What?", audio={"path": None, "array": [0.1]}),
        llava("What?", meta={"image": "a"}),
        llava("What?", attachments=[{"path": "A.JPG"}]),
        llava("What?", source="clips/a.mp4"),
        llava("What?", image="data:image/png;base64,AAAA"),
        llava("What?", image_path={"bytes": "AAAA"}),
        *(llava(f"{mark}\nWhat?") for mark in MARKS),
        llava(answer="<__dj__audio> A cat.", image="a.png"),
        openai({"type": "video", "video": "a.mp4"}),
        openai({"type": "input_audio", "input_audio": {"data": "AAAA"}}),
        openai({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
        openai({"type": "image", "base64": "AAAA"}) | {"images": None},
        openai({"type": "image", "path": "a.png"}, {"type": "image"}),
        openai({"type": "image"}, {"type": "image"}, images=["a.png"]),
        openai(videos=["a.mp4"]),
        openai({"type": "text", "text": "Q", "video": "a.mp4"}),
        openai({"type": "image", "image": "b.png"}, images=["a.png"]),
        openai("<img>b.png</img>", images=["a.png"]),
        *(
            {"messages": [{"role": "user", "content": "What?"} | keys, {"role": "assistant", "content": "A."}]}
            for keys in (
                {"files": ["a.png"]},
                {"attachments": [{"type": "image", "path": "a.png"}]},
                {"experimental_attachments": [{"contentType": "image/png", "url": "https://x/a.png"}]},
            )
        ),
        llava(image="a.png")
        | {
            "conversations": [
                {"from": "human", "value": "<image>\nQ", "video": "v.mp4"},
                {"from": "gpt", "value": "A."},
            ]
        },
        {
            "messages": [
                {"from": "user", "value": [{"type": "audio", "audio": "a"}, "What?"]},
                {"from": "gpt", "value": "A."},
            ]
        },
    ],
)
def test_a_row_with_other_media_is_not_trained_on_as_text(tmp_path, row):
    read_row = read(tmp_path, row)
    assert not (UNREAD_MEDIA in read_row and is_single_question(read_row)), (
        "a recipe of instructions would lose the problem"
    )
    problem = _check_text(read_row, build_sample_rules(several_images=True))
    assert problem is not None and problem[0] in ("other_media", "image_token", "control_token")


@pytest.mark.parametrize("kind", [{}, {"type": "text"}, {"type": "image"}])
def test_a_part_with_text_and_image_keeps_both(tmp_path, kind):
    part = {"image": "a.png", "text": "Q"} | kind
    row = read(tmp_path, {"messages": [{"role": "user", "content": [part]}, {"role": "model", "content": "A"}]})
    assert list_images(row) == ["a.png"] and row["conversations"][0]["value"] == "<image>\nQ"


@pytest.mark.parametrize("value", [0, {}, [1]])
def test_an_image_that_is_no_path_is_refused(tmp_path, value):
    with pytest.raises(InputError, match="row 1: 'image' must be a path or a list of paths"):
        read(tmp_path, llava("What?", image=value))


UNUSED = [  # columns next to an image a.png, and whether they name other media
    ({"video": "v.mp4"}, True),
    ({"clip_path": "v.mp4"}, True),
    ({"image_2": "b.png"}, True),
    ({"url": "https://x/b.png", "video_id": "v", "title": "IMG_1.jpg", "split": "a"}, False),
    ({"video": None, "image_2": ""}, False),
]


@pytest.mark.parametrize(("columns", "is_unread"), UNUSED)
def test_captions_with_other_media_are_flagged_by_every_reader(tmp_path, columns, is_unread):
    row = {"image": "a.png", "caption": "a cat"} | columns
    write_jsonl(tmp_path / "a.jsonl", [row])
    (tmp_path / "a.csv").write_text(",".join(row) + "\n" + ",".join(value or "" for value in row.values()) + "\n")
    write_tar(tmp_path / "a.tar", [("a.json", json.dumps(row).encode()), ("a.png", png(1))])
    image = {"bytes": png(1), "path": "a.png"}
    stored = {key: pa.array([value], pa.string()) for key, value in columns.items()}
    pq.write_table(pa.table({"image": [image], "caption": ["a cat"]} | stored), tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", pq.read_table(tmp_path / "a.parquet").schema) as stream:
        stream.write_table(pq.read_table(tmp_path / "a.parquet"))
    formats = {"a.jsonl": "table", "a.csv": "table", "a.parquet": "parquet", "a.arrow": "arrow", "a.tar": "webdataset"}
    for name, format_name in formats.items():
        [read_row] = READERS[format_name](Source("a", (tmp_path / name,), tmp_path, output=tmp_path / f"out-{name}"))
        assert (UNREAD_MEDIA in read_row) == is_unread, name
    write_jsonl(tmp_path / "pair.jsonl", [{"id": "1", "text": build_dj_text("a cat"), "images": ["a.png"]} | columns])
    if is_unread:
        with pytest.raises(InputError, match="is not read; delete the key"):
            list(read_pairs(tmp_path / "pair.jsonl"))
    else:
        assert len(list(read_pairs(tmp_path / "pair.jsonl"))) == 1


@pytest.mark.parametrize(
    ("texts", "column", "other"),
    [
        ({"caption": "a cat"}, "image_2", {"bytes": png(2), "path": None}),
        ({"conversations": llava("Q")["conversations"]}, "second", png(2)),
    ],
    ids=["struct", "bytes"],
)
def test_a_second_column_of_images_is_not_left_out_of_a_row(tmp_path, texts, column, other):
    columns = {"image": {"bytes": png(1), "path": None}} | texts | {column: other}
    pq.write_table(pa.table({key: [value, value] for key, value in columns.items()}), tmp_path / "a.parquet")
    rows = list(READERS["parquet"](Source("a", (tmp_path / "a.parquet",), tmp_path, output=tmp_path / "out")))
    assert all(row[UNREAD_MEDIA].endswith("is not read") for row in rows) and len(rows) == 2


@pytest.mark.parametrize(
    ("values", "is_unread"),
    [
        (pa.array([[("a", "v.mp4")]], pa.map_(pa.string(), pa.string())), True),
        (pa.array(["v.mp4"]).dictionary_encode(), True),
        (pa.array(["v.mp4"], pa.string_view()), True),
        (pa.array([[{"bytes": b"x", "path": None}]]), True),
        (pa.array([[0.5, 1]]), False),
        (pa.array([b"\1\2\3"]), False),
    ],
    ids=["map", "dictionary", "view", "struct", "numbers", "digest"],
)
def test_columns_of_any_type_are_searched_for_media(tmp_path, values, is_unread):
    image = {"bytes": png(1), "path": None}
    pq.write_table(pa.table({"image": [image], "caption": ["a cat"], "x": values}), tmp_path / "a.parquet")
    [row] = READERS["parquet"](Source("a", (tmp_path / "a.parquet",), tmp_path, output=tmp_path / "out"))
    assert (UNREAD_MEDIA in row) == is_unread


def test_media_in_a_shard_or_parquet_are_not_left_out_of_a_row(tmp_path):
    turns = llava("What?")["conversations"]
    members = [("a.json", json.dumps({"conversations": turns}).encode()), ("a.mp4", b"x")]
    members += [("b.json", json.dumps({"conversations": turns, "image": "b.png"}).encode())]
    about = {"image": "7", "file_name": "x.png"}  # names of the image before it was stored
    members += [("c.json", json.dumps({"conversations": turns} | about).encode()), ("c.png", png(1))]
    shard = write_tar(tmp_path / "x.tar", members)
    rows = list(READERS["webdataset"](Source("a", (shard,), tmp_path)))
    assert [UNREAD_MEDIA in row for row in rows] == [True, True, False] and len(list_images(rows[2])) == 1
    image = {"bytes": png(1), "path": None}
    columns = {"images": [[image], [], []], "video": [None, "a.mp4", None], "image_path": ["b.png", None, "a.png"]}
    talk = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}]
    pq.write_table(pa.table(columns | {"messages": [talk] * 3}), tmp_path / "a.parquet")
    rows = list(READERS["parquet"](Source("a", (tmp_path / "a.parquet",), tmp_path, output=tmp_path / "out")))
    assert [UNREAD_MEDIA in row for row in rows] == [False, True, True]


@pytest.mark.parametrize("keys", [{"videos": ["a.mp4"]}, {"text": "<__dj__image>\n<__dj__video> a cat <|__dj__eoc|>"}])
def test_a_pair_with_other_media_is_refused(tmp_path, keys):
    pair = {"id": "1", "text": "<__dj__image>\na cat <|__dj__eoc|>", "images": ["a.png"], "videos": [], "audios": None}
    write_jsonl(tmp_path / "a.jsonl", [pair])
    assert len(list(read_pairs(tmp_path / "a.jsonl"))) == 1
    write_jsonl(tmp_path / "a.jsonl", [pair | keys])
    with pytest.raises(InputError, match="a.jsonl, line 1: .*(video|read)"):
        list(read_pairs(tmp_path / "a.jsonl"))


def test_a_file_of_other_media_is_refused_at_the_start(tmp_path):
    for number, row in enumerate([llava("What?", video="a.mp4"), openai({"type": "image", "base64": "A" * 9000})]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_jsonl(folder / "rows.jsonl", [row] * 3)
        with pytest.raises(InputError, match="rows.jsonl: .*only image files are read") as error:
            resolve_dataset(str(folder))
        assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "text", ["<image>\na <b>bold</b> claim", "x < image > y", "<ref>a</ref>", "[image]", "<imagine>"]
)
def test_a_text_without_marks_is_kept(text):
    assert find_media_mark(text) is None
