"""Runs of Snakemake that are killed in the middle of a stage."""

import subprocess
import time
from collections.abc import Callable

import psutil

TIMEOUT_S = 600  # seconds, sufficient on a busy machine


def kill_midway(
    project,
    until: Callable[[], bool],
    *arguments: str,
    config: tuple[str, ...] = (),
    whole_tree: bool = False,
    snakemake_alone: bool = False,
    forked: bool = True,
) -> None:
    """Start Snakemake, wait until the stage is running, and kill it with SIGKILL (with or without Snakemake itself).

    A `forked` stage is a child of another process and ends with the `python` of Snakemake's job.
    """
    with open(project.folder / "killed.log", "w") as log:
        environment = project.environment(forked=forked)
        process = subprocess.Popen(
            project.command(*arguments, config=config), cwd=project.folder, env=environment, stdout=log, stderr=log
        )
        deadline = time.monotonic() + TIMEOUT_S
        while not until():
            assert process.poll() is None, (project.folder / "killed.log").read_text()[-3000:]
            assert time.monotonic() < deadline, "the stage was never killed, because the condition was not met"
            time.sleep(0.02)
        tree = psutil.Process(process.pid).children(recursive=True)
        if snakemake_alone:
            tree.clear()
        if whole_tree or snakemake_alone:
            tree.append(psutil.Process(process.pid))
        for victim in tree:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                pass
        assert process.wait(TIMEOUT_S) != 0
