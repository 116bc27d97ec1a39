"""Refuses to publish a model that has learned nothing according to the verdicts on its page."""

from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.files import read_json

VERDICT = "verdict.json"  # next to a page: verdicts, and signs that a model has learned nothing


def refuse_unlearned(experiment: str, verdict: str | Path, anyway: bool) -> None:
    """Raise InputError if the model of an experiment has learned nothing, unless it is published anyway.

    Args:
        experiment: the experiment whose model is published.
        verdict: the file of the verdicts of its page.
        anyway: `publish.anyway`.
    """
    faults = read_json(verdict).get(experiment, {}).get("learning_faults", [])
    if faults and not anyway:
        reason, remedy = (faults[0][key] for key in ("reason", "remedy"))
        raise InputError(
            f"publish: the model of {experiment} has learned nothing measurable. {reason}. {remedy}, "
            f"then run `snakemake --cores 1 {experiment}` again, or add `--config publish='{{anyway: true}}'` to "
            "publish it as it is"
        )
