"""Tabulate the effect of each operator of a recipe on rows kept, planted faults left, and scores.

    python workflow_scripts/tabulate_ablation.py --config results/ablation/config.yaml --output-dir results/ablation

The configuration has the format of the report's (see reporting/experiment.py): first the experiment with the complete
recipe, then the same with one more operator in `without`. Writes ablation.csv and ablation.html.
"""

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.reporting.ablation import page_notes, tabulate, variants, write_page
from dj2mgm.reporting.comparison import write_table
from dj2mgm.reporting.experiment import load_experiments


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    experiments = load_experiments(paths.config)
    rows = variants(experiments)
    write_page(rows, page_notes(experiments), paths.output_dir / "ablation.html")
    write_table(tabulate(rows), paths.output_dir / "ablation.csv")
    print(f"wrote {paths.output_dir / 'ablation.html'} and ablation.csv for {len(rows) - 1} operators", flush=True)


if __name__ == "__main__":
    main()
