r"""Score a task's answers with the task's own metrics, with 95 % intervals and controls.

    python workflow_scripts/score_evaluation.py --config results/evaluations/pope/config.yaml \
        --answers results/shapes/tiny/baseline/evaluations/pope/answers.jsonl \
        --output-dir results/shapes/tiny/baseline/evaluations/pope

The configuration is the same as for read_evaluation.py. Writes scores.jsonl with the values of every image, and
metrics.json with estimates on own images and, for the fine-tuned model, on shuffled images, of their paired difference,
and without an image.
"""

import platform
from importlib.metadata import version
from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.errors import InputError
from dj2mgm.evaluation.run_scores import aggregate, read_run_scores
from dj2mgm.features.lmms_eval.lmms_eval_keys import TaskSettings
from dj2mgm.features.lmms_eval.lmms_tasks import LmmsTask, score_answers
from dj2mgm.score_groups import OWN
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import compute_sha256, read_jsonl, write_json, write_jsonl


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--answers", "--output-dir")
    settings = load_settings(TaskSettings, paths.config)
    rows = list(read_jsonl(paths.answers, may_be_empty=False))
    task = LmmsTask(settings.task, Path(settings.data))
    scores = paths.output_dir / "scores.jsonl"
    if not write_jsonl(scores, score_answers(task, rows)):
        raise InputError(f"the task {task.name} has no metric that is a number; choose another one")
    groups = aggregate([read_run_scores(task.name, 0, scores)])
    for group, estimates in groups.items():
        for name, value in estimates.items():
            interval = "no interval" if value.low is None else f"[{value.low:.3f}, {value.high:.3f}]"
            print(f"{group:22} {name:40} {value.mean:8.3f}  {interval}", flush=True)
    record = {
        "versions": {"python": platform.python_version(), "lmms_eval": version("lmms_eval")},
        "inputs": {"answers": compute_sha256(paths.answers)},
    }
    counts = {
        "questions": len(task.docs),
        "empty": sum(not row["prediction"] for row in rows if row["images"] == OWN),
    }
    write_json(paths.output_dir / "metrics.json", {"task": task.name, "counts": counts, "groups": groups} | record)


if __name__ == "__main__":
    main()
