"""Number of samples of each source of a training file, from the settings and the rows that can be trained on."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from dj2mgm.errors import InputError
from dj2mgm.settings.data import JsonlSettings

SHARE_TOLERANCE = Fraction(1, 10**6)  # a smaller rest of the shares is an error of rounding
SourceCounts = Counter  # numbers of rows by source; the key None is a dataset without sources


@dataclass(frozen=True)
class SampleRules:
    """Rules for bad rows and for the number of samples."""

    settings: JsonlSettings
    budget: int | None = None  # exact number of samples; rows are repeated if needed; None: one sample per row
    leaked: frozenset[str] = frozenset()  # absolute paths of images that duplicate evaluation images; rows are dropped
    leaked_rows: frozenset[str] = frozenset()  # ids of rows that ask evaluation questions; they are dropped
    size: int | None = None  # number of different rows to draw at random; None: all up to `max_samples`
    selected: str = "pretrain"  # training file whose rows the other experiment selects
    size_before: int = 0  # rows that the other experiment had before it dropped any, including new ones

    @property
    def most_rows(self) -> int:
        return min(self.settings.max_samples, self.settings.max_samples if self.size is None else self.size)


def check_subset_size(usable: int, rules: SampleRules, stage: str) -> None:
    """Refuse a random subset of more rows than the file has, or of as many rows as `selected` has."""
    if rules.size is not None and (rules.size > usable or rules.size == usable and stage == rules.selected):
        raise InputError(
            f"a random subset of {rules.size} rows is no smaller than the {usable} rows of {stage}: the experiment "
            "does not select rows; remove random from its `controls`, or from ablation.controls"
        )


def apportion(usable: SourceCounts, rules: SampleRules, stage: str) -> tuple[SourceCounts, SourceCounts]:
    """Return the number of different rows and the number of samples of each source.

    The samples are in the exact proportions of amounts and shares, rounded once. A source repeats rows only if it has
    more samples than rows, or if `max_samples` or the size of a subset limits the number of different rows.
    """
    row_limits = Counter({source: _limit_rows(source, rows, rules) for source, rows in usable.items()})
    requested = _compute_requested_samples(
        {source: rows for source, rows in usable.items() if row_limits[source]}, rules, stage
    )
    total = round(sum(requested.values()))
    if usable and not total:
        amount_by_source = rules.settings.sources | rules.settings.shares
        amounts = ", ".join(f"{source}: {amount_by_source[source]} of {rows} rows" for source, rows in usable.items())
        raise InputError(f"sources: the amounts leave no row of {stage} to train on ({amounts}); raise one")
    budget = min(total, rules.most_rows) if rules.budget is None else rules.budget
    samples = _scale(requested, budget)
    used_rows = _fill(requested, row_limits & samples, rules.most_rows)
    # `max_samples` may leave a source with samples, but without rows to repeat
    while starved := {source for source, count in samples.items() if count and not used_rows[source]}:
        requested = {source: amount for source, amount in requested.items() if source not in starved}
        samples = _scale(requested, budget)
        used_rows = _fill(requested, row_limits & samples, rules.most_rows)
    return _shorten(used_rows, rules), _shorten(samples, rules)


def _compute_requested_samples(
    usable: Mapping[str | None, int], rules: SampleRules, stage: str
) -> dict[str | None, Fraction]:
    """Return the number of samples of each source before any limit, in the exact proportions of amounts and shares.

    The total is the number of rows, with those of sources without a share by their amounts. These sources divide the
    rest of the shares; without them, the shares are scaled to add up to 1. `usable` has only sources whose amounts
    leave them rows, because a source without rows must not limit the others.
    """
    shares = {source: _read_exactly(share) for source, share in rules.settings.shares.items() if source in usable}
    amounts: dict[str | None, Fraction] = {}
    for source, rows in usable.items():
        if source in shares:
            continue
        amount = rules.settings.sources.get(source, 1.0)
        amounts[source] = Fraction(amount) if isinstance(amount, int) else _read_exactly(amount) * rows
        if isinstance(amount, int) and amount > rows:
            raise InputError(
                f"sources.{source}: {amount} rows are requested, but only {rows} rows of {stage} can be trained on; "
                f"request fewer, or state a weight per row, {amount / rows:.2f}"
            )
    if not shares:
        return amounts
    total = sum(amounts.values(), Fraction(0))
    rest = 1 - sum(shares.values())
    weights = shares | dict.fromkeys(amounts, Fraction(0))
    if rest > SHARE_TOLERANCE and total:
        weights |= {source: rest * amount / total for source, amount in amounts.items()}
    total_rows = sum(amounts.get(source, usable[source]) for source, weight in weights.items() if weight)
    scale = Fraction(total_rows) / (sum(weights.values()) or 1)
    return {source: weights[source] * scale for source in usable}


def _read_exactly(number: float) -> Fraction:
    """Return the decimal number that the user has written."""
    return Fraction(str(number))


def _limit_rows(source: str | None, rows: int, rules: SampleRules) -> int:
    """Return the number of different rows that a source may use: fewer than it has only if its amount states so."""
    amount = 1.0 if source in rules.settings.shares else rules.settings.sources.get(source, 1.0)
    return min(rows, amount if isinstance(amount, int) else round(_read_exactly(amount) * rows))


def _shorten(rows: SourceCounts, rules: SampleRules) -> SourceCounts:
    """Return how many rows of each source `used_fraction` leaves, at least one if the source has any."""
    fraction = rules.settings.used_fraction
    shares = {source: fraction.get(source, 1.0) if isinstance(fraction, dict) else fraction for source in rows}
    return Counter({source: max(min(1, count), round(shares[source] * count)) for source, count in rows.items()})


def _scale(amounts: Mapping[str | None, Fraction], total: int) -> SourceCounts:
    """Return whole numbers with this total in the same proportions, by largest remainders (Hamilton's method)."""
    whole = sum(amounts.values())
    exact = {source: amount * total / whole for source, amount in amounts.items()} if whole else {}
    scaled = Counter({source: math.floor(share) for source, share in exact.items()})
    by_remainder = sorted(exact, key=lambda source: (scaled[source] - exact[source], str(source)))
    scaled.update(by_remainder[: total - scaled.total()] if exact else ())
    return scaled


def _fill(amounts: Mapping[str | None, Fraction], limits: SourceCounts, total: int) -> SourceCounts:
    """Divide a total in the proportions of amounts; what exceeds the limit of a source goes to the others."""
    filled: SourceCounts = Counter()
    remaining = {source: amount for source, amount in amounts.items() if amount}
    while remaining:
        scaled = _scale(remaining, total - filled.total())
        full = {source: limits[source] for source in remaining if scaled[source] >= limits[source]}
        if not full:
            return filled + scaled
        filled.update(full)
        remaining = {source: amount for source, amount in remaining.items() if source not in full}
    return filled


def count_drop_reasons(left_out: int, usable: SourceCounts, rules: SampleRules) -> Counter:
    """Return the reasons for dropping good rows, counted."""
    amounts = [amount for source, amount in rules.settings.sources.items() if source in usable]
    # the integer 1 is one row, the weight 1.0 all rows
    weighted = any(amount != 1.0 or isinstance(amount, int) for amount in amounts)
    weighted |= any(source in usable for source in rules.settings.shares)
    if rules.settings.used_fraction != 1 or weighted:
        return +Counter({"sampled": left_out})
    over_max = max(0, usable.total() - rules.settings.max_samples)
    over_size = max(0, usable.total() - over_max - rules.most_rows)
    left_out -= over_max + over_size
    return +Counter({"over_max_samples": over_max, "over_size": over_size, "over_budget": left_out})
