"""Links from numbers of a report to their rows in the explorer."""

from urllib.parse import quote, urlencode


def page_name(name: str) -> str:
    """Return the file name of an experiment's or a dataset's page in the explorer."""
    return f"explore-{name}.html"


def step_key(stage: str, number: int) -> str:
    """Return the name of an operator in links: its stage and its place in the recipe, from 1."""
    return f"{stage}-{number}"


def rows_link(experiment: str, **filters: str) -> str:
    """Link to rows of an experiment.

    Args:
        experiment: name of the experiment.
        filters: `drop` for an operator (`step_key`), `table`, `find` for an id, or a column and its value.
    """
    return f"{quote(page_name(experiment))}#{urlencode(filters)}"
