# The merged configuration of every experiment, and what rules ask of it.
import json
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

SCRIPTS = Path(workflow.basedir) / "workflow_scripts"
sys.path.insert(0, str(SCRIPTS))

from errors import InputError
from settings.code import modules_of
from settings.datasets import resolve_dataset
from settings.layers import experiment_names, merge_experiment
from settings.locks import note_owner, remove_stale_lock
from settings.stages import SETTINGS_OF, assemble_settings, foundation_settings

if remove_stale_lock():
    print(
        "the last run in this folder was killed; going on from where it was",
        file=sys.stderr,
    )


onstart:
    note_owner()


# no `configfile:` directive: `config` is then exactly the command line's layer, which comes last
EXPERIMENTS = experiment_names()
try:
    CONFIG = {name: merge_experiment(name, config) for name in EXPERIMENTS}
    DATASET_OF = {name: resolve_dataset(CONFIG[name]["dataset"]) for name in EXPERIMENTS}
    SETTINGS = {
        name: {
            stage: settings_of(CONFIG[name], DATASET_OF[name]["images"]) for stage, settings_of in SETTINGS_OF.items()
        }
        for name in EXPERIMENTS
    }
except InputError as error:
    raise WorkflowError(str(error)) from None
DATASETS = {dataset["name"]: dataset["settings"] for dataset in DATASET_OF.values()}
for dataset in DATASET_OF.values():
    if DATASETS[dataset["name"]] != dataset["settings"]:
        raise WorkflowError(f"two experiments use different datasets named {dataset['name']}; rename one's folder")
MODELS = {CONFIG[name]["model"]["name"]: CONFIG[name]["model"] for name in EXPERIMENTS}


wildcard_constraints:
    experiment="|".join(EXPERIMENTS),
    dataset="[^/]+",
    model="[^/]+",
    stage="|".join(SETTINGS_OF),
    part="clip|language_model",


def code(script, loaded_by_path=""):
    """A script and the project modules it uses, as inputs: a rule re-runs when its own code changes.

    `loaded_by_path` is a glob for modules that no import statement names, such as Data-Juicer's custom operators.
    """
    scripts = [
        SCRIPTS / script,
        *(SCRIPTS.glob(loaded_by_path) if loaded_by_path else ()),
    ]
    return sorted({os.path.relpath(module) for path in scripts for module in modules_of(path)})


def dataset_file(name):
    """Input function: a file of the experiment's dataset."""
    return lambda wildcards: f"results/datasets/{DATASET_OF[wildcards.experiment]['name']}/{name}"


def model_folder(wildcards):
    return f"results/models/{CONFIG[wildcards.experiment]['model']['name']}/mgm"


def model_file(wildcards):
    """Input function: the last file of the assembled model, which stands for its folder."""
    return f"{model_folder(wildcards)}/model.safetensors"


def foundation_files(model):
    """What this workflow trains for a model; nothing where its parts are somebody else's folders or hub ids."""
    parts = ("clip", "convnext", "language_model") if "foundation" in MODELS[model] else ()
    return [f"results/foundation/{model}/{part}/model.safetensors" for part in parts]


def source_files(wildcards):
    """The user's own files; the embedded dataset has none."""
    settings = DATASETS[wildcards.dataset]
    return [settings[split]["file"] for split in ("pretrain", "finetune", "evaluation") if split in settings]


def gpus(wildcards):
    return CONFIG[wildcards.experiment]["gpus"]


def free_port(wildcards):
    """A port of the launcher's that two training stages on one machine do not share."""
    return 29500 + EXPERIMENTS.index(wildcards.experiment)
