"""Puts the workflow's library on the path, as running a script from workflow_scripts/ does."""

import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "workflow_scripts"))
