"""Count how often a learning curve's interval contains the score of a training on twice as many rows.

    python benchmarks/learning_curves.py FOLDER           # FOLDER: a clone of the project; an hour on two cores
    python benchmarks/learning_curves.py FOLDER --tiny    # one case, to try the script

Each case has its own drawn dataset. Models are trained on shares of its rows, each share a part of the next one, and
with every seed. The curve through all shares but the largest predicts the score of a training on all rows, as a study's
page does for twice the rows that there are. The script prints each prediction, its interval and the score of each seed.
"""

import json
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "benchmarks")]

from mixture import parse_folder, run_target, write_scenes  # noqa: E402

from dj2mgm.evaluation.run_scores import MetricValues, read_run_scores  # noqa: E402
from dj2mgm.features.studies.learning_curves import LearningCurve, estimate_least_noise  # noqa: E402
from dj2mgm.records import read_jsonl_summary  # noqa: E402
from dj2mgm.storage.files import read_yaml, write_yaml  # noqa: E402

CASES, SEEDS = 10, [0]
SHARES = [0.0625, 0.125, 0.25, 0.5]  # of all rows: the default shares of a study with half of the rows
SIZES = {"pretrain_pairs": 500, "finetune_instructions": 4000, "evaluation_images": 200}
MIN_STEPS = 30  # of both stages: a third of the tiny model's, so that the cases take an hour
GROUP, METRIC = "finetune/own", "answer_probability"


def write_case(folder: Path, case: int) -> None:
    """Write a case's dataset, experiment and study into a clone of the project."""
    write_scenes(folder, f"scenes_{case}", SIZES | {"seed": case})
    steps = {"min_steps": MIN_STEPS}
    experiment = {"seeds": SEEDS, "pretrain": steps, "finetune": steps}
    write_yaml(folder / f"config/experiments/case_{case}.yaml", experiment)
    study = {"experiment": f"case_{case}", "controls": [], "design": {"kind": "curve", "fractions": SHARES}}
    write_yaml(folder / f"config/studies/curve_{case}.yaml", study)


def read_scores(folder: Path, name: str) -> list[tuple[int, MetricValues]]:
    """Return the number of rows and the scores of each seed."""
    scores = []
    for seed in SEEDS:
        run = folder / f"results/{name}" / (f"seed-{seed}" if seed else "")
        note = run / "jsonl/stage.yaml"  # of a stage that the baseline has run
        summary = read_jsonl_summary(
            folder / read_yaml(note)["same_as"] / "summary.json" if note.is_file() else run / "jsonl/summary.json"
        )
        rows = sum(counts.rows_out for counts in summary.files.values())
        scores.append((rows, read_run_scores(name, seed, run / "evaluate_vqa/scores.jsonl").groups[GROUP][METRIC]))
    return scores


def predict(folder: Path, case: int) -> dict:
    """Return the prediction for all rows, from the shares of them, and the scores."""
    name = f"scenes_{case}/tiny/case_{case}"
    points = [point for share in SHARES for point in read_scores(folder, f"{name}-rows-{share:g}")]
    (row_counts, values), truths = zip(*points, strict=True), [scores.mean for _, scores in read_scores(folder, name)]
    means, least_noise = [scores.mean for scores in values], estimate_least_noise(values)
    curve = LearningCurve(row_counts, means, least_noise)
    doubled = curve.predict_score(2 * curve.most)
    inside = [doubled.low <= truth <= doubled.high for truth in truths]
    return {
        "case": case,
        "curve": list(zip(row_counts, means, strict=True)),
        "least_noise": least_noise,
        "predicted": [doubled.low, doubled.median, doubled.high],
        "scores": truths,
        "inside": inside,
    }


def main() -> None:
    folder, is_tiny = parse_folder(__doc__)
    if not (folder / "config/recipes/all.yaml").exists():
        write_yaml(folder / "config/recipes/all.yaml", {"process": [{"image_integrity_filter": {}}]})
    for case in range(1 if is_tiny else CASES):
        if not (folder / f"config/studies/curve_{case}.yaml").exists():  # newer files would run everything again
            write_case(folder, case)
        run_target(folder, f"curve_{case}", f"dataset=scenes_{case}", "recipe=all")
        print(json.dumps(predict(folder, case)), flush=True)


if __name__ == "__main__":
    main()
