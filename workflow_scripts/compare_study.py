r"""Compare the variants of a study: rows, costs and scores, and differences from the reference.

    python workflow_scripts/compare_study.py --config results/shapes/tiny/ablation/config.yaml \
        --output-dir results/shapes/tiny/ablation

The configuration has the format of the report's (see reporting/experiment_results.py), with the study; the reference is
its first experiment. Writes <folder>.html and <folder>.csv, named after the output folder.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.errors import pluralize
from dj2mgm.features.studies.study_page import build_study_page
from dj2mgm.features.studies.study_records import StudyPageSettings
from dj2mgm.features.studies.study_table import compare_variants, tabulate
from dj2mgm.reporting.comparison import write_table
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.variants_page import write_variants_page
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.settings.validation import load_settings


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    name = paths.output_dir.name
    study = load_settings(StudyPageSettings, paths.config).study
    assessment = Assessment(load_experiments(paths.config), paths.output_dir)
    rows = compare_variants(assessment, study)
    write_table(tabulate(rows, assessment.headline), paths.output_dir / f"{name}.csv")
    page = build_study_page(assessment, rows, study, paths.output_dir)
    write_variants_page(page, paths.output_dir / f"{name}.html")
    print(f"wrote {paths.output_dir / name}.html and {name}.csv for {pluralize(len(rows), 'experiment')}", flush=True)


if __name__ == "__main__":
    main()
