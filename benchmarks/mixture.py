"""Measure whether it helps to weigh clean sources more, with embedded scenes in four sources of different noise.

    python benchmarks/mixture.py FOLDER                 # FOLDER: a clone of the project; an hour on two cores
    python benchmarks/mixture.py FOLDER --seeds 0 1 2

Each source has a quarter of the pairs; 0, 30, 60 and 90 % of their captions belong to other scenes. `equal` takes every
row once, `favoured` takes clean rows more often and noisy ones less often, with the same number of samples in total. No
filter drops rows. The accuracy of both is printed, and their difference with its 95 % interval.
"""

import argparse
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts")]

from dj2mgm.data.shapes import write_shapes  # noqa: E402
from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset  # noqa: E402
from dj2mgm.settings.dataset_files import FaultRates  # noqa: E402
from dj2mgm.storage.files import write_yaml  # noqa: E402

NOISE = {"clean": 0.0, "fair": 0.3, "poor": 0.6, "junk": 0.9}
FAVOURED = {"clean": 2.5, "fair": 1.0, "poor": 0.4, "junk": 0.1}
PAIRS = 2500  # of each source


def write_sources(folder: Path) -> None:
    embedded = resolve_dataset("shapes").settings
    sources = {}
    for number, (name, share) in enumerate(NOISE.items()):
        changes = {"pretrain_pairs": PAIRS, "seed": 100 + number, "fault_rates": FaultRates(mismatched=share)}
        write_shapes(embedded.model_copy(update=changes), folder / "data" / name)
        sources[name] = {"format": "data_juicer", "path": f"data/{name}/pretrain.jsonl"}
    sources["questions"] = {"format": "llava", "path": "data/clean/finetune.json", "split": "finetune"}
    evaluation = {"file": "data/clean/evaluation.jsonl", "images": "data/clean"}
    write_yaml(folder / "config/datasets/mixture.yaml", {"sources": sources, "evaluation": evaluation})


def parse_folder(doc: str) -> tuple[Path, bool]:
    """Return the clone of the project, and whether --tiny is given."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    return arguments.folder.resolve(), arguments.tiny


def write_scenes(folder: Path, name: str, changes: dict) -> None:
    """Draw scenes with changed settings into a clone of the project, as its dataset `name` of pairs and questions."""
    write_shapes(resolve_dataset("shapes").settings.model_copy(update=changes), folder / "data" / name)
    sources = {
        "pairs": {"format": "data_juicer", "path": f"data/{name}/pretrain.jsonl"},
        "questions": {"format": "llava", "path": f"data/{name}/finetune.json", "split": "finetune"},
    }
    evaluation = {"file": f"data/{name}/evaluation.jsonl", "images": f"data/{name}"}
    write_yaml(folder / f"config/datasets/{name}.yaml", {"sources": sources, "evaluation": evaluation})


def run_target(folder: Path, target: str, *config: str) -> None:
    subprocess.run(["snakemake", "--cores", "1", target, "--config", *config], cwd=folder, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not (folder / "config/experiments/favoured.yaml").exists():  # a newer recipe would run everything again
        write_sources(folder)
        write_yaml(folder / "config/recipes/all.yaml", {"process": [{"image_integrity_filter": {}}]})
        write_yaml(folder / "config/experiments/favoured.yaml", {"sources": FAVOURED})
    run_target(folder, "favoured", "dataset=mixture", "recipe=all", f"seeds={arguments.seeds}")
    print((folder / "results/mixture/tiny/favoured/report/comparison.csv").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
