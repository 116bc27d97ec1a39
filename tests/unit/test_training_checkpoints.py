import shutil

import pytest

from errors import InputError
from training.checkpoints import discard_checkpoints, discard_finished, find_checkpoint, mark_complete

NONE = "starting from step 0: no complete checkpoint found"
FOREIGN = "starting from step 0: the checkpoint found belongs to other settings, inputs or code"


def checkpoint(folder, step: int, fingerprint: str | None = "mine", processes: int = 1):
    """A checkpoint folder; without a fingerprint it was never marked complete."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "weights").write_text("x")
    if fingerprint:
        mark_complete(path, step, fingerprint, processes)
    return path


def test_without_checkpoints_training_starts_and_says_why(tmp_path):
    assert find_checkpoint(tmp_path / "never made", "mine", 1) == (None, NONE)
    assert find_checkpoint(tmp_path, "mine", 1) == (None, NONE)


def test_the_newest_complete_checkpoint_is_used_by_number_not_by_name(tmp_path):
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


def test_a_checkpoint_of_other_settings_is_refused_with_the_reason(tmp_path):
    checkpoint(tmp_path, 100, "other")
    assert find_checkpoint(tmp_path, "mine", 1) == (None, FOREIGN)


def test_a_checkpoint_of_another_number_of_processes_is_refused_with_both_ways_out(tmp_path):
    kept = checkpoint(tmp_path, 20, processes=2)
    said = "checkpoint-20 was written by 2 processes.*set gpus: 2 to resume from step 20, or delete that folder"
    with pytest.raises(InputError, match=said):
        find_checkpoint(tmp_path, "mine", 1)
    assert find_checkpoint(tmp_path, "mine", 2)[0] == kept
    assert find_checkpoint(tmp_path, "other", 1) == (None, FOREIGN)


def test_discarding_keeps_only_what_is_asked_for_and_nothing_else_is_touched(tmp_path):
    kept = checkpoint(tmp_path, 200)
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 300, fingerprint=None)
    (tmp_path / "trainer_state.json").write_text("{}")
    discard_checkpoints(tmp_path, keep=kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-200", "trainer_state.json"]
    discard_checkpoints(tmp_path, keep=None)
    assert [path.name for path in tmp_path.iterdir()] == ["trainer_state.json"]


def test_checkpoints_of_a_stage_are_discarded_once_its_outputs_are_whole(tmp_path):
    done, unfinished = tmp_path / "done", tmp_path / "unfinished"
    for stage in (done, unfinished):
        checkpoint(stage / "checkpoints", 100)
    (done / "metrics.json").write_text("{}")
    discard_finished([done, unfinished, tmp_path / "never run"])
    assert [path.name for path in done.iterdir()] == ["metrics.json"]
    assert find_checkpoint(unfinished / "checkpoints", "mine", 1)[0]
