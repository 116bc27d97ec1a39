"""Count searches among 20 equally good candidates that call their winner better than the experiment, which is wrong.

    python benchmarks/identical_candidates.py FOLDER           # FOLDER: a clone of the project; an hour on two cores
    python benchmarks/identical_candidates.py FOLDER --tiny    # one search among four candidates, to try the script

The candidates of a search train on 40 to 44 % of the same instructions, each on a few rows more than the one before.
So they draw other rows in another order, and their scores differ by chance. The experiment trains on 42 %. A search
tries all candidates on a quarter of the rows, and trains the best on all of them. `snakemake decide` compares the
winner with the experiment and with the runner-up on fresh seeds. The script prints the verdicts.
"""

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "benchmarks")]

from mixture import parse_folder, run_target, write_scenes  # noqa: E402

from dj2mgm.records import PageSettings  # noqa: E402
from dj2mgm.settings.dataset_files import FaultRates  # noqa: E402
from dj2mgm.settings.validation import load_settings  # noqa: E402
from dj2mgm.storage.files import read_yaml, write_yaml  # noqa: E402

SEARCHES, CANDIDATES = 5, 20
SIZES = {"pretrain_pairs": 500, "finetune_instructions": 2500, "evaluation_images": 200}
MIN_STEPS = 45  # of stage 2: half of the tiny model's, so that the searches take an hour
LOW, HIGH = 0.40, 0.44  # shares of the instructions
EXPERIMENT = "share"


def write_inputs(folder: Path, searches: int, candidates: int) -> None:
    """Write the dataset, the experiment and the studies into a clone of the project."""
    write_scenes(folder, "scenes", SIZES | {"fault_rates": FaultRates()})
    write_yaml(folder / "config/recipes/all.yaml", {"process": [{"image_integrity_filter": {}}]})
    experiment = {"sources": {"questions": round((LOW + HIGH) / 2, 5)}, "finetune": {"min_steps": MIN_STEPS}}
    write_yaml(folder / f"config/experiments/{EXPERIMENT}.yaml", experiment)
    for search in range(searches):
        # no two searches share a candidate
        positions = [searches * number + search for number in range(candidates)]
        shares = [round(LOW + (HIGH - LOW) * (position + 0.5) / (searches * candidates), 5) for position in positions]
        design = {"kind": "search", "space": {"sources.questions": shares}, "seed": search, "sampler": "random"}
        design |= {"rungs": [0.25, 1.0], "keep": 0.25, "batch": candidates}
        design |= {"trainings": candidates // 2}
        study = {"experiment": EXPERIMENT, "controls": [], "design": design}
        write_yaml(folder / f"config/studies/identical_{search}.yaml", study)


def decide(folder: Path, study: str) -> dict[str, str]:
    """Compare the best trial of a search with the experiment and the second, and return the last verdicts."""
    page = folder / "results/scenes/tiny" / study / "config.yaml"
    ranked = load_settings(PageSettings, page).study.search.rank_trials()
    winner, second = f"{study}_best", f"{study}_second"
    for trial, name in zip(ranked, (winner, second), strict=False):
        script = folder / "workflow_scripts/keep_variant.py"
        if not (folder / f"config/experiments/{name}.yaml").exists():
            arguments = [script, page.relative_to(folder), trial.name, name]
            subprocess.run([sys.executable, *arguments], cwd=folder, check=True)
    settings = ("dataset=scenes", "recipe=all", f"experiment={winner}")
    run_target(folder, "decide", *settings, f"decide={{against: [{EXPERIMENT}, {second}], seeds: 3}}")
    files = sorted((folder / "results/scenes/tiny" / winner / "decide").rglob("look.yaml"))
    return {look["against"]: look["kind"] for look in map(read_yaml, files)}


def main() -> None:
    folder, is_tiny = parse_folder(__doc__)
    searches, candidates = (1, 4) if is_tiny else (SEARCHES, CANDIDATES)
    if not (folder / f"config/experiments/{EXPERIMENT}.yaml").exists():  # newer files would run everything again
        write_inputs(folder, searches, candidates)
    for search in range(searches):
        run_target(folder, f"identical_{search}", "dataset=scenes", "recipe=all")
        print(json.dumps({"search": search, "verdicts": decide(folder, f"identical_{search}")}), flush=True)


if __name__ == "__main__":
    main()
