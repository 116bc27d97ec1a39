"""Commands of Snakemake that a page advises, with the settings that name its dataset and model."""

import shlex
from pathlib import Path

from dj2mgm.records.page_records import ShownExperiment
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.rendering import format_snakemake_command
from dj2mgm.settings.configuration import drop_defaults


def build_snakemake_command(experiment: ExperimentResults | ShownExperiment, target: str, /, **settings: str) -> str:
    """Return a command that continues with the results of an experiment.

    Args:
        experiment: an experiment whose folder has its own name, such as the reference of a page.
        target: target of Snakemake.
        settings: further settings of the command line, in YAML.
    """
    experiment_settings = drop_defaults({"dataset": experiment.config.dataset, "model": experiment.config.model.name})
    return format_snakemake_command(target, experiment_settings | settings)


def build_keep_command(variant: ExperimentResults, study: Path, suffix: str = "best") -> str:
    """Return the command that makes an experiment's file, named after the study with a suffix, of a variant.

    `study` is the folder of the study's page.
    """
    arguments = [f"{study}/config.yaml", variant.name, f"{study.name}_{suffix}"]
    return " ".join(["python workflow_scripts/keep_variant.py", *map(shlex.quote, arguments)])
