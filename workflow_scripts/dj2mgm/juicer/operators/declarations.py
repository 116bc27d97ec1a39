"""The interface between operators and the engine: typed declarations with defaults.

An operator of this workflow inherits from `Declarations`, or from one of the classes with more to declare:
`ShareFilter`, `ShareLimits` and `SelectionFilter` (selection.py), `NearDeduplicator` (deduplicators.py) and
`ServerCaptioner` with its `Captions`. The engine never reads the name or class of a single operator. Data-Juicer's own
operators have the defaults.
"""

import difflib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_juicer.ops.base_op import OP, OPERATORS, UNFORKABLE, Deduplicator, Filter, Mapper, Selector

from dj2mgm.recipes.recipe_files import select_file_arguments

WEIGHTS_AND_CONFIG = {".safetensors", ".bin", ".json", ".model", ".txt", ".jinja"}


class Declarations(ABC):
    """Attributes and methods by which an operator tells the engine how to run it.

    A public name of a subclass must be one of these, or one of Data-Juicer's. Other names begin with an underscore, so
    that a misspelt declaration is an error. A class that adds declarations is defined with `interface=True`.

    Attributes:
        needs_all_rows: whether the result for a row depends on other rows, so that the operator gets the whole dataset.
            None: it does, unless the operator inherits `run` from Data-Juicer's filters or mappers.
        hash_key: column that a deduplicator's `compute_hash` fills. The engine keeps the first row with each hash,
            partition by partition.
        report_key: name of the operator's report in summary.json.
        report: counts of the operator, which the engine takes and empties after each batch.
        unreadable_stat: stat with the reason why a row's images cannot be read. An analysis drops the rows that a
            filter with this stat drops.
        in_one_process: whether the operator must run in the stage's process, even with Ray, because it counts costs.
        budget: name of a budget that the operator spends. Operators of one recipe need different budgets.
        draws_at_random: whether the captions of a captioner depend on a seed.
        without_effect: arguments of a captioner that change no caption.
    """

    needs_all_rows: bool | None = None
    hash_key: str | None = None
    report_key: str | None = None
    report: dict
    unreadable_stat: str | None = None
    in_one_process: bool = False
    budget: str | None = None
    draws_at_random: bool = True
    without_effect: frozenset[str] = frozenset()

    def __init_subclass__(cls, interface: bool = False, **kwargs):
        """Raise TypeError for a public name that no base class has, unless the class is an interface."""
        super().__init_subclass__(**kwargs)
        bases = cls.__mro__[1:]
        allowed = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))}
        for name in vars(cls):
            if not interface and not name.startswith("_") and name not in allowed:
                [nearest] = difflib.get_close_matches(name, allowed, n=1, cutoff=0)
                raise TypeError(
                    f"{cls.__name__}.{name}: operators declare nothing of this name; the nearest known one is "
                    f"{nearest!r}. Correct it, or begin it with an underscore"
                )

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


@dataclass(frozen=True)
class Captions:
    """A captioner's captions of one image, best first."""

    candidates: list[str]
    log_likelihoods: list[float] | None  # log-likelihood of each caption in nats; None if the captioner reports none
    problem: str | None = None  # reason why none of them can be used, if the captioner reports one
    tokens: int | None = None  # their cost on a server


class ServerCaptioner(Declarations, Mapper, interface=True):
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


def needs_all_rows(operator: OP) -> bool:
    declaration = get_declarations(operator).needs_all_rows
    return _get_class(operator).run not in (Filter.run, Mapper.run) if declaration is None else declaration


def keeps_or_drops_rows(operator: OP | type[OP]) -> bool:
    """Return whether rows are kept, edited or dropped; other operators merge or group rows."""
    return issubclass(_get_class(operator), Filter | Mapper | Deduplicator | Selector)


def has_model(operator: OP) -> bool:
    return operator._accelerator == "cuda" or is_unforkable(operator)


def is_unforkable(operator: OP) -> bool:
    """Return whether the operator fails in a forked process, according to Data-Juicer's registry."""
    return operator._name in UNFORKABLE.modules


def get_batch_method(operator: OP, only_measures: bool = False) -> str | None:
    """Return the name of the method for a batch of rows.

    A filter computes stats, a deduplicator hashes, and a mapper edits rows, or scores them with
    `only_measures`. A selector has none.
    """
    if isinstance(operator, Filter):
        return "compute_stats"
    if isinstance(operator, Deduplicator):
        return "compute_hash"
    if isinstance(operator, Mapper):
        return "measure" if only_measures else "process"
    return None


def get_decision_method(operator: OP) -> Callable[[dict], Any] | None:
    """Return a filter's method that decides which rows of a measured batch are kept; None for other operators."""
    return operator.process if isinstance(operator, Filter) else None


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
