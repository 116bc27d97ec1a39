"""Limits suggested by the data, and a recipe with them.

Sizes, lengths and shares get a limit only if a gap separates a tail from the other rows. Scores, by which a model rates
a row, get a limit if their distribution has two humps. Otherwise the recipe's limits do not change.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import yaml

from dj2mgm.data.score_limits import SIDE_BY_SHARE
from dj2mgm.juicer.filter_statistics import FilterLimit, Limits, Statistic

MAX_TAIL = 0.05  # share of the rows; a larger group is not a tail
MIN_TAIL = 0.001  # share of the rows, and at least MIN_ROWS; a smaller group may be chance
MIN_ROWS = 10
ROWS_IN_GAP = 0.05  # most rows in a gap, as a share of the tail's rows
MIN_GAP = 0.5  # least width of a gap, as a share of the interquartile range
# least widths if the interquartile range is 0: a ratio of sizes, or a difference of shares
GAP_FACTOR = 1.5
GAP_SHARE = 0.2

FITTED_BINS = 1000
EM_ITERATIONS = 500
MIN_BIC_DIFFERENCE = 10.0  # BIC of one normal − BIC of two: "very strong" (Kass & Raftery 1995)
MAX_VALLEY_DENSITY = 0.5  # largest density in the valley, relative to the lower hump


@dataclass(frozen=True)
class Tail:
    """Rows at one end of a distribution, separated from the rest by a gap."""

    rows: int
    outermost: float
    innermost: float  # the tail's last value before the gap
    rest: float  # the first value after the gap

    @property
    def upper(self) -> bool:
        return self.innermost > self.rest


def is_logarithmic(values: np.ndarray) -> bool:
    """Return whether values are sizes or counts, whose ratios matter, and not shares or scores."""
    return bool(values.min() >= 0 and values.max() > 1)


def find_separated_tail(values: np.ndarray, upper: bool) -> Tail | None:
    """Return the tail at the lower or upper end if a gap separates it from the rest, or None. Values are (N,) finite.

    A tail has 0.1 to 5 % of the rows. The gap is at least half as wide as the interquartile range (of logarithms, for
    sizes and counts) and nearly empty. The widest of several gaps is taken, and the widest empty
    part of a gap with stray rows.
    """
    sign = -1 if upper else 1
    ordered = np.sort(sign * values)
    starts, ends = _find_edges(ordered, sign)
    low, high = np.quantile((starts + ends) / 2, [0.25, 0.75])
    wide = MIN_GAP * (high - low) if high > low else math.log(GAP_FACTOR) if is_logarithmic(values) else GAP_SHARE
    least, most = max(MIN_ROWS, math.ceil(MIN_TAIL * len(values))), math.floor(MAX_TAIL * len(values))
    rows = np.arange(least, most + 1)
    if not len(rows):
        return None
    strays = (ROWS_IN_GAP * rows).astype(int)
    gaps = starts[rows + strays] - ends[rows - 1]
    widest = int(gaps.argmax())
    if gaps[widest] < wide:
        return None
    first, last = rows[widest], rows[widest] + strays[widest]
    tail = int(first + (starts[first : last + 1] - ends[first - 1 : last]).argmax())
    if tail > most:
        return None
    return Tail(tail, *(float(sign * ordered[index]) for index in (0, tail - 1, tail)))


def _find_edges(ordered: np.ndarray, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and end of each value; a whole number is 1 wide, so that steps between them are not gaps."""
    half = 0.5 if np.all(ordered == np.round(ordered)) else 0.0
    starts, ends = ordered - half, ordered + half
    if not is_logarithmic(sign * ordered):
        return starts, ends
    above_zero = sign * ordered[sign * ordered > 0]
    lowest = above_zero.min() / 2  # replaces zero, which has no logarithm
    return sign * np.log(np.maximum(sign * starts, lowest)), sign * np.log(np.maximum(sign * ends, lowest))


def choose_gap_limit(tail: Tail, whole: bool) -> float:
    """Return a limit with few digits near the middle of the tail's gap (of logarithms, for values above 0).

    The limit is a whole number if values are.
    """
    a, b = tail.innermost, tail.rest
    middle = math.copysign(math.sqrt(a * b), a) if a * b > 0 else (a + b) / 2
    for digits in range(1, 12):
        limit = float(f"{middle:.{digits}g}")
        drops_the_tail = (tail.rest <= limit < a) if tail.upper else (a < limit <= tail.rest)
        if drops_the_tail and (not whole or limit == int(limit)):
            return limit
    return tail.rest


@dataclass(frozen=True)
class Valley:
    """The minimum of a mixture of two normal distributions between its humps."""

    at: float
    humps: tuple[float, float]  # means, the lower one first
    share: float  # share of the rows in the lower hump


def find_valley(values: np.ndarray) -> Valley | None:
    """Return the valley between the two normals that fit (N,) finite values best, or None if there is one hump.

    There are two humps if the Bayesian information criterion prefers two normals to one by 10, and if the density
    between them falls to at most half the density of the lower hump. A single skewed hump passes the first test only.
    """
    if values.min() == values.max():
        return None
    rows, edges = np.histogram(values, FITTED_BINS)
    at = (edges[1:] + edges[:-1]) / 2
    smallest_variance = (edges[1] - edges[0]) ** 2
    single = _fit(at, rows, np.ones((len(at), 1)), smallest_variance)
    starts = (at > np.quantile(values, share) for share in (0.2, 0.5, 0.8))
    fits = [_fit(at, rows, np.stack([~above, above], axis=1).astype(float), smallest_variance) for above in starts]
    mixture = max(fits, key=lambda fit: fit.log_likelihood)
    per_parameter = math.log(rows.sum())
    if 2 * (mixture.log_likelihood - single.log_likelihood) - 3 * per_parameter < MIN_BIC_DIFFERENCE:
        return None
    lower, upper = np.sort(mixture.means)
    line = np.linspace(lower, upper, FITTED_BINS)
    density = mixture.compute_densities(line).sum(axis=1)
    thinnest = int(density.argmin())
    if density[thinnest] > MAX_VALLEY_DENSITY * min(density[0], density[-1]):
        return None
    return Valley(float(line[thinnest]), (float(lower), float(upper)), float(mixture.weights[mixture.means.argmin()]))


@dataclass(frozen=True)
class _Normals:
    weights: np.ndarray  # (K,)
    means: np.ndarray
    variances: np.ndarray
    log_likelihood: float = 0.0

    def compute_densities(self, at: np.ndarray) -> np.ndarray:
        """Return the weighted densities (N, K) at (N,) values."""
        exponent = -((at[:, None] - self.means) ** 2) / (2 * self.variances)
        return self.weights * np.exp(exponent) / np.sqrt(2 * np.pi * self.variances)


def _fit(at: np.ndarray, rows: np.ndarray, parts: np.ndarray, smallest_variance: float) -> _Normals:
    """Fit K normals to a histogram by expectation maximization.

    Args:
        at: (bins,) centers.
        rows: (bins,) counts.
        parts: (bins, K) initial shares of each bin in each normal.
        smallest_variance: lower limit of the variances.
    """
    for _ in range(EM_ITERATIONS if parts.shape[1] > 1 else 1):
        mass = parts * rows[:, None]
        total = mass.sum(axis=0) + 1e-12
        means = (mass * at[:, None]).sum(axis=0) / total
        variances = (mass * (at[:, None] - means) ** 2).sum(axis=0) / total
        normals = _Normals(total / rows.sum(), means, np.maximum(variances, smallest_variance))
        density = normals.compute_densities(at)
        parts = density / np.maximum(density.sum(axis=1, keepdims=True), 1e-300)
    log_likelihood = float(rows @ np.log(np.maximum(density.sum(axis=1), 1e-300)))
    return _Normals(normals.weights, normals.means, normals.variances, log_likelihood)


SCORE_PART = "score"  # part of Data-Juicer's names for limits of a model's rating: min_score
SHOWN_SHARES = (0.9, 0.75, 0.5)  # shares to keep that are shown if a score suggests no limit
NO_TAIL = "No gap separates a tail from the rest, so the data suggest no limit."
TWO_HUMPS = "Two humps: the limit is the minimum between them in the best-fitting mixture of two normal distributions."


def suggest(statistic: Statistic) -> Statistic:
    """Return the statistic with suggested limits and a remark."""
    finite, limits = statistic.finite, statistic.limits
    if "min" in limits and limits["min"].argument in SIDE_BY_SHARE:
        return replace(statistic, suggested={side: _keep_limit(limit, statistic) for side, limit in limits.items()})
    if "min" in limits and SCORE_PART in limits["min"].argument:
        valley = find_valley(finite)
        suggested = {side: _keep_limit(limit, statistic) for side, limit in limits.items()}
        if valley:
            suggested["min"] = _move_to_valley(limits["min"], valley)
        return replace(statistic, suggested=suggested, remark=TWO_HUMPS if valley else _describe_one_hump(finite))
    tails = {side: find_separated_tail(finite, upper=side == "max") for side in limits}
    suggested = {
        side: _move_before_tail(limit, tails[side], statistic) if tails[side] else _keep_limit(limit, statistic)
        for side, limit in limits.items()
    }
    return replace(statistic, suggested=suggested, remark="" if any(tails.values()) or not limits else NO_TAIL)


def _move_to_valley(limit: FilterLimit, valley: Valley) -> FilterLimit:
    low, high = (format_statistic(hump) for hump in valley.humps)
    reason = f"the valley between two humps, at {low} ({valley.share:.0%} of the rows) and {high}"
    return _replace_value(limit, float(f"{valley.at:.3g}"), reason)


def _move_before_tail(limit: FilterLimit, tail: Tail, statistic: Statistic) -> FilterLimit:
    first, last = sorted([tail.outermost, tail.innermost])
    group = format_statistic(first) if first == last else f"{format_statistic(first)} to {format_statistic(last)}"
    reason = f"a separate group ({group}); no values between it and {format_statistic(tail.rest)}"
    low, high = sorted([tail.innermost, tail.rest])
    if _is_in_recipe(limit, statistic) and low < limit.value < high:
        return replace(limit, reason=f"{reason}; as in the recipe")
    whole = bool(np.all(statistic.finite == np.round(statistic.finite)))
    return _replace_value(limit, choose_gap_limit(tail, whole), reason)


def _keep_limit(limit: FilterLimit, statistic: Statistic) -> FilterLimit:
    """Keep a limit of the recipe; widen a default that would drop rows."""
    if _is_in_recipe(limit, statistic):
        return replace(limit, reason="as in the recipe")
    if not limit.drops(statistic.finite).any():
        return replace(limit, reason="the default")
    lowest = limit.side == "min"
    outermost = float(statistic.finite.min() if lowest else statistic.finite.max())
    return _replace_value(limit, _round_outward(outermost, down=lowest), "wide enough for all rows")


def _is_in_recipe(limit: FilterLimit, statistic: Statistic) -> bool:
    return statistic.arguments is not None and limit.argument in statistic.arguments


def _replace_value(limit: FilterLimit, value: float, reason: str) -> FilterLimit:
    """Return the limit with another value, in the type that the operator takes; sizes in bytes are strings."""
    if isinstance(limit.written, str):
        value = float(np.floor(value) if limit.side == "max" else np.ceil(value))
        return replace(limit, value=value, written=str(int(value)), reason=reason)
    recipe_value = int(value) if value == int(value) and isinstance(limit.written, int) else value
    return replace(limit, value=value, written=recipe_value, reason=reason)


def _round_outward(value: float, down: bool) -> float:
    """Round to two digits, away from the data."""
    if value == 0:
        return 0.0
    step = 10.0 ** (np.floor(np.log10(abs(value))) - 1)
    return float(f"{(np.floor if down else np.ceil)(value / step) * step:.6g}")


def _describe_one_hump(finite: np.ndarray) -> str:
    limits = ", ".join(
        f"{share:.0%} → {format_statistic(float(np.quantile(finite, 1 - share)))}" for share in SHOWN_SHARES
    )
    return f"One hump, so the data suggest no limit. Choose a share to keep: {limits}."


def format_statistic(value: float) -> str:
    """Return whole numbers below a million in full, and others with three digits."""
    return str(int(value)) if abs(value) < 1e6 and value == int(value) else f"{value:.3g}"


def format_recipe(head: str, process: list[dict], statistics: list[Statistic], drops: dict[str, str]) -> str:
    """Return a recipe for config/recipes/ with the suggested limits, each with its dropped rows and its reason.

    Args:
        head: comment at the top.
        process: operators and their arguments in order.
        statistics: statistics with suggested limits.
        drops: comments behind the operators' names.
    """
    by_operator = {name: [s for s in statistics if s.operator == name] for step in process for name in step}
    lines = [f"# {line}".rstrip() for line in head.splitlines()] + ["", "process:"]
    for step in process:
        [(name, arguments)] = step.items()
        limits_of_statistics = [(s, limit) for s in by_operator[name] for limit in s.suggested.values()]
        limits: Limits = {limit.argument: limit for _, limit in limits_of_statistics}
        rows = {limit.argument: int(limit.drops(s.finite).sum()) for s, limit in limits_of_statistics}
        lines.append(f"  - {name}:" + (f"  # {drops[name]}" if name in drops else ""))
        lines += [f"      # {s.name}: {s.remark}" for s in by_operator[name] if s.remark]
        for argument in dict.fromkeys([*(arguments or {}), *_find_non_default(limits)]):
            value = limits[argument].written if argument in limits else arguments[argument]
            comment = f"  # drops {rows[argument]}: {limits[argument].reason}" if argument in limits else ""
            lines.append(f"      {_format_pair({argument: value})}{comment}")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _find_non_default(limits: Limits) -> Iterator[str]:
    return (argument for argument, limit in limits.items() if limit.reason != "the default")


def _format_pair(pair: dict) -> str:
    """Return `argument: value` on one line."""
    [(argument, value)] = pair.items()
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return f"{argument}: {text.removesuffix(chr(10)).removesuffix('...').rstrip()}"
