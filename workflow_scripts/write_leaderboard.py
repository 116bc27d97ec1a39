"""Write the leaderboard: a page of all finished experiments, which sorts and filters them.

    python workflow_scripts/write_leaderboard.py --results results --output results/leaderboard/leaderboard.html

Without flags, it uses these two paths.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser, project_imports
from dj2mgm.errors import pluralize

with project_imports():
    from dj2mgm.cli.messages import note, warn
    from dj2mgm.features.leaderboard.leaderboard import write_leaderboard


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--output", type=Path, default=Path("results/leaderboard/leaderboard.html"))
    arguments = parser.parse_args()
    count, unread = write_leaderboard(arguments.results, arguments.output)
    for result in unread:
        warn(f"{arguments.results / result.folder}: {result.reason}")
    if not count and not unread:
        note("no experiment has finished yet; run one first, as in `snakemake baseline`")
    shown = pluralize(count, "experiment") if count else "no experiment"
    hidden = f"; {pluralize(len(unread), 'folder')} not shown" if unread else ""
    print(f"wrote {arguments.output} with {shown}{hidden}", flush=True)


if __name__ == "__main__":
    main()
