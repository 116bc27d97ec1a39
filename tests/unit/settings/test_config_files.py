"""Configuration files and values of the command line: their meaning, and one-sentence refusals."""

import json
from datetime import date
from functools import cache

import pytest
import yaml
from hypothesis import assume, example, given
from hypothesis import strategies as st
from snakemake.cli import parse_config

from configuration_files import FILES
from dj2mgm.errors import InputError
from dj2mgm.runs.layers import build_command_line_layer, merge, read_default_layer
from dj2mgm.settings.base import build_schema
from dj2mgm.settings.config_files import check_stated_once, convert_values, read_config, read_json_config, suggest_name
from dj2mgm.settings.configuration import Configuration
from dj2mgm.settings.dataset_files import FilesDataset
from dj2mgm.settings.models import MgmModel
from dj2mgm.settings.validation import validate_settings
from fuzzing import fuzzed
from paths import PROJECT

CONFIGURATION = Configuration


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a string or bytes as a file, with the same file name in all messages."""

    def read(content: str | bytes, reader=read_config) -> dict:
        path = tmp_path / "file.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return reader(path)

    return read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0e-4", 1e-4),
        ("-5", -5),
        (".5", 0.5),
        ("0", 0),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("y", "y"),
        ("2024-01-01", "2024-01-01"),
        ("nan", "nan"),
        ("'010'", "010"),
        ('"no"', "no"),
        ("|\n  12", "12"),
    ],
)
def test_scalars_follow_yaml_1_2(read, text, value):
    parsed = read(f"a: {text}")["a"]
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize("text", ["010", "1_000", "1:30", "0x1F", "0b11", "0o17", "no", "Yes", "on", "OFF"])
def test_scalars_that_differ_between_yaml_versions_are_refused(read, text):
    with pytest.raises(InputError, match="file.yaml: 'a.b': YAML's versions disagree about .*decimal number.*quotes"):
        read(f"a: {{b: {text}}}")


def test_a_string_keeps_its_spelling(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("{dataset: 007, model: 1e3, recipe: no, description: 5, without: [1_0], gpus: 2}", encoding="utf-8")
    assert read_config(path, build_schema(CONFIGURATION)) == {
        "dataset": "007",
        "model": "1e3",
        "recipe": "no",
        "description": "5",
        "without": ["1_0"],
        "gpus": 2,
    }


def test_keys_are_always_strings(read):
    assert read("{1: a, null: b, on: c, 1.5: d}") == {"1": "a", "null": "b", "on": "c", "1.5": "d"}


def test_a_byte_order_mark_and_empty_files_are_accepted(read):
    assert read(b"\xef\xbb\xbfgpus: 2") == {"gpus": 2}
    assert read("") == read("# a comment\n") == {}
    assert read(b'\xef\xbb\xbf{"a": 1}', read_json_config) == {"a": 1}


BOMB = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MERGE_BOMB = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 30)
)


def test_own_keys_override_merged_keys(read):
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: [{x: 4}, *a]}\nd: *a"
    assert read(text) == yaml.safe_load(text)
    assert read(MERGE_BOMB)["a29"] == {"k": 1}, "multiplying merged keys stay small"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("gpus: 1\ngpus: 2", "file.yaml, line 2: not valid YAML: the key 'gpus' is stated twice; keep one"),
        ("a:\n  b: 1\n  b: 1", "line 3: .*'b' is stated twice"),
        ("a: [1", "line 1: not valid YAML"),
        (
            "a:\n\tb: 1",
            "line 2: not valid YAML: found character .*; replace tabs by spaces",
        ),
        ("Bild: schön".encode("latin-1"), "file.yaml, line 1: not UTF-8 text; save the file as UTF-8"),
        ("a: 1".encode("utf-16"), "not UTF-8 text"),
        (b"\x00\x01\x02", "the character .* is not allowed"),
        ("a: !!python/object/apply:os.system [ls]", "the tag .* has no meaning"),
        ("a: &a [*a]", "an anchor holds an alias of itself"),
        ("a: *b", "undefined alias"),
        (BOMB, "more than 100000 values"),
        ("a: " + "[" * 2000, "levels deep"),
        ("a: " + "9" * 5000, "'a': must be a finite number"),
        ("a: 1e999", "'a': must be a finite number"),
        ('a: "\\UFFFFFFFF"', "too large"),
        ('a: "\\ud800"', "a character that is not allowed"),
        ("? [a]\n: b", "a key must be a string"),
        ("a: {<<: 1}", "<< must bring a mapping"),
        ("- a", "expected keys and values, found a list"),
        ("a: 1\n---\nb: 2", "but found another document"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_unreadable_file_is_refused_in_one_sentence(read, content, message):
    with pytest.raises(InputError, match=message) as error:
        read(content)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)


def test_an_infinite_number_is_refused_as_other_numbers_are():
    schema = {"properties": {"a": {"type": "number", "exclusiveMinimum": 0}}}
    with pytest.raises(InputError, match=r"'a': expected a number above 0, found -\.inf"):
        convert_values({"a": float("-inf")}, schema)


def test_a_folder_or_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path} cannot be read: Is a directory"):
        read_config(tmp_path)
    with pytest.raises(InputError, match="gone.yaml does not exist"):
        read_config(tmp_path / "gone.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1, "a": 2}', "file.yaml: the key 'a' is stated twice; keep one"),
        ('{"a": NaN}', "'a': must be a finite number"),
        ('{"a": [1e999]}', r"'a\.0': must be a finite number"),
        ('{"a": ' + "9" * 5000 + "}", "too large"),
        ('{"a": 1', "line 1: not valid JSON"),
        ('{"a": ' + "[" * 2000 + "]" * 2000 + "}", "levels deep"),
        ("[1]", "expected keys and values, found a list"),
        (b"\xff\xfe{", "not UTF-8"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_unreadable_deepspeed_file_is_refused(read, content, message):
    with pytest.raises(InputError, match=message):
        read(content, read_json_config)


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        10**30,
        date(2024, 1, 1),
        {1, 2},
        b"x",
        {None: 1},
        "\udcfc",
        "a\0b",
        2.0,
        True,
        "010",
    ],
    ids=repr,
)
def test_values_that_json_lacks_are_refused(value):
    with pytest.raises(InputError, match="the command line's --config: "):
        layer = build_command_line_layer({"pretrain": {"save_steps": value}})
        validate_settings(CONFIGURATION, layer.values, layer.source)


def test_numbers_on_the_command_line_can_be_strings():
    values = {
        "dataset": 123,
        "model": "5",
        "synthesize": {"mgm": {"experiment": "12"}},
        "gpus": "2",
        "description": True,
    }
    values = build_command_line_layer(values).values
    assert values == values | {"dataset": "123", "gpus": 2, "description": "true"}


# fuzzers

PIECES = ["a", "b", "gpus", ": ", ":", "\n", "\n  ", "- ", "&a ", "*a", "<<", "{", "}", "[", "]", ",", "? ", "!!set "]
PIECES += ["! ", "010", ".nan", "1e999", "no", '"', "'", "| ", ">-", "#", "%YAML 1.2", "---\n", "\t", "\\ud800", "\\"]
PIECES += ["\r", "\x85"]
YAMLISH = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)


@fuzzed(1000)
@example("a: &a [*a]")
@example("%YAML 99999999999999999999.1\n--- a")
@example("? \n")
@given(content=st.one_of(YAMLISH, st.text(max_size=60), st.binary(max_size=60)))
def test_any_file_is_read_or_refused_by_name(tmp_path, content):
    path = tmp_path / "file.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    for reader in (read_config, read_json_config):
        try:
            values = reader(path)
        except InputError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)
        else:
            _survives(values)


def _survives(values: dict) -> None:
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert yaml.safe_load(yaml.safe_dump(values, allow_unicode=True)) == values


PRINTED = st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=8)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | PRINTED,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(PRINTED, values, max_size=4),
    max_leaves=12,
)


@fuzzed(200)  # writing and reading take long
@example({"<<": []})
@given(values=st.dictionaries(PRINTED, JSON, max_size=4))
def test_json_is_read_like_by_json_loads(tmp_path, values):
    """YAML 1.2 is a superset of JSON, so compare with json.loads."""
    path = tmp_path / "file.yaml"
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    assert read_config(path) == read_json_config(path) == values


def _leaves(properties: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    paths = []
    for key, value in properties.items():
        paths += [(*path, key), *_leaves(value.get("properties", {}), (*path, key))]
    return paths


@cache
def _defaults():
    return read_default_layer()


HOSTILE = st.sampled_from(
    [float("nan"), float("inf"), 1.0, -1, 0, 10**20, "", "{question}", "{", "../x", "a b", "010", "1e-4"]
)
ANY = JSON | HOSTILE | st.text(max_size=6) | st.lists(st.integers(0, 2), max_size=3)


@fuzzed(1000)
@given(data=st.data())
def test_any_value_is_valid_or_refused_in_a_sentence(monkeypatch, data):
    monkeypatch.chdir(PROJECT)
    path = data.draw(st.sampled_from(_leaves(build_schema(CONFIGURATION)["properties"])))
    value = data.draw(ANY)
    for key in reversed(path):
        value = {key: value}
    try:
        layer = build_command_line_layer(value)
        layers = [_defaults(), layer]
        validate_settings(CONFIGURATION, merge(layers), "merged", layers)
    except InputError as error:
        assert str(error).startswith(("the command line's --config: ", "merged: ")) and "\n" not in str(error)
    else:
        _survives(layer.values)


@fuzzed(1000)
@example("a", "{x: &a [*a]}")
@example("gpus", "010")
@given(
    key=st.sampled_from(sorted(build_schema(CONFIGURATION)["properties"])),
    text=YAMLISH | st.text(min_size=1, max_size=20),
)
def test_any_command_line_string_is_typed_or_refused(key, text):
    try:
        parsed = parse_config([f"{key}={text}"])
    except Exception:  # Snakemake's own refusal
        assume(False)
    try:
        layer = build_command_line_layer(parsed)
        validate_settings(CONFIGURATION, layer.values, layer.source)
    except InputError as error:
        assert str(error).startswith("the command line's --config: ") and "\n" not in str(error)
    else:
        _survives(layer.values)


def _paths(schema: dict, at: tuple = ()):
    """Yield the locations of paths in a schema, with `x` for a key of any name."""
    if schema.get("format") == "path":
        yield at
    for key, inner in schema.get("properties", {}).items():
        yield from _paths(inner, (*at, key))
    for key, name in (("additionalProperties", "x"), ("items", 0)):
        if isinstance(schema.get(key), dict):
            yield from _paths(schema[key], (*at, name))


@pytest.mark.parametrize("model", [CONFIGURATION, *FILES], ids=lambda model: model.__name__)
def test_the_home_folder_is_expanded_in_every_path(monkeypatch, model):
    monkeypatch.setenv("HOME", "/home/me")
    schema = build_schema(model)
    for path in _paths(schema):
        value: object = "~/photos"
        for key in reversed(path):
            value = [value] if key == 0 else {key: value}
        parsed = convert_values(value, schema)
        for key in path:
            parsed = parsed[key]
        assert parsed == "/home/me/photos", path
    assert convert_values({"description": "~/photos"}, build_schema(CONFIGURATION)) == {"description": "~/photos"}


def test_folders_and_files_are_paths_of_the_schemas():
    assert {path[-1] for path in _paths(build_schema(FilesDataset))} == {"file", "images", "questions"}
    parts = {"language_model", "vision_tower", "vision_tower_aux", "clip"}
    assert {path[-1] for path in _paths(build_schema(MgmModel))} == parts
    expected = {"dataset", "evaluation_data", "judge_clip", "second_judge", "model", "answers", "images"}
    assert expected <= {path[-1] for path in _paths(build_schema(CONFIGURATION))}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["finetune={lora: {r: 4, r: 5}}"], "r"),
        (["finetune={learning_rate: 1, learning_rate: 1}"], "learning_rate"),
        (["seeds=[{a: 1, a: 2}]"], "a"),
        (["model=tiny", "dataset=shapes", "model=small"], "model"),
        (["finetune={epochs: 1}", "finetune=3"], "finetune"),
    ],
)
def test_a_repeated_key_on_the_command_line_is_refused(arguments, key):
    with pytest.raises(InputError, match=f"--config.*the key '{key}' is stated twice; keep one"):
        check_stated_once(arguments)


def test_braces_of_one_key_are_merged():
    check_stated_once(["finetune={epochs: 1}", "finetune={lora: null}"])
    check_stated_once(["a={", "b=: :", "c=x: y: z", "d"])


def test_a_typo_gets_the_nearest_and_all_names():
    assert suggest_name("smal", ["tiny", "small"]) == "did you mean 'small'? Known are small, tiny"
    assert suggest_name("zzz", ["tiny", "small"]) == "known are small, tiny"
