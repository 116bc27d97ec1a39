"""Search for diverged trainings, which would diverge again."""

from pathlib import Path

from dj2mgm.divergence import DIVERGED
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.stages import STAGES, TRAINING_STAGES

LOG_END = 20_000  # bytes at the end of a log, in which a diverged training is reported


def has_diverged(runs: Runs, experiment: str) -> bool:
    """Return whether an experiment's training diverged for any of its seeds. It would diverge again."""
    for seed in runs.experiments.configs[experiment].seeds:
        run = runs.get(experiment, seed)
        for stage in (stage for stage in TRAINING_STAGES if stage in run.settings):
            folder = Path(runs.find_stage_folder(run, stage))
            finished = (folder / STAGES[stage].outputs[-1]).is_file()
            if not finished and any(DIVERGED in _read_end(log) for log in folder.glob("*.log")):
                return True
    return False


def _read_end(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_END))
        return file.read().decode(errors="replace")
