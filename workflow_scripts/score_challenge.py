"""Tabulate the challenge's score of each run, compared with the reference model's.

    python workflow_scripts/score_challenge.py --config results/challenge/config.yaml --output-dir results/challenge

reporting/challenge.py describes the configuration. Writes challenge.csv.
"""

from dj2mgm.command_line import command_line, parse_paths
from dj2mgm.files import read_yaml
from dj2mgm.reporting.challenge import tabulate_challenge
from dj2mgm.reporting.comparison import write_table


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--output-dir")
    table = tabulate_challenge(read_yaml(paths.config))
    print(table.round(2).to_string(index=False), flush=True)
    write_table(table, paths.output_dir / "challenge.csv")


if __name__ == "__main__":
    main()
