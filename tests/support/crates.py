"""A finished page written by hand like the rules do, and its crate."""

import contextlib
import io
import json
import os
import zipfile
from pathlib import Path

from PIL import Image

from dj2mgm.data.formats import build_conversation, build_dj_text
from dj2mgm.features.crate.crate_record import CrateSettings
from dj2mgm.features.crate.crate_writer import write_crate
from dj2mgm.runs.stages import STAGES
from dj2mgm.storage.files import write_json, write_jsonl, write_text
from evaluated_runs import build_entry, write_run
from training_records import write_training_record

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


def write_page_with_crate(folder: Path) -> Path:
    """Write a finished page and its crate, run.crate.zip, into a folder, and return the folder."""
    with contextlib.chdir(folder):
        write_crate(write_page(), Path("run.crate.zip"))
    return folder


def read_graph(crate: Path) -> dict[str, dict]:
    """Return the entities of a crate by their address."""
    with zipfile.ZipFile(crate) as archive:
        return {entity["@id"]: entity for entity in json.loads(archive.read("ro-crate-metadata.json"))["@graph"]}


def read_contents(crate: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(crate) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
