"""Puts the workflow's library on the path, as running a script from workflow_scripts/ does."""

import sys

from places import PROJECT

sys.path.insert(0, str(PROJECT / "workflow_scripts"))
