"""Numbers of rows at each step of a recipe: summary.json of the stages `filter` and `synthesize`."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from dj2mgm.storage.files import read_json


@dataclass(frozen=True)
class OperatorSummary:
    """Numbers of rows before and after an operator.

    Attributes:
        step: position of the operator in the recipe, from 1.
        operator: name.
        dropped: number of rows that it dropped.
        changed: number of rows that it changed.
        seconds: time in the operator, summed over processes.
        reports: the operator's own counts by name, such as `broken_images`; most operators have none.
    """

    step: int
    operator: str
    rows_in: int
    rows_out: int
    dropped: int
    changed: int
    seconds: float
    reports: dict[str, dict[str, Any]]

    def as_dict(self) -> dict:
        values = asdict(self)
        return values | values.pop("reports")


@dataclass(frozen=True)
class RecipeSummary:
    """Content of the file.

    Attributes:
        broken_images: numbers of images that cannot be read, by reason.
        data_juicer: version of Data-Juicer.
        input: path and digest of the input file.
        rows: the kind of rows, if it is not image–caption pairs.
    """

    rows_in: int
    rows_kept: int
    broken_images: dict[str, int]
    operators: list[OperatorSummary]
    data_juicer: str
    input: dict[str, str]
    rows: str | None = None

    def as_dict(self) -> dict:
        counts = {
            "rows_in": self.rows_in,
            "rows_kept": self.rows_kept,
            "rows_dropped": self.rows_in - self.rows_kept,
            "errors": 0,
            "broken_images": self.broken_images,
            "operators": [operator.as_dict() for operator in self.operators],
            "data_juicer": self.data_juicer,
            "input": self.input,
        }
        return counts | ({"rows": self.rows} if self.rows else {})


def read_recipe_summary(path: Path) -> RecipeSummary:
    values = read_json(path)
    operators = [_read_operator(operator) for operator in values["operators"]]
    counts = {key: values[key] for key in ("rows_in", "rows_kept", "broken_images", "data_juicer", "input")}
    return RecipeSummary(**counts, operators=operators, rows=values.get("rows"))


def _read_operator(values: dict) -> OperatorSummary:
    names = [field.name for field in fields(OperatorSummary) if field.name != "reports"]
    reports = {key: value for key, value in values.items() if key not in names}
    return OperatorSummary(**{name: values[name] for name in names}, reports=reports)
