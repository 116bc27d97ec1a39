"""A `python` whose scripts run in forks of a process that has imported torch.

    subprocess.run([forked_python(), "workflow_scripts/filter_data.py", ...])
    environment["PATH"] = f"{programs()}{os.pathsep}{environment['PATH']}"  # for Snakemake's jobs

The parent has imported libraries but none of the project's modules, which each process imports from its own folder.
A process ends with the `python` that requested it.
"""

import array
import atexit
import fcntl
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from functools import cache
from pathlib import Path

import numpy

NO_LIBRARIES = "# runs without libraries\n"  # first line of a script that a fork would only slow down
# sends scripts to the parent if it has imported libraries for them; executes Python itself otherwise
CLIENT = """#!{python} -IS
import array, json, os, socket, sys
words = [word for word in sys.argv[1:] if word != "-u"]
if words and words[0].endswith(".py"):
    with open(words[0]) as script:
        if script.readline() == {no_libraries!r}:
            sys.argv = words
            exec(script.read(), {{"__name__": "__main__"}})
            sys.exit()
if not words or words[0] != "-c" and os.path.basename(words[0]) not in {scripts!r}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
parent = socket.socket(socket.AF_UNIX)
parent.connect({address!r})
request = json.dumps({{"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}}).encode()
parent.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
parent.shutdown(socket.SHUT_WR)
status = int(parent.recv(10))
if status < 0:  # a signal ended it
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
SHARED = "DJ2MGM_TESTS_PARENT"  # id of the process that owns the parent, and the parent's folder
SCRIPTS = [
    *("train_clip.py", "train_language_model.py", "unpack_foundation.py", "assemble_model.py", "filter_data.py"),
    *("synthesize_captions.py", "pretrain.py", "finetune.py", "generate_answers.py", "answer_benchmark.py"),
    "answer_evaluation.py",
    *("evaluate_clip.py", "evaluate_vqa.py", "analyze_data.py", "doctor.py", "train_text_model.py"),
    *("compare_experiments.py", "compare_study.py", "take_look.py", "write_decision.py", "ask_trials.py"),
    *("score_trials.py", "score_mixtures.py", "score_benchmark.py", "find_leaks.py"),
    *(
        "read_evaluation.py",
        "score_evaluation.py",
        "publish_model.py",
        "publish_dataset.py",
        "export_data.py",
    ),
]


def forked_python() -> str:
    return f"{programs()}/python"


def share(folder: str) -> None:
    """Use one parent for this process and the workers that it starts; the parent ends with this process.

    Args:
        folder: empty folder with a short path.
    """
    os.environ[SHARED] = f"{os.getpid()} {folder}"


@cache
def programs() -> str:
    """Return a folder with a `python` whose parent runs; the first caller starts the parent."""
    if SHARED not in os.environ:
        share(tempfile.mkdtemp(prefix="python-"))
    owner, folder = os.environ[SHARED].split(" ", 1)
    address, client = Path(folder, "socket"), Path(folder, "python")
    with open(Path(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            client.write_text(
                CLIENT.format(python=sys.executable, scripts=SCRIPTS, address=str(address), no_libraries=NO_LIBRARIES)
            )
            client.chmod(0o755)
            parent = subprocess.Popen([sys.executable, __file__, address, owner], start_new_session=True)
            while not address.exists():
                assert parent.poll() is None, "the parent of forked scripts ended"
                time.sleep(0.05)
    return folder


def serve(address: str, owner: int) -> None:
    import_everything()
    threading.Thread(target=end_with, args=(owner,), daemon=True).start()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no waiting for children, for which `python` waits
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)  # from now on, clients can connect
        while True:
            caller, _ = listener.accept()
            if not os.fork():
                run(caller)
            caller.close()


def end_with(owner: int) -> None:
    """End this process when its owner ends."""
    try:
        select.select([os.pidfd_open(owner)], [], [])
    except ProcessLookupError:  # the owner has already ended
        pass
    os._exit(0)


def import_everything() -> None:
    # like dj2mgm.torch_environment, which is not imported here because each fork imports its own copy of the project
    os.environ.setdefault("GOMP_SPINCOUNT", "300")
    import accelerate  # noqa: F401
    import cpuinfo
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import optuna  # noqa: F401
    import peft  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import torchao.optim  # noqa: F401
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401
    from transformers import Trainer  # noqa: F401

    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    gc.collect()
    gc.freeze()


def run(caller: socket.socket) -> None:
    """Run the script in a child of the new process, and send its exit status to the caller."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    request, streams = receive(caller)
    child = os.fork()
    if not child:
        caller.close()
        run_script(request, streams)
    for descriptor in streams:
        os.close(descriptor)
    threading.Thread(target=end_with_caller, args=(caller,), daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    caller.send(str(status).encode())
    os._exit(0)


def run_script(request: dict, streams: list[int]) -> None:
    """Run a script with the streams, folder and environment of the caller."""
    status = 1
    try:
        for stream, descriptor in enumerate(streams):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        sys.stdin = open(0)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        random.seed()
        numpy.random.seed()
        sys.argv = request["words"]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        if sys.argv[0] == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # like an interpreter that ends: wait for threads, print and ignore their errors, then run the exit functions
        try:
            threading._shutdown()
        except Exception:  # of concurrent.futures, which may write to a pipe that another thread has closed
            traceback.print_exc()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def receive(caller: socket.socket) -> tuple[dict, list[int]]:
    descriptors = array.array("i")
    request, ancillary, _, _ = caller.recvmsg(1 << 20, socket.CMSG_LEN(3 * descriptors.itemsize))
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    while block := caller.recv(1 << 20):
        request += block
    return json.loads(request), list(descriptors)


def end_with_caller(caller: socket.socket) -> None:
    """Kill this process group if the calling `python` is killed."""
    poller = select.poll()
    poller.register(caller, select.POLLHUP)
    poller.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
