"""Commands of Snakemake that a page advises, with the settings that name its dataset, model and folder."""

import shlex
from pathlib import Path

from dj2mgm.records.page_records import ShownExperiment
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.settings.configuration import ExperimentOnlyKeys


def build_snakemake_command(experiment: ExperimentResults | ShownExperiment, target: str, /, **settings: str) -> str:
    """Return a command that continues with the results of an experiment.

    Args:
        experiment: an experiment whose folder has its own name, such as the reference of a page.
        target: target of Snakemake.
        settings: further settings of the command line, in YAML.
    """
    experiment_settings = {"dataset": experiment.config.dataset, "model": experiment.config.model.name}
    experiment_settings = {
        key: value
        for key, value in experiment_settings.items()
        if value != ExperimentOnlyKeys.model_fields[key].default
    }
    if subfolder := _find_results_subfolder(experiment):
        experiment_settings["results"] = subfolder
    arguments = [shlex.quote(f"{key}={value}") for key, value in (experiment_settings | settings).items()]
    return " ".join(["snakemake --cores 1", target, *(["--config", *arguments] if arguments else [])])


def build_keep_command(variant: ExperimentResults, study: str) -> str:
    """Return the command that makes an experiment's file of a study's variant."""
    folder = "/".join(filter(None, ["results", _find_results_subfolder(variant), study]))
    arguments = [f"{folder}/config.yaml", variant.name, f"{study}_best"]
    return " ".join(["python workflow_scripts/keep_variant.py", *map(shlex.quote, arguments)])


def _find_results_subfolder(experiment: ExperimentResults | ShownExperiment) -> str:
    """Return the value of `results`: the folder below results/ that contains the experiment's folder."""
    parts = Path(experiment.runs[0].stages["finetune"]).parts
    return parts[1] if parts[0] == "results" and parts[2:3] == (experiment.name,) else ""
