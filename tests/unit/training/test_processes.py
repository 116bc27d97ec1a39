"""Values that processes of a training share before they have a process group."""

import socket
import subprocess

from forked_python import forked_python
from paths import PROJECT

SHARE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from dj2mgm.training.processes import gather_early
print(gather_early([float(os.environ["RANK"]), None]), flush=True)
sys.stdin.read()  # the first process holds the values
"""


def test_processes_exchange_their_values():
    with socket.create_server(("", 0)) as server:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [forked_python(), "-c", SHARE, PROJECT / "workflow_scripts"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    first, second = (subprocess.Popen(command, env={**variables, "RANK": rank}, **pipes) for rank in "01")
    printed = [process.communicate(timeout=120)[0] for process in (second, first)]
    assert all(text.endswith("[[0.0, None], [1.0, None]]\n") for text in printed)
