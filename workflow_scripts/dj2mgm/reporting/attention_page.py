"""Page of the attention benchmark: time and memory by sequence length."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.files import write_text
from dj2mgm.memory.attention_benchmark import IMPLEMENTATIONS, Measurement
from dj2mgm.reporting.drawing import Scale, Tick, template_environment

NAMES = {"eager": "eager", "sdpa": "SDPA", "flash_attention_2": "FlashAttention 2"}


@dataclass(frozen=True)
class Plot:
    """A chart of one quantity by sequence length."""

    title: str
    paths: list[tuple[int, str]]  # index of the implementation, and its line in a box of 100 × 100 units
    x_ticks: list[Tick]
    y_ticks: list[Tick]


def write_page(rows: list[Measurement], path: str | Path) -> None:
    """Write one self-contained HTML file without scripts."""
    measured = [row for row in rows if not row.skipped]
    quantities = {
        "Time of a forward and backward pass, ms": lambda row: 1000 * row.seconds,
        "Memory above weights and input, GiB": lambda row: row.memory_gib,
    }
    page = (
        template_environment()
        .get_template("attention.html.j2")
        .render(
            plots=[_plot(title, measured, of) for title, of in quantities.items() if measured],
            legend=[(index, NAMES[name]) for index, name in enumerate(IMPLEMENTATIONS) if _has(measured, name)],
            rows=[(NAMES[row.implementation], row) for row in rows],
        )
    )
    write_text(path, page)


def _has(measured: list[Measurement], name: str) -> bool:
    return any(row.implementation == name for row in measured)


def _plot(title: str, measured: list[Measurement], of: Callable[[Measurement], float]) -> Plot:
    lengths = sorted({row.sequence_length for row in measured})
    x, y = Scale(0, lengths[-1]), Scale(0, 1.05 * max(map(of, measured)))
    paths = []
    for index, name in enumerate(IMPLEMENTATIONS):
        if points := [row for row in measured if row.implementation == name]:
            places = [f"{x.at(row.sequence_length):.2f} {100 - y.at(of(row)):.2f}" for row in points]
            paths.append((index, "M" + "L".join(places)))
    return Plot(title, paths, [Tick(x.at(length), str(length)) for length in lengths[-4:]], y.ticks(4))
