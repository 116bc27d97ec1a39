"""Folders that a crate's run may read, and checks of the paths and models that a crate names."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from dj2mgm.errors import InputError, quote_value
from dj2mgm.model_files.hub_cache import find_cached_snapshot, is_folder_path
from dj2mgm.provenance.crate_files import MADE_HERE, ROOT
from dj2mgm.storage.files import can_be_path

SYSTEM_FOLDERS = ("/proc", "/sys", "/dev", "/run")  # never data, even inside a user's folder
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
PATTERN = re.compile(r"[*?[]")  # a text with one of these characters may match several files
FOLDERS_KEY = "crate_folders"


class OutsideError(InputError):
    """Error of a crate that names a path outside of the user's folders."""


class AllowedFolders:
    """Folders that a crate's run may read: `here`, which relative paths refer to, and further folders of the user.

    Links in them are followed. They are the user's own, because crates contain no links.
    """

    def __init__(self, here: Path, folders: Sequence[Path] = ()):
        self._here = Path(os.path.abspath(here))
        self._allowed = [self._here, ROOT, *(Path(os.path.abspath(folder.expanduser())) for folder in folders)]

    def resolve(self, text: str) -> Path:
        """Return the absolute path, without `..`, of a path in the crate, unless it is outside or a system file."""
        if not can_be_path(text):
            raise OutsideError(
                f"the crate names {quote_value(text)}, which is not a path of a file; take another crate"
            )
        path = Path(os.path.normpath(self._here / os.path.expanduser(text)))
        if any(candidate.is_relative_to(folder) for candidate in (path, path.resolve()) for folder in SYSTEM_FOLDERS):
            raise OutsideError(f"the crate names {path}, a file of the system; a crate may not read it")
        if not any(path.is_relative_to(folder) for folder in self._allowed):
            raise OutsideError(
                f"the crate names {path}, which is outside of the current folder; put the folder into {FOLDERS_KEY} "
                "if the crate may read it"
            )
        return path

    def make_absolute(self, text: str) -> str:
        """Return the absolute path of a file, folder or pattern; hub ids and names without a file stay unchanged.

        Paths of the run's own results stay relative to the project of the run.
        """
        if text.startswith(MADE_HERE) and os.path.normpath(text).startswith(MADE_HERE):
            return text
        path = self.resolve(text)
        return str(path) if path.exists() or PATTERN.search(text) else text

    def check_model(self, name: str) -> None:
        """Check that a model of the crate's run, a hub id or a checked folder, is on this machine."""
        is_folder = is_folder_path(name) or not HUB_NAME.fullmatch(name) or os.path.isdir(name)
        if not is_folder and find_cached_snapshot(name, "models") is None:
            raise InputError(
                f"the crate names {name}, which is not on this machine, and nothing is fetched for a crate; "
                f"`hf download {name}` fetches it"
            )

    def check_input(self, source: str, file: str) -> None:
        """Check the path of an input in a crate's record: a file, or `file` in a folder or hub id `source`."""
        if file and ({"..", ""} & set(file.split("/")) or not can_be_path(f"{source}/{file}")):
            raise OutsideError(
                f"the crate names {quote_value(file)} in {source}, which leads out of it; take another crate"
            )
        if not (file and HUB_NAME.fullmatch(source) and find_cached_snapshot(source, "models")):
            self.resolve(source)
