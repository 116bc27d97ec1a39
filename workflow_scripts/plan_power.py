"""Write the smallest difference that a comparison would show, and what one more seed costs, before it is run.

    python workflow_scripts/plan_power.py --config results/plan/power.yaml --output results/plan/power.txt

The noise is that of finished runs, or a typical one if there are none.
"""

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.config.settings.power_settings import PowerSettings
from dj2mgm.config.settings.validation import load_settings
from dj2mgm.files import write_text
from dj2mgm.reporting.verdicts.power import describe_power


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output")
    write_text(paths.output, describe_power(load_settings(PowerSettings, paths.config)))


if __name__ == "__main__":
    main()
