"""Explore data on a page with rows, images, statistics, and a slider for each limit of the recipe.

    python workflow_scripts/explore.py results/shapes/tiny/baseline                        # serve it until Ctrl-C
    python workflow_scripts/explore.py results/shapes/tiny/baseline --output explore.html  # write one file

A folder is results/<dataset>/<model>/<experiment>, one of its seeds, or results/datasets/<dataset>. Numbers in the
report link to their rows on this page; the script also prints the address of the report.
"""

import sys
from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser, project_imports

with project_imports():
    from dj2mgm.errors import InputError
    from dj2mgm.features.explorer.explorer_page import Explorer, Server, write_offline_page
    from dj2mgm.features.explorer.results import read_results
    from dj2mgm.reporting.rendering import locate_explorer_page

REPORTS = ("../report/report.html", "report/report.html")  # report of several experiments, report of one


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="folder")
    parser.add_argument("--output", type=Path, help="write this file instead of serving")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")
    arguments = parser.parse_args()
    if arguments.output and len(arguments.folders) > 1:
        raise InputError("--output writes the page of one folder; name one")
    if arguments.output and (arguments.output.is_dir() or not arguments.output.parent.is_dir()):
        raise InputError(f"--output {arguments.output} cannot be written; name a file in an existing folder")
    results = []
    for folder in arguments.folders:
        print(f"reading the rows of {folder} …", file=sys.stderr, flush=True)
        results.append(read_results(folder))
    if arguments.output:
        write_offline_page(results[0], arguments.output)
        print(f"wrote {arguments.output}", flush=True)
        return
    files = [folder / report for report in REPORTS for folder in arguments.folders]
    report = next((file for file in files if file.is_file()), None)
    server = Server(Explorer(results, {"report.html": report.read_bytes()} if report else {}), arguments.port)
    for result in results:
        print(f"explore {result.name}: {server.build_address(locate_explorer_page(result.name))}", flush=True)
    if report:
        print(f"report: {server.build_address('report.html')}", flush=True)
    print("press Ctrl-C to stop", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
