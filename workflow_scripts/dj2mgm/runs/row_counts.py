"""Numbers of rows to train on, before a training."""

from collections.abc import Collection
from pathlib import Path

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER
from dj2mgm.records.jsonl_summary import read_jsonl_summary
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.run import Run
from dj2mgm.runs.stages import TRAINING_STAGES
from dj2mgm.storage.files import read_json


def read_row_counts(runs: Runs, run: Run, planned_folders: Collection[Path] = ()) -> tuple[dict[str, int], bool]:
    """Return the rows of both training files by stage, and whether they are exact; no rows if nothing has counted them.

    Args:
        planned_folders: folders whose files will be written again, so that their counts say nothing.
    """
    written, made = Path(runs.find_stage_folder(run, "jsonl")), Path(DATASETS_FOLDER, run.dataset.name)
    if (written / "summary.json").is_file() and written not in planned_folders:
        files = read_jsonl_summary(written / "summary.json").files
        return {stage: files[stage].rows_out for stage in TRAINING_STAGES}, True
    if (made / "summary.json").is_file() and made not in planned_folders:
        counts = read_json(made / "summary.json")
        return {stage: counts[stage] for stage in TRAINING_STAGES}, False
    return {}, False
