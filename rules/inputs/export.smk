# Input functions of rules/export.smk.
import os

from dj2mgm.cli.console import UserError


def filter_folders(wildcards):
    """Params function: the output folders of the filter stage and, if it ran on pairs, the synthesize stage."""
    run = RUNS.by_folder(wildcards.run)
    names = ("filter",) if run.selects_instructions else ("filter", "synthesize")
    stages = [stage for stage in names if stage in run.settings]
    return [RUNS.find_stage_folder(run, stage) for stage in stages]


def export_folder(wildcards):
    """Params function: the folder of an export; fails if it cannot be written."""
    folder = f"results/{wildcards.run}/export"
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        raise UserError(
            f"{folder} cannot be written; allow it, or make {folder} a link to a folder on another disk"
        )
    return f"{folder}/{wildcards.format}"
