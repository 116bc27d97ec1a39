"""Paths of a crate are checked against the user's folders: links, system files and patterns."""

import pytest

from dj2mgm.errors import InputError
from dj2mgm.provenance.allowed_folders import AllowedFolders


def test_users_links_are_followed_except_to_system_files(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "here/data").symlink_to(tmp_path / "data")
    (tmp_path / "here/self").symlink_to("/proc/self")
    allowed_folders = AllowedFolders(tmp_path / "here")
    assert allowed_folders.make_absolute("data") == str(tmp_path / "here/data")
    with pytest.raises(InputError, match="a file of the system; a crate may not read it"):
        allowed_folders.make_absolute("self/environ")


def test_a_pattern_is_checked_without_searching_files(tmp_path, monkeypatch):
    monkeypatch.setattr("glob.iglob", lambda *_: pytest.fail("searched"))
    pattern = "/".join(["**", "*"] * 20)
    assert AllowedFolders(tmp_path).make_absolute(pattern) == f"{tmp_path}/{pattern}"
