"""Loss at supervised positions compared with the loss over all logits."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dj2mgm.models.loss import LanguageModelHead, compute_loss_and_gradient, recording_likelihoods, score_targets
from dj2mgm.models.vision_language import IGNORE_INDEX
from tiny_models import NUM_IMAGE_TOKENS, tiny_mgm, training_batch


def full_logits_loss(model, inputs: dict) -> torch.Tensor:
    """Return the loss over all logits of transformers' causal language model on the same embeddings."""
    captured = {}
    hook = model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: captured.update(kwargs), with_kwargs=True
    )
    model(**inputs)
    hook.remove()
    language = AutoModelForCausalLM.from_config(model.config.text_config).to(model.dtype).eval()
    language.model, language.lm_head = model.model.language_model, model.lm_head
    return language(
        inputs_embeds=captured["inputs_embeds"], attention_mask=inputs["attention_mask"], labels=inputs["labels"]
    ).loss


@pytest.mark.parametrize("family", ["gemma", "qwen2"])
def test_loss_and_gradients_equal_full_cross_entropy(family):
    model = tiny_mgm(family)
    inputs = training_batch(model)
    loss, reference = model(**inputs).loss, full_logits_loss(model, inputs)
    torch.testing.assert_close(loss, reference)
    trained = [*model.model.projector.parameters(), *model.model.patch_info_mining.parameters(), model.lm_head.weight]
    for a, b in zip(torch.autograd.grad(loss, trained), torch.autograd.grad(reference, trained), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_losses_of_micro_batches_sum_to_the_batchs():
    model = tiny_mgm()
    inputs = training_batch(model, rows=4)
    items = (inputs["labels"] != IGNORE_INDEX).sum()
    with torch.inference_mode():
        whole = model(**inputs).loss
        micro = [
            model(**{key: value[start:end] for key, value in inputs.items()}, num_items_in_batch=items).loss
            for start, end in ((0, 1), (1, 3), (3, 4))
        ]
    torch.testing.assert_close(sum(micro), whole)


def test_padding_has_no_effect_on_the_loss():
    model = tiny_mgm()
    inputs = training_batch(model)
    pad = torch.full((3, 5), model.config.pad_token_id)
    wider = {
        "input_ids": torch.cat([inputs["input_ids"], pad], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.zeros_like(pad)], 1),
        "labels": torch.cat([inputs["labels"], torch.full_like(pad, IGNORE_INDEX)], 1),
        "pixel_values": inputs["pixel_values"],
    }
    with torch.inference_mode():
        torch.testing.assert_close(model(**wider).loss, model(**inputs).loss)
        del inputs["attention_mask"]
        torch.testing.assert_close(model(**inputs).loss, model(**wider).loss, msg="right padding needs no mask")


def test_logits_are_computed_per_chunk_of_supervised_tokens(monkeypatch):
    monkeypatch.setattr("dj2mgm.models.loss.ROWS_AT_ONCE", 7)
    model = tiny_mgm()
    inputs = training_batch(model)
    shapes = []

    def recorded(logits, targets):
        shapes.append(tuple(logits.shape))
        return compute_loss_and_gradient(logits, targets)

    model.lm_head.loss_and_gradient = recorded
    assert model(**inputs).logits is None
    supervised, words = int((inputs["labels"] != IGNORE_INDEX).sum()), model.config.text_config.vocab_size
    assert supervised == 18 and shapes == [(7, words), (7, words), (4, words)]


@pytest.mark.parametrize("frozen", ["neither", "hidden", "weight"])
def test_head_loss_equals_pytorchs_cross_entropy(frozen, monkeypatch):
    monkeypatch.setattr("dj2mgm.models.loss.ROWS_AT_ONCE", 4)
    torch.manual_seed(0)
    head = LanguageModelHead(6, 11).double()
    hidden = torch.randn(10, 6, dtype=torch.float64)
    targets = torch.randint(0, 11, (10,))
    sources = [source for name, source in (("hidden", hidden), ("weight", head.weight)) if name != frozen]
    for source in (hidden, head.weight):
        source.requires_grad_(any(source is chosen for chosen in sources))
    own = head(hidden, targets)
    reference = torch.nn.functional.cross_entropy(head(hidden), targets, reduction="sum")
    torch.testing.assert_close(own, reference.float(), rtol=1e-6, atol=0)
    for a, b in zip(torch.autograd.grad(own / 3, sources), torch.autograd.grad(reference / 3, sources), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_batch_without_labels_has_no_loss_and_no_gradient():
    model = tiny_mgm()
    inputs = training_batch(model)
    loss = model(**{**inputs, "labels": torch.full_like(inputs["labels"], IGNORE_INDEX)}).loss
    loss.backward()
    assert loss.item() == 0.0
    assert not any(parameter.grad.any() for parameter in model.model.projector.parameters())


@pytest.mark.parametrize("change", [-1, 1, -NUM_IMAGE_TOKENS])
def test_wrong_number_of_image_tokens_is_refused(change):
    model = tiny_mgm()
    inputs = training_batch(model, rows=2)
    ids = inputs["input_ids"]
    start = 1 + NUM_IMAGE_TOKENS
    if change > 0:
        ids[0, start : start + change] = model.config.image_token_id
    else:
        ids[0, start + change : start] = 11
    with pytest.raises(ValueError, match=f"2 images need 32 image tokens in input_ids, found {32 + change}$"):
        model(**inputs)


def test_text_without_images_is_accepted():
    model = tiny_mgm()
    ids = torch.randint(10, 200, (2, 9))
    with torch.inference_mode():
        own = model(input_ids=ids, labels=ids).loss
        language = AutoModelForCausalLM.from_config(model.config.text_config).eval()
        language.model, language.lm_head = model.model.language_model, model.lm_head
        torch.testing.assert_close(own, language(input_ids=ids, labels=ids).loss)


def test_each_image_is_inserted_into_its_row():
    model = tiny_mgm()
    inputs = training_batch(model)
    with torch.inference_mode():
        together = model(**{**inputs, "labels": None}).logits
        for row in range(3):
            alone = model(**{key: value[row : row + 1] for key, value in inputs.items() if key != "labels"}).logits
            valid = inputs["attention_mask"][row].bool()
            torch.testing.assert_close(together[row][valid], alone[0][valid], rtol=1e-4, atol=1e-4)


def test_activation_checkpointing_keeps_loss_and_gradients():
    model = tiny_mgm().train()
    inputs = training_batch(model)
    trained = list(model.model.projector.parameters())
    plain = model(**inputs).loss
    expected = torch.autograd.grad(plain, trained)
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert model.model.language_model.is_activation_checkpointing
    again = model(**inputs).loss
    torch.testing.assert_close(again, plain)
    for a, b in zip(torch.autograd.grad(again, trained), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_recorded_likelihoods_follow_from_the_logits():
    model = tiny_mgm()
    inputs = training_batch(model, rows=4)
    labels = inputs["labels"]
    with torch.no_grad():
        logits = model(**{**inputs, "labels": None}).logits
    # one of the answers' tokens is the likeliest
    [(row, position), *_] = (labels != IGNORE_INDEX).nonzero().tolist()
    labels[row, position] = logits[row, position - 1].argmax()
    with recording_likelihoods(model.lm_head) as recorded:
        loss = model(**inputs).loss
    [(values, hits)] = recorded
    positions = (labels != IGNORE_INDEX).nonzero().tolist()
    expected = [logits[row, position - 1].log_softmax(-1)[labels[row, position]] for row, position in positions]
    torch.testing.assert_close(values, torch.stack(expected))
    assert hits.tolist() == [
        bool(logits[row, position - 1].argmax() == labels[row, position]) for row, position in positions
    ]
    assert hits[0] and not loss.requires_grad and loss == pytest.approx(-values.mean().item())
    assert model(**inputs).loss.requires_grad and len(recorded) == 1


def test_a_softcap_applies_to_recorded_likelihoods():
    logits, targets = 40 * torch.randn(5, 9, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 8, 3, 3, 1])
    values, _ = score_targets(logits, targets, softcap=10.0)
    assert -values.sum().item() == pytest.approx(compute_loss_and_gradient(logits, targets, 10.0)[0].item())
