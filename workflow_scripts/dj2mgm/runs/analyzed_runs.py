"""Choice of the run whose recipe and CLIP analyze a dataset."""

from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import REFERENCE
from dj2mgm.runs.run import Run


def find_analyzed(runs: Runs, dataset: str) -> Run:
    """Return the run whose recipe and CLIP analyze a dataset: of the requested experiment if it uses the dataset."""
    users = [run for run in runs if run.dataset.name == dataset]
    experiment = runs.experiments.get_requested("analyze", REFERENCE)
    return next((run for run in users if run.experiment == experiment), users[0])
