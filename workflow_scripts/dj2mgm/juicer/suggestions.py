"""Limits suggested by the data, and a recipe with them.

Sizes, lengths and shares get a limit only if a gap separates a tail from the other rows. Scores, by which a model rates
a row, get a limit if their distribution has two humps. Otherwise the recipe's limits do not change.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import yaml

from dj2mgm.data.shares import SIDES
from dj2mgm.juicer.distributions import Tail, Valley, between, separated_tail, valley_between_humps
from dj2mgm.juicer.statistics import FilterLimit, Limits, Statistic

SCORE = "score"  # part of Data-Juicer's names for limits of a model's rating: min_score
SHARES = (0.9, 0.75, 0.5)  # shares to keep that are shown if a score suggests no limit
NO_TAIL = "No gap separates a tail from the rest, so the data suggest no limit."
TWO_HUMPS = "Two humps: the limit is the minimum between them in the best-fitting mixture of two normal distributions."


def suggest(statistic: Statistic) -> Statistic:
    """Return the statistic with suggested limits and a remark."""
    finite, limits = statistic.finite, statistic.limits
    if "min" in limits and limits["min"].argument in SIDES:
        return replace(statistic, suggested={side: _unchanged(limit, statistic) for side, limit in limits.items()})
    if "min" in limits and SCORE in limits["min"].argument:
        valley = valley_between_humps(finite)
        suggested = {side: _unchanged(limit, statistic) for side, limit in limits.items()}
        if valley:
            suggested["min"] = _in_valley(limits["min"], valley)
        return replace(statistic, suggested=suggested, remark=TWO_HUMPS if valley else _one_hump(finite))
    tails = {side: separated_tail(finite, upper=side == "max") for side in limits}
    suggested = {
        side: _before_tail(limit, tails[side], statistic) if tails[side] else _unchanged(limit, statistic)
        for side, limit in limits.items()
    }
    return replace(statistic, suggested=suggested, remark="" if any(tails.values()) or not limits else NO_TAIL)


def _in_valley(limit: FilterLimit, valley: Valley) -> FilterLimit:
    low, high = (show(hump) for hump in valley.humps)
    reason = f"the valley between two humps, at {low} ({valley.share:.0%} of the rows) and {high}"
    return _moved(limit, float(f"{valley.at:.3g}"), reason)


def _before_tail(limit: FilterLimit, tail: Tail, statistic: Statistic) -> FilterLimit:
    first, last = sorted([tail.outermost, tail.innermost])
    group = show(first) if first == last else f"{show(first)} to {show(last)}"
    reason = f"a group of its own: {group}, then none {'down' if tail.upper else 'up'} to {show(tail.rest)}"
    low, high = sorted([tail.innermost, tail.rest])
    if _stated(limit, statistic) and low < limit.value < high:
        return replace(limit, reason=f"{reason}; as in the recipe")
    whole = bool(np.all(statistic.finite == np.round(statistic.finite)))
    return _moved(limit, between(tail, whole), reason)


def _unchanged(limit: FilterLimit, statistic: Statistic) -> FilterLimit:
    """Keep a limit of the recipe; widen a default that would drop rows."""
    if _stated(limit, statistic):
        return replace(limit, reason="as in the recipe")
    if not limit.drops(statistic.finite).any():
        return replace(limit, reason="the default")
    lowest = limit.side == "min"
    outermost = float(statistic.finite.min() if lowest else statistic.finite.max())
    return _moved(limit, _rounded(outermost, down=lowest), "wide enough for all rows")


def _stated(limit: FilterLimit, statistic: Statistic) -> bool:
    return statistic.arguments is not None and limit.argument in statistic.arguments


def _moved(limit: FilterLimit, value: float, reason: str) -> FilterLimit:
    """Return the limit with another value, in the type that the operator takes; sizes in bytes are strings."""
    if isinstance(limit.written, str):
        value = float(np.floor(value) if limit.side == "max" else np.ceil(value))
        return replace(limit, value=value, written=str(int(value)), reason=reason)
    written = int(value) if value == int(value) and isinstance(limit.written, int) else value
    return replace(limit, value=value, written=written, reason=reason)


def _rounded(value: float, down: bool) -> float:
    """Round to two digits, away from the data."""
    if value == 0:
        return 0.0
    step = 10.0 ** (np.floor(np.log10(abs(value))) - 1)
    return float(f"{(np.floor if down else np.ceil)(value / step) * step:.6g}")


def _one_hump(finite: np.ndarray) -> str:
    kept = ", ".join(f"{share:.0%} → {show(float(np.quantile(finite, 1 - share)))}" for share in SHARES)
    return f"One hump, so the data suggest no limit. Choose a share to keep: {kept}."


def show(value: float) -> str:
    """Return whole numbers below a million in full, and others with three digits."""
    return str(int(value)) if abs(value) < 1e6 and value == int(value) else f"{value:.3g}"


def recipe_text(head: str, process: list[dict], statistics: list[Statistic], drops: dict[str, str]) -> str:
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
        found = [(s, limit) for s in by_operator[name] for limit in s.suggested.values()]
        limits: Limits = {limit.argument: limit for _, limit in found}
        rows = {limit.argument: int(limit.drops(s.finite).sum()) for s, limit in found}
        lines.append(f"  - {name}:" + (f"  # {drops[name]}" if name in drops else ""))
        lines += [f"      # {s.name}: {s.remark}" for s in by_operator[name] if s.remark]
        for argument in dict.fromkeys([*(arguments or {}), *_not_default(limits)]):
            value = limits[argument].written if argument in limits else arguments[argument]
            comment = f"  # drops {rows[argument]}: {limits[argument].reason}" if argument in limits else ""
            lines.append(f"      {_flow({argument: value})}{comment}")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _not_default(limits: Limits) -> Iterator[str]:
    return (argument for argument, limit in limits.items() if limit.reason != "the default")


def _flow(pair: dict) -> str:
    """Return `argument: value` on one line."""
    [(argument, value)] = pair.items()
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return f"{argument}: {text.removesuffix(chr(10)).removesuffix('...').rstrip()}"
