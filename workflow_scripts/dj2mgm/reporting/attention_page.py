"""Page of the attention benchmark: time and memory by sequence length."""

from collections.abc import Callable
from pathlib import Path

from dj2mgm.files import write_text
from dj2mgm.memory.attention_benchmark import IMPLEMENTATIONS, Measurement
from dj2mgm.reporting.charts import Line, LineChart, Scale, Tick, draw_line
from dj2mgm.reporting.rendering import template_environment

NAMES = {"eager": "eager", "sdpa": "SDPA", "flash_attention_2": "FlashAttention 2"}


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
            charts=[_draw_chart(quantity, measured, of) for quantity, of in quantities.items() if measured],
            rows=[(NAMES[row.implementation], row) for row in rows],
        )
    )
    write_text(path, page)


def _draw_chart(quantity: str, measured: list[Measurement], of: Callable[[Measurement], float]) -> LineChart:
    lengths = sorted({row.sequence_length for row in measured})
    x, y = Scale(0, lengths[-1]), Scale(0, 1.05 * max(map(of, measured)))
    lines, ends = [], []
    for index, name in enumerate(IMPLEMENTATIONS):
        if points := [row for row in measured if row.implementation == name]:
            lines.append(
                Line("mean", draw_line(x, y, [row.sequence_length for row in points], [*map(of, points)]), index)
            )
            ends.append((index, NAMES[name], ""))
    ticks = [Tick(x.at(length), str(length)) for length in lengths[-4:]]
    description = f"{quantity}, by sequence length; the table below has the values"
    return LineChart(quantity, lines, ticks, y.ticks(4), "tokens", description, ends)
