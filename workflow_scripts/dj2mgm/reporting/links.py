"""Links from a report's numbers to the rows behind them, in the pages that explore.py serves or writes beside it."""

from urllib.parse import quote, urlencode


def page_name(name: str) -> str:
    """Of an experiment's or a dataset's page."""
    return f"explore-{name}.html"


def step_key(stage: str, number: int) -> str:
    """What a link names an operator by: its place in the stage's recipe, from 1."""
    return f"{stage}-{number}"


def rows_link(experiment: str, **asked: str) -> str:
    """
    Args:
        asked: what the page filters by; `drop` an operator (`step_key`), `table`, `find` an id, and columns' words.
    """
    return f"{quote(page_name(experiment))}#{urlencode(asked)}"
