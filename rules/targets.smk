# Files of targets, and checks of an experiment before its first job.
from snakemake.settings.types import DeploymentMethod

from dj2mgm.dataset_resolution.experiment_dataset import check_files
from dj2mgm.model_files.missing_models import check_judge, check_made
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.stage_settings import require_flash_attention, require_fp8_device

# Features add targets that start no training, and checks of all requested targets before the first job.
READING_TARGETS = {}
TARGET_CHECKS = []


def target_files(target, *files):
    """Return the input function of a target's files, which fails with the reason if the target cannot run."""

    def checked_files(wildcards):
        with raising_user_errors():
            RUNS.require_target(target)
        # Checked for the target, because Snakemake uses old results of a stage whose input function fails.
        for name in {target, REFERENCE} & RUNS.experiments.configs.keys():
            list_model_files(RUNS.experiments.configs[name].model)
            check_clips(RUNS.experiments.configs[name])
            check_training(RUNS.experiments.configs[name])
            with raising_user_errors():
                check_files(RUNS.first_seed(name).dataset.settings)
        return list(files)

    return checked_files


def find_requested_run(target, default):
    """Return the first run of the experiment that a target is about."""
    with raising_user_errors():
        name = RUNS.experiments.get_requested(target, default)
        RUNS.require_target(name)
        return RUNS.first_seed(name)


def requested_files(target, default, locate):
    """Return the input function of a target's files for the experiments in the key `experiment`.

    Args:
        target: the target if it is about one experiment; None if it takes several.
        default: experiment without the key.
        locate: function that returns the file of an experiment's first run.
    """

    def files(wildcards):
        with raising_user_errors():
            if target:
                RUNS.experiments.get_requested(target, default)
            names = RUNS.experiments.list_requested(default)
        for name in names:
            target_files(name)(wildcards)  # only its checks
        return [locate(RUNS.first_seed(name)) for name in names]

    return files


def check_clips(config):
    """Fail if a judging CLIP is incomplete, or if the configuration names a CLIP that nothing makes."""
    judges = {
        f"evaluate.{key}": getattr(config.evaluate, key)
        for key in ("judge_clip", "second_judge")
    }
    trained = {name for name, model in MODELS.items() if model.trained_parts is model}
    with raising_user_errors():
        for key, name in judges.items():
            if name:
                check_judge(name, key)
        for key, name in ({"clip": config.model.clip} | judges).items():
            if name:
                check_made(name, key, trained)


def check_training(config):
    """Fail if training needs a GPU for FP8, or FlashAttention's package, and this machine has none.

    Stages on a cluster, and in environments of their own, check it themselves. A dry run may be for a cluster.
    """
    with raising_user_errors():
        if not workflow.non_local_exec_or_dryrun:
            require_fp8_device(config)
        if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
            require_flash_attention(config)
