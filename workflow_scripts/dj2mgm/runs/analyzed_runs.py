"""Choice of the run whose recipe and CLIP analyze a dataset."""

from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.run import Run


def find_analyzed(runs: Runs, dataset: str) -> Run:
    """Return the run whose recipe and CLIP analyze a dataset: the reference if it uses the dataset."""
    users = [run for run in runs if run.dataset.name == dataset]
    return next((run for run in users if run.experiment == REFERENCE), users[0])
