"""Numbers of rows in the training files: summary.json of the stage `jsonl`."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from dj2mgm.storage.files import read_json

SIZE_REASONS = ("sampled", "over_max_samples", "over_size", "over_budget")  # of good rows


@dataclass(frozen=True)
class SourceSamples:
    """Numbers of a source in a training file."""

    usable: int = 0  # rows that can be trained on
    used: int = 0  # different rows among the samples
    rows_out: int = 0  # samples, including repeated rows
    words: int = 0  # words of the samples


@dataclass(frozen=True)
class TrainingFileCounts:
    """Numbers of rows of a training file, which add up."""

    rows_in: int
    rows_out: int  # samples, including repeated rows
    dropped: dict[str, int]  # rows by reason
    repeated: int = 0
    sources: dict[str, SourceSamples] = field(default_factory=dict)  # empty for a dataset without sources

    @property
    def losses(self) -> dict[str, int]:
        """Rows that cannot or must not be trained on by reason, without good rows that are left out to fit a size."""
        return {reason: count for reason, count in self.dropped.items() if reason not in SIZE_REASONS}

    @property
    def different_rows(self) -> int:
        return self.rows_out - self.repeated

    def as_dict(self) -> dict:
        return {key: value for key, value in asdict(self).items() if key != "sources" or value}


@dataclass(frozen=True)
class JsonlSummary:
    """Content of the file."""

    files: dict[str, TrainingFileCounts]  # of `pretrain` and `finetune`
    inputs: dict[str, str]  # digests of the files that were read

    def as_dict(self) -> dict:
        return {split: counts.as_dict() for split, counts in self.files.items()} | {"inputs": self.inputs}


def read_jsonl_summary(path: Path) -> JsonlSummary:
    """Read the file; older ones have no digests, no repeated rows and no different rows of each source."""
    values = read_json(path)
    files = {split: _read_counts(values[split]) for split in ("pretrain", "finetune")}
    return JsonlSummary(files, values.get("inputs", {}))


def _read_counts(values: dict) -> TrainingFileCounts:
    sources = {
        name: SourceSamples(
            counts["usable"],
            counts.get("used", min(counts["usable"], counts["rows_out"])),
            counts["rows_out"],
            counts["words"],
        )
        for name, counts in values.get("sources", {}).items()
    }
    return TrainingFileCounts(
        values["rows_in"], values["rows_out"], values["dropped"], values.get("repeated", 0), sources
    )
