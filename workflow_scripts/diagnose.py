"""Says why a stage failed, from its log: cause, evidence, remedy.

    python workflow_scripts/diagnose.py results/baseline/finetune/finetune.log

Of a stage that finished successfully it says so.

Rules call it with the exit status of a command that failed: the diagnosis is then added to the log too, and the status
is passed on.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from dj2mgm.diagnosis.diagnosis import find_cause, healthy, mistake_with_cause, no_failure, stated_mistake, unknown
from dj2mgm.diagnosis.signature import read_log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--exit-status", type=int, help="of the command that wrote the log")
    args = parser.parse_args()
    if args.exit_status is None and not args.log.is_file():
        parser.error(f"{args.log} does not exist; a stage's log lies beside its results")
    log = read_log(args.log, args.exit_status)
    if args.exit_status is None:
        said = healthy(log) or mistake_with_cause(log) or find_cause(log) or no_failure(log) or unknown(log)
        print(said, end="")
        return
    if not stated_mistake(log):
        diagnosis = f"\n{find_cause(log) or unknown(log)}"
        print(diagnosis, end="", flush=True)
        with suppress(OSError), open(args.log, "a", encoding="utf-8") as file:  # the disk may be what is at fault
            file.write(diagnosis)
    sys.exit(args.exit_status)


if __name__ == "__main__":
    main()
