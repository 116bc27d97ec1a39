"""Write the smallest difference that a comparison would show, and what one more seed costs, before it is run.

    python workflow_scripts/plan_power.py --config results/plan/power.yaml --output results/plan/power.txt

The noise is measured in finished runs. Without finished runs, it is a typical value.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.reporting.verdicts.power import PowerSettings, describe_power
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_text


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output")
    write_text(paths.output, describe_power(load_settings(PowerSettings, paths.config)))


if __name__ == "__main__":
    main()
