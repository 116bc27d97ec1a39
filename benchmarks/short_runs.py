"""Measure how often short trainings order two recipes of search_truth.py as the full trainings do.

    python benchmarks/short_runs.py FOLDER    # FOLDER: that of search_truth.py, after its run; an hour on two cores

A search with random proposals trains all recipes on a tenth of the rows, and the best of them on all. For each
likelihood of held-out answers, the script prints the pairs that it orders rightly, with the exact 95 % interval. The
truth is the headline after training on all rows. Trainings on a quarter of the rows are counted, too, if the searches
of search_truth.py have trained all recipes on them.
"""

import argparse
import math
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "benchmarks")]

from search_truth import SPACE, read_truth, run_study  # noqa: E402

from dj2mgm.evaluation.intervals import Estimate  # noqa: E402
from dj2mgm.features.studies.proxies import measure_agreement  # noqa: E402
from dj2mgm.storage.files import read_json, read_yaml, write_yaml  # noqa: E402

STUDY, SHARES = "tenth", (0.1, 0.25)
RESULTS = "results/mixture/tiny"
SCORES = {
    "the headline": ("finetune/own", "answer_probability"),
    "log-likelihood of the right answer": ("finetune/own", "answer_log_likelihood"),
    "the same, minus that with the image of another question": ("finetune/difference", "answer_log_likelihood"),
}


def write_study(folder: Path) -> None:
    count = math.prod(map(len, SPACE.values()))
    design = {"kind": "search", "space": SPACE, "sampler": "random", "trainings": count // 4}
    design |= {"rungs": [SHARES[0], 1.0], "keep": 0.1, "batch": count}
    write_yaml(folder / f"config/studies/{STUDY}.yaml", {"experiment": "baseline", "controls": [], "design": design})


def read_names(folder: Path) -> dict[str, tuple]:
    """Return the values of each recipe by the name of its run."""
    records = [read_yaml(file) for file in (folder / RESULTS / STUDY / "search").rglob("trials.yaml")]
    trials = [trial for record in records for trial in record["trials"]]
    return {trial["name"]: tuple(float(trial["changes"][key]) for key in SPACE) for trial in trials if trial["changes"]}


def read_scores(folder: Path, names: dict[str, tuple], share: float, group: str, metric: str) -> dict[tuple, float]:
    """Return the score of each recipe after a training on a share of the rows."""
    runs = {values: folder / RESULTS / f"{name}-{share:g}" for name, values in names.items()}
    files = {values: run / "evaluate_vqa/metrics.json" for values, run in runs.items()}
    return {
        values: Estimate(**read_json(file)["groups"][group][metric]).mean
        for values, file in files.items()
        if file.is_file()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    if not (folder / f"config/studies/{STUDY}.yaml").exists():  # a newer file would run everything again
        write_study(folder)
    run_study(folder, STUDY)
    truth, names = read_truth(folder, SPACE), read_names(folder)
    for share in SHARES:
        for title, (group, metric) in SCORES.items():
            scores = read_scores(folder, names, share, group, metric)
            if agreement := measure_agreement(scores, truth) if len(scores) == len(truth) else None:
                print(
                    f"{share:g} of the rows, {title}: {agreement.right} of {agreement.pairs} pairs, "
                    f"{100 * agreement.share:.0f} % ({100 * agreement.low:.0f} to {100 * agreement.high:.0f})"
                )


if __name__ == "__main__":
    main()
