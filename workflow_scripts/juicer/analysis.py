"""Measuring a dataset: every statistic of every row, what a recipe's limits would drop, and limits to suggest.

Rows whose image cannot be read are taken out first, and counted. Nothing else is dropped: filters only measure, and
deduplicators only count. Mappers and selectors are left out: they would change what is measured.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from loguru import logger

from errors import InputError
from juicer.dataset import iterate, read_dataset
from juicer.library import OP, OPERATORS, Deduplicator, Fields, Filter, NestedDataset
from juicer.operators.batched_image_text_similarity_filter import NAME as SIMILARITY
from juicer.operators.image_integrity_filter import NAME as INTEGRITY
from juicer.operators.image_integrity_filter import STAT as IMAGE_INTEGRITY
from juicer.operators.image_text_deduplicator import NAME as DEDUPLICATOR
from juicer.recipe import build_operators, check_process, complete
from juicer.settings import StageSettings
from juicer.statistics import FRACTION, Statistic, as_numbers, limits_of, share_kept
from juicer.steps import run_step
from juicer.suggestions import suggest

NOT_MEASURED = "edits or selects rows; the data are analysed as they are"


@dataclass
class Analysis:
    """What was found. Columns and statistics are of the rows whose image can be read, in their order."""

    data: Path
    rows_in: int
    process: list[dict]  # the recipe's operators, and those that were added for the analysis
    recipe: set[str]  # names of the recipe's operators
    unreadable: dict[str, str] = field(default_factory=dict)  # reason by id
    texts: list[str] = field(default_factory=list)
    images: list[list[str]] = field(default_factory=list)  # absolute paths
    statistics: list[Statistic] = field(default_factory=list)
    repeats: dict[str, np.ndarray] = field(default_factory=dict)  # by deduplicator: (N,) bool, an earlier row is equal
    not_measured: dict[str, str] = field(default_factory=dict)  # operator: why

    @property
    def rows(self) -> int:
        return len(self.texts)

    @property
    def repeated(self) -> np.ndarray:
        """(N,) bool."""
        return np.any(list(self.repeats.values()), axis=0)

    def kept(self, limits: str) -> int:
        """Rows that all `current` or all `suggested` limits leave, together with the deduplicators."""
        dropped = [statistic.drops(getattr(statistic, limits)) for statistic in self.statistics]
        return int((~np.any([self.repeated, *dropped], axis=0)).sum())


def measure(settings: StageSettings, clip: str | None, data: Path, working: Path) -> tuple[Analysis, NestedDataset]:
    """Run the recipe's filters over all rows of `data` whose image can be read; return the rows with their stats, too.

    Args:
        clip: folder or hub id of the CLIP that judges captions; None for an analysis without it, unless the recipe has
            a similarity filter of its own.
        working: folder for what Data-Juicer writes.

    Raises:
        InputError: a bad row, a bad recipe, an operator that fails, no image that can be read, or nothing to measure.
    """
    check_process(settings.process)
    process = _with_needed(settings.process, clip)
    dataset = read_dataset(data, settings.image_root, working)
    operators = build_operators(complete(process, settings.arguments), settings.processes, working)
    found = Analysis(data, len(dataset), process, {name for step in settings.process for name in step})
    measured_by: dict[str, int] = {}
    for number, operator in enumerate(operators, start=1):
        before = _statistics_in(dataset)
        try:
            dataset = _run(number, operator, dataset, found)
        except InputError as error:
            if operator._name == SIMILARITY and clip is not None:
                raise InputError(f"{error} (here as model.clip_score)") from None
            raise
        new = [name for name in _statistics_in(dataset) if name not in before and name != IMAGE_INTEGRITY]
        measured_by |= dict.fromkeys(new, number - 1)
        if isinstance(operator, Filter) and operator._name != INTEGRITY and not new:
            found.not_measured[operator._name] = "computes no statistic that the operators before it have not"
        logger.info(f"[{number}/{len(operators)}] {operator._name}")
    _describe(found, dataset, operators, measured_by)
    return found, dataset


def _with_needed(process: list[dict], clip: str | None) -> list[dict]:
    """The recipe with unreadable images taken out first, a count of repeats, and the similarity if there is a CLIP."""
    integrity = [step for step in process if INTEGRITY in step] or [{INTEGRITY: None}]
    process = integrity[:1] + [step for step in process if INTEGRITY not in step]
    names = [next(iter(step)) for step in process]
    if not any(issubclass(OPERATORS.modules[name], Deduplicator) for name in names):
        process.append({DEDUPLICATOR: None})
    if clip is not None and not any("image_text_similarity" in name for name in names):
        process.append({SIMILARITY: None})
    return process


def _run(number: int, operator: OP, dataset: NestedDataset, found: Analysis) -> NestedDataset:
    """All rows that can be read, with what the operator measured."""
    if operator._name == INTEGRITY:
        dataset, step = run_step(number, operator, dataset)
        found.unreadable = {row["id"]: row["stats"][IMAGE_INTEGRITY] for row in step.trace}
        if not len(dataset):
            reasons = ", ".join(f"{reason} {count}" for reason, count in step.broken_images.items())
            raise InputError(
                f"{found.data}: none of {found.rows_in} images can be read ({reasons}); check that 'image_root' is the "
                "folder that its image paths are relative to"
            )
    elif isinstance(operator, Deduplicator):
        kept, _ = run_step(number, operator, dataset)
        left = {identifier for (identifier,) in iterate(kept, "id")}
        repeated = [identifier not in left for (identifier,) in iterate(dataset, "id")]
        found.repeats[operator._name] = np.array(repeated)
    elif isinstance(operator, Filter):
        operator.process = _keep_all
        dataset, _ = run_step(number, operator, dataset)
    else:
        found.not_measured[operator._name] = NOT_MEASURED
    return dataset


def _keep_all(samples: dict) -> list[bool]:
    return [True] * len(samples[Fields.stats])


def _statistics_in(dataset: NestedDataset) -> list[str]:
    """Every row has all: filters write one even where there is nothing to measure."""
    return list(dataset[0].get(Fields.stats) or {})


def _describe(found: Analysis, dataset: NestedDataset, operators: list[OP], measured_by: dict[str, int]) -> None:
    """Fill in the columns and the statistics.

    Args:
        measured_by: place of the operator in the list, by statistic.
    """
    for text, images in iterate(dataset, "text", "images"):
        found.texts.append(text)
        found.images.append(images)
    columns: dict[str, list] = {name: [] for name in measured_by}
    for (stats,) in iterate(dataset, Fields.stats):
        for name, column in columns.items():
            column.append(stats[name])
    of_operator = Counter(measured_by.values())
    for name, place in measured_by.items():
        operator, [arguments] = operators[place], found.process[place].values()
        numbers = as_numbers(columns.pop(name))
        if numbers is None:
            found.not_measured[f"{operator._name}, {name}"] = "is not numeric"
            continue
        limits = limits_of(operator, arguments, name, alone=of_operator[place] == 1)
        if fraction := (arguments or {}).get(FRACTION):
            limits["min"] = share_kept(numbers[0], fraction)
        arguments = (arguments or {}) if operator._name in found.recipe else None
        found.statistics.append(suggest(Statistic(name, operator._name, *numbers, arguments, limits)))
    if not found.statistics:
        raise InputError(
            "there is nothing to analyze: no filter of the recipe computes a number; name a recipe that has some "
            "(config/recipes/baseline.yaml has), or a CLIP as model.clip_score"
        )
