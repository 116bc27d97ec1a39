"""A search without trainings: `python simulated_search.py <folder> <storage> <trainings> [<batch>]`.

It asks and tells as the workflow does, and keeps the same files, so that it continues after a kill. A "training" adds a
line to trained.txt. The score is highest at x = 0.3 and kind = "b".
"""

import sys
from pathlib import Path

from dj2mgm.config.settings.search_records import BatchScores, SearchSettings, TrialRecord, count_next
from dj2mgm.config.settings.study_files import Interval, SearchDesign
from dj2mgm.config.settings.validation import load_settings
from dj2mgm.files import read_yaml, write_yaml
from dj2mgm.trials import Trials


def score(changes: dict) -> float:
    return -((changes["x"] - 0.3) ** 2) - (0.1 if changes["kind"] != "b" else 0.0)


def settings(folder: Path, storage: str, **values) -> SearchSettings:
    axes = {"x": Interval(low=0.0, high=1.0), "kind": ["a", "b", None]}
    values = {"axes": axes, "sampler": "tpe", "seed": 0} | values
    names = {"name": "simulated", "experiment": "base", "folder": str(folder)}
    return SearchSettings(**names, **values, storage=storage)


def run(search: SearchSettings, trainings: int, batch: int = 3, rate=score) -> dict[str, TrialRecord]:
    """Run the search to its end, and return its trials by name."""
    folder, budget = Path(search.folder), SearchDesign(trainings=trainings, batch=batch)
    batches, trials = [BatchScores(scores={"base": 0.0}, seconds=1.0)], {}
    while number := count_next(budget, batches):
        place = folder / f"batch-{len(batches)}"
        if not (place / "trials.yaml").exists():
            known = Trials(search, folder.name, trainings)
            for done in batches[1:]:
                known.tell(done.scores)
            asked = known.ask(len(batches), number)
            write_yaml(place / "trials.yaml", {"trials": [trial.model_dump() for trial in asked]})
        asked = [TrialRecord(**trial) for trial in read_yaml(place / "trials.yaml")["trials"]]
        if not asked:
            break
        if not (place / "scores.yaml").exists():
            scores = {trial.name: rate(trial.changes) for trial in asked}
            with open(folder / "trained.txt", "a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in scores)
            write_yaml(place / "scores.yaml", {"scores": scores, "seconds": 1.0})
        batches.append(load_settings(BatchScores, place / "scores.yaml"))
        trials |= {trial.name: trial for trial in asked}
    known = Trials(search, folder.name, trainings)
    for done in batches[1:]:
        known.tell(done.scores)
    return trials


if __name__ == "__main__":
    place, address, *numbers = sys.argv[1:]
    run(settings(Path(place), address), *map(int, numbers))
