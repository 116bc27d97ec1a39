r"""Write the explorer's page of each experiment of a report, to which the report links.

    python workflow_scripts/write_explorers.py --config results/shapes/tiny/report/config.yaml \
        --output results/shapes/tiny/report/explorer

A note names experiments with too many rows for a page.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.features.explorer.explorer_page import write_explorers


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output")
    write_explorers(paths.config, paths.output)


if __name__ == "__main__":
    main()
