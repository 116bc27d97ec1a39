"""Pairs of experiments that a page compares, and their controls."""

from dataclasses import dataclass

from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.runs.experiments import REFERENCE


@dataclass(frozen=True)
class ExperimentPair:
    """Two experiments that a page compares.

    Attributes:
        subject: the experiment under whose name the verdict is shown. It is `experiment`, or the control that this
            comparison belongs to.
    """

    experiment: ExperimentResults
    reference: ExperimentResults
    subject: ExperimentResults

    @property
    def owner(self) -> str:
        """Target of Snakemake whose page shows the comparison: the experiment, or the control's experiment."""
        return self.subject.control.experiment if self.subject.control else self.experiment.name

    @property
    def can_be_decided(self) -> bool:
        """True if `snakemake decide` makes this comparison."""
        return self.subject.control is None and self.reference.name == REFERENCE


def find_comparisons(experiments: list[ExperimentResults]) -> list[ExperimentPair]:
    """Return the comparisons of a page: each later experiment with the first one, and the controls' comparisons."""
    reference, *later_experiments = experiments
    by_name = {experiment.name: experiment for experiment in experiments}
    pairs = [
        (experiment, experiment.control.compared if experiment.control else (experiment.name, reference.name))
        for experiment in later_experiments
    ]
    return [ExperimentPair(by_name[pair[0]], by_name[pair[1]], subject) for subject, pair in pairs if pair]


def find_controls(experiments: list[ExperimentResults], comparison: ExperimentPair) -> list[str]:
    """Return the kinds of controls that a page has of a compared experiment."""
    kinds = [
        experiment.control.kind
        for experiment in experiments
        if experiment.control and experiment.control.experiment == comparison.owner
    ]
    return list(dict.fromkeys(kinds))


def is_learning_rate_control(subject: ExperimentResults) -> bool:
    """Return whether this is the control at half of the learning rates, which repeats its experiment's verdict."""
    return subject.control is not None and subject.control.kind == "half_learning_rate"
