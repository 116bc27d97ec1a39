"""Checkpoints: selection for a resume, retention, and damage."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dj2mgm.errors import InputError
from dj2mgm.training.checkpoints import (
    discard_checkpoints,
    discard_finished,
    find_checkpoint,
    find_checkpoint_before,
    mark_complete,
    read_mark,
)
from fuzzing import fuzzed

NONE = "starting from step 0: no complete checkpoint found"
FOREIGN = "starting from step 0: the checkpoint found belongs to other settings, inputs or code"
KEYS = st.sampled_from(["step", "fingerprint", "processes", "files", "seal"])
FILES = {"weights.safetensors": b"weights" * 30, "global_step/optimizer.pt": bytes(range(256)), "empty": b""}


def checkpoint(folder: Path, step: int, fingerprint: str | None = "mine", processes: int = 1) -> Path:
    """Make a checkpoint folder; without a fingerprint, it is not marked complete."""
    path = folder / f"checkpoint-{step}"
    for name, contents in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(contents)
    if fingerprint:
        mark_complete(path, step, fingerprint, processes)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_first_start_has_no_message_about_checkpoints(tmp_path):
    assert find_checkpoint(tmp_path / "never made", "mine", 1) == (None, "")
    assert find_checkpoint(tmp_path, "mine", 1) == (None, "")


def test_the_newest_checkpoint_before_a_step_is_found(tmp_path):
    older, newer = checkpoint(tmp_path, 90), checkpoint(tmp_path, 100)
    checkpoints = [find_checkpoint_before(tmp_path, step) for step in (90, 91, 100, 101)]
    assert checkpoints == [None, older, older, newer]


def test_the_newest_checkpoint_is_found_by_number(tmp_path):
    checkpoint(tmp_path, 900)
    newest = checkpoint(tmp_path, 1000)
    checkpoint(tmp_path, 50)
    assert find_checkpoint(tmp_path, "mine", 1) == (newest, "resuming from step 1000 (checkpoint-1000)")


def test_a_checkpoint_without_the_mark_is_ignored(tmp_path):
    complete = checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 200, fingerprint=None)
    assert find_checkpoint(tmp_path, "mine", 1)[0] == complete
    shutil.rmtree(complete)
    assert find_checkpoint(tmp_path, "mine", 1) == (None, NONE)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    checkpoint(tmp_path, 100, "other")
    assert find_checkpoint(tmp_path, "mine", 1) == (None, FOREIGN)


def test_another_number_of_processes_is_refused(tmp_path):
    newest = checkpoint(tmp_path, 20, processes=2)
    message = "checkpoint-20 was written by 2 processes.*Set gpus: 2 to resume from step 20, or delete .* to start over"
    with pytest.raises(InputError, match=message):
        find_checkpoint(tmp_path, "mine", 1)
    assert find_checkpoint(tmp_path, "mine", 2)[0] == newest
    assert find_checkpoint(tmp_path, "other", 1) == (None, FOREIGN)


def flip(path: Path, start: int, count: int) -> None:
    contents = bytearray(path.read_bytes())
    for index in range(start, start + count):
        contents[index % len(contents)] ^= 0xFF
    path.write_bytes(contents)


DAMAGES = {
    "changed": (
        lambda at: flip(at / "global_step/optimizer.pt", 100, 64),
        "the content of global_step/optimizer.pt was changed",
    ),
    "missing": (lambda at: (at / "weights.safetensors").unlink(), "weights.safetensors is missing"),
    "truncated": (lambda at: (at / "weights.safetensors").write_bytes(b"weights"), "has 7 bytes instead of 210"),
    "emptied": (lambda at: (at / "weights.safetensors").write_bytes(b""), "has 0 bytes instead of 210"),
    "extra": (lambda at: (at / "global_step/extra").touch(), "global_step/extra was added later"),
    "half a mark": (lambda at: flip(at / "complete.json", 5, 400), "complete.json was changed"),
    "empty mark": (lambda at: (at / "complete.json").write_bytes(b""), "complete.json was changed"),
    "another mark": (lambda at: (at / "complete.json").write_text("[]"), "complete.json was changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_renamed_and_an_older_one_used(tmp_path, damage):
    older, newest = checkpoint(tmp_path, 20), checkpoint(tmp_path, 40)
    harm, cause = DAMAGES[damage]
    harm(newest)
    taken, reason = find_checkpoint(tmp_path, "mine", 1)
    assert taken == older
    assert reason.startswith("checkpoint-40 is damaged (") and cause in reason
    assert reason.endswith("and was renamed to damaged-checkpoint-40; resuming from step 20 (checkpoint-20)")
    assert names(tmp_path) == ["checkpoint-20", "damaged-checkpoint-40"]
    assert find_checkpoint(tmp_path, "mine", 1) == (older, "resuming from step 20 (checkpoint-20)")


def test_training_starts_over_if_all_checkpoints_are_damaged(tmp_path):
    for step in (20, 40):
        flip(checkpoint(tmp_path, step) / "weights.safetensors", 0, 1)
    taken, reason = find_checkpoint(tmp_path, "mine", 1)
    assert taken is None
    assert "checkpoint-40 is damaged" in reason and "checkpoint-20 is damaged" in reason and reason.endswith(NONE)
    assert names(tmp_path) == ["damaged-checkpoint-20"]


@fuzzed(2000)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 255))
def test_a_mark_with_a_changed_byte_is_ignored(tmp_path, position, value):
    if not (tmp_path / "written").exists():
        (checkpoint(tmp_path, 20) / "complete.json").rename(tmp_path / "written")
    written = (tmp_path / "written").read_bytes()
    index = int(position * len(written))
    mark = tmp_path / "checkpoint-20/complete.json"
    mark.write_bytes(written[:index] + bytes([value]) + written[index + 1 :])
    expected = {key: part for key, part in json.loads(written).items() if key != "seal"}
    assert read_mark(mark.parent) in (None, expected)


VALUES = st.none() | st.integers(0, 9) | st.sampled_from(["", "mine", [], {}])


@fuzzed(400)
@given(st.binary(max_size=30) | (VALUES | st.dictionaries(KEYS, VALUES, max_size=3)).map(json.dumps).map(str.encode))
@example(b'{"seal": null}')
def test_a_mark_with_other_contents_is_ignored(tmp_path, contents):
    (tmp_path / "complete.json").write_bytes(contents)
    assert read_mark(tmp_path) is None


def test_discarding_keeps_two_checkpoints_and_other_files(tmp_path):
    for step in (100, 200, 300):
        checkpoint(tmp_path, step)
    newest = tmp_path / "checkpoint-300"
    checkpoint(tmp_path, 400, fingerprint=None)
    (tmp_path / "trainer_state.json").write_text("{}")
    discard_checkpoints(tmp_path, newest)
    assert names(tmp_path) == ["checkpoint-200", "checkpoint-300", "trainer_state.json"]
    discard_checkpoints(tmp_path, tmp_path / "checkpoint-200")
    assert names(tmp_path) == ["checkpoint-200", "trainer_state.json"]
    discard_checkpoints(tmp_path, newest=None)
    assert names(tmp_path) == ["trainer_state.json"]


def test_checkpoints_of_complete_stages_are_discarded(tmp_path):
    done, unfinished = tmp_path / "done", tmp_path / "unfinished"
    for stage in (done, unfinished):
        checkpoint(stage / "checkpoints", 100)
    (done / "metrics.json").write_text("{}")
    discard_finished([done, unfinished, tmp_path / "never run"])
    assert names(done) == ["metrics.json"]
    assert find_checkpoint(unfinished / "checkpoints", "mine", 1)[0]


def test_all_files_are_synced_before_the_mark_is_written(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        "dj2mgm.training.checkpoints.os.fsync", lambda file: synced.append(Path(f"/proc/self/fd/{file}").readlink())
    )
    monkeypatch.setattr("dj2mgm.training.checkpoints.write_json", lambda path, _: synced.append(path))
    path = checkpoint(tmp_path, 20)
    before = synced[: synced.index(path / "complete.json")]
    assert {path / name for name in FILES} <= set(before)
    assert before[-3:] == [path / "global_step", path, tmp_path]
    assert synced[-1] == path  # which contains the name of the mark
