"""Warnings and notes that Snakemake shows at its start."""

from collections.abc import Iterator

from dj2mgm.cli.command_line import escape_control
from dj2mgm.runs.all_runs import Runs


def list_start_messages(runs: Runs) -> Iterator[str]:
    """Yield a line about each risk and each guess; names of the user's files are untrusted."""
    if runs.shared.trusted_recipes:
        yield (
            "warning: trusted_recipes is true: recipes may run code, ask servers, and write or delete files; run only "
            "recipes that you have read"
        )
    for dataset in runs.datasets.values():
        yield from map(escape_control, dataset.note.splitlines())
    detected = (run.config.model for run in runs if run.dataset.note)
    for name in sorted({model.name for model in detected if model.trained_by_workflow}):
        yield (
            f"note: the model {name} is made for rendered scenes, and its scores on photos mean nothing. For a verdict "
            "on photos, name another model (docs/models.md)."
        )
    for warning in runs.experiments.list_warnings():
        yield f"warning: {escape_control(warning)}. Other experiments are not affected."
