"""Numbers of rows to train on, before a training."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER
from dj2mgm.errors import pluralize
from dj2mgm.records.jsonl_summary import read_jsonl_summary
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.run import Run
from dj2mgm.runs.stages import TRAINING_STAGES
from dj2mgm.storage.files import read_json


@dataclass(frozen=True)
class RowCount:
    """Rows that a stage trains on in one epoch; `different` leaves out the repetitions of a row in the file."""

    rows: int
    different: int
    is_exact: bool  # False: the numbers are upper bounds

    def describe(self) -> str:
        rows = f"{'' if self.is_exact else 'at most '}{pluralize(self.rows, 'row')}"
        return rows if self.different == self.rows else f"{rows}, {self.different} of them different"


def count_training_rows(runs: Runs, run: Run, planned_folders: Collection[Path] = ()) -> dict[str, RowCount]:
    """Return the rows of each training stage of a run; none if nothing has counted them.

    Args:
        planned_folders: folders whose files will be written again, so that their counts say nothing.
    """
    counts = _read_counts(runs, run, planned_folders)
    if counts and len(run.training_stages) == 1:  # it trains on both files
        sums = (sum(getattr(count, key) for count in counts.values()) for key in ("rows", "different"))
        counts = {run.training_stages[0]: RowCount(*sums, counts["finetune"].is_exact)}
    elif counts and not counts["finetune"].rows:  # without instructions, stage 2 trains on the pairs
        counts["finetune"] = counts["pretrain"]
    return {stage: count for stage, count in counts.items() if count.rows}


def _read_counts(runs: Runs, run: Run, planned_folders: Collection[Path]) -> dict[str, RowCount]:
    """Return the rows of both training files by stage."""
    written, made = Path(runs.find_stage_folder(run, "jsonl")), Path(DATASETS_FOLDER, run.dataset.name)
    if (written / "summary.json").is_file() and written not in planned_folders:
        files = read_jsonl_summary(written / "summary.json").files
        return {stage: RowCount(files[stage].rows_out, files[stage].different_rows, True) for stage in TRAINING_STAGES}
    settings = run.dataset.settings
    if (made / "summary.json").is_file() and made not in planned_folders:
        rows = read_json(made / "summary.json")
    elif settings.is_rendered:
        rows = {"pretrain": settings.pretrain_pairs, "finetune": settings.finetune_instructions}
    else:
        return {}
    numbers = {stage: min(rows[stage], run.config.jsonl.max_samples) for stage in TRAINING_STAGES}
    return {stage: RowCount(number, number, False) for stage, number in numbers.items()}
