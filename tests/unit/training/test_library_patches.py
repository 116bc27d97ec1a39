"""Changes to third-party libraries for training are made by the entry point's call and not on import."""

import subprocess

import pytest
import torch
import transformers.trainer
from transformers.masking_utils import create_causal_mask

from dj2mgm.training import trainer
from dj2mgm.training.library_patches import apply_library_patches
from dj2mgm.training.trainer import ResumableTrainer
from forked_python import forked_python
from paths import PROJECT
from tiny_models import text_config

IMPORT_ALL = """
import cpuinfo, transformers.masking_utils, transformers.trainer
cpuinfo.get_cpu_info = cpuinfo.get_cpu_info.__wrapped__  # the forked process has cached it

def functions():
    changed = (transformers.trainer, "deepspeed_load_checkpoint"), (transformers.trainer, "skip_first_batches")
    changed += (transformers.masking_utils, "find_packed_sequence_indices"), (cpuinfo, "get_cpu_info")
    return [getattr(module, name) for module, name in changed]

before = functions()
import dj2mgm.training.stage
from dj2mgm.training.library_patches import apply_library_patches
assert functions() == before, "changed on import"
apply_library_patches()
after = functions()
assert not set(after) & set(before), "not changed"
apply_library_patches()
assert functions() == after, "changed again"
"""


@pytest.fixture
def changed(monkeypatch):
    """Apply the changes, and undo them after the test."""
    for name in ("deepspeed_load_checkpoint", "skip_first_batches"):
        monkeypatch.setattr(transformers.trainer, name, getattr(transformers.trainer, name))
    masking = transformers.masking_utils
    monkeypatch.setattr(masking, "find_packed_sequence_indices", masking.find_packed_sequence_indices)
    apply_library_patches()


def test_libraries_change_once_and_not_on_import():
    scripts = PROJECT / "workflow_scripts"
    done = subprocess.run([forked_python(), "-c", IMPORT_ALL], cwd=scripts, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_trainer_without_the_changes_is_refused(monkeypatch):
    monkeypatch.setattr(trainer, "are_patches_applied", lambda: False)
    with pytest.raises(RuntimeError, match="call apply_library_patches first"):
        ResumableTrainer(fingerprint="", global_batch_size=1)


def test_a_resumed_epoch_is_not_skipped_twice(changed):
    loader = object()
    assert transformers.trainer.skip_first_batches(loader, 3) is loader


def test_masks_are_made_without_checking_packed_sequences(changed):
    config = text_config("gemma")
    config._attn_implementation = "sdpa"
    positions = torch.zeros(1, 4, dtype=torch.long, device="meta")  # reading its values would raise an error
    embedded = torch.zeros(1, 4, config.hidden_size)
    assert (
        create_causal_mask(config, embedded, attention_mask=None, past_key_values=None, position_ids=positions) is None
    )
