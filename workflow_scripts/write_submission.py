r"""Write the file for a benchmark's evaluation server from the model's answers.

    python workflow_scripts/write_submission.py \
        --answers results/shapes/tiny/baseline/benchmarks/mmbench/answers.jsonl \
        --output-dir results/shapes/tiny/baseline/benchmarks/mmbench

The benchmark's module in features/challenge/benchmarks describes the content of submission.xlsx.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.errors import InputError
from dj2mgm.features.challenge.benchmarks import load_benchmark
from dj2mgm.storage.files import read_jsonl


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--answers", "--output-dir")
    rows = list(read_jsonl(paths.answers))
    benchmark = load_benchmark(name := rows[0]["benchmark"])
    if not benchmark.write_submission:
        raise InputError(f"the benchmark {name} has no submission")
    benchmark.write_submission(rows, paths.output_dir / "submission.xlsx")


if __name__ == "__main__":
    main()
