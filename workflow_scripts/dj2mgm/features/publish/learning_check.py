"""Refusal to publish a model that has learned nothing according to the verdicts on its page."""

from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.records.page_records import read_verdicts


def refuse_unlearned(experiment: str, verdict: str | Path, allow_unlearned: bool) -> None:
    """Raise InputError if the model of an experiment has learned nothing, unless that is allowed.

    Args:
        experiment: the experiment whose model is published.
        verdict: the file of the verdicts of its page.
        allow_unlearned: `publish.allow_unlearned`.
    """
    faults = read_verdicts(verdict).get(experiment, {}).get("learning_faults", [])
    if faults and not allow_unlearned:
        reason, remedy = (faults[0][key] for key in ("reason", "remedy"))
        raise InputError(
            f"publish: the model of {experiment} has learned nothing measurable. {reason}. {remedy}, "
            f"then run `snakemake {experiment}` again, or add "
            "`--config publish='{allow_unlearned: true}'` to publish it as it is"
        )
