r"""Measure eager attention, SDPA and FlashAttention in the model's language model, by sequence length.

    python workflow_scripts/benchmark_attention.py --config results/attention_benchmark/config.yaml \
        --model results/models/tiny/mgm --output-dir results/attention_benchmark

Writes attention.csv and attention.html. Configurations that cannot run here (FlashAttention without a GPU, long
sequences on a CPU) have a row with the reason.
"""

import csv
import sys
from dataclasses import asdict, fields

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.files import read_yaml, replace_file
    from dj2mgm.memory.attention_benchmark import Measurement, measure_all
    from dj2mgm.reporting.attention_page import write_page


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--model", "--output-dir")
    rows = []
    for row in measure_all(paths.model, read_yaml(paths.config)):
        result = f"skipped: {row.skipped}" if row.skipped else f"{row.seconds:.3f} s, {row.memory_gib:.3f} GiB"
        print(f"{row.implementation}, {row.sequence_length} tokens: {result}", file=sys.stderr, flush=True)
        rows.append(row)
    with replace_file(paths.output_dir / "attention.csv") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Measurement)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    write_page(rows, paths.output_dir / "attention.html")


if __name__ == "__main__":
    main()
