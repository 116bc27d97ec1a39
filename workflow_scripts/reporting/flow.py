"""The flow diagram of a chain: vertical lanes, from which every operator takes its ribbon to the dropped rows.

Each step is a strip of its own, in a box of WIDTH × HEIGHT units that the page stretches to the width of the column and
to the height of the text beside it; so labels cannot overlap, however thin a ribbon is and however a label wraps.
"""

from collections.abc import Callable
from dataclasses import dataclass

from reporting.chain import Lanes, Step
from reporting.scales import grouped

WIDTH, HEIGHT = 1000.0, 100.0
GAP = 0.11  # between what stays and what was dropped, as a share of the rows
LANE_GAP = 0.02  # between the lanes that stay

Edges = tuple[float, float]  # left and right, in rows


@dataclass(frozen=True)
class Shape:
    lane: str  # original, recaptioned, repeated or dropped: its colour
    path: str
    title: str = ""


def draw_flows(chains: list[list[Step]]) -> list[list[list[Shape]]]:
    """The shapes of every step of every chain; a row is equally wide in all of them."""
    places = [_Places(steps) for steps in chains]
    across = max(place.across for place in places) or 1.0
    return [
        [_step(place, across, steps[max(index - 1, 0)].lanes, step) for index, step in enumerate(steps)]
        for place, steps in zip(places, chains, strict=True)
    ]


class _Places:
    """Edges of the lanes, in rows. New captions stay where they left the old ones, so that no lane moves sideways."""

    def __init__(self, steps: list[Step]):
        rows = max(lanes.original + lanes.recaptioned + lanes.dropped for lanes in (step.lanes for step in steps))
        self.gap = LANE_GAP * rows
        split = next((step.lanes.original for step in steps if step.kind == "recaption"), None)
        self.start = self.gap + (steps[-1].lanes.original if split is None else split)
        last = steps[-1].lanes
        self.across = max((1 + GAP) * rows, self.repeated(last)[1] + GAP * rows + last.dropped)

    def recaptioned(self, lanes: Lanes) -> Edges:
        return self.start, self.start + lanes.recaptioned

    def repeated(self, lanes: Lanes) -> Edges:
        left = self.start + (lanes.recaptioned + self.gap if lanes.recaptioned else 0)
        return left, left + lanes.repeated


def _step(places: _Places, across: float, before: Lanes, step: Step) -> list[Shape]:
    """Straight bands of what stays in its lane, then the ribbons of what changes it."""
    after, shapes = step.lanes, []

    def band(lane: str, top: Edges, bottom: Edges, title: str = "") -> None:
        if max(top[1] - top[0], bottom[1] - bottom[0]) > 0:
            shapes.append(Shape(lane, _path(top, bottom, WIDTH / across), title))

    band("original", (0, after.original), (0, after.original))
    if step.kind != "recaption":
        band("recaptioned", places.recaptioned(after), places.recaptioned(after))
    band("dropped", (across - before.dropped, across), (across - before.dropped, across))
    if step.kind == "recaption":
        band("recaptioned", (after.original, before.original), places.recaptioned(after), step.note)
    if step.kind == "repeat":
        left, right = places.repeated(after)
        band("repeated", (left - places.gap, left - places.gap), (left, right), step.note)
    elif after.repeated:
        band("repeated", places.repeated(after), places.repeated(after))
    if step.dropped:
        _drop(band, places, across, before, step)
    return shapes


def _drop(band: Callable, places: _Places, across: float, before: Lanes, step: Step) -> None:
    """Ribbons from the right edges of the lanes to the left edge of what was dropped before."""
    after, left = step.lanes, across - step.lanes.dropped
    recaptions_left = places.recaptioned(after)[1]
    for rows, edge in (
        (before.original - after.original, after.original),
        (before.recaptioned - after.recaptioned, recaptions_left),
    ):
        if rows > 0:
            band("dropped", (edge, edge + rows), (left, left + rows), f"{step.name}: {grouped(step.dropped)} dropped")
            left += rows


def _path(top: Edges, bottom: Edges, scale: float) -> str:
    """A band from two edges at the top to two at the bottom, all with vertical tangents."""
    a, b, c, d = (f"{edge * scale:.1f}" for edge in (*top, *bottom))
    if (a, b) == (c, d):
        return f"M{a} 0H{b}V{HEIGHT:g}H{a}Z"
    middle = HEIGHT / 2
    return f"M{a} 0C{a} {middle:g} {c} {middle:g} {c} {HEIGHT:g}H{d}C{d} {middle:g} {b} {middle:g} {b} 0Z"
