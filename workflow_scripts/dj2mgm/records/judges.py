"""Models that judge captions, as metrics.json of the stage `evaluate_clip` lists them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Judge:
    """A model that judges captions.

    Attributes:
        name: folder or hub id.
        kind: CLIP or SigLIP.
        selects: CLIPs with the same image tower that selected the training data.
        sees: whether the trained model has the same image tower.
    """

    name: str
    kind: str
    selects: list[str]
    sees: bool

    @property
    def title(self) -> str:
        return f"{self.name} ({self.kind})"
