"""The assessment of a page's experiments: what its scores show, computed once for pages, console and verdict.json."""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from dj2mgm.evaluation.run_scores import GroupEstimates
from dj2mgm.reporting.comparison import HeadlineScore, compare_with_first, find_headline
from dj2mgm.reporting.experiment_results import ExperimentResults
from dj2mgm.reporting.verdicts.headline_verdicts import (
    HeadlineVerdict,
    build_headline_verdicts,
    find_unlearned,
    judge_single,
)
from dj2mgm.reporting.verdicts.learning_faults import LearningFault, TrainingChange, judge_training_changes
from dj2mgm.reporting.verdicts.verdict_cards import VerdictCard, merge_withheld, write_verdict_cards


@dataclass(frozen=True)
class Assessment:
    """Headline, verdicts and changes of experiments on a page. Each part is computed at its first use, and once only.

    Attributes:
        experiments: the reference, and the others.
        study: folder of a page of variants, of the name of its Snakemake target; None for a page of experiments, which
            are targets.
    """

    experiments: list[ExperimentResults]
    study: Path | None = None

    @cached_property
    def headline(self) -> HeadlineScore:
        """The score that decides."""
        return find_headline(self.experiments)

    @cached_property
    def differences(self) -> dict[str, GroupEstimates]:
        """Differences of all scores from the first experiment, by experiment."""
        return compare_with_first(self.experiments)

    @cached_property
    def unlearned(self) -> dict[str, list[LearningFault]]:
        """Signs that models have learned nothing, by experiment; only experiments with such signs."""
        return find_unlearned(self.experiments, self.headline)

    @cached_property
    def training_changes(self) -> dict[str, dict[tuple[str, str], TrainingChange]]:
        """Scores before and after training, by experiment, and by group and metric."""
        return {experiment.name: judge_training_changes(experiment, self.headline) for experiment in self.experiments}

    @cached_property
    def forgotten(self) -> dict[str, list[TrainingChange]]:
        """Scores that training made worse, by experiment; only experiments with such scores."""
        forgotten = {
            name: [change for change in changes.values() if change.kind == "worse"]
            for name, changes in self.training_changes.items()
        }
        return {name: changes for name, changes in forgotten.items() if changes}

    @cached_property
    def verdicts(self) -> list[HeadlineVerdict]:
        """Verdicts by the headline on all comparisons of the page, or on its single experiment."""
        if len(self.experiments) == 1:
            [experiment] = self.experiments
            return [judge_single(experiment, self.headline, self.training_changes[experiment.name])]
        return build_headline_verdicts(self.experiments, self.headline, self.unlearned, self._target)

    @cached_property
    def cards(self) -> list[VerdictCard]:
        """Verdicts with their certainty, cost and next step: one card on each comparison."""
        return write_verdict_cards(
            self.experiments,
            self.verdicts,
            self.unlearned,
            self.forgotten,
            {} if self.study else self.differences,
            self.study,
        )

    def merge_cards(self, cards: list[VerdictCard]) -> list[VerdictCard]:
        """Return cards of the page, with one for all comparisons that are withheld for the same remedy."""
        return merge_withheld(cards, self.experiments[0], self._target)

    def build_records(self) -> dict[str, dict]:
        """Return the experiments of verdict.json, by name."""
        cards = {card.verdict.experiment: card for card in self.cards}
        records = {}
        for name in (experiment.name for experiment in self.experiments):
            record = {"learning_faults": [asdict(fault) for fault in self.unlearned.get(name, [])]}
            record |= {"forgotten": [asdict(change) for change in self.forgotten.get(name, [])]}
            if card := cards.get(name):
                verdict = card.verdict
                record |= {"verdict": card.label, "statement": verdict.statement, "certainty": verdict.certainty}
                record |= {"cost": card.cost, "next_step": card.next_step, "command": card.command}
                record |= {"fallen": card.fallen, "control_command": card.control}
            records[name] = record
        return records

    @property
    def _target(self) -> str:
        return self.study.name if self.study else ""
