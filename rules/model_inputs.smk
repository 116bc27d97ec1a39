# Input functions of models and their weights, which rules of several files use.
import os
from itertools import chain

from dj2mgm.model_files.missing_models import (
    FOUNDATION_PARTS,
    MissingModelError,
    check_model_folders,
    list_clip_files,
)
from dj2mgm.model_files.model_folders import list_local_model_files
from dj2mgm.runs.stages import BASE

MISSING_MODELS = []  # errors about models that only a dry run goes on without


def model_folder(wildcards):
    """Params function: the folder of the model that a run starts from."""
    return RUNS.by_folder(wildcards.run).config.model.folder


def model_files(wildcards):
    """Input function: the model that a run starts from."""
    return list_model_files(RUNS.by_folder(wildcards.run).config.model)


def list_model_files(model):
    """Return the files of a whole model's folder, as inputs."""
    if model.whole_model:
        try:
            check_model_folders(model)
        except MissingModelError as error:
            if not workflow.dryrun:
                raise
            MISSING_MODELS.append(error)
        return check_user_files(list_local_model_files(model.folder))
    return [f"{model.folder}/model.safetensors"]


def list_foundation_files(model, parts=FOUNDATION_PARTS):
    """Return the trained parts that a tiny model is made from, as inputs; none for other models."""
    owner = MODELS[model].trained_parts
    return [
        f"results/foundation/{owner.name}/{part}/model.safetensors"
        for part in parts
        if owner
    ]


def clip_files(stage):
    """Return the input function of the CLIPs with which a stage selects data or judges captions."""

    def files(wildcards):
        settings = RUNS.by_folder(wildcards.run).settings[stage]
        clips = {settings.clip, getattr(settings, "second_judge", None)} - {None}
        return check_user_files(sorted(chain(*map(list_clip_files, clips))))

    return files


def projector_file(wildcards):
    """Input function: the projector of stage 1, if the model has one."""
    run = RUNS.by_folder(wildcards.run)
    if "pretrain" not in run.settings:
        return []
    return RUNS.locate_output(run, "pretrain", "projector.safetensors")


def finetuned_files(wildcards):
    """Input function: the weights of stage 2."""
    run = RUNS.by_folder(wildcards.run)
    return [RUNS.locate_output(run, "finetune", name) for name in run.stage_2_weights]


def answering_weights(folder):
    """Return the input function of the weights of the model that answers; none for the model before training.

    `folder` is the wildcard that begins with `BASE` for the model before training.
    """

    def weights(wildcards):
        if wildcards.get(folder).startswith(BASE):
            return []
        metrics = stage_output("finetune", "metrics.json")(wildcards)
        return [*finetuned_files(wildcards), metrics]

    return weights


def finetuned_flags(folder):
    """Return the params function of the flag for stage 2's folder; none for the model before training."""

    def flags(wildcards):
        weights = answering_weights(folder)(wildcards)
        return [f"--finetuned={os.path.dirname(weights[-1])}"] if weights else []

    return flags
