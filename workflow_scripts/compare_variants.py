"""Compare variants of an experiment: a recipe without each of its operators, or fine-tuning methods.

    python workflow_scripts/compare_variants.py --config results/ablation/config.yaml --output-dir results/ablation

The configuration has the format of the report's (see reporting/experiment.py): first the reference, such as the
complete recipe. Writes <folder>.html and <folder>.csv, named after the output folder, which selects the page.
"""

from dataclasses import replace

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.reporting import ablation, tuning
from dj2mgm.reporting.comparison import write_table
from dj2mgm.reporting.experiment import load_experiments
from dj2mgm.reporting.first_screen import write_briefs
from dj2mgm.reporting.headline import find_unlearned
from dj2mgm.reporting.variants_page import write_variants_page

PAGES = {
    "ablation": (ablation, "Operator ablation"),
    "lora_sweep": (tuning, "LoRA rank sweep"),
    "lora_vs_full": (tuning, "LoRA compared with full fine-tuning"),
}


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    name = paths.output_dir.name
    kind, title = PAGES[name]
    experiments = load_experiments(paths.config)
    rows = kind.variants(experiments)
    write_table(kind.tabulate(rows), paths.output_dir / f"{name}.csv")
    page = kind.build_page(rows, kind.page_notes(experiments), title)
    order = [row.name for row in rows]  # that of the table
    briefs = sorted(write_briefs(experiments, name), key=lambda brief: order.index(brief.verdict.experiment))
    page = replace(page, briefs=briefs, unlearned=find_unlearned(experiments))
    write_variants_page(page, paths.output_dir / f"{name}.html")
    print(f"wrote {paths.output_dir / name}.html and {name}.csv for {len(rows)} experiments", flush=True)


if __name__ == "__main__":
    main()
