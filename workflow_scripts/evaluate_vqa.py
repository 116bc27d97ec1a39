r"""Score the generated answers by accuracy overall and by question type, with the shuffled-image control.

    python workflow_scripts/evaluate_vqa.py --answers results/baseline/generate/answers.jsonl \
        --output-dir results/baseline/evaluate_vqa

Writes metrics.json, and scores.jsonl with the values of every image. With
`--leaks results/datasets/photos/leaks/leaks.jsonl`, metrics.json also contains the figures without questions about
images that are in the training data.
"""

import platform

import numpy

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.evaluation.groups import HELD_OUT, Rows, read_leaked_ids, read_pairs, score_rows
from dj2mgm.evaluation.vqa import evaluate_answers, measure_answers
from dj2mgm.files import compute_sha256, write_json, write_jsonl


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--answers", "--output-dir", optional=("--leaks",))
    models = read_pairs(paths.answers, key=("id", "type", "question"))
    result = evaluate_answers(models)
    if leaked := read_leaked_ids(paths.leaks, HELD_OUT):
        rest = {
            model: {images: without(leaked, rows) for images, rows in pair.items()} for model, pair in models.items()
        }
        rest = {model: pair for model, pair in rest.items() if pair["own"]}
        result["without_leaked"] = evaluate_answers(rest)
        print(f"{result['without_leaked']['questions']} questions on images without a copy in the dataset", flush=True)
    print(f"{result['questions']} questions", flush=True)
    for group, estimates in result["groups"].items():
        figures = "  ".join(f"{name} {value['mean']:.3f}" for name, value in estimates.items())
        print(f"{group:20} {figures}", flush=True)
    record = {
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__},
        "inputs": {"answers": compute_sha256(paths.answers)},
    }
    write_jsonl(paths.output_dir / "scores.jsonl", score_rows(measure_answers(models)))
    write_json(paths.output_dir / "metrics.json", result | record)


def without(leaked: set[str], rows: Rows) -> Rows:
    return [row for row in rows if row["id"] not in leaked]


if __name__ == "__main__":
    main()
