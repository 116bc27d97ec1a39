"""Crates match recomputed hashes and the RO-Crate profile."""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from PIL import Image

from dj2mgm.data.formats import build_conversation, build_dj_text
from dj2mgm.features.crate.crate_files import digest_images
from dj2mgm.features.crate.crate_record import CrateSettings, find_jobs
from dj2mgm.features.crate.crate_writer import write_crate
from dj2mgm.runs.stages import STAGES
from dj2mgm.storage.files import write_json, write_jsonl, write_text
from evaluated_runs import build_entry, write_run
from training_records import write_training_record

PROFILES = ("process/0.5", "workflow/0.5", "provenance/0.5")
PAGE = "baseline/report"
ENDED = 1_700_000_000  # of every job, as a file's time
SECONDS = 30  # of each job
VALUES = {"finetune/own": {"clip_score": {"e0": (1.0, 1)}}}
TABLE = "experiment,seeds,group,metric,value,low,high,n\nbaseline,1,finetune/own,clip_score,0.5,0.4,0.6,1\n"


def write_log(folder: Path, rule: str) -> None:
    """Write a job's log and benchmark file, as Snakemake does."""
    write_text(folder / f"{rule}.log", "done\n")
    write_text(folder / f"{rule}.benchmark.tsv", f"s\th:m:s\tmax_rss\tcpu_time\n{SECONDS}.2\t0:00:30\t100.5\t-\n")
    os.utime(folder / f"{rule}.benchmark.tsv", (ENDED, ENDED))


def encode_png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_page() -> CrateSettings:
    """Make a finished page on a user's photos in the current folder, and return the inputs of its crate."""
    photos, dataset = Path("my phötos"), Path("results/datasets/photos")
    (photos / "images").mkdir(parents=True)
    for number in range(3):
        (photos / f"images/{number}.png").write_bytes(encode_png(number))
    rows = [{"id": str(n), "text": build_dj_text("a boat"), "images": [f"images/{n}.png"]} for n in (0, 1, 7)]
    for path in (photos / "captions.jsonl", dataset / "pretrain.jsonl"):
        write_jsonl(path, rows)
    write_json(dataset / "finetune.json", [build_conversation("0", "images/0.png", "What?", "A boat.")])
    write_jsonl(
        dataset / "evaluation.jsonl",
        [{"id": "e0", "image": "images/2.png", "captions": ["a cat"], "objects": [], "questions": []}],
    )
    write_json(dataset / "summary.json", {"pretrain": 3})
    write_log(dataset, "make_dataset")
    stages = write_run(Path("results/baseline"), VALUES, VALUES)
    for stage, folder in stages.items():
        write_log(Path(folder), STAGES[stage].rule)
    Path(stages["pretrain"], "projector.safetensors").write_bytes(b"weights")
    write_training_record(Path(stages["finetune"]), versions={"torch": "0.0.1"})
    write_text(f"results/{PAGE}/report.html", "<html></html>")
    write_text(f"results/{PAGE}/comparison.csv", TABLE)
    write_log(Path("results", PAGE), "compare_experiments")
    settings = {"pretrain": {"file": str(photos / "captions.jsonl"), "images": str(photos)}}
    images = dict.fromkeys(("pretrain", "finetune", "evaluation"), str(photos))
    stages_read = {name: {"upstream": [*stage.upstream], "reads": [*stage.reads]} for name, stage in STAGES.items()}
    stages_read["evaluations/pope"] = {"upstream": ["finetune"], "reads": ["model"]}
    keys = {
        "page": PAGE,
        "stages": stages_read,
        "experiments": [build_entry("baseline", dataset, {0: stages})],
        "datasets": {"photos": {"settings": settings, "images": images}},
        "models": [],
        "captioners": [],
        "foundations": {},
        "command_line": {"dataset": str(photos)},
        "snakemake": "9.27.1",
    }
    return CrateSettings.model_validate(keys)


def read_graph(crate: Path) -> dict[str, dict]:
    """Return the entities of a crate by their address."""
    with zipfile.ZipFile(crate) as archive:
        return {entity["@id"]: entity for entity in json.loads(archive.read("ro-crate-metadata.json"))["@graph"]}


def read_contents(crate: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(crate) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Make a folder with a finished page and its crate, which tests do not change."""
    folder = tmp_path_factory.mktemp("a page ä")
    with contextlib.chdir(folder):
        write_crate(write_page(), Path("run.crate.zip"))
    return folder


@pytest.fixture
def crate(page, monkeypatch) -> Path:
    monkeypatch.chdir(page)
    return page / "run.crate.zip"


def links(entity: dict, key: str) -> list[str]:
    value = entity.get(key, [])
    return [item["@id"] for item in (value if isinstance(value, list) else [value])]


def select_type(graph: dict[str, dict], kind: str) -> list[dict]:
    return [entity for entity in graph.values() if kind == entity["@type"] or kind in list(entity["@type"])]


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
    assert {"Snakefile", "rules/features/crate.smk", "workflow_scripts/finetune.py", "envs/train.yaml"} <= set(names)
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


def test_explorer_pages_are_results_of_their_own_script(tmp_path, monkeypatch):
    """Both scripts of a page write into its folder."""
    monkeypatch.chdir(tmp_path)
    settings, page = write_page(), Path("results", PAGE)
    write_text(page / "explorer/baseline.html", "<html></html>")
    write_log(page, "write_explorers")
    *_, explorers, report = find_jobs(settings)
    assert explorers.script == "write_explorers" and explorers.results == [page / "explorer/baseline.html"]
    assert report.script == "compare_experiments"
    assert report.results == [page / "comparison.csv", page / "report.html"]


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
