"""Items and batches of conversations: labels, truncation, padding, and refused rows."""

import pytest
import torch

from dj2mgm.data.formats import build_conversation
from dj2mgm.errors import InputError
from dj2mgm.models.mgm.mgm_family import MGMEncoder
from dj2mgm.models.vision_language import IGNORE_INDEX
from dj2mgm.storage.files import write_jsonl
from dj2mgm.training.training_data import Collator, ConversationDataset, compute_padded_width
from tiny_models import IMAGE_SIDE, NUM_IMAGE_TOKENS, save_image, tiny_mgm, tiny_processor

TEXT_ONLY = {"id": "t", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}


@pytest.fixture
def dataset(tmp_path):
    def dataset(*rows: dict, template: str = "gemma", max_length: int = 256) -> ConversationDataset:
        write_jsonl(tmp_path / "data.jsonl", rows)
        return ConversationDataset(tmp_path / "data.jsonl", MGMEncoder(tiny_processor(), template, max_length))

    return dataset


@pytest.fixture
def image(tmp_path) -> str:
    return str(save_image(tmp_path / "a b.png"))


def decode(ids: list[int]) -> str:
    processor = tiny_processor()
    text = processor.tokenizer.decode(ids)
    return text.replace(processor.image_token * NUM_IMAGE_TOKENS, "<image>")


def answered(item: dict) -> str:
    return tiny_processor().tokenizer.decode([label for label in item["labels"] if label != IGNORE_INDEX])


def test_an_item_has_the_templated_conversation_and_image(dataset, image):
    item = dataset(build_conversation("1", image, "How many?", "two"))[0]
    assert decode(item["input_ids"]) == (
        "<bos><start_of_turn>user\n<image>\nHow many?<end_of_turn>\n<start_of_turn>model\ntwo<end_of_turn>\n<eos>"
    )
    assert answered(item) == "two<end_of_turn>\n<eos>"
    assert item["pixel_values"].shape == (3, IMAGE_SIDE, IMAGE_SIDE)


def test_a_text_only_item_has_no_image(dataset):
    item = dataset(TEXT_ONLY)[0]
    assert item["pixel_values"] is None and "<image>" not in decode(item["input_ids"])


def test_a_long_conversation_is_truncated_after_its_image(dataset, image):
    row = build_conversation("1", image, "How many?", "two " * 100)
    whole, cut = dataset(row)[0], dataset(row, max_length=NUM_IMAGE_TOKENS + 40)[0]
    assert len(cut["input_ids"]) == len(cut["labels"]) == NUM_IMAGE_TOKENS + 40 < len(whole["input_ids"])
    for key in ("input_ids", "labels"):
        assert cut[key] == whole[key][: NUM_IMAGE_TOKENS + 40]
    assert cut["input_ids"].count(tiny_processor().image_token_id) == NUM_IMAGE_TOKENS


def test_truncated_conversations_and_answers_are_counted(dataset, image):
    short, long = (
        build_conversation("1", image, "How many?", "two"),
        build_conversation("2", image, "How many?", "two " * 100),
    )
    lost = build_conversation("3", image, "How many? " * 100, "two")
    length = NUM_IMAGE_TOKENS + 60
    assert dataset(short).describe_truncation() is None
    assert dataset(short, long, lost, max_length=length).describe_truncation() == (
        f"2 of 3 conversations have at least max_length ({length}) tokens and are truncated; 1 of all have no token of "
        "an answer left to learn"
    )


def test_data_without_remaining_answers_are_refused(dataset, image):
    with pytest.raises(InputError, match="no token of any answer .* raise max_length, or shorten"):
        dataset(build_conversation("3", image, "How many? " * 100, "two"), max_length=NUM_IMAGE_TOKENS + 20)


def test_a_max_length_without_room_for_text_is_refused(dataset, image):
    with pytest.raises(InputError, match=f"max_length {NUM_IMAGE_TOKENS} leaves no room .* raise it"):
        dataset(build_conversation("1", image, "Q", "A"), max_length=NUM_IMAGE_TOKENS)


@pytest.mark.parametrize(
    "values", [("<image>\nQ <|im_end|>", "A"), ("<image>\nQ", "<image>"), ("<image><image>", "A"), ("Q", "A")]
)
def test_a_row_with_control_tokens_is_refused(dataset, image, values):
    """`write_jsonl` writes no such row, but users can provide a file."""
    row = build_conversation("2", image, "Q", "A")
    for turn, value in zip(row["conversations"], values, strict=True):
        turn["value"] = value
    with pytest.raises(InputError, match="data.jsonl, row 2: .* token .*; fix or delete the row"):
        dataset(build_conversation("1", image, "Q", "A"), row)


def test_a_conversation_with_two_images_is_refused_by_row(dataset, image):
    row = build_conversation("two", "", "<image> Which is red?", "the first") | {"image": [str(image), str(image)]}
    with pytest.raises(InputError, match="row two: has 2 images, but MGM takes one"):
        dataset(row)


def test_an_empty_file_is_refused(dataset):
    with pytest.raises(InputError, match="data.jsonl: there are no conversations to train on"):
        dataset()


def test_a_batch_is_padded_right_without_labels(dataset, image):
    data = dataset(
        build_conversation("1", image, "How many objects are there?", "two"), build_conversation("2", image, "", "two")
    )
    items = [data[0], data[1]]
    pad = tiny_processor().tokenizer.pad_token_id
    longest = len(items[0]["input_ids"])
    batch = Collator(data.encoder, longest=200)(items)
    width = batch["input_ids"].shape[1]
    assert len(items[1]["input_ids"]) < longest < width == compute_padded_width(longest, 200)
    for key, filler in (("input_ids", pad), ("labels", IGNORE_INDEX)):
        assert batch[key].tolist() == [item[key] + [filler] * (width - len(item[key])) for item in items]
    assert torch.equal(batch["pixel_values"], torch.stack([item["pixel_values"] for item in items]))


def test_images_of_a_mixed_batch_keep_the_order_of_their_rows(dataset, tmp_path):
    red = build_conversation("1", str(save_image(tmp_path / "r.png", (255, 0, 0))), "Q", "A")
    blue = build_conversation("2", str(save_image(tmp_path / "b.png", (0, 0, 255))), "Q", "A")
    data = dataset(red, TEXT_ONLY, blue)
    batch = Collator(data.encoder, longest=99)([data[index] for index in range(3)])
    assert batch["pixel_values"].shape[0] == 2
    centre = batch["pixel_values"][:, :, IMAGE_SIDE // 2, IMAGE_SIDE // 2]
    assert centre[0, 0] > centre[0, 2] and centre[1, 2] > centre[1, 0]
    with torch.inference_mode():
        batch["pixel_values"] = tiny_processor().normalize_pixels(batch["pixel_values"])
        assert torch.isfinite(tiny_mgm()(**batch).loss)


def test_a_batch_of_text_alone_has_no_pixel_values(dataset):
    data = dataset(TEXT_ONLY)
    assert "pixel_values" not in Collator(data.encoder, longest=99)([data[0]])
