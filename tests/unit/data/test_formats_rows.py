"""Messages about malformed rows of each format name the file, the line or row, and the remedy."""

import codecs
import json
import os
import pickle
import tracemalloc

import pytest

from dj2mgm.data.formats import (
    build_dj_text,
    extract_caption,
    read_evaluation,
    read_llava,
    read_pairs,
)
from dj2mgm.errors import InputError
from dj2mgm.storage.files import write_json_list, write_jsonl
from dj2mgm.storage.streaming import MAX_ROW, LineIndex, _read, read_json_file, read_json_list

PAIR = {"id": "1", "text": build_dj_text("a red circle"), "images": ["a.png"]}
TURNS = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]
TALK = {"id": "1", "image": "a.png", "conversations": TURNS}
HELD_OUT = {"id": "1", "image": "a.png", "captions": ["a red circle"]}


def turns(*values: str) -> list[dict]:
    return [{"from": ("human", "gpt")[index % 2], "value": value} for index, value in enumerate(values)]


def without(row: dict, key: str) -> dict:
    return {name: value for name, value in row.items() if name != key}


def write_lines(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def message(reader, path) -> str:
    with pytest.raises(InputError) as error:
        list(reader(path))
    assert str(path) in str(error.value)
    return str(error.value)


READERS = [(read_pairs, PAIR), (read_llava, TALK), (read_evaluation, HELD_OUT)]
READER_NAMES = ["dj_jsonl", "llava", "evaluation_jsonl"]


@pytest.mark.parametrize(("reader", "row"), READERS, ids=READER_NAMES)
class TestEveryJsonl:
    def test_valid_rows_are_yielded_unchanged(self, reader, row, tmp_path):
        rows = [row, row | {"id": "zwei 二", "extra": {"kept": True}}]
        path = write_lines(tmp_path / "Ordner mit Leerzeichen é" / "a.jsonl", *rows)
        assert [without(without(r, "objects"), "questions") for r in reader(path)] == rows

    @pytest.mark.parametrize(
        "line", ["nonsense", '{"id": "2"} {"id": "3"}', "[" * 100_000, '{"id": ' + "9" * 5000 + "}"]
    )
    def test_a_line_that_is_not_json_is_named(self, reader, row, tmp_path, line):
        error = message(reader, write_lines(tmp_path / "a.jsonl", row, line))
        assert "line 2" in error and "fix or delete the line" in error

    def test_blank_lines_are_skipped_and_lines_are_numbered(self, reader, row, tmp_path):
        path = write_lines(tmp_path / "a.jsonl", row, "", "  ")
        assert len(list(reader(path))) == 1
        error = message(reader, write_lines(path, row, "", '{"id": "x", '))
        assert "line 3: not one JSON object" in error and error.count("line ") == 1

    def test_a_line_that_is_not_utf8_is_named(self, reader, row, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_bytes(json.dumps(row).encode() + b'\n{"id": "caf\xe9"}\n')
        error = message(reader, path)
        assert "line 2" in error and "save the file as UTF-8, or delete the line" in error

    @pytest.mark.parametrize("line", ["[]", "null"])
    def test_a_line_without_an_object_is_named(self, reader, row, tmp_path, line):
        error = message(reader, write_lines(tmp_path / "a.jsonl", row, line))
        assert "line 2" in error and "expected a JSON object" in error

    def test_half_a_surrogate_pair_is_refused_anywhere(self, reader, row, tmp_path):
        for bad in (row | {"id": "\ud800"}, row | {"id": "2", "extra": [{"deep": "x\udc00"}]}, row | {"\ud834": 1}):
            error = message(reader, write_lines(tmp_path / "a.jsonl", row | {"id": "0"}, bad))
            assert "line 2" in error and "surrogate" in error and "fix or delete" in error
            assert error.isprintable()

    def test_a_complete_surrogate_pair_is_one_character(self, reader, row, tmp_path):
        path = write_lines(tmp_path / "a.jsonl", json.dumps(row | {"id": "🏔"}))
        assert "\\ud83c" in path.read_text()
        assert next(iter(reader(path)))["id"] == "🏔"

    def test_a_repeated_id_names_both_rows(self, reader, row, tmp_path):
        error = message(reader, write_lines(tmp_path / "a.jsonl", row, row | {"id": "2"}, row))
        assert "row 3" in error and "of row 1" in error and "ids must be unique" in error

    def test_missing_file_refers_to_configured_paths(self, reader, row, tmp_path):
        assert "a.jsonl does not exist; check the paths in config/datasets/" in message(reader, tmp_path / "a.jsonl")

    def test_paths_without_a_regular_file_are_named(self, reader, row, tmp_path):
        (tmp_path / "folder.jsonl").mkdir()
        os.mkfifo(tmp_path / "pipe.jsonl")  # opening it would block
        (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
        assert "is a folder; check the paths" in message(reader, tmp_path / "folder.jsonl")
        assert "is not a regular file" in message(reader, tmp_path / "pipe.jsonl")
        assert "cannot be read (Too many levels of symbolic links)" in message(reader, tmp_path / "loop.jsonl")
        assert "cannot be read (File name too long)" in message(reader, tmp_path / ("a" * 300 + ".jsonl"))

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
    def test_another_encoding_is_named(self, reader, row, tmp_path, encoding):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(row | {"extra": "é"}, ensure_ascii=False) + "\n", encoding=encoding)
        assert "line 1: not" in message(reader, path)

    def test_a_byte_order_mark_is_not_part_of_the_first_row(self, reader, row, tmp_path):
        path = write_lines(tmp_path / "a.jsonl", row, row | {"id": "2"})
        rows = list(reader(path))
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b", ", b",\r"))  # not a line end
        assert list(reader(path)) == rows

    @pytest.mark.parametrize("number", ["NaN", "1e999"])
    def test_a_number_outside_of_json_is_named(self, reader, row, tmp_path, number):
        line = json.dumps(row | {"id": "2", "extra": [{"deep": "*"}]}).replace('"*"', number)
        error = message(reader, write_lines(tmp_path / "a.jsonl", row, line))
        assert "line 2: a number is NaN, infinite or too large for JSON; fix or delete the row" in error

    def test_a_row_too_deep_to_be_pickled_is_named(self, reader, row, tmp_path):
        for depth, fits in ((98, True), (99, False), (500, False)):
            path = write_lines(tmp_path / "a.jsonl", json.dumps(row)[:-1] + f', "x": [{"[" * depth + "]" * depth}]}}')
            if fits:
                assert pickle.dumps(list(reader(path)))
            else:
                assert "line 1: lists and objects are nested more than 100 levels deep" in message(reader, path)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (without(PAIR, "id"), "'id' is missing"),
        (PAIR | {"id": 7}, "'id' must be a str, found int"),
        (PAIR | {"text": None}, "'text' must be a str, found NoneType"),
        (PAIR | {"images": "a.png"}, "'images' must be a list, found str"),
        (PAIR | {"images": []}, "at least one path"),
        (PAIR | {"images": ["a.png", "b.png"]}, "once for each of its 2 images, found 1"),
        (PAIR | {"images": [3]}, "at least one path"),
        (PAIR | {"text": "a red circle"}, "exactly once, found 0; write <__dj__image>"),
    ],
)
def test_message_names_an_invalid_pair_and_its_fault(tmp_path, row, says):
    error = message(read_pairs, write_lines(tmp_path / "a.jsonl", PAIR | {"id": "0"}, row))
    assert "line 2" in error and says in error


def test_the_question_of_a_pair_must_be_text(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", PAIR | {"question": "What is this?"})
    assert [row["question"] for row in read_pairs(path)] == ["What is this?"]
    write_lines(path, PAIR | {"question": 3})
    with pytest.raises(InputError, match="line 1: 'question' must be a string, found 3"):
        list(read_pairs(path))


def test_a_row_with_several_images_becomes_one_pair_per_image(tmp_path):
    text = f"{build_dj_text('a red circle')}\n{build_dj_text('two dogs')}"
    rows = [{"id": "7", "images": ["a.png", "b.png"], "text": text, "source": "web"}, PAIR | {"id": "8"}]
    write_jsonl(tmp_path / "pairs.jsonl", rows)
    first, second, third = read_pairs(tmp_path / "pairs.jsonl")
    assert [row["id"] for row in (first, second, third)] == ["7", "7~2", "8"] and third == rows[1]
    assert [extract_caption(row["text"]) for row in (first, second)] == ["a red circle", "two dogs"]
    assert [row["images"] for row in (first, second)] == [["a.png"], ["b.png"]] and second["source"] == "web"
    write_jsonl(tmp_path / "made.jsonl", [first, second])
    assert list(read_pairs(tmp_path / "made.jsonl")) == [first, second]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"text": "<__dj__image> <__dj__image> two dogs <|__dj__eoc|>"}, "2 images need as many chunks"),
        ({"text": build_dj_text("a red circle")}, "once for each of its 2 images, found 1"),
        ({"images": []}, "must contain at least one path"),
        ({"images": ["a.png", 3]}, "must contain at least one path"),
        ({"id": "8~2"}, "8~2"),
    ],
)
def test_an_indivisible_row_with_several_images_is_named(tmp_path, changes, fault):
    several = {"id": "8", "images": ["a.png", "b.png"], "text": build_dj_text("a") + build_dj_text("b")}
    write_jsonl(
        tmp_path / "pairs.jsonl", [PAIR, several, several | changes] if "id" in changes else [several | changes]
    )
    with pytest.raises(InputError, match=f"pairs.jsonl, (line|row) .*{fault}"):
        list(read_pairs(tmp_path / "pairs.jsonl"))


def test_a_caption_survives_conversion_to_data_juicer_text():
    for caption in ("a red circle", "", "two\nlines", "größer 山"):
        assert extract_caption(build_dj_text(caption)) == caption
    for caption in ("<|__dj__eoc|> at the front", "in the <|__dj__eoc|> middle"):  # kept, so that the row is refused
        assert extract_caption(build_dj_text(caption)) == caption
    assert build_dj_text("a white chandelier") == "<__dj__image>\na white chandelier <|__dj__eoc|>"


BAD_TALKS = [
    (without(TALK, "id"), "'id' must be a string"),
    (TALK | {"image": ["a.png", 1]}, "leave it out for text-only rows"),
    (TALK | {"conversations": []}, "must alternate human and gpt turns"),
    (TALK | {"conversations": turns("<image>\nQ", "A", "Q")}, "ending with gpt"),
    (TALK | {"conversations": TURNS[::-1]}, "turn 1 must be {'from': 'human'"),
    (TALK | {"conversations": [TURNS[0], TURNS[0]]}, "turn 2 must be {'from': 'gpt'"),
    (TALK | {"conversations": [TURNS[0], {"from": "gpt"}]}, "turn 2 must be"),
    (TALK | {"id": True}, "'id' must be a string, found true"),
]


@pytest.mark.parametrize(("row", "says"), BAD_TALKS)
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_message_names_an_invalid_conversation_and_its_fault(tmp_path, row, says, suffix):
    rows = [TALK | {"id": "0"}, row]
    path = tmp_path / f"a.{suffix}"
    path.write_text(json.dumps(rows) if suffix == "json" else "".join(json.dumps(r) + "\n" for r in rows))
    error = message(read_llava, path)
    assert "row 2" in error and says in error


def test_repeated_ids_of_published_files_are_numbered(tmp_path):
    """LLaVA's mixtures have several rows with the id of one image, and integer ids."""
    path = tmp_path / "a.jsonl"
    for identifiers, numbered in (
        (["7", 7, "8", "7"], ["7", "7~2", "8", "7~3"]),
        (["7", "7", "7~2"], ["7", "7~2", "7~2~2"]),
        (["7~2", "7", "7", "7"], ["7~2", "7", "7~3", "7~4"]),
    ):
        write_lines(path, *[TALK | {"id": identifier} for identifier in identifiers])
        assert [row["id"] for row in read_llava(path, number_ids=True)] == numbered
    write_lines(path, TALK, TALK | {"id": 7})
    with pytest.raises(InputError, match="row 2: 'id' must be a string"):
        list(read_llava(path))
    for identifier in (None, True, 1.5, ["7"]):
        write_lines(path, TALK | {"id": identifier})
        with pytest.raises(InputError, match="row 1: 'id' must be a string"):
            list(read_llava(path, number_ids=True))


def test_a_json_list_has_the_rows_of_its_jsonl(tmp_path):
    rows = [TALK, {"id": "2", "conversations": turns("Q", "A", "Q", "A")}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert list(read_llava(tmp_path / "a.json")) == rows == list(read_llava(write_lines(tmp_path / "a.jsonl", *rows)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "expected a JSON list, found an object; the name of a file with one object per line must end in .jsonl"),
        ("[" * 100_000, "not valid JSON"),
        (f"[{json.dumps(TALK)}, " + "9" * 5000 + "]", "row 2: not valid JSON (Exceeds the limit"),
        ('[{"id": NaN}]', "row 1: a number is NaN"),
        ('[{"id": "\\ud800"}]', "row 1: half of a surrogate pair (\\ud800)"),
        ("[3]", "row 1: expected a JSON object, found int"),
        (f"[{json.dumps(TALK)}", "row 1: not valid JSON (the list does not end)"),
        (f"[{json.dumps(TALK)} {json.dumps(TALK)}]", "row 2: not valid JSON (Expecting ',' delimiter)"),
        (f"[{json.dumps(TALK)}] 1", "row 2: not valid JSON"),
    ],
)
def test_message_names_an_invalid_json_file_and_its_fault(tmp_path, content, says):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert says in message(read_llava, path)


def test_a_list_written_in_rows_can_be_read_by_json(tmp_path):
    for rows in ([TALK, {"id": "é", "n": [1]}], []):
        assert write_json_list(tmp_path / "a.json", iter(rows)) == len(rows)
        assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == rows


def test_a_list_is_read_only_as_far_as_needed(tmp_path, monkeypatch):
    monkeypatch.setattr("dj2mgm.storage.streaming.CHUNK_CHARACTERS", 100)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([TALK] * 100)[:-1] + ", and then no JSON")
    rows = read_json_list(path)
    assert [next(rows) for _ in range(100)] == [TALK] * 100
    with pytest.raises(InputError, match="a.json, row 101: not valid JSON"):
        next(rows)


def test_an_error_is_found_before_the_rest_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("dj2mgm.storage.streaming.CHUNK_CHARACTERS", 1000)
    path, read = tmp_path / "a.json", []
    path.write_text("[" + json.dumps(TALK) + "".join(f" {json.dumps(TALK)}," for _ in range(200)) + "{}]")
    own = _read
    monkeypatch.setattr("dj2mgm.storage.streaming._read", lambda *arguments: read.append(own(*arguments)) or read[-1])
    with pytest.raises(InputError, match="row 2: not valid JSON"):
        list(read_json_list(path))
    assert len("".join(read)) == 1000


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (without(HELD_OUT, "id"), "'id' and 'image' must be strings"),
        (HELD_OUT | {"image": None}, "'id' and 'image' must be strings"),
        (without(HELD_OUT, "captions"), "at least one reference caption"),
        (HELD_OUT | {"captions": [""]}, "at least one reference caption"),
        (HELD_OUT | {"objects": [{"color": "red"}]}, "'color', 'position', 'shape'"),
        (HELD_OUT | {"objects": {}}, "'objects' must be a list"),
        (HELD_OUT | {"questions": [{"question": "Q", "answer": "A"}]}, "'answer', 'question', 'type'"),
        (HELD_OUT | {"questions": [{"type": "n", "question": "Q", "answer": 2}]}, "must be strings, found 2"),
    ],
)
def test_message_names_an_invalid_held_out_row_and_its_fault(tmp_path, row, says):
    error = message(read_evaluation, write_lines(tmp_path / "a.jsonl", HELD_OUT | {"id": "0"}, row))
    assert "line 2" in error and says in error


@pytest.mark.parametrize("token", ["<image>", "</s>", "<|image_pad|>"])
def test_question_with_control_token_is_refused(tmp_path, token):
    question = {"type": "n", "question": f"What is {token} here?", "answer": token}
    held_out = HELD_OUT | {"captions": [f"a {token}"], "questions": [question]}
    error = message(read_evaluation, write_lines(tmp_path / "a.jsonl", held_out))
    assert f"line 1: its text contains the control token {token}; fix or delete the row" in error
    path = write_lines(tmp_path / "a.jsonl", HELD_OUT | {"captions": [f"a {token}"]})
    assert [row["captions"] for row in read_evaluation(path)] == [[f"a {token}"]]  # a reference is not part of a prompt


def test_held_out_rows_without_questions_get_empty_lists(tmp_path):
    (row,) = read_evaluation(write_lines(tmp_path / "a.jsonl", HELD_OUT))
    assert row["objects"] == row["questions"] == []


def test_each_line_of_an_indexed_file_is_found(tmp_path):
    rows = [{"id": str(number), "text": "é" * number} for number in range(50)]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    index = LineIndex(path)
    assert len(index) == 50 and [index[number] for number in (49, 0, 17)] == [rows[49], rows[0], rows[17]]
    with pytest.raises(IndexError):
        index[50]


def peak_and_message(reader, path) -> tuple[int, str]:
    """Return the peak bytes that Python allocates while a file is refused, and the message."""
    tracemalloc.start()
    try:
        return (tracemalloc.get_traced_memory()[1], text) if (text := message(reader, path)) else (0, "")
    finally:
        tracemalloc.stop()


def test_line_of_300_megabytes_is_refused_in_little_memory(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", PAIR)
    with open(path, "a") as file:
        file.write('{"id": "2", "text": "')
    os.truncate(path, 3 * 10**8)
    peak, text = peak_and_message(read_pairs, path)
    assert text.startswith(f"{path}, line 2: the row has more than {MAX_ROW} bytes; at most {MAX_ROW} (32 MiB)")
    assert peak < 3 * MAX_ROW


def test_a_row_of_maximal_length_is_read(tmp_path):
    row = PAIR | {"note": "x"}
    row["note"] *= MAX_ROW - len(json.dumps(row))
    assert [len(json.dumps(read)) for read in read_pairs(write_lines(tmp_path / "a.jsonl", row))] == [MAX_ROW - 1]
    write_lines(tmp_path / "a.jsonl", row | {"note": row["note"] + "xx"})
    assert "the row has" in message(read_pairs, tmp_path / "a.jsonl")


def test_an_item_of_200_megabytes_is_refused_and_not_held(tmp_path):
    path = tmp_path / "a.json"
    with open(path, "w") as file:
        file.write(json.dumps([TALK])[:-1] + ', {"id": "2", "image": "')
        for _ in range(200):
            file.write("x" * 10**6)
    peak, text = peak_and_message(read_llava, path)
    assert f"{path}, row 2: the row has more than {MAX_ROW} bytes" in text and peak < 6 * MAX_ROW


def test_the_size_of_a_json_file_is_limited(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{}")
    os.truncate(path, 2**30 + 1)
    with pytest.raises(InputError, match="a.json: the file has 1073741825 bytes; at most 1073741824"):
        read_json_file(path)


@pytest.mark.parametrize("reader", [read_pairs, read_llava])
def test_a_repeated_key_of_an_object_is_named(tmp_path, reader):
    twice = json.dumps(TALK | PAIR)[:-1] + ', "id": "2"}'
    for path, content in ((tmp_path / "a.jsonl", f"{twice}\n"), (tmp_path / "a.json", f"[{twice}]")):
        if path.suffix == ".jsonl" or reader is read_llava:
            path.write_text(content)
            assert "the key 'id' occurs twice in an object" in message(reader, path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL"])
def test_line_ends_marks_and_upper_case_names_are_accepted(tmp_path, end, name):
    path = tmp_path / name
    path.write_bytes(codecs.BOM_UTF8 + end.join([json.dumps(TALK), "", json.dumps(TALK | {"id": "2"})]).encode())
    assert list(read_llava(path)) == [TALK, TALK | {"id": "2"}]
