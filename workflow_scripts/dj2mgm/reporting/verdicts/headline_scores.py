"""The score that decides between experiments, declared before the results are seen."""

from dataclasses import dataclass

import numpy as np

from dj2mgm.evaluation.contrasts import PairedContrast, contrast_with_base
from dj2mgm.evaluation.paired_values import PairedValues
from dj2mgm.reporting.comparison import LOWER_IS_BETTER, SCORE_TITLES
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.score_groups import UNTRAINED, name_group, split_group


@dataclass(frozen=True)
class HeadlineScore:
    """The score that decides, declared before the results are seen."""

    title: str
    group: str
    metric: str
    margin: float

    @property
    def lower_is_better(self) -> bool:
        return self.metric in LOWER_IS_BETTER


def find_headline(experiments: list[ExperimentResults], share_of_rows: float = 1) -> HeadlineScore:
    """Return the score that decides between trainings on this share of the rows (`ReportSection.locate_headline`)."""
    settings = experiments[0].config.report
    has_questions = any(run.question_count for experiment in experiments for run in experiment.runs)
    headline = settings.locate_headline(has_questions, share_of_rows)
    return HeadlineScore(SCORE_TITLES[headline.key], headline.group, headline.metric, settings.margin)


def compute_change_by_training(
    experiment: ExperimentResults, group: str, metric: str, base_model: str = UNTRAINED
) -> PairedContrast | None:
    """Return the difference of the fine-tuned model from an earlier one, paired by image.

    None if a score was not measured.
    """
    base_group = name_group(base_model, split_group(group)[1])
    pairs = [
        (run.groups.get(group, {}).get(metric), run.groups.get(base_group, {}).get(metric)) for run in experiment.scores
    ]
    if any(None in pair for pair in pairs):
        return None
    changes = [tuned - base for tuned, base in pairs]
    values = PairedValues(tuple(experiment.seeds), np.stack([change.sums for change in changes]), changes[0].counts)
    return contrast_with_base(values)


def find_group_before_training(group: str) -> str:
    """Return the group of the model before training that corresponds to a group of the fine-tuned model."""
    return name_group(UNTRAINED, split_group(group)[1])
