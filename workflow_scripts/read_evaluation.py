r"""Read a task of lmms-eval: each question's prompt, and its image as a file.

    python workflow_scripts/read_evaluation.py --config results/evaluations/pope/config.yaml \
        --output-dir results/evaluations/pope

Writes images/, decoding.json (maximum length of an answer, and the texts that end it) and questions.jsonl.
"""

from collections.abc import Iterator
from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.errors import pluralize
from dj2mgm.features.lmms_eval.exchange import save_once
from dj2mgm.features.lmms_eval.lmms_eval_keys import TaskSettings
from dj2mgm.features.lmms_eval.lmms_tasks import LmmsTask
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_json, write_jsonl


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    settings = load_settings(TaskSettings, paths.config)
    task = LmmsTask(settings.task, Path(settings.data))
    (paths.output_dir / "images").mkdir(parents=True, exist_ok=True)
    write_json(paths.output_dir / "decoding.json", task.decoding)
    rows = list(_save_questions(task, paths.output_dir))
    task.check_metrics([row["image"] for row in rows])
    count = write_jsonl(paths.output_dir / "questions.jsonl", rows)
    print(f"{settings.task}: {pluralize(count, 'question')}", flush=True)


def _save_questions(task: LmmsTask, folder: Path) -> Iterator[dict]:
    for number, (prompt, image) in enumerate(task.iterate_questions()):
        file = save_once(image, folder / "images")
        yield {"id": str(number), "image": f"images/{file.name}", "prompt": prompt}


if __name__ == "__main__":
    main()
