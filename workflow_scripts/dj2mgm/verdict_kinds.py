"""Kinds of verdicts, with their labels, their tones, and their classes of the style sheets."""

from enum import StrEnum


class VerdictKind(StrEnum):
    """Kind of a verdict. Records in results/ contain the values."""

    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"  # within the margin
    UNDECIDED = "undecided"
    WITHHELD = "withheld"  # a model learned nothing
    NO_DIFFERENCE = "no difference shown"  # of a single score, without a margin and a correction
    NONE = ""  # scores were not measured, or cannot be compared

    @property
    def label(self) -> str:
        """Verdict on a comparison in one or two words."""
        return {self.WITHHELD: "Nothing learned", self.NONE: "No verdict"}.get(self, self.capitalize())

    @property
    def learning_label(self) -> str:
        """Verdict on a model that is compared only with itself before training or without its images."""
        return {self.BETTER: "Learned", self.WORSE: "Forgot", self.UNDECIDED: "Not shown"}[self]

    @property
    def tone(self) -> str:
        """Class of a card and its label: good, bad or same."""
        return {self.BETTER: "good", self.WORSE: "bad", self.WITHHELD: "bad"}.get(self, "same")

    @property
    def css_class(self) -> str:
        """Class of a table's cell or a chart's mark: better, worse or same."""
        return self.value if self in (self.BETTER, self.WORSE) else "same"

    @property
    def is_decided(self) -> bool:
        return self in (self.BETTER, self.WORSE, self.EQUIVALENT)
