"""A search without trainings.

It requests trials like the workflow and writes the same files, so that it continues after a kill. A
"training" adds a line to trained.txt. The score is highest at x = 0.3 and kind = "b".
"""

from collections.abc import Callable
from pathlib import Path

from dj2mgm.features.studies.axes import Interval
from dj2mgm.features.studies.designs import SearchDesign
from dj2mgm.features.studies.halving import SearchHistory, plan_next
from dj2mgm.features.studies.study_records import BatchRecord, BatchResult, SearchSettings, TrialRecord
from dj2mgm.features.studies.trials import ask_for_batch
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_yaml


def score(changes: dict) -> float:
    return -((changes["x"] - 0.3) ** 2) - (0.1 if changes["kind"] != "b" else 0.0)


def settings(folder: Path, **values) -> SearchSettings:
    axes = {"x": Interval(low=0.0, high=1.0), "kind": ["a", "b", None]}
    values = {"axes": axes, "sampler": "tpe", "seed": 0, "seeds": [0]} | values
    return SearchSettings(experiment="base", folder=str(folder), **values)


def run(search: SearchSettings, trainings: int, batch: int = 3, rate=score) -> dict[str, TrialRecord]:
    """Run the search to its end, and return its trials by name."""
    design = SearchDesign(trainings=trainings, batch=batch)

    def measure(record: BatchRecord, history: SearchHistory) -> BatchResult:
        scores = {trial.name: rate(trial.changes) for trial in record.trials}
        return BatchResult(scores=scores, runs=len(scores), seconds=1.0)

    history = simulate(search, design, measure)
    return {trial.name: trial for record, _ in history.finished_batches for trial in record.trials}


def simulate(
    search: SearchSettings, design: SearchDesign, measure: Callable[[BatchRecord, SearchHistory], BatchResult]
) -> SearchHistory:
    """Run batches until a search ends; `measure` replaces training and evaluation."""
    folder, finished_batches = Path(search.folder), []
    while True:
        history = SearchHistory(
            design, search, BatchResult(scores={"base": 0.0}, runs=1, seconds=1.0), finished_batches
        )
        if plan_next(history) is None:
            return history
        batch_folder = folder / f"batch-{len(finished_batches) + 1}"
        if not (batch_folder / "trials.yaml").exists():
            write_yaml(batch_folder / "trials.yaml", ask_for_batch(history).model_dump())
        record = load_settings(BatchRecord, batch_folder / "trials.yaml")
        if not (batch_folder / "scores.yaml").exists():
            with open(folder / "trained.txt", "a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in record.names)
            write_yaml(batch_folder / "scores.yaml", measure(record, history).model_dump())
        finished_batches = [*finished_batches, (record, load_settings(BatchResult, batch_folder / "scores.yaml"))]
