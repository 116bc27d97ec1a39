# Input functions that rules of several files use.
import os
from glob import escape, glob
from itertools import chain
from pathlib import Path

from snakemake.settings.types import DeploymentMethod

from dj2mgm.cli.console import UserError
from dj2mgm.dataset_resolution.experiment_dataset import check_files
from dj2mgm.errors import InputError
from dj2mgm.model_files.clips import check_judge, check_made, list_clip_files
from dj2mgm.model_files.foundation import FOUNDATION_PARTS
from dj2mgm.model_files.missing_models import (
    check_model_folders,
    list_local_model_files,
)
from dj2mgm.recipes.recipe_files import find_recipe_files
from dj2mgm.runs import challenge, pages
from dj2mgm.runs.evaluations import find_evaluation_data
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.leaks import locate_leaks_folder
from dj2mgm.runs.studies import search_batches
from dj2mgm.runs.training_checks import require_flash_attention, require_fp8_device
from dj2mgm.script_modules import find_modules
from dj2mgm.settings.string_formats import check_format
from dj2mgm.storage.fingerprints import Fingerprints

FINGERPRINTS = Fingerprints(Path(".snakemake/fingerprints.json"))


def target_files(target, *files):
    """Input function: the files of a target; fails with the reason if the target cannot run."""

    def checked_files(wildcards):
        with user_errors():
            RUNS.require_target(target)
        # Checked here, before there are results: Snakemake takes old files for the results of a rule that cannot run.
        for name in {target, REFERENCE} & RUNS.experiments.configs.keys():
            complete_model_files(RUNS.experiments.configs[name].model)
            check_clips(RUNS.experiments.configs[name])
            check_training(RUNS.experiments.configs[name])
            with user_errors():
                check_files(RUNS.first_seed(name).dataset.settings)
        return list(files)

    return checked_files


def script_files(*scripts):
    """Return scripts and the modules that they import, as inputs: a rule re-runs when its own code changes."""
    files = {module for script in scripts for module in find_modules(SCRIPTS / script)}
    return sorted(map(os.path.relpath, files))


def templates(*patterns):
    """Return templates of a page, and the style sheet of all pages, as inputs."""
    folder = escape(os.path.relpath(SCRIPTS / "dj2mgm/reporting/templates"))
    return sorted(
        file
        for pattern in (*patterns, "base_style.css")
        for file in glob(f"{folder}/{pattern}")
    )


def dataset_file(name):
    """Input function: a file of the run's dataset."""
    return (
        lambda wildcards: f"results/datasets/{RUNS.by_folder(wildcards.run).dataset.name}/{name}"
    )


def stage_output(stage, name):
    """Input function: a file of a stage's output, in the folder of the run that owns the stage."""
    return (
        lambda wildcards: f"{RUNS.stage_folder(RUNS.by_folder(wildcards.run), stage)}/{name}"
    )


def pairs_file(wildcards):
    """Input function: the image–caption pairs to train on."""
    run = RUNS.by_folder(wildcards.run)
    synthesizes = "synthesize" in run.settings and not run.selects_instructions
    stage, name = (
        ("synthesize", "synthesized") if synthesizes else ("filter", "filtered")
    )
    return f"{RUNS.stage_folder(run, stage)}/{name}.jsonl"


def instruction_output(file):
    """Return the input function of a file that the synthesize stage writes, if its recipe is for instructions."""

    def path(wildcards):
        selects = RUNS.by_folder(wildcards.run).selects_instructions
        return stage_output("synthesize", file)(wildcards) if selects else []

    return path


def leaks_file(wildcards):
    """Input function: near-duplicates of evaluation images among training images; none for the embedded dataset."""
    folder = locate_leaks_folder(RUNS.by_folder(wildcards.run).dataset)
    return f"{folder}/leaks.jsonl" if folder else []


def optional_flag(flag, name):
    """Return the params function of a flag with the files of an input; no flag if the input has none."""

    def flag_words(wildcards, input):
        files = getattr(input, name)
        return [flag, *([files] if isinstance(files, str) else files)] if files else []

    return flag_words


def user_files(paths):
    """Return the user's own files, as inputs."""
    paths = list(paths)
    with user_errors():
        for path in paths:
            check_format(path, "path", path)
    return paths


def hash_user_files(*functions):
    """Params function: a digest of the user's own files that these input functions return.

    It takes the wildcards only: Snakemake does not notice changes of params that are functions of the input.
    """

    def digest(wildcards):
        files = map(str, chain.from_iterable(find(wildcards) for find in functions))
        # Snakemake's time stamps suffice for files that the workflow makes.
        return FINGERPRINTS.hash_files(
            file for file in files if not file.startswith("results/")
        )

    return digest


def complete_model_files(model):
    """Return the files of a whole model's folder, as inputs."""
    if model.whole_model:
        with user_errors():
            check_model_folders(model)
        return user_files(list_local_model_files(model.folder))
    return [f"{model.folder}/model.safetensors"]


def model_folder(wildcards):
    """Params function: the folder of the model that a run starts from."""
    return RUNS.by_folder(wildcards.run).config.model.folder


def model_files(wildcards):
    """Input function: the model that a run starts from."""
    return complete_model_files(RUNS.by_folder(wildcards.run).config.model)


def foundation_files(model, parts=FOUNDATION_PARTS):
    """Return the trained parts that a tiny model is made from, as inputs; none for other models."""
    owner = MODELS[model].trained_parts
    return [
        f"results/foundation/{owner.name}/{part}/model.safetensors"
        for part in parts
        if owner
    ]


def check_clips(config):
    """Fail if a judging CLIP is incomplete, or if the configuration names a CLIP that nothing makes."""
    judges = {
        f"evaluate.{key}": getattr(config.evaluate, key)
        for key in ("judge_clip", "second_judge")
    }
    trained = {name for name, model in MODELS.items() if model.trained_parts is model}
    with user_errors():
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
    with user_errors():
        if not workflow.non_local_exec_or_dryrun:
            require_fp8_device(config)
        if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
            require_flash_attention(config)


def clip_files(stage):
    """Input function: the CLIPs that a stage selects data or judges captions with."""

    def files(wildcards):
        settings = RUNS.by_folder(wildcards.run).settings[stage]
        clips = {settings.clip, getattr(settings, "second_judge", None)} - {None}
        return user_files(sorted(chain.from_iterable(map(list_clip_files, clips))))

    return files


def recipe_files(stage):
    """Input function: the user's own files that a stage's recipe names, such as a list of words."""
    return lambda wildcards: user_files(
        find_recipe_files(RUNS.by_folder(wildcards.run).settings[stage].recipe)
    )


def projector_file(wildcards):
    """Input function: the projector of stage 1, if the model has one."""
    run = RUNS.by_folder(wildcards.run)
    return (
        f"{RUNS.stage_folder(run, 'pretrain')}/projector.safetensors"
        if "pretrain" in run.settings
        else []
    )


def finetuned_files(wildcards):
    """Input function: the weights of stage 2."""
    names = weights_of_stage_2(RUNS.by_folder(wildcards.run))
    return [stage_output("finetune", name)(wildcards) for name in names]


def weights_of_stage_2(run):
    """Return the names of the files of weights that a run's stage 2 writes."""
    adapter = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
    lora = run.config.finetune.lora
    names = adapter if lora else ["language_model.safetensors"]
    return names + (
        ["projector.safetensors"] if "pretrain" in run.settings or not lora else []
    )


def answering_weights(wildcards):
    """Input function: the weights that answer a benchmark or a task of lmms-eval; none before training."""
    folder = wildcards.get("benchmarks") or wildcards.evaluations
    if folder.startswith("base_"):
        return []
    metrics = stage_output("finetune", "metrics.json")(wildcards)
    return [*finetuned_files(wildcards), metrics]


def finetuned_flags(wildcards):
    """Params function: the flag for stage 2's folder; none before training."""
    weights = answering_weights(wildcards)
    return [f"--finetuned={os.path.dirname(weights[-1])}"] if weights else []


def used_dataset(wildcards):
    """Return a dataset that an experiment uses."""
    if wildcards.dataset not in RUNS.datasets:
        raise UserError(
            f"no experiment uses a dataset of the name {wildcards.dataset}; they use {', '.join(sorted(RUNS.datasets))}"
        )
    return RUNS.datasets[wildcards.dataset]


def evaluation_settings(task):
    """Return the task of lmms-eval, and the folder of its data."""
    with user_errors():
        data = find_evaluation_data(task, RUNS.shared.evaluation_data)
    return {"task": task, "data": str(data)}


def challenge_settings():
    """Return the settings of the challenge's table."""
    with user_errors():
        return challenge.build_challenge_settings(RUNS)


def page_files(experiments):
    """Return all files that a page reads."""
    with user_errors():
        return pages.list_page_files(RUNS, experiments)


def requested_search(wildcards):
    """Return the search of a study, whose files have the key of its settings."""
    with user_errors():
        search = search_batches.find_search(RUNS, wildcards.study)
        if search is None or search.key != wildcards.key:
            raise InputError(
                f"{wildcards.study}: its search has other settings now, so these files are not made again"
            )
    return search


def all_scores(study):
    """Input function: the scores of all batches of a study's search; none for other designs.

    Snakemake does not create a missing input if the page is newer than the other inputs, so the target requests these
    files itself.
    """

    def get(checkpoint, search, number):
        return checkpoint.get(study=study, key=search.key, number=number).output[0]

    def scores(wildcards):
        with user_errors():
            return search_batches.take_batches(
                RUNS,
                study,
                lambda *batch: get(checkpoints.ask_trials, *batch),
                lambda *batch: get(checkpoints.score_trials, *batch),
            )

    return scores
