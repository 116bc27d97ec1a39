# Input functions of the rules that make data: dataset, filters, captions, training files, exports.
from dj2mgm.dataset_resolution.experiment_dataset import (
    list_dataset_files,
    list_image_path_files,
)
from dj2mgm.model_files.missing_models import list_part_files
from dj2mgm.settings.config_files import locate_config_file
from dj2mgm.runs.leaks import list_decontamination_files


def dataset_images(wildcards):
    """Params function: a digest of the user's own images in a dataset."""
    return FINGERPRINTS.hash_images(
        list_image_path_files(used_dataset(wildcards).settings)
    )


def source_files(wildcards):
    """Input function: the user's own files of a dataset; none of the embedded one."""
    with user_errors():
        return user_files(list_dataset_files(used_dataset(wildcards).settings))


def shipped_foundation_files(model):
    """Return the trained parts of a tiny model that come with the workflow."""
    folder = os.path.relpath(RUNS.shipped_foundations[model])
    return sorted(glob(f"{escape(folder)}/*/*"))


def assembled_files(wildcards):
    """Input function: the files of the folders that an MGM is assembled from."""
    return user_files(list_part_files(MODELS[wildcards.model]))


def filter_gpus(wildcards):
    """Resource function: 1 if the filter's recipe uses a CLIP, else 0."""
    return int(RUNS.by_folder(wildcards.run).settings["filter"].clip is not None)


def analyzed_files(wildcards):
    """Input function: the CLIP, and the recipe's files, that a dataset is analyzed with."""
    run = pages.find_analyzed(RUNS, wildcards.dataset)
    recipe_inputs = find_recipe_files(run.settings["filter"].recipe)
    return user_files(list_clip_files(run.config.model.clip) + recipe_inputs)


def captioner_files(wildcards):
    """Input function: the model that writes captions, if it is one of this workflow or a folder."""
    run = RUNS.by_folder(wildcards.run)
    folder = RUNS.captioner_folder(run)
    if not folder:
        captioner = run.settings["synthesize"].captioner
        return user_files(list_local_model_files(captioner and captioner.folder or ""))
    if os.path.basename(folder) == "finetune":
        config = RUNS.get(run.captioner, run.seed).config
        weights = "adapter/adapter_model" if config.finetune.lora else "language_model"
    else:
        weights = "projector"
    return [f"{folder}/{weights}.safetensors", *model_files(wildcards)]


def instruction_inputs(wildcards):
    """Input function: instructions and evaluation file, if the recipe of the synthesize stage is for instructions."""
    selects = RUNS.by_folder(wildcards.run).selects_instructions
    names = ("finetune.json", "evaluation.jsonl") if selects else ()
    return [dataset_file(name)(wildcards) for name in names]


def instruction_output(file):
    """Return the input function of a file that the synthesize stage writes, if its recipe is for instructions."""

    def path(wildcards):
        selects = RUNS.by_folder(wildcards.run).selects_instructions
        return stage_output("synthesize", file)(wildcards) if selects else []

    return path


def captioner_flags(wildcards):
    """Params function: the flags for the trained model that writes captions."""
    folder = RUNS.captioner_folder(RUNS.by_folder(wildcards.run))
    model = model_folder(wildcards)
    return (
        [f"--captioner-model={model}", f"--captioner-stage={folder}"] if folder else []
    )


def decontamination_files(wildcards):
    """Input function: the user's own files that training images are compared with."""
    with user_errors():
        return user_files(list_decontamination_files(RUNS))


def dropped_leaks(wildcards):
    """Input function: near-duplicates of evaluation images, if their rows are left out."""
    drops = RUNS.by_folder(wildcards.run).config.jsonl.leaks == "drop"
    return leaks_file(wildcards) if drops else []


def reference_summary(wildcards):
    """Input function: the reference's number of samples; none for the reference itself."""
    run = RUNS.by_folder(wildcards.run)
    reference = RUNS.get(REFERENCE, run.seed)
    return (
        []
        if run.experiment == REFERENCE
        else f"{RUNS.stage_folder(reference, 'jsonl')}/summary.json"
    )


def counted_summary(wildcards):
    """Input function: the number of rows to draw at random; none if all rows are used."""
    run = RUNS.by_folder(wildcards.run)
    experiment = run.config.jsonl.same_size_as
    return (
        f"{RUNS.stage_folder(RUNS.get(experiment, run.seed), 'jsonl')}/summary.json"
        if experiment
        else []
    )


def filter_folders(wildcards):
    """Params function: the folders of the filters' and the synthesis' output, in this order."""
    run = RUNS.by_folder(wildcards.run)
    names = ("filter",) if run.selects_instructions else ("filter", "synthesize")
    stages = [stage for stage in names if stage in run.settings]
    return [RUNS.stage_folder(run, stage) for stage in stages]


def export_folder(wildcards):
    """Params function: the folder of an export; fails if it cannot be written."""
    folder = f"results/{wildcards.run}/export"
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise UserError(
            f"{folder} cannot be written; allow it, or make {folder} a link to a folder on another disk"
        )
    return f"{folder}/{wildcards.format}"


def chat_templates(*names):
    """Return chat formats that a script reads by name, as inputs."""
    files = (locate_config_file("chat_templates", f"{name}.yaml") for name in names)
    return [os.path.relpath(file) for file in files]
