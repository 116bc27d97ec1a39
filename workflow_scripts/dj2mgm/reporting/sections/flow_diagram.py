"""The flow diagram of the report: bands of rows through the steps, as wide as the number of rows.

Each step is a drawing of WIDTH × HEIGHT units. The page stretches it to the height of the step's text, so that labels
cannot overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dj2mgm.reporting.rendering import format_integer
from dj2mgm.reporting.row_flow import FlowStep, Lanes

WIDTH, HEIGHT = 1000.0, 100.0
DROPPED_GAP = 0.11  # between kept and dropped rows, as a share of the rows
LANE_GAP = 0.02  # between the lanes of kept rows

Edges = tuple[float, float]  # left and right, in rows


@dataclass(frozen=True)
class Shape:
    """A band of the flow diagram."""

    lane: str  # original, recaptioned, repeated or dropped; sets the color
    path: str
    title: str = ""


def draw_flows(chains: list[list[FlowStep]]) -> list[list[list[Shape]]]:
    """Return the shapes of each step of each chain; all chains have the same scale."""
    edges_by_chain = [_LaneEdges(steps) for steps in chains]
    total_width = max(edges.total_width for edges in edges_by_chain) or 1.0
    return [
        [_draw_step(edges, total_width, steps[max(index - 1, 0)].lanes, step) for index, step in enumerate(steps)]
        for edges, steps in zip(edges_by_chain, chains, strict=True)
    ]


class _LaneEdges:
    """Edges of the lanes, in rows. Rows with new captions keep their position, so that no lane moves sideways."""

    def __init__(self, steps: list[FlowStep]):
        rows = max(lanes.original + lanes.recaptioned + lanes.dropped for lanes in (step.lanes for step in steps))
        self.gap = LANE_GAP * rows
        original = next((step.lanes.original for step in steps if step.kind == "recaption"), None)
        self.start = self.gap + (steps[-1].lanes.original if original is None else original)
        last = steps[-1].lanes
        self.total_width = max((1 + LANE_GAP) * rows, self.locate_repeated(last)[1] + LANE_GAP * rows + last.dropped)

    def locate_recaptioned(self, lanes: Lanes) -> Edges:
        return self.start, self.start + lanes.recaptioned

    def locate_repeated(self, lanes: Lanes) -> Edges:
        left = self.start + (lanes.recaptioned + self.gap if lanes.recaptioned else 0)
        return left, left + lanes.repeated


def _draw_step(edges: _LaneEdges, total_width: float, before: Lanes, step: FlowStep) -> list[Shape]:
    """Draw straight bands for rows that stay in their lane, then curved bands for rows that change it."""
    after, shapes = step.lanes, []

    def draw_band(lane: str, top: Edges, bottom: Edges, title: str = "") -> None:
        if max(top[1] - top[0], bottom[1] - bottom[0]) > 0:
            shapes.append(Shape(lane, _build_path(top, bottom, WIDTH / total_width), title))

    draw_band("original", (0, after.original), (0, after.original))
    if step.kind != "recaption":
        draw_band("recaptioned", edges.locate_recaptioned(after), edges.locate_recaptioned(after))
    draw_band("dropped", (total_width - before.dropped, total_width), (total_width - before.dropped, total_width))
    if step.kind == "recaption":
        draw_band("recaptioned", (after.original, before.original), edges.locate_recaptioned(after), step.note)
    if step.kind == "repeat":
        left, right = edges.locate_repeated(after)
        draw_band("repeated", (left - edges.gap, left - edges.gap), (left, right), step.note)
    elif after.repeated:
        draw_band("repeated", edges.locate_repeated(after), edges.locate_repeated(after))
    if step.dropped:
        _draw_dropped(draw_band, edges, total_width, before, step)
    return shapes


def _draw_dropped(draw_band: Callable, edges: _LaneEdges, total_width: float, before: Lanes, step: FlowStep) -> None:
    """Draw bands from the right edges of the lanes to the left edge of the rows dropped before."""
    after, left = step.lanes, total_width - step.lanes.dropped
    recaptions_end = edges.locate_recaptioned(after)[1]
    for rows, edge in (
        (before.original - after.original, after.original),
        (before.recaptioned - after.recaptioned, recaptions_end),
    ):
        if rows > 0:
            draw_band(
                "dropped",
                (edge, edge + rows),
                (left, left + rows),
                f"{step.name}: {format_integer(step.dropped)} dropped",
            )
            left += rows


def _build_path(top: Edges, bottom: Edges, scale: float) -> str:
    """Return a band from two edges at the top to two edges at the bottom, all with vertical tangents."""
    a, b, c, d = (f"{edge * scale:.1f}" for edge in (*top, *bottom))
    if (a, b) == (c, d):
        return f"M{a} 0H{b}V{HEIGHT:g}H{a}Z"
    middle = HEIGHT / 2
    return f"M{a} 0C{a} {middle:g} {c} {middle:g} {c} {HEIGHT:g}H{d}C{d} {middle:g} {b} {middle:g} {b} 0Z"
