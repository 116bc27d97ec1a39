r"""Read the headline score and the cost of the trials of a batch.

    python workflow_scripts/score_trials.py --config results/my_search/search/1a2b3c4d/batch-1/config.yaml \
        --trials results/my_search/search/1a2b3c4d/batch-1/trials.yaml \
        --output results/my_search/search/1a2b3c4d/batch-1/scores.yaml

Without `--trials`, it is batch 0: the experiment that the trials change. The configuration lists finished trials.
"""

import argparse
from pathlib import Path

from dj2mgm.command_line import command_line
from dj2mgm.config.seed_times import sum_seconds
from dj2mgm.config.settings.page_settings import PageSettings
from dj2mgm.config.settings.search_records import BatchRecord, BatchScores
from dj2mgm.config.settings.validation import load_settings
from dj2mgm.errors import InputError
from dj2mgm.files import write_yaml
from dj2mgm.reporting.experiment import ExperimentResults, load_experiments
from dj2mgm.reporting.headline import HeadlineScore, find_headline


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--trials", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    finished = load_experiments(args.config) if load_settings(PageSettings, args.config).experiments else []
    names = [one.name for one in load_settings(BatchRecord, args.trials).trials] if args.trials else [finished[0].name]
    headline = find_headline(finished) if finished else None
    scores = dict.fromkeys(names) | {one.name: read_score(headline, one) for one in finished if one.name in names}
    seconds = [gpu_seconds(one) for one in finished if one.name in names]
    measured = sum(filter(None, seconds)) if any(seconds) else None
    write_yaml(args.output, BatchScores(scores=scores, seconds=measured).model_dump())


def read_score(headline: HeadlineScore, experiment: ExperimentResults) -> float:
    """Return the mean of the headline over the seeds."""
    measured = experiment.groups.get(headline.group, {}).get(headline.metric)
    if measured is None:
        raise InputError(f"{experiment.name} does not report {headline.title}; choose another report.headline")
    return float(measured["mean"])


def gpu_seconds(experiment: ExperimentResults) -> float | None:
    """Return the seconds of the stages in an experiment's own folder, times GPUs."""
    folders = {folder for run in experiment.runs for folder in run.stages.values() if experiment.name in folder.parts}
    seconds = sum_seconds(folders) if folders else 0.0
    return None if seconds is None else seconds * experiment.config.gpus


if __name__ == "__main__":
    main()
