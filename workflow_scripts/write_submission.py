r"""Write the file for a benchmark's evaluation server from the model's answers.

    python workflow_scripts/write_submission.py --answers results/baseline/benchmarks/mmbench/answers.jsonl \
        --output-dir results/baseline/benchmarks/mmbench

The benchmark's module in evaluation/benchmarks describes the content of submission.xlsx.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.evaluation.benchmarks import save_submission
from dj2mgm.storage.files import read_jsonl


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--answers", "--output-dir")
    rows = list(read_jsonl(paths.answers))
    save_submission(rows[0]["benchmark"], rows, paths.output_dir / "submission.xlsx")


if __name__ == "__main__":
    main()
