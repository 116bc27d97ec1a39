"""Messages of errors about long values."""

from dj2mgm.cli.messages import note
from dj2mgm.errors import InputError, pluralize, quote_value
from dj2mgm.runs.command_messages import RowCount


def test_long_values_are_cut_in_messages(capsys):
    image = "data:image/jpeg;base64," + "A" * 200_000
    message = str(InputError(f"rows.json, row 7: {image} does not exist; write the image to a file"))
    assert len(message) < 200 and message.startswith("rows.json, row 7: data:image") and message.endswith("to a file")
    assert len(quote_value([{"caption": "many words " * 9999}])) <= 100
    note(f"1 missing; the first is {image}")
    assert len(capsys.readouterr().err) < 200


def test_a_number_has_its_noun():
    assert [pluralize(number, "row") for number in (0, 1, 1000)] == ["0 rows", "1 row", "1,000 rows"]
    assert RowCount(1, 1, is_exact=False).describe() == "at most 1 row"


def test_paths_are_shown_whole():
    path = "/data/" + "folder/" * 50 + "rows.json"
    assert str(InputError(f"{path} does not exist")) == f"{path} does not exist"
