"""Check whether this machine can run the workflow: driver, CUDA, compilers, GPU, memory, disk, models.

    python workflow_scripts/doctor.py
    python workflow_scripts/doctor.py --fix && source results/doctor/environment.sh

Each check passes, warns, fails or is skipped, and prints its reason and a remedy. `--fix` writes variables for the
shell; it installs and deletes nothing. The exit status is 1 if a check fails.
"""

import dataclasses
import json
import sys

from dj2mgm.cli.command_line import make_parser, quiet_command_line, quiet_imports

with quiet_imports():
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dj2mgm.health.doctor_checks import ENVIRONMENT_FILE, Finding, run_checks

COLORS = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def print_findings(findings: list[Finding]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("check", "", "reason and fix"):
        table.add_column(column, no_wrap=column != "reason and fix", overflow="fold")
    for finding in findings:
        remedy = f"\n→ {finding.remedy}" if finding.remedy else ""
        color = COLORS[finding.status]
        table.add_row(finding.name, f"[{color}]{finding.status}[/]", Text(f"{finding.reason}{remedy}"))
    Console().print(table)


def run_visible_checks(console: Console, config: dict, fix: bool, end_stray: bool) -> list[Finding]:
    """Run all checks, and show which one is running: on one line of a terminal, otherwise on a line each."""
    if not console.is_terminal:
        return run_checks(config, fix, end_stray, lambda part: console.print(f"checking {part} …", soft_wrap=True))
    with console.status("Checking …") as status:
        return run_checks(config, fix, end_stray, lambda part: status.update(f"Checking {part} …"))


@quiet_command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=json.loads, default={}, help="the values of snakemake's --config, as JSON")
    parser.add_argument("--json", action="store_true", help="print a list of findings")
    parser.add_argument("--fix", action="store_true", help=f"write {ENVIRONMENT_FILE}")
    parser.add_argument("--end-stray", action="store_true", help="end your orphaned processes on a GPU")
    args = parser.parse_args()
    findings = run_visible_checks(Console(stderr=args.json), args.config, args.fix, args.end_stray)
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        print_findings(findings)
    if failed := [finding.name for finding in findings if finding.status == "fail"]:
        print(f"error: not ready: {', '.join(failed)}. The remedies are above, after each →", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
