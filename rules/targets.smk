# Files of targets, and checks of an experiment before its first job.
from snakemake.settings.types import DeploymentMethod

from dj2mgm.dataset_resolution.experiment_dataset import check_files
from dj2mgm.runs.command_messages import check_clips
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.stage_settings import require_flash_attention, require_fp8_device

# Features add targets that start no training, and checks of all requested targets before the first job.
READING_TARGETS = {}
TARGET_CHECKS = []


def target_files(target, *files):
    """Return the input function of a target's files, which fails with the reason if the target cannot run."""

    def checked_files(wildcards):
        RUNS.require_target(target)
        # Checked for the target, because Snakemake uses old results of a stage whose input function fails.
        for name in {target, REFERENCE} & RUNS.experiments.configs.keys():
            list_model_files(RUNS.experiments.configs[name].model)
            check_clips(RUNS.experiments.configs[name], MODELS)
            check_training(RUNS.experiments.configs[name])
            check_files(RUNS.first_seed(name).dataset.settings)
        return list(files)

    return checked_files


def find_requested_run(target, default):
    """Return the first run of the experiment that a target is about."""
    name = RUNS.experiments.get_requested(target, default)
    RUNS.require_target(name)
    return RUNS.first_seed(name)


def requested_files(default, locate):
    """Return the input function of a target's files for the experiments in the key `experiment`.

    Args:
        default: experiment without the key.
        locate: function that returns the file of an experiment's first run.
    """

    def files(wildcards):
        names = RUNS.experiments.list_requested(default)
        for name in names:
            target_files(name)(wildcards)  # only its checks
        return [locate(RUNS.first_seed(name)) for name in names]

    return files


def check_training(config):
    """Fail if training needs a GPU for FP8, or FlashAttention's package, and this machine has none.

    Stages on a cluster, and in environments of their own, check it themselves. A dry run may be for a cluster.
    """
    if not workflow.non_local_exec_or_dryrun:
        require_fp8_device(config)
    if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
        require_flash_attention(config)
