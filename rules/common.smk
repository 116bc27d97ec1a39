# Input functions that several rule files use, except those of models (model_inputs.smk).
import os
from itertools import chain
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.recipes.catalogue import find_recipe_files
from dj2mgm.runs import pages
from dj2mgm.settings.string_formats import check_paths
from dj2mgm.storage.fingerprints import Fingerprints

FINGERPRINTS = Fingerprints(Path(".snakemake/fingerprints.json"))


def check_user_files(paths):
    """Check the user's own files, and return them as inputs.

    A missing one is found here, because Snakemake uses old results of a stage whose input is missing.
    """
    paths = list(paths)
    check_paths(paths)
    for path in paths:
        if not path.startswith("results/") and not os.path.exists(path):
            raise InputError(
                f"{path}: the file is missing. Restore it, or correct its path"
            )
    return paths


def hash_user_files(*functions):
    """Return a params function: the hash of the user's own files that these input functions return.

    It takes only the wildcards. If it took the input, Snakemake would not notice that its value changed.
    """

    def digest(wildcards):
        files = map(str, chain.from_iterable(find(wildcards) for find in functions))
        # Snakemake's time stamps suffice for files that the workflow makes.
        return FINGERPRINTS.hash_files(
            file for file in files if not file.startswith("results/")
        )

    return digest


def find_used_dataset(wildcards):
    """Return the dataset of this name; fail if no experiment uses it."""
    if wildcards.dataset not in RUNS.datasets:
        raise InputError(
            f"no experiment uses a dataset of the name {wildcards.dataset}; they use {', '.join(sorted(RUNS.datasets))}"
        )
    return RUNS.datasets[wildcards.dataset]


def dataset_file(name):
    """Return the input function of a file of the run's dataset."""
    return lambda w: f"results/datasets/{RUNS.by_folder(w.run).dataset.name}/{name}"


def recipe_files(stage):
    """Return the input function of the user's own files that a stage's recipe names, such as a list of words."""
    return lambda w: check_user_files(
        find_recipe_files(RUNS.by_folder(w.run).settings[stage].recipe)
    )


def stage_output(stage, name):
    """Return the input function of a file of a stage's output, in the folder of the run that owns the stage."""
    return lambda w: RUNS.locate_output(RUNS.by_folder(w.run), stage, name)


def pairs_file(wildcards):
    """Input function: the image–caption pairs to train on."""
    run = RUNS.by_folder(wildcards.run)
    if "synthesize" in run.settings and not run.selects_instructions:
        return RUNS.locate_output(run, "synthesize", "synthesized.jsonl")
    return RUNS.locate_output(run, "filter", "filtered.jsonl")


def leaks_file(wildcards):
    """Input function: near-duplicates of evaluation images among training images; none for the embedded dataset."""
    folder = pages.locate_leaks_folder(RUNS.by_folder(wildcards.run).dataset)
    return f"{folder}/leaks.jsonl" if folder else []


def page_files(wildcards):
    """Input function: all files that a page reads."""
    experiments = pages.list_page_experiments(RUNS, wildcards.page)
    return pages.list_page_files(RUNS, experiments)
