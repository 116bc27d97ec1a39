"""Scores a benchmark's answers: VQA accuracy for TextVQA, (circular) accuracy for MMBench, in per cent.

    python workflow_scripts/score_benchmark.py --answers results/baseline/benchmarks/textvqa/answers.jsonl \\
        --output-dir results/baseline/benchmarks/textvqa

Writes metrics.json: the benchmark, the variant of its prompts, and estimates with 95 % intervals. Where the
benchmark withholds its answers there are no estimates.
"""

import platform

import numpy

from command_line import command_line, path_arguments
from errors import InputError
from evaluation.groups import Rows, estimate_metrics
from evaluation.mmbench import chosen_option, measure_mmbench
from evaluation.textvqa import measure_textvqa
from files import read_jsonl, sha256_of, write_json

MEASURES = {"textvqa": measure_textvqa, "mmbench": measure_mmbench}


@command_line
def main() -> None:
    paths = path_arguments(__doc__, "--answers", "--output-dir")
    if not paths.answers.is_file():
        raise InputError(f"{paths.answers} does not exist; run the rule answer_benchmark first")
    rows = list(read_jsonl(paths.answers))
    benchmark, variant = rows[0]["benchmark"], rows[0]["variant"]
    estimates = estimate_metrics(MEASURES[benchmark](rows))
    print(f"{benchmark}, {variant}, {len(rows)} answers", flush=True)
    for name, value in estimates.items():
        interval = "no interval" if value["low"] is None else f"[{value['low']:.2f}, {value['high']:.2f}]"
        print(f"{name:40} {value['mean']:6.2f}  {interval}", flush=True)
    if not estimates:
        print("the benchmark's answers are withheld: its server scores submission.xlsx", flush=True)
    record = {
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__},
        "inputs": {"answers": sha256_of(paths.answers)},
    }
    scored = {"benchmark": benchmark, "variant": variant, "counts": count(rows), "estimates": estimates}
    write_json(paths.output_dir / "metrics.json", scored | record)


def count(rows: Rows) -> dict[str, int]:
    """Answers, those that are empty and, of multiple choices, those that name no option."""
    counts = {"answers": len(rows), "empty": sum(not row["prediction"].strip() for row in rows)}
    if "options" in rows[0]:
        counts["unreadable"] = sum(chosen_option(row["prediction"], row["options"]) is None for row in rows)
    return counts


if __name__ == "__main__":
    main()
