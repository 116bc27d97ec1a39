"""Entry points: the environment of the processes that they start."""

import os
import subprocess
import sys

from dj2mgm.cli.command_line import command_line


def test_processes_of_a_script_import_nothing_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    statuses = []
    run = command_line(lambda: statuses.append(subprocess.run([sys.executable, "-c", "import random"]).returncode))
    run()
    assert statuses == [0] and "PYTHONSAFEPATH" not in os.environ
