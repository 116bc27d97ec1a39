"""Stages of tasks of lmms-eval: the scores of the fine-tuned model, and of the model before training."""

from functools import partial

from dj2mgm.features.lmms_eval.lmms_eval_keys import AnswerSettings
from dj2mgm.runs.stage_settings import build_answer_values
from dj2mgm.runs.stages import BASE, SCORE_OUTPUTS, Stage
from dj2mgm.settings.configuration import Configuration, Experiment


def list_stages(shared: Configuration) -> dict[str, Stage]:
    """Return the stages of the tasks in `evaluations` by name."""
    common = {"rule": "score_evaluation", "outputs": SCORE_OUTPUTS, "reads": ("model",), "optional": True}
    stages = {
        f"evaluations/{task}": Stage(task, upstream=("finetune",), settings=partial(_build_settings, task), **common)
        for task in shared.evaluations
    }
    return stages | {
        f"{BASE}evaluations/{task}": Stage(
            f"{task}, before training",
            upstream=(),
            settings=partial(_build_base_settings, task),
            uses_dataset=False,
            **common,
        )
        for task in shared.evaluations
    }


def _build_settings(task: str, config: Experiment, images: dict) -> AnswerSettings | None:
    """Return the settings of a task, or None if the experiment does not list it."""
    return AnswerSettings.from_sections(config, **build_answer_values(config)) if task in config.evaluations else None


def _build_base_settings(task: str, config: Experiment, images: dict) -> AnswerSettings | None:
    """Return the settings of a task for the model before training, which are the same for all seeds."""
    settings = _build_settings(task, config, images)
    return None if settings is None else settings.model_copy(update={"seed": 0})
