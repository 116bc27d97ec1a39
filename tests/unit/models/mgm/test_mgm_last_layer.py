"""The last decoder layer computes its MLP only at positions that predict an answer."""

import copy

import pytest
import torch

from dj2mgm.models.loss import find_answer_positions
from tiny_models import tiny_mgm, training_batch


def rows_computed(model) -> list[int]:
    """Record the number of rows in each call of the last MLP's layers."""
    rows = []
    last = model.model.language_model.layers[-1].mlp
    last.gate_proj.register_forward_hook(lambda module, args, output: rows.append(output[..., 0].numel()))
    return rows


@pytest.mark.parametrize("family", ["gemma", "qwen2"])
def test_last_mlp_computes_answers_only_if_labels_are_given(family):
    model = tiny_mgm(family)
    batch = training_batch(model)
    rows = rows_computed(model)
    model(**batch)
    del batch["labels"]
    logits = model(**batch).logits
    assert rows == [len(find_answer_positions(training_batch(model)["labels"])), batch["input_ids"].numel()]
    torch.testing.assert_close(logits, tiny_mgm(family)(**batch).logits, rtol=0, atol=0)


def test_used_hidden_states_equal_those_of_the_full_model():
    model, batch = tiny_mgm(dtype=torch.float64), training_batch(tiny_mgm(dtype=torch.float64))
    read = find_answer_positions(batch.pop("labels"))
    expected = model.model(**batch).last_hidden_state.flatten(0, 1)
    hidden = model.model(**batch, read_positions=read).last_hidden_state.flatten(0, 1)
    torch.testing.assert_close(hidden[read], expected[read], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(hidden, expected), "nothing was left out"


def test_checkpointed_layer_skips_the_same_positions():
    model = tiny_mgm().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    rows = rows_computed(model)
    model(**training_batch(model)).loss.backward()
    assert len(rows) == 2 and rows[0] == rows[1]


def test_copied_model_uses_its_own_weights():
    model = tiny_mgm()
    batch = training_batch(model)
    loss = model(**batch).loss.item()
    twin = copy.deepcopy(model)
    twin.model.language_model.layers[-1].mlp.down_proj.weight.data.zero_()
    assert twin(**batch).loss.item() != loss
    assert model(**batch).loss.item() == loss
