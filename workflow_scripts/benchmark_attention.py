r"""Measure eager attention, SDPA and FlashAttention in the model's language model, by sequence length.

    python workflow_scripts/benchmark_attention.py --config results/shapes/tiny/attention_benchmark/config.yaml \
        --model results/models/tiny/mgm --output-dir results/shapes/tiny/attention_benchmark

Writes attention.csv and attention.html. Configurations that cannot run here (FlashAttention without a GPU, long
sequences on a CPU) have a row with the reason.
"""

import csv
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.planning.attention_benchmark import IMPLEMENTATIONS, Measurement, measure_all
    from dj2mgm.reporting.charts import Line, LineChart, Scale, Tick, draw_line
    from dj2mgm.reporting.rendering import build_template_environment
    from dj2mgm.settings.targets import AttentionSettings
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import replace_file, write_text

IMPLEMENTATION_NAMES = {"eager": "eager", "sdpa": "SDPA", "flash_attention_2": "FlashAttention 2"}


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--model", "--output-dir")
    rows = []
    for row in measure_all(paths.model, load_settings(AttentionSettings, paths.config)):
        result = f"skipped: {row.skipped}" if row.skipped else f"{row.seconds:.3f} s, {row.memory_gib:.3f} GiB"
        print(f"{row.implementation}, {row.sequence_length} tokens: {result}", file=sys.stderr, flush=True)
        rows.append(row)
    with replace_file(paths.output_dir / "attention.csv") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Measurement)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    write_attention_page(rows, paths.output_dir / "attention.html")


def write_attention_page(rows: list[Measurement], path: str | Path) -> None:
    """Write one self-contained HTML file without scripts."""
    measurements = [row for row in rows if not row.skipped]
    quantities = {
        "Time of a forward and backward pass, ms": lambda row: 1000 * row.seconds,
        "Memory above weights and input, GiB": lambda row: row.memory_gib,
    }
    page = (
        build_template_environment()
        .get_template("attention.html.j2")
        .render(
            charts=[
                _draw_chart(quantity, measurements, get_value)
                for quantity, get_value in quantities.items()
                if measurements
            ],
            rows=[(IMPLEMENTATION_NAMES[row.implementation], row) for row in rows],
        )
    )
    write_text(path, page)


def _draw_chart(quantity: str, measurements: list[Measurement], get_value: Callable[[Measurement], float]) -> LineChart:
    lengths = sorted({row.sequence_length for row in measurements})
    x, y = Scale(0, lengths[-1]), Scale(0, 1.05 * max(map(get_value, measurements)))
    lines, line_ends = [], []
    for index, name in enumerate(IMPLEMENTATIONS):
        if points := [row for row in measurements if row.implementation == name]:
            lines.append(
                Line("mean", draw_line(x, y, [row.sequence_length for row in points], [*map(get_value, points)]), index)
            )
            line_ends.append((index, IMPLEMENTATION_NAMES[name], ""))
    ticks = [Tick(x.locate(length), str(length)) for length in lengths[-4:]]
    description = f"{quantity}, by sequence length; the table below has the values"
    return LineChart(quantity, lines, ticks, y.choose_ticks(4), "tokens", description, line_ends)


if __name__ == "__main__":
    main()
