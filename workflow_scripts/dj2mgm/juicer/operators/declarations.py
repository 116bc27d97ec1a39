"""The interface between operators and the engine: typed declarations with defaults, and the kinds of decisions.

An operator works in two phases: it measures batches of rows, and then decides which rows are kept.

- Most operators decide about each batch as soon as it is measured. Filters do so by Data-Juicer's `process`.
- `ShareLimits`: shares of all rows set the limits by which a filter decides, or by which a mapper edits rows. Such a
  mapper has a method `measure`, which only scores the rows.
- `DecidesLast`: `decide` gets all rows once they are measured. `SelectionFilter` draws rows, and deduplicators keep one
  row of each group. Data-Juicer's own deduplicators and selectors decide in this phase, too.

An operator of this workflow inherits from `Declarations` or from one of these classes. The engine never reads the name
or class of a single operator. Data-Juicer's own operators have the defaults.
"""

import hashlib
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from data_juicer.ops.base_op import OP, OPERATORS, UNFORKABLE, Deduplicator, Filter, Mapper, Selector
from data_juicer.utils.constant import Fields

from dj2mgm.data.score_limits import SIDE_BY_SHARE, compute_score_limits
from dj2mgm.recipes.catalogue import select_file_arguments

WEIGHTS_AND_CONFIG = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja"}
NO_GROUP = -1
SIGNIFICAND_BITS = 53  # bits of a float64's significand


class Argument(NamedTuple):
    """An argument that a recipe may give."""

    default: object
    description: str


def argument(default: Any, description: str) -> Any:
    """Declare an argument of an operator, as an attribute of its class; `...` stands for no default."""
    return Argument(default, description)


class Declarations(ABC):
    """Attributes and methods by which an operator tells the engine how to run it, and its declared arguments.

    `__init__` sets the attributes that are declared with `argument`, and passes on the arguments of every operator.

    Attributes:
        report_key: name of the operator's report in summary.json.
        report: counts of the operator, which the engine takes and empties after each batch.
        unreadable_stat: stat with the reason why a row's images cannot be read. An analysis drops the rows that a
            filter with this stat drops.
        budget: name of a budget of requests to a server that the operator spends. It then runs in the stage's process,
            even with Ray, and operators of one recipe need different budgets.
        draws_at_random: whether the captions of a captioner depend on a seed.
        without_effect: arguments of a captioner that change no caption.
        handles_tokens: whether it gets a row's whole text, with image token and end of chunk, instead of the caption;
            None: if its module uses the names by which Data-Juicer's operators find these tokens.
    """

    report_key: str | None = None
    report: dict
    unreadable_stat: str | None = None
    budget: str | None = None
    draws_at_random: bool = True
    without_effect: frozenset[str] = frozenset()
    handles_tokens: bool | None = None

    _arguments: Mapping[str, Argument] = {}

    def __init_subclass__(cls, **kwargs):
        """Give `__init__` the signature of the declared arguments, which Data-Juicer reads."""
        super().__init_subclass__(**kwargs)
        attributes: dict[str, object] = {}
        for base in reversed(cls.__mro__):
            attributes |= vars(base)
        cls._arguments = {name: value for name, value in attributes.items() if isinstance(value, Argument)}
        if cls._arguments:
            if "__init__" not in vars(cls):
                cls.__init__ = lambda self, *args, **kwargs: super(cls, self).__init__(*args, **kwargs)
            cls.__init__.__signature__ = cls._build_signature()

    @classmethod
    def _build_signature(cls) -> Signature:
        """Return the parameters that `__init__` names itself, and the declared arguments."""
        types = {name: kind for base in reversed(cls.__mro__) for name, kind in inspect.get_annotations(base).items()}
        parameters = {
            name: Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if declared.default is ... else declared.default,
                annotation=types[name],
            )
            for name, declared in cls._arguments.items()
        }
        named = inspect.signature(cls.__init__).parameters.items()
        own = {name: parameter for name, parameter in named if parameter.kind is Parameter.POSITIONAL_OR_KEYWORD}
        return Signature([*(own | {key: value for key, value in parameters.items() if key not in own}).values()])

    def __init__(self, *args, **kwargs):
        values = {name: kwargs.pop(name, declared.default) for name, declared in self._arguments.items()}
        if missing := [name for name, value in values.items() if value is ...]:
            raise TypeError(f"{type(self).__name__} needs the arguments {', '.join(missing)}")
        inherited = {name: values.pop(name) for name in ("batch_size",) if name in values}
        super().__init__(*args, **kwargs | inherited)
        vars(self).update(values)
        self.report = {}

    @staticmethod
    def list_model_files(arguments: dict) -> list[Path] | None:
        """Return the model files that results depend on; None stands for all folders that `arguments` name."""
        return None

    def check_ready(self) -> None:  # noqa: B027 (optional)
        """Raise InputError if the operator could not run; called before the first row."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Close files that stay open between batches."""

    def finish_report(self, report: dict) -> dict:
        """Return the report of all rows for summary.json; warn, or raise InputError, if it shows a defect."""
        return report


class Rows(Iterable[dict], Sized, Protocol):
    """All measured rows with their stats and the columns of the measurement. They can be iterated repeatedly."""


@dataclass(frozen=True)
class Decision:
    """The decision about N rows, in their order."""

    mask: np.ndarray  # (N,) bool, true for kept rows
    stats: dict[str, np.ndarray] = field(default_factory=dict)  # further stats of the rows by name, (N,) numbers each
    copy_of: np.ndarray | None = None  # (N,) position of the kept row that a dropped row resembles, -1 for kept rows
    distance: np.ndarray | None = None  # (N,) distance between the two


class DecidesLast(Declarations):
    """An operator that decides once all rows are measured.

    Attributes:
        column: column that the measurement fills for `decide`. It is removed afterwards.
    """

    column: str | None = None

    @abstractmethod
    def decide(self, rows: Rows, folder: Path) -> Decision:
        """Decide about all rows, and fill in `report`; `folder` is for temporary files."""


class ShareLimits(Declarations):
    """An operator whose limits may be given as shares of all rows' scores.

    Attributes:
        limit: name of the argument that `keep_fraction` replaces.
        quantiles: limits by the argument that replaces them with a quantile of the scores. The operator has
            attributes of these names (None if the recipe gives no quantile).
        keep_fraction: share of the rows, or None.
    """

    limit: str
    quantiles: Mapping[str, str] = {}
    keep_fraction: float | None

    @staticmethod
    @abstractmethod
    def read_scores(stats: dict) -> list[float]:
        """Return the row's scores; `keep_fraction` is a share of the scores of all rows."""

    @property
    def shares(self) -> dict[str, str]:
        """Shares and quantiles that the recipe gives, with the limits that they replace."""
        replaced_limits = {"keep_fraction": self.limit, **self.quantiles}
        return {name: limit for name, limit in replaced_limits.items() if getattr(self, name) is not None}

    def set_limits(self, stats: Iterable[dict]) -> None:
        """Set the limits that keep the operator's share of the rows, from the stats of all rows."""
        shares = self.shares
        scores = (score for row in stats for score in self.read_scores(row))
        limits = compute_score_limits(scores, **{name: getattr(self, name) for name in shares})
        for name, limit in shares.items():
            setattr(self, limit, limits[SIDE_BY_SHARE[name]])


class ValueFilter(Declarations, Filter):
    """A filter that keeps rows whose value lies in a range, and rows without a value.

    Attributes:
        stat: name of the stat, which holds a list of at most one number.
        bounds: names of the arguments with the lowest and the highest value to keep (None: no limit).
    """

    stat: str
    bounds: tuple[str | None, str | None]

    def fill(self, samples: dict, values: dict[int, float]) -> dict:
        """Return the samples with the stat from `values`, {row: value}. A row that has the stat keeps it."""
        for row, stats in enumerate(samples[Fields.stats]):
            if self.stat not in stats:
                stats[self.stat] = np.array([values[row]] if row in values else [], dtype=np.float64)
        return samples

    def process_single(self, sample: dict) -> bool:
        low, high = (None if name is None else getattr(self, name) for name in self.bounds)
        return all(self.get_keep_boolean(value, low, high) for value in sample[Fields.stats][self.stat])


class ShareFilter(ShareLimits, Filter):
    """A filter that takes shares of the rows in place of its limits."""


class SelectionFilter(DecidesLast, Filter):
    """A filter that keeps a share of the rows, or a number of them (all if there are fewer).

    Of rows that rank equally, the earlier one is kept. Draws depend on the seed, the filter's name and the row's id,
    and not on other rows: adding or removing a row does not change the draws of the others. The filter's name is part
    of the draw, because with the same draws a second filter would favor groups that the first has reduced.
    """

    _batched_op = True
    report_key = "selection"

    keep_fraction: float | None = argument(None, "share of the rows to keep")
    keep_rows: int | None = argument(None, "number of rows to keep, in place of `keep_fraction`")
    seed: int = argument(0, "seed of the draws")

    def draw_rows(self, rows: Rows, *names: str) -> np.ndarray:
        """Return a number in (0, 1] for each row, (N,) float64."""
        draws = (draw(self.seed, self._name, *names, row["id"]) for row in rows)
        return np.fromiter(draws, dtype=np.float64, count=len(rows))

    def count_rows_to_keep(self, rows: int) -> int:
        """Return the number of rows to keep out of `rows`, at least 1 unless there are none."""
        share = self.keep_rows if self.keep_fraction is None else max(1, round(self.keep_fraction * rows))
        return min(rows, share)

    def compute_stats_batched(self, samples: dict) -> dict:
        return samples


class BalanceFilter(SelectionFilter):
    """A filter that keeps equally many rows of each group, as far as the group has them."""

    stat: str  # name of the stat with the row's group

    @abstractmethod
    def assign_groups(self, rows: Rows) -> np.ndarray:
        """Return the rows' groups, (N,) whole numbers; rows with `NO_GROUP` are kept and not counted."""

    def decide(self, rows: Rows, folder: Path) -> Decision:
        groups = self.assign_groups(rows)
        members = np.flatnonzero(groups != NO_GROUP)
        mask = np.ones(len(groups), dtype=bool)
        draws = self.draw_rows(rows)[members]
        mask[members] = sample_evenly(groups[members], draws, self.count_rows_to_keep(len(members)))
        sizes = np.unique(groups[members], return_counts=True)[1]
        most = np.unique(groups[members][mask[members]], return_counts=True)[1]
        self.report = {
            "groups": len(sizes),
            "largest_group": int(sizes.max(initial=0)),
            "most_kept_of_a_group": int(most.max(initial=0)),
            "without_group": len(groups) - len(members),
        }
        return Decision(mask, {self.stat: groups})


def sample_evenly(groups: np.ndarray, draws: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` of N rows so that no group gets two rows more than another group with rows left.

    The first row of each group comes before the second row of any group. Within a group, and among rows of equal rank,
    the lowest draws come first. Groups are (N,) whole numbers, draws (N,) float64, the result (N,) bool.
    """
    by_group = np.lexsort((draws, groups))  # stable: of equal draws the earlier row comes first
    starts = np.flatnonzero(np.diff(groups[by_group], prepend=groups[by_group[:1]] - 1))
    sizes = np.diff(starts, append=len(groups))
    rank = np.empty(len(groups), dtype=np.int64)
    rank[by_group] = np.arange(len(groups)) - np.repeat(starts, sizes)
    is_chosen = np.zeros(len(groups), dtype=bool)
    is_chosen[np.lexsort((draws, rank))[:count]] = True
    return is_chosen


def draw(seed: int, *names: str) -> float:
    """Return a number in (0, 1] that is the same for the same seed and names."""
    digest = hashlib.blake2b("\n".join([str(seed), *names]).encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> (64 - SIGNIFICAND_BITS)) + 1) / 2**SIGNIFICAND_BITS


@dataclass(frozen=True)
class Captions:
    """A captioner's captions of one image, best first."""

    candidates: list[str]
    log_likelihoods: list[float] | None  # log-likelihood of each caption in nats; None if the captioner reports none
    problem: str | None = None  # reason why none of them can be used, if the captioner reports one
    tokens: int | None = None  # their cost on a server


class ServerCaptioner(Declarations, Mapper):
    """A captioner that requests captions from a server, which may cost money."""

    @abstractmethod
    def connect(self, spent: tuple[int, int] = (0, 0)) -> None:
        """Check that the server can be used, and count costs from `spent` (requests, tokens)."""

    @abstractmethod
    def request_captions(
        self, images: Sequence[str], keep: Callable[[int, Captions], None], questions: Sequence[str] | None = None
    ) -> None:
        """Pass the index of each answered image, and its captions, to `keep` as they arrive."""


NOTHING_DECLARED = Declarations()


def get_declarations(operator: OP | type[OP] | None) -> Declarations:
    """Return an operator's declarations; Data-Juicer's own operators declare nothing."""
    return operator if issubclass(_get_class(operator), Declarations) else NOTHING_DECLARED


def has_model(operator: OP) -> bool:
    return operator._accelerator == "cuda" or is_unforkable(operator)


def is_unforkable(operator: OP) -> bool:
    """Return whether the operator fails in a forked process, according to Data-Juicer's registry."""
    return operator._name in UNFORKABLE.modules


def decides_last(operator: OP) -> bool:
    """Return whether the operator decides once all rows are measured."""
    return isinstance(operator, DecidesLast | Deduplicator | Selector)


def get_batch_method(operator: OP, only_measures: bool = False) -> Callable[..., dict] | None:
    """Return the method for a batch of rows.

    A filter computes stats, a deduplicator of this workflow hashes, and a mapper edits rows, or scores them with
    `only_measures`. Data-Juicer's own deduplicators and selectors have none, since they get the whole dataset.
    """
    if isinstance(operator, Filter):
        return operator.compute_stats
    if isinstance(operator, Mapper):
        return operator.measure if only_measures else operator.process
    return operator.compute_hash if isinstance(operator, DecidesLast) else None


def get_decision_method(operator: OP) -> Callable[[dict], Any] | None:
    """Return a filter's method that decides about a measured batch of rows; None for operators that do not."""
    return operator.process if isinstance(operator, Filter) and not isinstance(operator, DecidesLast) else None


def take_report(operator: OP) -> dict:
    """Return the counts since the last call."""
    if get_declarations(operator).report_key is None:
        return {}
    report, operator.report = operator.report, {}
    return report


def merge_reports(first: dict, second: dict) -> dict:
    """Add up the numbers of two reports, at any depth; of two strings the first is kept."""
    merged = dict(first)
    for key, value in second.items():
        if isinstance(value, dict):
            merged[key] = merge_reports(merged.get(key, {}), value)
        elif isinstance(value, str):
            merged[key] = merged.get(key) or value
        else:
            merged[key] = merged.get(key, 0) + value
    return merged


def find_model_files(value: object) -> list[Path]:
    """Return the files of all models in a `process` list, or in a part of it."""
    if isinstance(value, str):
        return list_weight_files(Path(value)) if os.path.isdir(value) else []  # Path("") would be the current folder
    if isinstance(value, list):
        return [file for item in value for file in find_model_files(item)]
    if not isinstance(value, dict):
        return []
    if len(value) == 1:
        [(name, arguments)] = value.items()
        files = get_declarations(OPERATORS.modules.get(name)).list_model_files(arguments or {})
        if files is not None:
            return files
        if name in OPERATORS.modules:
            value = select_file_arguments(name, arguments or {})
    return [file for _, item in sorted(value.items()) for file in find_model_files(item)]


def list_weight_files(folder: Path) -> list[Path]:
    """Return a model folder's weights and configuration, sorted; none if there is no such folder."""
    return sorted(path for path in folder.glob("*") if path.suffix in WEIGHTS_AND_CONFIG)


def _get_class(operator: OP | type[OP] | None) -> type:
    return operator if isinstance(operator, type) else type(operator)
