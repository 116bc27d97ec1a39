"""Records that pages write for later commands."""

import pytest

from dj2mgm.errors import InputError
from dj2mgm.records.page_records import read_verdicts, write_verdicts
from dj2mgm.storage.files import write_json


def test_verdicts_of_another_version_are_refused(tmp_path):
    write_verdicts(tmp_path / "verdict.json", {"baseline": {"forgotten": []}})
    assert read_verdicts(tmp_path / "verdict.json") == {"baseline": {"forgotten": []}}
    write_json(tmp_path / "verdict.json", {"baseline": {"forgotten": []}})
    with pytest.raises(InputError, match="verdict.json is from another version .* delete it"):
        read_verdicts(tmp_path / "verdict.json")
