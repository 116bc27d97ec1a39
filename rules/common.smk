# Input functions of the rules: which files a job reads.
from glob import escape, glob
from itertools import chain

from snakemake.settings.types import DeploymentMethod
from snakemake import __version__ as SNAKEMAKE

from dj2mgm.code import find_modules
from dj2mgm.config import pages
from dj2mgm.config.clips import check_judge, check_made
from dj2mgm.config.clips import clip_files as files_of_clip
from dj2mgm.config.datasets import check_files, image_lists
from dj2mgm.config.datasets import files_of as files_in
from dj2mgm.config.evaluations import TABLES, check_lmms_eval
from dj2mgm.config.foundation import PARTS
from dj2mgm.config.leaks import leaks_of
from dj2mgm.config.leaks import reference_files as files_apart
from dj2mgm.config.missing_models import check_model_folders, part_files
from dj2mgm.config.missing_models import model_files as files_in_model
from dj2mgm.config.reading import config_file
from dj2mgm.config.recipe_parsing import find_recipe_files
from dj2mgm.config.settings.strings import check_format
from dj2mgm.config.stages import TRAINING, has_stage_1
from dj2mgm.config.training import check_flash_attention
from dj2mgm.files import find_files
from dj2mgm.fingerprints import Fingerprints

FINGERPRINTS = Fingerprints(Path(".snakemake/fingerprints.json"))


def wanted(target, *files):
    """Input function: returns the files of a target, or fails with the message that explains why it is invalid."""

    def files_or_sentence(wildcards):
        with user_errors():
            RUNS.require(target)
        # here, where nothing is there yet: of a rule that cannot be run, Snakemake takes old files for its results
        for name in {target, REFERENCE} & RUNS.configs.keys():
            files_of(RUNS.configs[name]["model"])
            check_clips(RUNS.configs[name])
            check_attention(RUNS.configs[name])
            with user_errors():
                check_files(RUNS.first(name).dataset["settings"])
        return list(files)

    return files_or_sentence


def code(*scripts):
    """Scripts and the project modules they use, as inputs: a rule re-runs when its own code changes."""
    files = {module for script in scripts for module in find_modules(SCRIPTS / script)}
    return sorted(map(os.path.relpath, files))


def templates(*patterns):
    """Templates of a page, as inputs."""
    folder = escape(os.path.relpath(SCRIPTS / "dj2mgm/reporting/templates"))
    return sorted(file for pattern in patterns for file in glob(f"{folder}/{pattern}"))


def chat_templates(*names):
    """Chat formats that a script reads by name, as inputs."""
    files = (config_file("chat_templates", f"{name}.yaml") for name in names)
    return [os.path.relpath(file) for file in files]


def dataset_file(name):
    """Input function: a file of the run's dataset."""
    return (
        lambda wildcards: f"results/datasets/{RUNS.at(wildcards.run).dataset['name']}/{name}"
    )


def output_of(stage, name):
    """Input function: what a stage wrote for this run, wherever that is: runs share stages that are equal."""
    return lambda wildcards: f"{RUNS.stage(RUNS.at(wildcards.run), stage)}/{name}"


def pairs(wildcards):
    """Input function: the image–caption pairs to train on."""
    run = RUNS.at(wildcards.run)
    stage, name = (
        ("synthesize", "synthesized")
        if "synthesize" in run.settings
        else ("filter", "filtered")
    )
    return f"{RUNS.stage(run, stage)}/{name}.jsonl"


def filter_folders(wildcards):
    """Where the filters and the synthesis of a run wrote, in this order."""
    run = RUNS.at(wildcards.run)
    stages = [stage for stage in ("filter", "synthesize") if stage in run.settings]
    return [RUNS.stage(run, stage) for stage in stages]


def leaks(wildcards):
    """Input function: the training images that are copies of images that are evaluated on; nothing for the embedded
    dataset."""
    folder = leaks_of(RUNS.at(wildcards.run).dataset)
    return f"{folder}/leaks.jsonl" if folder else []


def dropped_leaks(wildcards):
    """Input function: the same, where rows about them are left out."""
    drops = RUNS.at(wildcards.run).config["jsonl"]["leaks"] == "drop"
    return leaks(wildcards) if drops else []


def leaks_flag(wildcards, input):
    return ["--leaks", input.leaks] if input.leaks else []


def budget(wildcards):
    """Input function: how many samples the reference trains on; nothing for the reference itself."""
    run = RUNS.at(wildcards.run)
    reference = RUNS.of(REFERENCE, run.seed)
    return (
        []
        if run.experiment == REFERENCE
        else f"{RUNS.stage(reference, 'jsonl')}/summary.json"
    )


def own_files(paths):
    """The user's own files, as inputs."""
    paths = list(paths)
    with user_errors():
        for path in paths:
            check_format(path, "path", path)
    return paths


def own_content(*functions):
    """Params function: changes with the content of the user's own files among those that these input functions return.

    It takes the wildcards only: of params that are functions of the input, Snakemake notices no change.
    """

    def content(wildcards):
        files = map(str, chain.from_iterable(find(wildcards) for find in functions))
        # what the workflow makes has time stamps of its own
        return FINGERPRINTS.of_files(
            file for file in files if not file.startswith("results/")
        )

    return content


def dataset_images(wildcards):
    """Params function: changes with the images of the user's own that a dataset names."""
    return FINGERPRINTS.of_images(image_lists(dataset_settings(wildcards)))


def benchmark_images(wildcards):
    """Params function: changes with the images that a benchmark's files name."""
    settings = RUNS.at(wildcards.run).settings.get(f"benchmarks/{wildcards.benchmark}")
    files = settings["files"] if settings else {}
    folder = files.get("images")
    return FINGERPRINTS.of_images(
        (file, folder) for kind, file in files.items() if folder and kind != "images"
    )


def folder_of(model):
    """The folder of the whole model: somebody else's, or the one that is made here."""
    given = model.get("assembled") or model.get("transformers")
    made = "vlm" if "tiny" in model else "mgm"
    return given or f"results/models/{model['name']}/{made}"


def folder_is_given(model):
    """Whether the whole model is somebody else's folder."""
    return "assembled" in model or "transformers" in model


def files_of(model):
    """The files that stand for the model's folder."""
    folder = folder_of(model)
    if folder_is_given(model):
        with user_errors():
            check_model_folders(model)
        return own_files(files_in_model(folder))
    return [f"{folder}/model.safetensors"]


def model_folder(wildcards):
    return folder_of(RUNS.at(wildcards.run).config["model"])


def model_files(wildcards):
    """Input function: the model that a run starts from."""
    return files_of(RUNS.at(wildcards.run).config["model"])


def shipped_foundation_files(model):
    """The trained parts of a tiny model that come with the workflow."""
    folder = os.path.relpath(RUNS.shipped_foundations[model])
    return sorted(glob(f"{escape(folder)}/*/*"))


def foundation_files(model, parts=PARTS):
    """These parts of a tiny model, or of the one that it is made of; nothing where its parts are somebody else's folders
    or hub ids."""
    foundation = MODELS[model].get("foundation")
    owner = foundation and foundation.get("name", model)
    return [
        f"results/foundation/{owner}/{part}/model.safetensors"
        for part in parts
        if owner
    ]


def assembled_files(wildcards):
    """Input function: the files of the folders that an MGM is assembled from."""
    return own_files(part_files(MODELS[wildcards.model]))


def check_clips(config):
    """Fails with a sentence on what a CLIP lacks that judges, or on one that nothing makes."""
    judges = {
        f"evaluate.{key}": config["evaluate"][key]
        for key in ("judge_clip", "second_judge")
    }
    made = {
        name
        for name, model in MODELS.items()
        if "foundation" in model and "name" not in model["foundation"]
    }
    with user_errors():
        for key, name in judges.items():
            if name:
                check_judge(name, key)
        for key, name in (
            {"clip_score": config["model"]["clip_score"]} | judges
        ).items():
            if name:
                check_made(name, key, made)


def check_attention(config):
    """Fails with a sentence on FlashAttention without its package, unless stages have environments of their own."""
    if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
        with user_errors():
            check_flash_attention(config)


def clip_files(stage):
    """Input function: the CLIPs by which a stage selects data, or judges captions."""

    def files(wildcards):
        settings = RUNS.at(wildcards.run).settings[stage]
        named = {settings.get("clip"), settings.get("second_judge")} - {None}
        return own_files(sorted(chain.from_iterable(map(files_of_clip, named))))

    return files


def recipe_files(stage):
    """Input function: the user's own files that a stage's recipe names, such as a list of words."""
    return lambda wildcards: own_files(
        find_recipe_files(RUNS.at(wildcards.run).settings[stage]["recipe"])
    )


def analyzed_files(wildcards):
    """Input function: the CLIP, and the recipe's files, that a dataset is analyzed with."""
    run = RUNS.analyzed(wildcards.dataset)
    named = find_recipe_files(run.settings["filter"]["recipe"])
    return own_files(files_of_clip(run.config["model"]["clip_score"]) + named)


def fine_tuned(lora, stages=None):
    """The experiments that train with LoRA or without, and in so many stages."""
    return [
        name
        for name, config in RUNS.configs.items()
        if stages in (None, 2 if has_stage_1(config["model"]) else 1)
        and bool(config["finetune"]["lora"]) == lora
    ]


def held_out_files(wildcards):
    """Input function: what a model is asked while it is trained, and how, if anything. A change of either trains nothing
    again: the weights do not depend on them."""
    run = RUNS.at(wildcards.run)
    if not run.config["score_while_training"]["questions"]:
        return []
    config = f"results/{wildcards.run}/generate/config.yaml"
    return [ancient(dataset_file("evaluation.jsonl")(wildcards)), ancient(config)]


def held_out_flags(wildcards, input):
    """As a list, of which Snakemake quotes each."""
    if not input.held_out:
        return []
    evaluation, asking = input.held_out
    return ["--evaluation", evaluation, "--asking", asking]


def first_stage(wildcards):
    """Input function: what stage 1 wrote; nothing where there is none."""
    run = RUNS.at(wildcards.run)
    return (
        f"{RUNS.stage(run, 'pretrain')}/projector.safetensors"
        if "pretrain" in run.settings
        else []
    )


def before_fine_tuning(wildcards):
    """Input function: what stage 1 wrote, or the pairs that it would have learned from."""
    return first_stage(wildcards) or output_of("jsonl", "pretrain.jsonl")(wildcards)


def before_flags(wildcards, input):
    """As a list, of which Snakemake quotes each."""
    return ["--projector" if first_stage(wildcards) else "--pairs", input.before]


def pretrained_flags(wildcards):
    """As a list, of which Snakemake quotes each."""
    projector = first_stage(wildcards)
    return [f"--pretrained={os.path.dirname(projector)}"] if projector else []


def finetuned_files(wildcards):
    """Input function: the weights that fine-tuning wrote."""
    run = RUNS.at(wildcards.run)
    adapter = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
    lora = run.config["finetune"]["lora"]
    names = adapter if lora else ["language_model.safetensors"]
    names += ["projector.safetensors"] if "pretrain" in run.settings or not lora else []
    return [output_of("finetune", name)(wildcards) for name in names]


def captioner_files(wildcards):
    """Input function: the model that writes captions, where it is one of this workflow or a folder."""
    run = RUNS.at(wildcards.run)
    folder = RUNS.captioner_stage(run)
    if not folder:
        captioner = run.settings["synthesize"]["captioner"] or {}
        return own_files(files_in_model(captioner.get("model") or ""))
    finetuned = os.path.basename(folder) == "finetune"
    weights = "adapter/adapter_model" if finetuned else "projector"
    return [f"{folder}/{weights}.safetensors", *model_files(wildcards)]


def reference_model_files(wildcards):
    """Input function: the reference's model."""
    return files_of(RUNS.first(REFERENCE).config["model"])


def captioner_flags(wildcards):
    """As a list, of which Snakemake quotes each."""
    folder = RUNS.captioner_stage(RUNS.at(wildcards.run))
    model = model_folder(wildcards)
    return (
        [f"--captioner-model={model}", f"--captioner-stage={folder}"] if folder else []
    )


def dataset_settings(wildcards):
    """What a dataset is made of, if an experiment uses it."""
    if wildcards.dataset not in RUNS.datasets:
        raise UserError(
            f"no experiment uses a dataset of the name {wildcards.dataset}; they use {', '.join(sorted(RUNS.datasets))}"
        )
    return RUNS.datasets[wildcards.dataset]


def source_files(wildcards):
    """The user's own files; the embedded dataset has none."""
    with user_errors():
        return own_files(files_in(dataset_settings(wildcards)))


def benchmark_files(wildcards):
    """Input function: the user's own files of a benchmark, without the folder of its images."""
    settings = RUNS.at(wildcards.run).settings.get(f"benchmarks/{wildcards.benchmark}")
    if settings is None:
        raise UserError(
            f"benchmarks.{wildcards.benchmark} is not set: name its files in config/config.yaml"
        )
    files = settings["files"]
    return own_files(file for kind, file in files.items() if kind != "images")


def evaluation_settings(task):
    """The task of lmms-eval, and the folder of its data."""
    with user_errors():
        return RUNS.evaluation_settings(task)


def evaluation_data(wildcards):
    """Input function: the files of a task's data, without those that a download leaves beside them."""
    with user_errors():
        if DeploymentMethod.CONDA not in workflow.deployment_settings.deployment_method:
            check_lmms_eval()
        files = find_files(evaluation_settings(wildcards.task)["data"], TABLES)
    return own_files(map(str, files))


def evaluated(wildcards):
    """Input function: the report of all compared experiments, with what tasks say about them."""
    if not RUNS.tasks:
        raise UserError(
            "evaluations is empty: name tasks of lmms-eval in config/config.yaml, or with "
            "--config 'evaluations=[pope]' (docs/evaluation.md)"
        )
    for task in RUNS.tasks:
        evaluation_settings(task)
    return wanted("evaluate", f"results/{PLACE}report/report.html")(wildcards)


def challenge_settings():
    """What the challenge's table is made from."""
    with user_errors():
        return pages.challenge_settings(RUNS)


def benchmark_outputs(benchmark, name):
    """A file of a benchmark, for every run in the challenge's table."""
    return sorted(
        {
            f"{run['benchmarks'][benchmark]}/{name}"
            for run in challenge_settings()["runs"]
        }
    )


def challenge_files(names, file):
    """A file of each of these benchmarks that the challenge scores, for every run in its table."""
    scored = [name for name in challenge_settings()["scores"] if name in names]
    return [path for name in scored for path in benchmark_outputs(name, file)]


def page(experiments):
    """What a page that compares experiments is made from."""
    with user_errors():
        return pages.page_settings(RUNS, experiments)


def page_files(experiments):
    """All files that a page reads."""
    with user_errors():
        return pages.page_files(RUNS, experiments)


def crate_settings(page):
    """What a page's crate is made from."""
    with user_errors():
        return pages.crate_settings(RUNS, page) | {"snakemake": SNAKEMAKE}


def crate_to_reproduce(wildcards):
    """Params function: the crate that the command line names."""
    if RUNS.crate is None:
        raise UserError(
            "crate is not set: `snakemake --cores 1 reproduce --config crate=path/to/run.crate.zip`"
        )
    return RUNS.crate


def reference_files(wildcards):
    """Input function: the user's own files that training images are compared with."""
    with user_errors():
        return own_files(files_apart(RUNS))


def export_folder(wildcards):
    """Where an export goes; Snakemake would not say in a sentence that it cannot be written."""
    folder = f"results/{wildcards.run}/export"
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise UserError(
            f"{folder} cannot be written; allow it, or make {folder} a link to a folder on another disk"
        )
    return f"{folder}/{wildcards.format}"
