"""Crates match recomputed hashes and the RO-Crate profile; modified crates are rejected."""

import hashlib
import json
import re
import shutil
import stat
import tracemalloc
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from crates import (
    ENDED,
    PAGE,
    SECONDS,
    TABLE,
    encode_png,
    forge_crate,
    read_contents,
    read_graph,
    write_log,
    write_page,
    write_page_with_crate,
    write_zip,
)
from dj2mgm.errors import InputError
from dj2mgm.provenance import differences
from dj2mgm.provenance.allowed_folders import AllowedFolders
from dj2mgm.provenance.crate_files import digest_images
from dj2mgm.provenance.crate_reader import open_crate
from dj2mgm.provenance.crate_writer import write_crate
from dj2mgm.provenance.differences import (
    check_inputs,
    compare_scores,
    describe_differences,
    format_comparisons,
    parse_comparison,
)
from dj2mgm.provenance.finished_jobs import find_jobs
from dj2mgm.provenance.reproduction_folder import write_reproduction_folder
from dj2mgm.runs.all_runs import Runs
from dj2mgm.storage.files import write_json

PROFILES = ("process/0.5", "workflow/0.5", "provenance/0.5")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Make a folder with a finished page and its crate, which tests do not change."""
    return write_page_with_crate(tmp_path_factory.mktemp("a page ä"))


@pytest.fixture
def crate(page, monkeypatch) -> Path:
    monkeypatch.chdir(page)
    return page / "run.crate.zip"


def links(entity: dict, key: str) -> list[str]:
    value = entity.get(key, [])
    return [item["@id"] for item in (value if isinstance(value, list) else [value])]


def select_type(graph: dict[str, dict], kind: str) -> list[dict]:
    return [entity for entity in graph.values() if kind == entity["@type"] or kind in list(entity["@type"])]


def read_run_json(crate: Path) -> dict:
    return json.loads(read_contents(crate)["run.json"])


def with_record(crate: Path, path: Path, **values: object) -> Path:
    return forge_crate(crate, path, {"run.json": json.dumps(read_run_json(crate) | values).encode()})


def test_each_file_has_the_recomputed_digest_and_size(crate):
    archive_files, outside = read_contents(crate), 0
    for entity in select_type(read_graph(crate), "File"):
        name = unquote(entity["@id"])
        if name.startswith("file:"):
            content, outside = Path(unquote(urlsplit(entity["@id"]).path)).read_bytes(), outside + 1
        else:
            content = archive_files.pop(name)
        assert entity["sha256"] == hashlib.sha256(content).hexdigest(), name
        assert entity["contentSize"] == str(len(content)), name
    assert list(archive_files) == ["ro-crate-metadata.json"] and outside == 2  # the user's captions, and the weights


def test_weights_and_the_users_data_are_not_in_a_crate(crate):
    names = read_contents(crate)
    assert not [name for name in names if name.endswith((".safetensors", ".png")) or "phötos" in name]
    assert {"Snakefile", "rules/crate.smk", "workflow_scripts/finetune.py", "envs/train.yaml"} <= set(names)
    assert {"config/config.yaml", "config/recipes/baseline.yaml", f"results/{PAGE}/comparison.csv"} <= set(names)


def test_job_has_times_script_inputs_and_results(crate):
    graph = read_graph(crate)
    job = graph["#results/baseline/finetune/finetune"]
    assert datetime.fromisoformat(job["endTime"]) == datetime.fromtimestamp(ENDED, UTC)
    assert datetime.fromisoformat(job["startTime"]) == datetime.fromtimestamp(ENDED, UTC) - timedelta(seconds=SECONDS)
    assert links(job, "instrument") == ["workflow_scripts/finetune.py"]
    weights = (Path.cwd() / "results/baseline/pretrain/projector.safetensors").as_uri()
    assert {weights, "results/baseline/jsonl/pretrain.jsonl"} <= set(links(job, "object"))
    assert "results/baseline/finetune/metrics.json" in links(job, "result")
    [usage] = [graph[uri] for uri in links(job, "resourceUsage")]
    assert (usage["name"], usage["value"], usage["unitCode"]) == ("max_rss", "100.5", "4L")
    made = graph["#results/datasets/photos/make_dataset"]
    assert (Path.cwd() / "my phötos/captions.jsonl").as_uri() in links(made, "object")


def test_answering_a_task_is_a_job_after_fine_tuning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, folder = write_page(), tmp_path / "results/baseline/evaluations/pope"
    write_json(folder / "metrics.json", {})
    write_log(folder, "answer_evaluation")
    stages = settings.experiments[0].runs[0].stages
    stages["evaluations/pope"] = str(folder)
    [job] = [job for job in find_jobs(settings) if job.folder == folder]
    assert job.script == "answer_evaluation" and job.reads == (Path(stages["finetune"]),)


def test_crates_satisfy_the_profile(crate):
    """Check the structure that roc-validator 0.13 requires of a Provenance Run Crate 0.5."""
    graph = read_graph(crate)
    root = graph["./"]
    assert {f"https://w3id.org/ro/wfrun/{profile}" for profile in PROFILES} <= set(links(root, "conformsTo"))
    assert all(root[key] for key in ("name", "description", "datePublished", "license"))
    [main] = links(root, "mainEntity")
    workflow = graph[main]
    assert {"File", "SoftwareSourceCode", "ComputationalWorkflow", "HowTo"} == set(workflow["@type"])
    actions = select_type(graph, "CreateAction")
    [run] = [action for action in actions if links(action, "instrument") == [main]]
    jobs = [action for action in actions if action is not run]
    tools = {uri for action in jobs for uri in links(action, "instrument")}
    assert tools == set(links(workflow, "hasPart")) and len(jobs) == 9
    assert {uri for step in links(workflow, "step") for uri in links(graph[step], "workExample")} == tools
    controls = select_type(graph, "ControlAction")
    assert {uri for control in controls for uri in links(control, "object")} == {job["@id"] for job in jobs}
    assert {uri for control in controls for uri in links(control, "instrument")} <= set(links(workflow, "step"))
    [organized] = select_type(graph, "OrganizeAction")
    assert set(links(organized, "object")) == {control["@id"] for control in controls}
    assert links(organized, "result") == [run["@id"]]
    for parameter in select_type(graph, "FormalParameter"):
        assert parameter["additionalType"] == "File"
        assert links(graph[links(parameter, "workExample")[0]], "exampleOfWork") == [parameter["@id"]]
    linked = set(re.findall(r'\{"@id": "([^"]+)"\}', json.dumps(list(graph.values()))))
    assert [uri for uri in linked - graph.keys() if not uri.startswith("http")] == []


def test_digest_of_images_does_not_depend_on_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    roots = write_page().datasets["photos"].images
    digest = digest_images(Path("results/datasets/photos"), roots)
    lines = [*(hashlib.sha256(encode_png(n)).hexdigest() for n in (0, 1)), "missing"]
    lines += [hashlib.sha256(encode_png(n)).hexdigest() for n in (0, 2)]  # images of instructions, and held-out images
    expected = hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
    assert digest == {"count": 5, "sha256": expected}
    shutil.move("my phötos", "moved")
    moved = dict.fromkeys(roots, "moved")
    assert digest_images(Path("results/datasets/photos"), moved) == digest
    Path("moved/images/2.png").write_bytes(encode_png(200))
    assert digest_images(Path("results/datasets/photos"), moved)["sha256"] != expected


def test_a_folder_is_read_like_its_zip_file(crate, tmp_path):
    with zipfile.ZipFile(crate) as archive:
        archive.extractall(tmp_path / "unpacked")
    with open_crate(crate) as zipped, open_crate(tmp_path / "unpacked") as unpacked:
        assert (zipped.record, zipped.digests, zipped.identity) == (
            unpacked.record,
            unpacked.digests,
            unpacked.identity,
        )
        assert zipped.record.model_dump(by_alias=True) == read_run_json(crate)
        assert zipped.record.versions == {"torch": ["0.0.1"], "py-data-juicer": ["1.6.1"]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda files: files.update({"Snakefile": b"rule all:"}), "'Snakefile' has changed since"),
        (lambda files: files.update({"more.yaml": b""}), "which its metadata does not list"),
        (lambda files: files.pop("config/config.yaml"), "lacks 'config/config.yaml'"),
        (lambda files: files.pop("ro-crate-metadata.json"), "has no ro-crate-metadata.json"),
        (lambda files: files.update({"ro-crate-metadata.json": b"[" * 100_000}), "is not JSON"),
        (lambda files: files.update({"ro-crate-metadata.json": b"[1]"}), "must be an object"),
        (lambda files: files.update({"ro-crate-metadata.json": b'{"@graph": [{"@id": 1}, 2]}'}), "does not list"),
    ],
)
def test_a_changed_crate_is_noticed(crate, tmp_path, change, sentence):
    files = read_contents(crate)
    change(files)
    with pytest.raises(InputError, match=sentence), open_crate(write_zip(tmp_path / "changed.zip", files)):
        pass


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "config/../../x", "a\\..\\x", "C:/x", "a//x", "./x", "x\n", "config/."]
)
def test_a_name_outside_of_the_crate_is_refused(crate, tmp_path, name):
    with (
        pytest.raises(InputError, match="is not a valid file name"),
        open_crate(forge_crate(crate, tmp_path / "x.zip", {name: b""})),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["x.zip"]


def test_a_file_changed_after_its_check_is_noticed(crate, tmp_path):
    with zipfile.ZipFile(crate) as archive:
        archive.extractall(tmp_path)
    with open_crate(tmp_path) as opened:
        (tmp_path / "config/config.yaml").write_text("seeds: [1]")
        with pytest.raises(InputError, match="has changed since"):
            opened.read("config/config.yaml")
        with pytest.raises(InputError, match="holds no more.csv"):
            opened.read("more.csv")


def test_links_are_refused_in_a_zip_file_and_in_a_folder(crate, tmp_path):
    link = zipfile.ZipInfo("config/passwords.yaml")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(shutil.copy(crate, tmp_path / "linked.zip"), "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with zipfile.ZipFile(crate) as archive:
        archive.extractall(tmp_path / "folder")
    shutil.rmtree(tmp_path / "folder/envs")
    (tmp_path / "folder/envs").symlink_to("/etc")
    for path in (tmp_path / "linked.zip", tmp_path / "folder"):
        with pytest.raises(InputError, match="is a link"), open_crate(path):
            pass


def test_a_crate_with_too_many_unpacked_bytes_is_refused(crate, tmp_path):
    path = shutil.copy(crate, tmp_path / "bomb.zip")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(65 << 20))
    with pytest.raises(InputError, match="more or larger files"), open_crate(path):
        pass
    (tmp_path / "text.zip").write_text("no zip")
    with pytest.raises(InputError, match="not a readable zip file"), open_crate(tmp_path / "text.zip"):
        pass


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_streamable_compression_is_accepted(crate, tmp_path, kind):
    path = shutil.copy(crate, tmp_path / "packed.zip")
    with zipfile.ZipFile(path, "a", kind) as archive:
        archive.writestr("zeros", bytes(1 << 20))
    with pytest.raises(InputError, match="'zeros' has an unknown compression"), open_crate(path):
        pass


def test_a_forged_size_does_not_exhaust_memory(crate, tmp_path):
    path, files = tmp_path / "forged.zip", read_contents(crate)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ro-crate-metadata.json", bytes(256 << 20))
        archive.getinfo("ro-crate-metadata.json").file_size = 10  # in the directory at the end, which readers use
        for name in files.keys() - {"ro-crate-metadata.json"}:
            archive.writestr(name, files[name])
    tracemalloc.start()
    with pytest.raises(InputError, match="not a readable zip file"), open_crate(path):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_too_large_configuration_is_refused(crate, tmp_path):
    large = {"config/recipes/baseline.yaml": b"#" * ((1 << 20) + 1)}
    with pytest.raises(InputError, match="recipes/baseline.yaml' is larger than a configuration may be"):
        with open_crate(forge_crate(crate, tmp_path / "x.zip", large)):
            pass


@pytest.mark.parametrize(
    "values", [{"page": "../../x"}, {"experiments": ["a/b"]}, {"format": 2}, {"more": 1}, {"inputs": [{}]}]
)
def test_an_invalid_record_is_refused(crate, tmp_path, values):
    with pytest.raises(InputError, match="run.json"), open_crate(with_record(crate, tmp_path / "x.zip", **values)):
        pass


def test_differences_from_the_crates_machine_are_listed(crate, tmp_path, monkeypatch):
    with open_crate(forge_crate(crate, tmp_path / "x.zip", {"rules/crate.smk": b"", "rules/gone.smk": b""})) as other:
        monkeypatch.setattr(
            differences, "describe_this_machine", lambda: other.record.machine.model_copy(update={"gpus": ["H100"]})
        )
        lines = list(describe_differences(other))
    assert lines[0].endswith("files differ: rules/crate.smk") and "are missing here: rules/gone.smk" in lines[1]
    assert lines[2].startswith("code: the run uses this clone")
    assert lines[3].startswith("torch: 0.0.1 there, ") and lines[4:] == ["gpus: none there, H100 here"]


def test_missing_or_different_input_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_crate(write_page(), Path("run.crate.zip"))
    with open_crate(Path("run.crate.zip")) as opened:
        inputs, captions = opened.record.inputs, Path("my phötos/captions.jsonl")
    check_inputs(inputs, AllowedFolders(Path.cwd()))
    captions.write_bytes(captions.read_bytes().replace(b"boat", b"goat"))
    with pytest.raises(InputError, match="my phötos/captions.jsonl differs from the file that the crate's run read"):
        check_inputs(inputs, AllowedFolders(Path.cwd()))
    captions.unlink()
    with pytest.raises(InputError, match=f"is missing.* then {tmp_path}/my phötos/captions.jsonl"):
        check_inputs(inputs, AllowedFolders(Path.cwd()))


def test_a_crates_configuration_names_the_same_files(crate, tmp_path):
    with open_crate(crate) as opened:
        runs = write_reproduction_folder(opened, tmp_path, AllowedFolders(Path.cwd()))
    [dataset] = runs.datasets
    assert dataset == "my phötos"
    assert runs.first_seed("baseline").config.dataset == str(crate.parent / "my phötos")
    kinds = {path.relative_to(tmp_path).parts[1] for path in tmp_path.rglob("config/*/*")}
    assert not kinds & {"schemas", "deepspeed", "foundation"}
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".yaml", ".json", ".jinja"}


def test_code_weights_and_deepspeed_of_a_crate_are_ignored(crate, tmp_path):
    names = [
        "config/x.py",
        "config/deepspeed/zero3.json",
        "config/foundation/tiny/settings.json",
        "config/schemas/x.yaml",
    ]
    with open_crate(forge_crate(crate, tmp_path / "x.zip", dict.fromkeys(names, b"{}"))) as opened:
        write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd()))
    assert not [name for name in names if (tmp_path / "made" / name).exists()]


FILTER = b"process: [text_length_filter: {}]"
SERVER = b"synthesize: {recipe: dj_synth, captioner: openai, openai: {model: x}}"
ASKING = b"process: [extract_keyword_mapper: {}]"
CODE = b"process: [python_lambda_mapper: {lambda_str: 'lambda x: x'}]"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("experiments/dj_synth.yaml", SERVER, "base_url.*answers cannot be reproduced"),
        ("recipes/baseline.yaml", b"executor: ray\nray_address: a.b:1\n" + FILTER, "ray_address"),
        ("recipes/baseline.yaml", ASKING, "extract_keyword_mapper is not allowed in a recipe, because it sends data"),
        ("recipes/baseline.yaml", CODE, "python_lambda_mapper is not allowed in a recipe, because it runs code"),
        ("recipes/baseline.yaml", b"process: [clean_links_mapper: {pattern: x}]", "'pattern' is not allowed"),
        ("experiments/baseline.yaml", b"learning_rat: 1", "unknown key"),
        ("models/tiny.yaml", b"!!python/object/apply:os.system [id]", "tag"),
    ],
)
def test_a_forbidden_configuration_is_refused(crate, tmp_path, name, content, sentence):
    page = {"page": "report", "experiments": ["baseline", "dj_synth"]}
    path = with_record(crate, tmp_path / "page.zip", **page)
    with open_crate(forge_crate(path, tmp_path / "x.zip", {f"config/{name}": content})) as opened:
        with pytest.raises(InputError, match=sentence):
            write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd()))


OUTSIDE = "which is outside of the current folder; put the folder into crate_folders"
SYSTEM = "a file of the system; a crate may not read it"


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("experiments/baseline.yaml", {"dataset": "/home/decoy"}, f"names /home/decoy, {OUTSIDE}"),
        ("experiments/baseline.yaml", {"dataset": "~/decoy"}, OUTSIDE),
        ("experiments/baseline.yaml", {"dataset": "../decoy"}, OUTSIDE),
        ("experiments/baseline.yaml", {"dataset": "results/../../decoy"}, OUTSIDE),
        ("experiments/baseline.yaml", {"dataset": "/proc/self"}, SYSTEM),
        ("experiments/baseline.yaml", {"evaluate": {"judge_clip": "/dev/shm"}}, SYSTEM),
        ("experiments/baseline.yaml", {"evaluate": {"second_judge": "a/b"}}, "a/b, which is not on this machine"),
        ("config.yaml", {"decontaminate": {"folders": ["/srv/decoy"]}}, OUTSIDE),
        ("config.yaml", {"evaluation_data": "/srv/decoy"}, OUTSIDE),
        ("models/tiny.yaml", {"clip": "/srv/decoy"}, OUTSIDE),
        ("models/tiny.yaml", {"clip": "a/b"}, "`hf download a/b` fetches it"),
        ("datasets/shapes.yaml", {"pretrain": {"file": "/srv/decoy/x.jsonl", "images": "."}}, OUTSIDE),
    ],
)
def test_a_crate_cannot_name_outside_folders_or_downloads(crate, tmp_path, monkeypatch, name, values, sentence):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    files = read_contents(crate)
    crate_values = yaml.safe_load(files.get(f"config/{name}", b"{}")) or {}
    if "dataset" in values:  # otherwise the command line's value applies
        crate = with_record(crate, tmp_path / "page.zip", command_line={})
    changed = {f"config/{name}": yaml.safe_dump(merged(crate_values, values)).encode()}
    with open_crate(forge_crate(crate, tmp_path / "x.zip", changed)) as opened:
        with pytest.raises(InputError, match=re.escape(sentence)):
            write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd()))


def merged(old: dict, new: dict) -> dict:
    return old | {
        key: merged(old.get(key) or {}, item) if isinstance(item, dict) else item for key, item in new.items()
    }


def test_folders_named_by_the_user_are_accepted(crate, tmp_path, monkeypatch):
    photos = crate.parent / "my phötos"
    path = with_record(crate, tmp_path / "x.zip", command_line={"dataset": str(photos)})
    monkeypatch.chdir(tmp_path)
    with open_crate(path) as opened:
        with pytest.raises(InputError, match=OUTSIDE):
            write_reproduction_folder(opened, tmp_path / "refused", AllowedFolders(Path.cwd()))
        runs = write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd(), [crate.parent]))
    assert runs.first_seed("baseline").config.dataset == str(photos)


def test_an_unused_file_with_an_outside_path_is_omitted(crate, tmp_path):
    values = {"pretrain": {"file": "/srv/decoy/x.jsonl", "images": "/srv/decoy"}}
    changed = {"config/datasets/unused.yaml": yaml.safe_dump(values).encode()}
    with open_crate(forge_crate(crate, tmp_path / "x.zip", changed)) as opened:
        write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd()))
    assert not (tmp_path / "made/config/datasets/unused.yaml").exists()
    path = with_record(crate, tmp_path / "page.zip", command_line={"dataset": "unused"})
    with open_crate(forge_crate(path, tmp_path / "y.zip", changed)) as opened:
        with pytest.raises(InputError, match=f"unused.*names /srv/decoy/x.jsonl, {OUTSIDE}"):
            write_reproduction_folder(opened, tmp_path / "again", AllowedFolders(Path.cwd()))


@pytest.mark.parametrize(
    ("source", "file", "sentence"),
    [
        ("/proc/self/environ", "", SYSTEM),
        ("/srv/decoy", "", OUTSIDE),
        ("config/foundation/../../../../decoy", "x", OUTSIDE),
        ("my photos", "../../decoy", "leads out of it"),
        ("~/decoy", "model.safetensors", OUTSIDE),
    ],
)
def test_inputs_of_a_crate_outside_of_the_folder_are_not_read(crate, source, file, sentence):
    with open_crate(crate) as opened:
        entry = opened.record.inputs[0].model_copy(update={"configured_path": source, "file": file})
    with pytest.raises(InputError, match=re.escape(sentence)):
        check_inputs([entry], AllowedFolders(Path.cwd()))


@pytest.mark.parametrize("by", ["config.yaml", "command line"])
def test_a_crates_recipes_are_never_trusted(crate, tmp_path, by):
    path, changes = crate, {"config/recipes/baseline.yaml": CODE}
    if by == "command line":
        command_line = read_run_json(crate)["command_line"] | {"trusted_recipes": True}
        path = with_record(crate, tmp_path / "page.zip", command_line=command_line)
    else:
        config = yaml.safe_load(read_contents(crate)["config/config.yaml"]) | {"trusted_recipes": True}
        changes["config/config.yaml"] = yaml.safe_dump(config).encode()
    with open_crate(forge_crate(path, tmp_path / "x.zip", changes)) as opened:
        with pytest.raises(InputError, match="python_lambda_mapper is not allowed in a recipe, because it runs code"):
            write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd()))


@pytest.mark.parametrize("by", ["experiment", "model", "command line"])
def test_a_crate_does_not_enable_trackers(crate, tmp_path, monkeypatch, by):
    trackers = ["tensorboard", "wandb", "mlflow", "trackio"]
    path, changes = crate, {}
    if by == "command line":
        command_line = read_run_json(crate)["command_line"] | {"trackers": trackers}
        path = with_record(crate, tmp_path / "page.zip", command_line=command_line)
    elif by == "model":
        model = yaml.safe_load(read_contents(crate)["config/models/tiny.yaml"])
        changes["config/models/tiny.yaml"] = model | {"settings": model.get("settings", {}) | {"trackers": trackers}}
    else:
        changes["config/experiments/baseline.yaml"] = {"trackers": trackers}
    changes = {name: yaml.safe_dump(values).encode() for name, values in changes.items()}
    with open_crate(forge_crate(path, tmp_path / "x.zip", changes)) as opened:
        runs = write_reproduction_folder(opened, tmp_path / "made", AllowedFolders(Path.cwd()))
    monkeypatch.chdir(tmp_path / "made")
    again = Runs(json.loads((tmp_path / "made/command_line.json").read_text()))  # settings passed to Snakemake
    for run in (*runs, again.first_seed("baseline")):
        assert run.config.trackers == ["tensorboard"]
        assert all(run.settings[stage].trackers == ["tensorboard"] for stage in ("pretrain", "finetune"))


def test_scores_are_compared_with_the_crates_interval():
    def compared(old: str, new: str) -> list:
        return compare_scores(*(parse_comparison(text.encode(), "x") for text in (TABLE, TABLE.replace(old, new))))

    rows = compared("0.5,", "0.5004,")
    assert [row.agrees for row in rows] == [True] and rows[0].difference == pytest.approx(0.0004)
    [row] = compared("0.5,", "0.7,")
    assert row.is_outside and not row.agrees
    assert "0.400 to 0.600  0.700  +0.200" in format_comparisons([row]) and "1 lie outside" in format_comparisons([row])
    with pytest.raises(InputError, match="only one of the two runs"):
        compared("clip_score", "vqa")
    with pytest.raises(InputError, match="not a table of scores"):
        compared("0.5,", "half,")
