"""Sets experiments side by side: report.html, one self-contained page, and comparison.csv with every figure.

    python workflow_scripts/compare_experiments.py --experiments results/baseline results/dj_synth \
        --datasets results/datasets/shapes results/datasets/shapes --output-dir results/report

`--datasets` names each experiment's dataset, in the same order.
"""

import argparse
from pathlib import Path

from command_line import command_line
from errors import InputError
from reporting.comparison import write_comparison
from reporting.experiment import load_experiment
from reporting.page import write_page


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", required=True, nargs="+")
    parser.add_argument("--datasets", required=True, nargs="+")
    parser.add_argument("--output-dir", required=True, type=Path)
    paths = parser.parse_args()
    if len(paths.experiments) != len(paths.datasets):
        raise InputError(
            f"--datasets names {len(paths.datasets)} folders for {len(paths.experiments)} experiments; "
            "name each experiment's dataset, in the same order"
        )
    experiments = [load_experiment(*pair) for pair in zip(paths.experiments, paths.datasets, strict=True)]
    write_comparison(experiments, paths.output_dir / "comparison.csv")
    write_page(experiments, paths.output_dir / "report.html")
    print(f"wrote {paths.output_dir / 'report.html'} and comparison.csv for {len(experiments)} experiments", flush=True)


if __name__ == "__main__":
    main()
