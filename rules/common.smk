# The merged configuration of every experiment, and what rules ask of it.
import json
import os
import re
import sys
from glob import escape, glob
from pathlib import Path

from snakemake.exceptions import WorkflowError

SCRIPTS = Path(workflow.basedir) / "workflow_scripts"
sys.path.insert(0, str(SCRIPTS))

from errors import InputError
from settings.code import modules_of
from settings.killed_runs import note_owner, runs_jobs, take_over
from settings.recipe_shape import files_named
from settings.runs import REFERENCE, Runs
from settings.schema import check_format
from settings.stages import (
    SETTINGS_OF,
    TRAINING,
    analysis_settings,
    assemble_settings,
    foundation_settings,
    gpus_on_one_node,
)


onstart:
    note_owner(on_cluster=workflow.non_local_exec)


try:
    # each job starts a Snakemake for itself, which takes nothing over
    if workflow.is_main_process and runs_jobs(sys.argv):
        take_over()
    # no `configfile:` directive: `config` is then exactly the command line's layer
    RUNS = Runs(config)
except InputError as error:
    raise WorkflowError(str(error)) from None
EXPERIMENTS = RUNS.names
if workflow.is_main_process:
    for name, error in RUNS.refused.items():
        if name in RUNS.files:
            print(f"warning: {error}", file=sys.stderr)
# Every stage takes this machine's first GPUs: one at a time, however many --cores. On a cluster (only there are jobs at a
# time, `nodes`, limited) each job has its own.
if workflow.resource_settings.nodes is None and "gpu" not in workflow.global_resources:
    workflow.register_resource("gpu", max(run.config["gpus"] for run in RUNS))
DATASETS = {run.dataset["name"]: run.dataset["settings"] for run in RUNS}
MODELS = {run.config["model"]["name"]: run.config["model"] for run in RUNS}


def wanted(target, *files):
    """Input function: the files of a target, or the sentence that says which mistake is in its way."""

    def files_or_sentence(wildcards):
        try:
            RUNS.require(target)
        except InputError as error:
            raise WorkflowError(str(error)) from None
        return list(files)

    return files_or_sentence


def any_of(names):
    """A regular expression: one of these names, and nothing else."""
    return f"({'|'.join(map(re.escape, names)) or '(?!)'})"


def runs_of(experiments):
    """A regular expression: the folders of these experiments' runs."""
    return f"{any_of(experiments)}(/seed-[0-9]+)?"


wildcard_constraints:
    run=runs_of(RUNS.configs),
    page=f"report|{any_of(EXPERIMENTS)}/report",
    dataset="[^/]+",
    model="[^/]+",
    stage=any_of(SETTINGS_OF),
    benchmark=any_of(RUNS.benchmarks),
    part="clip|language_model",
    variants=any_of(RUNS.compared_on),


def nodes_of_all():
    """On how many nodes training runs: on the same number in all experiments, since rules ask for it as a whole."""
    numbers = {run.config["nodes"] for run in RUNS}
    if len(numbers) > 1:
        raise WorkflowError(
            "experiments state different numbers of `nodes`; run them one after another"
        )
    return numbers.pop()


NODES = nodes_of_all()


def several_nodes():
    """What Snakemake's Slurm plugin wants in order to start a command once and leave the nodes to its srun."""
    return (
        {}
        if NODES == 1
        else {"nodes": NODES, "tasks": NODES, "tasks_per_gpu": -1, "mpi": "srun"}
    )


def logged(command):
    """A stage's shell command: what it prints is shown and kept in its log; when it fails, both end with a diagnosis."""
    return f"{command} 2>&1 | tee {{log:q}} || python workflow_scripts/diagnose.py {{log:q}} --exit-status $?"


def code(script):
    """A script and the project modules it uses, as inputs: a rule re-runs when its own code changes."""
    return [os.path.relpath(module) for module in modules_of(SCRIPTS / script)]


def growing(mem_mb):
    """Resource function: half as much memory again at each further attempt, for jobs that ran out of it."""
    return lambda wildcards, attempt: mem_mb * (attempt + 1) // 2


def settings(wildcards):
    """What a stage of a run is handed, as text."""
    return json.dumps(RUNS.at(wildcards.run).settings[wildcards.stage])


def dataset_file(name):
    """Input function: a file of the run's dataset."""
    return (
        lambda wildcards: f"results/datasets/{RUNS.at(wildcards.run).dataset['name']}/{name}"
    )


def analyzed(wildcards):
    """The run whose recipe and CLIP a dataset is analyzed with: the reference's, if it uses the dataset."""
    runs = [run for run in RUNS if run.dataset["name"] == wildcards.dataset]
    return next((run for run in runs if run.experiment == REFERENCE), runs[0])


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
    try:
        for path in paths:
            check_format(path, "path", path)
    except InputError as error:
        raise WorkflowError(str(error)) from None
    return paths


def folder_of(model):
    """The folder of the whole model: somebody else's, or the one that is assembled here."""
    return model.get("assembled", f"results/models/{model['name']}/mgm")


def files_of(model):
    """The files that stand for the model's folder."""
    folder = folder_of(model)
    if "assembled" in model:
        described = {f"{folder}/config.json", *glob(f"{escape(folder)}/*.json")}
        weights = glob(f"{escape(folder)}/*.safetensors")
        return own_files([*sorted(described), *sorted(weights)])
    return [f"{folder}/model.safetensors"]


def model_folder(wildcards):
    return folder_of(RUNS.at(wildcards.run).config["model"])


def model_files(wildcards):
    """Input function: the model that a run starts from."""
    return files_of(RUNS.at(wildcards.run).config["model"])


def foundation_files(model):
    """What this workflow trains for a model; nothing where its parts are somebody else's folders or hub ids."""
    parts = (
        ("clip", "convnext", "language_model") if "foundation" in MODELS[model] else ()
    )
    return [f"results/foundation/{model}/{part}/model.safetensors" for part in parts]


def clip_files(stage):
    """Input function: the CLIP that a stage judges by, where this workflow trains it and the stage uses one."""

    def files(wildcards):
        run = RUNS.at(wildcards.run)
        return (
            foundation_files(run.config["model"]["name"])[:1]
            if "clip" in run.settings[stage]
            else []
        )

    return files


def recipe_files(stage):
    """Input function: the user's own files that a stage's recipe names, such as a list of words."""
    return lambda wildcards: own_files(
        files_named(RUNS.at(wildcards.run).settings[stage]["recipe"])
    )


def finetuned_files(wildcards):
    """Input function: what fine-tuning wrote beside the projector."""
    lora = RUNS.at(wildcards.run).config["finetune"]["lora"]
    names = ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
    return [
        output_of("finetune", name)(wildcards)
        for name in (names if lora else ["language_model.safetensors"])
    ]


def plan_flags(wildcards):
    """The settings of fine-tuning that decide about memory; sequences are as long as it lets through."""
    config = RUNS.first(REFERENCE).config
    finetune = config["finetune"]
    lora, batch = finetune["lora"], finetune["global_batch_size"]
    flags = [f"--model={PLANNED}", f"--sequence={finetune['max_length']}"]
    if lora:
        targets = [f"--lora-target={target}" for target in lora["targets"]]
        flags += [f"--lora-rank={lora['r']}", *targets]
    else:
        flags += ["--tuning=full"]
    if config["gpus"] > 1:
        flags += [f"--gpus={config['gpus']}", f"--nodes={config['nodes']}"]
    if finetune["compile"]:
        flags += ["--fused"]
    return flags + ([f"--global-batch={batch}"] if batch else [])


def captioner_stage(wildcards):
    """The folder of the stage-1 model that writes captions; None where the captioner is somebody else's model."""
    run = RUNS.at(wildcards.run)
    return run.captioner and RUNS.stage(RUNS.of(run.captioner, run.seed), "pretrain")


def captioner_files(wildcards):
    folder = captioner_stage(wildcards)
    return (
        [f"{folder}/projector.safetensors", *model_files(wildcards)] if folder else []
    )


def captioner_flags(wildcards):
    """As a list, of which Snakemake quotes each."""
    folder, model = captioner_stage(wildcards), model_folder(wildcards)
    return (
        [f"--captioner-model={model}", f"--captioner-stage={folder}"] if folder else []
    )


def source_files(wildcards):
    """The user's own files; the embedded dataset has none."""
    settings = DATASETS[wildcards.dataset]
    splits = [
        settings[split]
        for split in ("pretrain", "finetune", "evaluation")
        if split in settings
    ]
    keys = ("file", "questions")
    return own_files(split[key] for split in splits for key in keys if key in split)


def gpus(wildcards):
    return RUNS.at(wildcards.run).config["gpus"]


def gpus_of_a_node(wildcards):
    return gpus_on_one_node(RUNS.at(wildcards.run).config)


def benchmark_files(wildcards):
    """Input function: the user's own files of a benchmark, without the folder of its images."""
    settings = RUNS.at(wildcards.run).settings.get(f"benchmarks/{wildcards.benchmark}")
    if settings is None:
        raise WorkflowError(
            f"benchmarks.{wildcards.benchmark} is not set: name its files in config/config.yaml"
        )
    files = settings["files"]
    return own_files(file for kind, file in files.items() if kind != "images")


def challenge_settings():
    """What the challenge's table is made from."""
    try:
        return RUNS.challenge()
    except InputError as error:
        raise WorkflowError(str(error)) from None


def benchmark_outputs(benchmark, name):
    """A file of a benchmark, for every run in the challenge's table."""
    return sorted(
        {
            f"{run['benchmarks'][benchmark]}/{name}"
            for run in challenge_settings()["runs"]
        }
    )


def page_of(experiment):
    """Where an experiment is reported: with all that are compared, if it is one of them; else beside the reference."""
    compared = experiment in RUNS.compared and experiment != REFERENCE
    return "report" if compared else f"{experiment}/report"


def experiments_on(page):
    """The experiments of a page, the one that the others are compared with first."""
    if page == "report":
        return RUNS.compared
    return list(dict.fromkeys([REFERENCE, os.path.dirname(page)]))


def evaluated_files(page):
    """All that a page of RUNS.page is made from."""
    outputs = {
        "filter": ["summary.json", "stats.jsonl", "dropped.jsonl", "filtered.jsonl"],
        "synthesize": [
            "config.yaml",
            "summary.json",
            "stats.jsonl",
            "dropped.jsonl",
            "synthesized.jsonl",
        ],
        "jsonl": ["summary.json", "pretrain.jsonl"],
        "pretrain": ["metrics.jsonl", "metrics.json", "memory.csv"],
        "finetune": ["metrics.jsonl", "metrics.json", "memory.csv"],
        "generate": ["captions.jsonl", "answers.jsonl"],
        "evaluate_clip": ["config.yaml", "metrics.json", "scores.jsonl"],
        "evaluate_vqa": ["metrics.json", "scores.jsonl"],
    }
    files = []
    for experiment in page["experiments"]:
        files += [
            f"{experiment['dataset']}/{name}"
            for name in ("summary.json", "evaluation.jsonl")
        ]
        for run in experiment["runs"]:
            files += [
                f"{folder}/{name}"
                for stage, folder in run["stages"].items()
                for name in outputs[stage]
            ]
    return sorted(set(files))
