"""Summaries of recipes for results that tests write."""

from pathlib import Path

from dj2mgm.records import OperatorSummary, RecipeSummary
from dj2mgm.storage.files import write_json


def write_recipe_summary(
    folder: Path, rows_in: int, rows_kept: int, operators: list[OperatorSummary] = (), data: str = "pretrain.jsonl"
) -> None:
    """Write summary.json of a stage that read `data`."""
    summary = RecipeSummary(rows_in, rows_kept, {}, list(operators), "1.6.1", {"path": data, "sha256": "0" * 64})
    write_json(folder / "summary.json", summary.as_dict())


def summarize_operator(
    step: int, name: str, rows_in: int, dropped: int, reports: dict[str, dict] | None = None
) -> OperatorSummary:
    return OperatorSummary(step, name, rows_in, rows_in - dropped, dropped, 0, 1.5, reports or {})
