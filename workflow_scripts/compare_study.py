"""Compare the variants of a study: rows, costs and scores, and differences from the reference.

    python workflow_scripts/compare_study.py --config results/ablation/config.yaml --output-dir results/ablation

The configuration has the format of the report's (see reporting/experiment.py), with the study; the reference is its
first experiment. Writes <folder>.html and <folder>.csv, named after the output folder.
"""

from dataclasses import replace

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.config.settings.page_settings import PageSettings
from dj2mgm.config.settings.validation import load_settings
from dj2mgm.reporting.commands import keep_command
from dj2mgm.reporting.comparison import write_table
from dj2mgm.reporting.experiment import load_experiments
from dj2mgm.reporting.search_page import confirm_briefs
from dj2mgm.reporting.study_page import build_study_page, compare_variants, page_notes, summarize_verdicts, tabulate
from dj2mgm.reporting.variants_page import write_variants_page
from dj2mgm.reporting.verdicts.first_screen import merge_withheld, write_briefs
from dj2mgm.reporting.verdicts.headline_verdicts import find_unlearned

MAX_BRIEFS = 8  # verdicts above the table


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    name = paths.output_dir.name
    experiments = load_experiments(paths.config)
    study = load_settings(PageSettings, paths.config).study
    rows = compare_variants(experiments, study)
    write_table(tabulate(rows), paths.output_dir / f"{name}.csv")
    order = [row.name for row in rows]  # verdicts get the order of the table
    winner = next((one for one in experiments if study.search and one.name == study.search.winner), None)
    briefs = confirm_briefs(study.search, keep_command(winner, name)) if winner else []
    if not briefs:
        briefs = sorted(write_briefs(experiments, name), key=lambda brief: order.index(brief.verdict.experiment))
    summary = "" if winner else summarize_verdicts(experiments, briefs)
    briefs = briefs if winner else merge_withheld(briefs, experiments[0], name)
    notes = page_notes(experiments)
    if len(briefs) > MAX_BRIEFS:
        notes = [
            f"The verdicts on the best {MAX_BRIEFS} of {len(briefs)} are shown, corrected for all of them.",
            *notes,
        ]
        briefs = briefs[:MAX_BRIEFS]
    page = build_study_page(rows, notes, study, name)
    page = replace(page, summary=summary, briefs=briefs, unlearned=find_unlearned(experiments))
    write_variants_page(page, paths.output_dir / f"{name}.html")
    print(f"wrote {paths.output_dir / name}.html and {name}.csv for {len(rows)} experiments", flush=True)


if __name__ == "__main__":
    main()
