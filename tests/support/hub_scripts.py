"""Scripts that use the hub, in forks of the tests' process, which has imported the hub's library."""

import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars

import fetch  # noqa: F401
import push_to_hub  # noqa: F401
from dj2mgm.cli.command_line import SWITCHES
from paths import PROJECT

FORK = multiprocessing.get_context("fork")  # a fork, because imports would take longer than the script


def run_hub_script(
    script: str, *arguments: object, folder: Path, url: str, token: str | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """Run a script in a folder with the hub at `url`; further variables of the environment are strings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= SWITCHES | {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home")}
    environment |= variables | ({"HF_TOKEN": token} if token else {})
    words = [str(PROJECT / "workflow_scripts" / script), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        streams = [output.fileno(), errors.fileno()]
        process = FORK.Process(target=_run, args=(words, folder, environment, streams))
        process.start()
        process.join(timeout=300)
        assert process.exitcode is not None, "the script does not end"
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(words, process.exitcode, output.read(), errors.read())


def _run(words: list[str], folder: Path, environment: dict[str, str], streams: list[int]) -> None:
    for stream, descriptor in enumerate(streams, start=1):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    importlib.reload(constants)  # the hub's library has read the environment when it was imported
    disable_progress_bars()
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def run_fetch(
    folder: Path, url: str, token: str | None = None, timeout: int = 10, offline: bool = False, **config: object
) -> subprocess.CompletedProcess:
    """Run fetch.py in a folder with keys of the configuration; `timeout` in seconds is the limit for one answer."""
    limits = {"HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DOWNLOAD_TIMEOUT": str(timeout)}
    return run_hub_script("fetch.py", "--config", json.dumps(config), folder=folder, url=url, token=token, **limits)
