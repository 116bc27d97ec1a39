"""Checks paths in an untrusted crate: files in the user's folders, and models on this machine."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from dj2mgm.config.reading import cached_snapshot, names_folder, shown
from dj2mgm.errors import InputError
from dj2mgm.files import can_be_path
from dj2mgm.provenance.crate_files import MADE_HERE
from dj2mgm.provenance.machine import ROOT

SYSTEM = ("/proc", "/sys", "/dev", "/run")  # never data, even inside a user's folder
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
PATTERN = re.compile(r"[*?[]")  # a text with one of these characters may match several files
KEY = "crate_folders"


class OutsideError(InputError):
    """Error of a crate that names a place outside of the user's folders."""


class Places:
    """Folders that a crate's run may read.

    Links in them are the user's own, because crates contain no links, and are followed.

    Args:
        here: the folder that relative paths of the crate refer to.
        folders: further folders of the user.
    """

    def __init__(self, here: Path, folders: Sequence[Path] = ()):
        self._here = Path(os.path.abspath(here))
        self._allowed = [self._here, ROOT, *(Path(os.path.abspath(folder.expanduser())) for folder in folders)]

    def path(self, text: str) -> Path:
        """Return the absolute path, without `..`, of a path in the crate.

        Raises:
            OutsideError: it is outside of the folders, or a system file.
        """
        if not can_be_path(text):
            raise OutsideError(f"the crate names {shown(text)}, which is not a path of a file; take another crate")
        found = Path(os.path.normpath(self._here / os.path.expanduser(text)))
        if any(place.is_relative_to(folder) for place in (found, found.resolve()) for folder in SYSTEM):
            raise OutsideError(f"the crate names {found}, a file of the system; a crate may not read it")
        if not any(found.is_relative_to(folder) for folder in self._allowed):
            raise OutsideError(
                f"the crate names {found}, which is outside of the current folder; put the folder into {KEY} if the "
                "crate may read it"
            )
        return found

    def make_absolute(self, text: str) -> str:
        """Return the absolute path of a file, folder or pattern; hub ids and names without a file stay unchanged.

        Paths of the run's own results stay relative to the project of the run.

        Raises:
            OutsideError: see `path`.
        """
        if text.startswith(MADE_HERE) and os.path.normpath(text).startswith(MADE_HERE):
            return text
        path = self.path(text)
        return str(path) if path.exists() or PATTERN.search(text) else text

    def check_model(self, name: str) -> None:
        """Check that a model of the crate's run is on this machine.

        Args:
            name: a hub id, or a folder that `make_absolute` has checked.

        Raises:
            InputError: the model would have to be downloaded.
        """
        is_folder = names_folder(name) or not HUB_ID.fullmatch(name) or os.path.isdir(name)
        if not is_folder and cached_snapshot(name, "models") is None:
            raise InputError(
                f"the crate names {name}, which is not on this machine, and nothing is fetched for a crate; "
                f"`hf download {name}` fetches it"
            )

    def check_input(self, given: str, file: str) -> None:
        """Check the path of an input in a crate's record.

        Args:
            given: a file, a folder or a hub id.
            file: name in the folder or repository; empty for a file.

        Raises:
            InputError: it is outside of the allowed folders, or leads out of the folder or repository.
        """
        if file and ({"..", ""} & set(file.split("/")) or not can_be_path(f"{given}/{file}")):
            raise OutsideError(f"the crate names {shown(file)} in {given}, which leads out of it; take another crate")
        if not (file and HUB_ID.fullmatch(given) and cached_snapshot(given, "models")):
            self.path(given)
