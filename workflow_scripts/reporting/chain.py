"""What became of the data: rows into and out of every step, from the dataset to the training samples."""

from dataclasses import dataclass

from reporting.experiment import Experiment


@dataclass(frozen=True)
class Step:
    """Rows after one step; widths in per cent of the longest bar."""

    name: str
    rows: int
    dropped: int
    reasons: str  # "undecodable 12, missing 1", empty where a step has only one
    kept_width: float
    dropped_width: float


def pretrain_chain(experiment: Experiment) -> list[Step]:
    """Dataset, every filter operator, the training file, and the samples that stage 1 saw."""
    steps = [("dataset", experiment.dataset_counts["pretrain"], 0, {})]
    steps += [
        (op["operator"], op["rows_out"], op["dropped"], op.get("broken_images"))
        for op in experiment.filter["operators"]
    ]
    return _widths(steps + _written_and_trained(experiment, "pretrain"))


def finetune_chain(experiment: Experiment) -> list[Step]:
    """Instructions in the dataset, in the training file, and the samples that stage 2 saw."""
    steps = [("dataset", experiment.dataset_counts["finetune"], 0, {})]
    return _widths(steps + _written_and_trained(experiment, "finetune"))


def _written_and_trained(experiment: Experiment, stage: str) -> list[tuple]:
    written = experiment.jsonl[stage]
    dropped = written["rows_in"] - written["rows_out"]
    return [
        ("training file", written["rows_out"], dropped, written.get("dropped")),
        ("samples trained", experiment.records[stage]["samples"], 0, {}),
    ]


def _widths(steps: list[tuple]) -> list[Step]:
    longest = max(rows + dropped for _, rows, dropped, _ in steps) or 1
    return [
        Step(
            name,
            rows,
            dropped,
            ", ".join(f"{reason} {count}" for reason, count in (reasons or {}).items()),
            round(100 * rows / longest, 2),
            round(100 * dropped / longest, 2),
        )
        for name, rows, dropped, reasons in steps
    ]
