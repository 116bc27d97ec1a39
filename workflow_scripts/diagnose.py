"""Explain from a stage's log why it failed: cause, evidence, remedy.

    python workflow_scripts/diagnose.py results/shapes/tiny/baseline/finetune/finetune.log

A stage that finished successfully is reported as healthy. Rules pass the exit status of a failed command: the diagnosis
is then appended to the log too, and the script exits with that status.
"""

import sys
from contextlib import suppress
from pathlib import Path

from dj2mgm.cli.command_line import make_parser
from dj2mgm.health.diagnosis import (
    explain_input_error,
    find_cause,
    find_input_error,
    report_no_failure,
    report_success,
    report_unknown,
)
from dj2mgm.health.failure_signature import read_log


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--exit-status", type=int, help="of the command that wrote the log")
    args = parser.parse_args()
    if args.exit_status is None and not args.log.is_file():
        parser.error(f"{args.log} does not exist; a stage's log is in the folder of its results")
    log = read_log(args.log, args.exit_status)
    if args.exit_status is None:
        report = (
            report_success(log)
            or explain_input_error(log)
            or find_cause(log)
            or report_no_failure(log)
            or report_unknown(log)
        )
        print(report, end="")
        return
    if not find_input_error(log):
        diagnosis = f"\n{find_cause(log) or report_unknown(log)}"
        print(diagnosis, end="", flush=True)
        with suppress(OSError), open(args.log, "a", encoding="utf-8") as file:  # the disk may be full or faulty
            file.write(diagnosis)
    sys.exit(args.exit_status)


if __name__ == "__main__":
    main()
