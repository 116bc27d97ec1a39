"""Run several scripts one after another in one process, which imports lmms-eval once.

The process fails after the last script if one of them failed.

python tests/support/run_scripts.py '[["read_evaluation.py", "--config", "…"], …]'
"""

import json
import runpy
import sys

from paths import PROJECT

if __name__ == "__main__":
    sys.path.insert(0, str(PROJECT / "workflow_scripts"))
    failed = 0
    for script, *arguments in json.loads(sys.argv[1]):
        sys.argv = [script, *arguments]
        try:
            runpy.run_path(str(PROJECT / "workflow_scripts" / script), run_name="__main__")
        except SystemExit:
            failed = 1
    sys.exit(failed)
