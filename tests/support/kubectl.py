"""Stand-in for `kubectl` and its cluster, which records Jobs and runs them as processes on this machine.

    kubectl.py create --output=name --filename=-     manifest on standard input
    kubectl.py get NAME --output=jsonpath=…          types of its conditions

Records are `<name>.yaml`, and `<name>.ended` with the exit status, in the folder $KUBECTL_NOTES. The manifest's
command runs in its workingDir; image, volumes and limits are only recorded.
"""

import os
import subprocess
import sys
from pathlib import Path

import yaml

NOTES = Path(os.environ["KUBECTL_NOTES"])


def create() -> None:
    text = sys.stdin.read()
    job = yaml.safe_load(text)
    name = f"{job['metadata']['generateName']}{len(list(NOTES.glob('*.yaml')))}"
    (NOTES / f"{name}.yaml").write_text(text)
    [container] = job["spec"]["template"]["spec"]["containers"]
    [script] = container["command"]
    run_and_note = '"$0" > "$1.log" 2>&1; echo $? > "$1.partial"; mv "$1.partial" "$1.ended"'
    subprocess.Popen(
        ["bash", "-c", run_and_note, script, str(NOTES / name)],
        cwd=container["workingDir"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(f"job.batch/{name}")


def get(name: str) -> None:
    ended = NOTES / f"{name.removeprefix('job.batch/')}.ended"
    if ended.exists():
        print("SuccessCriteriaMet Complete" if int(ended.read_text()) == 0 else "FailureTarget Failed")


if __name__ == "__main__":
    create() if sys.argv[1] == "create" else get(sys.argv[2])
