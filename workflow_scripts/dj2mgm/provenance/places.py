"""The places that a crate of somebody else may name: files in the user's folders, and models on this machine."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from dj2mgm.config.reading import cached_snapshot, names_folder, shown
from dj2mgm.errors import InputError
from dj2mgm.files import can_be_path
from dj2mgm.provenance.crate_files import MADE_HERE
from dj2mgm.provenance.machine import ROOT

SYSTEM = ("/proc", "/sys", "/dev", "/run")  # not files of data, even if a user's folder contains them
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
PATTERN = re.compile(r"[*?[]")  # a text with one of these may name several files
KEY = "crate_folders"


class OutsideError(InputError):
    """A crate names a place outside of the user's folders."""


class Places:
    """The folders whose files a crate's run may read.

    Links in them are the user's own, since nothing of a crate is a link, and are followed.

    Args:
        here: the folder that a crate's relative paths are relative to.
        folders: others that the user names.
    """

    def __init__(self, here: Path, folders: Sequence[Path] = ()):
        self._here = Path(os.path.abspath(here))
        self._allowed = [self._here, ROOT, *(Path(os.path.abspath(folder.expanduser())) for folder in folders)]

    def path(self, text: str) -> Path:
        """Return the absolute path, without `..`, that a text of the crate stands for.

        Raises:
            OutsideError: it is outside of the folders, or a file of the system.
        """
        if not can_be_path(text):
            raise OutsideError(f"the crate names {shown(text)}, which is no path of a file; take another crate")
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
        """Return the absolute path of a file, folder or pattern; a hub id or a name without a file stays as it is.

        What the run itself makes is relative to the project of the run, and stays so, too.

        Raises:
            OutsideError: as `path` does.
        """
        if text.startswith(MADE_HERE) and os.path.normpath(text).startswith(MADE_HERE):
            return text
        path = self.path(text)
        return str(path) if path.exists() or PATTERN.search(text) else text

    def check_model(self, name: str) -> None:
        """Check that the model that a crate's run loads is on this machine.

        Args:
            name: a hub id; or a folder, which `make_absolute` has checked.

        Raises:
            InputError: it would be fetched.
        """
        is_folder = names_folder(name) or not HUB_ID.fullmatch(name) or os.path.isdir(name)
        if not is_folder and cached_snapshot(name, "models") is None:
            raise InputError(
                f"the crate names {name}, which is not on this machine, and nothing is fetched for a crate; "
                f"`hf download {name}` fetches it"
            )

    def check_input(self, given: str, file: str) -> None:
        """Check where an input of a crate's record would be read.

        Args:
            given: a file; or a folder or hub id, in which it is `file`.

        Raises:
            InputError: it is outside of the folders, or of the folder or hub id.
        """
        if file and ({"..", ""} & set(file.split("/")) or not can_be_path(f"{given}/{file}")):
            raise OutsideError(f"the crate names {shown(file)} in {given}, which leads out of it; take another crate")
        if not (file and HUB_ID.fullmatch(given) and cached_snapshot(given, "models")):
            self.path(given)
