r"""Compare the variants of a study: rows, costs and scores, and differences from the reference.

    python workflow_scripts/compare_study.py --config results/shapes/tiny/ablation/config.yaml \
        --output-dir results/shapes/tiny/ablation

The configuration has the format of the report's (see reporting/experiment_results.py), with the study; the reference is
its first experiment. Writes <folder>.html and <folder>.csv, named after the output folder.
"""

from dataclasses import replace

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.records.page_records import PageSettings
from dj2mgm.reporting.comparison import write_table
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.study.study_page import (
    MAX_CARDS,
    build_study_cards,
    build_study_page,
    describe_cut,
    list_page_notes,
)
from dj2mgm.reporting.study.study_table import compare_variants, tabulate
from dj2mgm.reporting.variants_page import write_variants_page
from dj2mgm.reporting.verdicts.headline_verdicts import find_unlearned
from dj2mgm.settings.validation import load_settings


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    name = paths.output_dir.name
    experiments = load_experiments(paths.config)
    study = load_settings(PageSettings, paths.config).study
    rows = compare_variants(experiments, study)
    write_table(tabulate(rows), paths.output_dir / f"{name}.csv")
    cards, summary = build_study_cards(experiments, rows, study, paths.output_dir)
    page = build_study_page(rows, [*describe_cut(cards), *list_page_notes(experiments)], study, name)
    page = replace(page, summary=summary, cards=cards[:MAX_CARDS], unlearned=find_unlearned(experiments))
    write_variants_page(page, paths.output_dir / f"{name}.html")
    print(f"wrote {paths.output_dir / name}.html and {name}.csv for {len(rows)} experiments", flush=True)


if __name__ == "__main__":
    main()
