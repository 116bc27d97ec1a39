r"""Score generated answers by accuracy, and the likelihoods of reference answers, with the shuffled-image control.

    python workflow_scripts/evaluate_vqa.py --answers results/shapes/tiny/baseline/generate/answers.jsonl \
        --likelihoods results/shapes/tiny/baseline/generate/likelihoods.jsonl \
        --output-dir results/shapes/tiny/baseline/evaluate_vqa

Writes metrics.json, and scores.jsonl with the values of every image. Without --likelihoods, it scores answers only.
With `--leaks results/datasets/photos/leaks/leaks.jsonl`, metrics.json also contains the figures without images that
are in the training data.
"""

import platform

import numpy

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.evaluation.groups import HELD_OUT, Rows, iterate_score_rows, read_leaked_ids, read_paired_rows
from dj2mgm.evaluation.vqa import (
    evaluate_answers,
    measure_accuracy,
    measure_log_likelihoods,
    merge_metrics,
    read_likelihoods,
)
from dj2mgm.score_groups import OWN
from dj2mgm.storage.files import compute_sha256, write_json, write_jsonl


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--answers", "--output-dir", optional=("--leaks", "--likelihoods"))
    models = read_paired_rows(paths.answers, key=("id", "type", "question"))
    references = read_likelihoods(paths.likelihoods) if paths.likelihoods else {}
    likelihoods = measure_log_likelihoods(references)
    result = evaluate_answers(models, likelihoods)
    if leaked_ids := read_leaked_ids(paths.leaks, HELD_OUT):
        unleaked_likelihoods = measure_log_likelihoods(drop_leaked(leaked_ids, references))
        result["without_leaked"] = evaluate_answers(drop_leaked(leaked_ids, models), unleaked_likelihoods)
        print(f"{result['without_leaked']['questions']} questions on images without a copy in the dataset", flush=True)
    print(f"{result['questions']} questions", flush=True)
    for group, estimates in result["groups"].items():
        figures = "  ".join(f"{name} {value.mean:.3f}" for name, value in estimates.items())
        print(f"{group:20} {figures}", flush=True)
    input_files = {"answers": paths.answers} | ({"likelihoods": paths.likelihoods} if paths.likelihoods else {})
    record = {
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__},
        "inputs": {name: compute_sha256(path) for name, path in input_files.items()},
    }
    measurements = merge_metrics(measure_accuracy(models), likelihoods)
    write_jsonl(paths.output_dir / "scores.jsonl", iterate_score_rows(measurements))
    write_json(paths.output_dir / "metrics.json", result | record)


def drop_leaked(leaked_ids: set[str], models: dict[str, dict[str, Rows]]) -> dict[str, dict[str, Rows]]:
    """Return the rows without these images, and without models that then have no rows."""
    remaining = {
        model: {images: [row for row in rows if row["id"] not in leaked_ids] for images, rows in pair.items()}
        for model, pair in models.items()
    }
    return {model: pair for model, pair in remaining.items() if pair[OWN]}


if __name__ == "__main__":
    main()
