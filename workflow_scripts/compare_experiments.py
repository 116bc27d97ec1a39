r"""Compare experiments: write report.html, comparison.csv with all scores, and verdict.json.

    python workflow_scripts/compare_experiments.py --config results/shapes/tiny/report/config.yaml \
        --output-dir results/shapes/tiny/report

The configuration lists the experiments and the folders of their stages (see reporting/experiment_results.py). The
report links to the explorer's pages in explorer/, next to it.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.cli.messages import warn
from dj2mgm.records import VERDICT_FILE, write_verdicts
from dj2mgm.reporting.comparison import tabulate_scores, write_table
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.rendering import EXPLORER
from dj2mgm.reporting.report_page import write_report_page
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.reporting.verdicts.learning_faults import write_warning


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    experiments = load_experiments(paths.config)
    assessment = Assessment(experiments)
    write_table(tabulate_scores(experiments, assessment.differences), paths.output_dir / "comparison.csv")
    write_verdicts(paths.output_dir / VERDICT_FILE, assessment.build_records())
    explored = {page.stem for page in (paths.output_dir / EXPLORER).glob("*.html")}
    write_report_page(assessment, paths.output_dir / "report.html", explored)
    if assessment.unlearned:
        warn(write_warning(assessment.unlearned))
    print(f"wrote {paths.output_dir / 'report.html'} and comparison.csv for {len(experiments)} experiments", flush=True)


if __name__ == "__main__":
    main()
