"""The command `fetch.py` against a hub server, with its cache in a test's folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

from dj2mgm.cli.command_line import SWITCHES
from paths import PROJECT


def run_fetch(
    folder: Path, url: str, token: str | None = None, timeout: int = 10, offline: bool = False, **config: object
) -> subprocess.CompletedProcess:
    """Run fetch.py in a folder with keys of the configuration; `timeout` in seconds is the limit for one answer."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= SWITCHES | {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(folder / "home")}
    environment |= {"HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DOWNLOAD_TIMEOUT": str(timeout)} | (
        {"HF_TOKEN": token} if token else {}
    )
    command = [sys.executable, PROJECT / "workflow_scripts/fetch.py", "--config", json.dumps(config)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
