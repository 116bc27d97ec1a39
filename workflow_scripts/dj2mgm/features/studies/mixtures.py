"""Mixtures: shares of sources with a constant sum, computed from independent numbers between 0 and 1."""

import random
from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from dj2mgm.features.studies.axes import Interval
from dj2mgm.features.studies.changes import hash_changes
from dj2mgm.settings.base import Number, Section, UniqueItems, setting
from dj2mgm.settings.string_formats import has_format

SHARE_DECIMALS = 3


class MixtureSpace(Section):
    """Shares of sources that vary while their sum stays the same."""

    sources: Annotated[list[str], UniqueItems(), Field(min_length=2)] = setting(
        ..., "sources of one split whose shares of the stage's samples vary"
    )
    total: Annotated[Number, Field(gt=0, le=1)] = setting(
        1.0, "sum of these shares; the split's other sources divide the rest"
    )


def build_share_axes(mixture: MixtureSpace | None) -> dict[str, Interval]:
    """Return the interval of each source's share, by dotted key."""
    sources = mixture.sources if mixture else ()
    return {f"shares.{source}": Interval(low=0.0, high=float(mixture.total)) for source in sources}


def list_quantile_keys(mixture: MixtureSpace | None) -> list[str]:
    """Return the names of the numbers that determine a mixture: one for each source but the last."""
    return [f"quantile of {key}" for key in list(build_share_axes(mixture))[:-1]]


def compute_shares(mixture: MixtureSpace | None, quantiles: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each source, by dotted key.

    Each number is the conditional quantile of its share, given the earlier shares. So independent uniform numbers make
    all mixtures equally likely (stick-breaking of a Dirichlet distribution whose parameters are 1).

    Args:
        mixture: the sources.
        quantiles: a number from 0 to 1 for each of `list_quantile_keys`.
    """
    keys = list(build_share_axes(mixture))
    shares = _break_stick(mixture.total, [quantiles[key] for key in list_quantile_keys(mixture)]) if mixture else ()
    return dict(zip(keys, shares, strict=True))


def compute_quantiles(mixture: MixtureSpace | None, shares: Mapping[str, float]) -> dict[str, float]:
    """Return numbers for which `compute_shares` returns these shares, by `list_quantile_keys`."""
    names, quantiles = list_quantile_keys(mixture), []
    rest = float(mixture.total) if mixture else 0.0
    for later, key in zip(range(len(names), 0, -1), build_share_axes(mixture), strict=False):
        part = min(1.0, shares[key] / rest) if rest > 0 else 0.0
        quantiles.append(1 - (1 - part) ** later)
        rest = round(rest - shares[key], SHARE_DECIMALS)
    return dict(zip(names, quantiles, strict=True))


def _break_stick(total: float, quantiles: list[float]) -> Iterator[float]:
    """Break parts off a total; the last part is the rest.

    Each part is a Beta(1, m) fraction of the rest, with m sources still to come.
    """
    rest = round(float(total), SHARE_DECIMALS)
    for later, quantile in zip(range(len(quantiles), 0, -1), quantiles, strict=True):
        part = round(rest * (1 - (1 - quantile) ** (1 / later)), SHARE_DECIMALS)
        yield part
        rest = round(rest - part, SHARE_DECIMALS)
    yield rest


def list_single_source_changes(mixture: MixtureSpace) -> dict[str, dict[str, float]]:
    """Return the changes of the variants that train on one source of a mixture alone, by label."""
    variants = {}
    for source in mixture.sources:
        changes = {f"shares.{name}": float(mixture.total) * (name == source) for name in mixture.sources}
        label = f"only-{source}"
        variants[label if has_format("name", label) else hash_changes(changes)] = changes
    return variants


def draw_mixtures(mixture: MixtureSpace, count: int, seed: int) -> list[dict[str, float]]:
    """Return the shares of at most `count` different random mixtures; all mixtures are equally likely."""
    numbers, keys = random.Random(f"{seed} merged"), list_quantile_keys(mixture)
    draws = [tuple(compute_shares(mixture, {key: numbers.random() for key in keys}).values()) for _ in range(count)]
    return [dict(zip(mixture.sources, shares, strict=True)) for shares in dict.fromkeys(draws)]
