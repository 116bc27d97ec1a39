r"""Score a benchmark's answers in percent with the benchmark's own metric.

    python workflow_scripts/score_benchmark.py --answers results/shapes/tiny/baseline/benchmarks/textvqa/answers.jsonl \
        --output-dir results/shapes/tiny/baseline/benchmarks/textvqa

Writes metrics.json with the benchmark, the variant of its prompts, and estimates with 95 % intervals over images, also
of the answers without the image. There are no estimates if the benchmark withholds its right answers.
"""

import platform

import numpy

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.errors import pluralize
from dj2mgm.evaluation.groups import estimate_metrics, read_leaked_ids
from dj2mgm.features.challenge.benchmarks import load_benchmark
from dj2mgm.storage.files import compute_sha256, read_jsonl, write_json


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--answers", "--output-dir", optional=("--leaks",))
    rows = list(read_jsonl(paths.answers))
    name, variant = rows[0]["benchmark"], rows[0]["variant"]
    benchmark = load_benchmark(name)
    estimates = estimate_metrics(benchmark.measure(rows))
    print(f"{name}, {variant}, {pluralize(len(rows), 'answer')}", flush=True)
    blind = [row | {"prediction": row["blind_prediction"]} for row in rows]
    without_image = estimate_metrics(benchmark.measure(blind))
    printed_estimates = estimates | ({"score without the image": without_image["score"]} if without_image else {})
    for metric, value in printed_estimates.items():
        interval = "no interval" if value.low is None else f"[{value.low:.2f}, {value.high:.2f}]"
        print(f"{metric:40} {value.mean:6.2f}  {interval}", flush=True)
    if not estimates:
        print("the benchmark withholds its right answers; its server scores submission.xlsx", flush=True)
    record = {
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__},
        "inputs": {"answers": compute_sha256(paths.answers)},
    }
    counts = benchmark.count_answers(rows)
    metrics = {"benchmark": name, "variant": variant, "counts": counts, "estimates": estimates}
    metrics["without_image"] = {"estimates": without_image}
    if leaked_ids := read_leaked_ids(paths.leaks, name):
        unleaked_rows = benchmark.drop_questions(rows, leaked_ids)
        metrics["without_leaked"] = {
            "counts": benchmark.count_answers(unleaked_rows),
            "estimates": estimate_metrics(benchmark.measure(unleaked_rows)) if unleaked_rows else {},
        }
        print(
            f"{pluralize(len(unleaked_rows), 'answer')} to questions whose image and text are not in the training data",
            flush=True,
        )
    write_json(paths.output_dir / "metrics.json", metrics | record)


if __name__ == "__main__":
    main()
