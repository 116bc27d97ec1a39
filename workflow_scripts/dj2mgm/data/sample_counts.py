"""Number of samples of each source of a training file, from the settings and the rows that can be trained on."""

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from dj2mgm.errors import InputError
from dj2mgm.settings.data import JsonlSettings

SHARE_RESOLUTION = 10**6  # resolution of the sources' shares
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

    The amounts are scaled to the largest number of samples, then to the budget, and then to the share of each source.
    """
    requested = _compute_requested_samples(usable, rules, stage)
    if usable and not requested.total():
        amount_by_source = rules.settings.sources | rules.settings.shares
        amounts = ", ".join(f"{source}: {amount_by_source[source]} of {rows} rows" for source, rows in usable.items())
        raise InputError(f"sources: the amounts leave no row of {stage} to train on ({amounts}); raise one")
    capped = _scale(requested, min(requested.total(), rules.most_rows))
    used_rows = Counter({source: min(usable[source], rows) for source, rows in capped.items()})
    sample_counts = capped if rules.budget is None else _scale(capped, rules.budget)
    if rules.settings.used_fraction == 1:
        return used_rows, sample_counts
    sample_counts = _shorten(sample_counts, rules)
    # rows are limited to samples only here, so that the rows of a smaller share are a part of a larger share's rows
    return Counter(
        {source: min(rows, sample_counts[source]) for source, rows in _shorten(used_rows, rules).items()}
    ), sample_counts


def _compute_requested_samples(usable: SourceCounts, rules: SampleRules, stage: str) -> SourceCounts:
    """Return the number of samples of each source before any limit, in the proportions of the amounts and shares.

    Sources without a share get their amounts, and the shares scale the other sources relative to these. If all sources
    have shares, the total is the number of their rows.
    """
    parts = {
        source: round(share * SHARE_RESOLUTION) for source, share in rules.settings.shares.items() if source in usable
    }
    requested: SourceCounts = Counter()
    for source, rows in usable.items():
        if source in parts:
            continue
        amount = rules.settings.sources.get(source, 1.0)
        requested[source] = amount if isinstance(amount, int) else round(amount * rows)
        if isinstance(amount, int) and amount > rows:
            raise InputError(
                f"sources.{source}: {amount} rows are requested, but only {rows} rows of {stage} can be trained on; "
                f"request fewer, or state a weight per row, {amount / rows:.2f}"
            )
    if not parts:
        return requested
    shared, rest = Counter(parts), SHARE_RESOLUTION - sum(parts.values())
    if rest > 0 and requested.total():
        return requested + _scale(shared, round(requested.total() * shared.total() / rest))
    return _scale(shared, sum(usable[source] for source in shared)) if shared.total() else shared


def _shorten(rows: SourceCounts, rules: SampleRules) -> SourceCounts:
    """Return how many rows of each source `used_fraction` leaves, at least one if the source has any."""
    fraction = rules.settings.used_fraction
    shares = {source: fraction.get(source, 1.0) if isinstance(fraction, dict) else fraction for source in rows}
    return Counter({source: max(min(1, count), round(shares[source] * count)) for source, count in rows.items()})


def _scale(rows: SourceCounts, total: int) -> SourceCounts:
    """Scale numbers to a total in the same proportions, by largest remainders (Hamilton's method)."""
    exact = {source: Fraction(count * total, rows.total()) for source, count in rows.items()}
    scaled = Counter({source: math.floor(share) for source, share in exact.items()})
    by_remainder = sorted(exact, key=lambda source: (scaled[source] - exact[source], str(source)))
    scaled.update(by_remainder[: total - scaled.total()] if exact else ())
    return scaled


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
