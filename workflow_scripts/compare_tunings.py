"""Compare fine-tuning methods by their scores, trained parameters, time and memory.

    python workflow_scripts/compare_tunings.py --config results/lora_sweep/config.yaml --output-dir results/lora_sweep

The configuration has the format of the report's (see reporting/experiment.py), the reference first. Writes
<folder>.html and <folder>.csv, named after the output folder.
"""

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.reporting.comparison import write_table
from dj2mgm.reporting.experiment import load_experiments
from dj2mgm.reporting.tuning import page_notes, tabulate, tunings, write_page

TITLES = {"lora_sweep": "LoRA rank sweep", "lora_vs_full": "LoRA compared with full fine-tuning"}


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    name = paths.output_dir.name
    experiments = load_experiments(paths.config)
    rows = tunings(experiments)
    write_table(tabulate(rows), paths.output_dir / f"{name}.csv")
    write_page(rows, page_notes(experiments), TITLES[name], paths.output_dir / f"{name}.html")
    print(f"wrote {paths.output_dir / name}.html and {name}.csv for {len(rows)} experiments", flush=True)


if __name__ == "__main__":
    main()
