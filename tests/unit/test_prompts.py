import pytest
from tiny_models import tiny_processor, tiny_qwen_processor

from errors import InputError
from formats.prompts import prompt_of, segments_of, stop_tokens
from mgm.processing_mgm import IGNORED

TURNS = [{"from": "human", "value": "<image>\nHow many?"}, {"from": "gpt", "value": "two"}]
MORE = [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "left"}]


def joined(segments) -> str:
    return "".join(text for text, _ in segments)


def answers(segments) -> list[str]:
    return [text for text, is_answer in segments if is_answer]


def readable_mask(segments, processor=None) -> str:
    """The conversation as the model reads it: one image token stands for all, supervised tokens are in *stars*."""
    processor = processor or tiny_processor()
    encoded = processor.encode(segments)
    parts = []
    for token, label in zip(encoded["input_ids"], encoded["labels"], strict=True):
        text = processor.tokenizer.decode([token], skip_special_tokens=False).replace("\n", "\\n")
        parts.append(text if label == IGNORED else f"*{text}*")
    text = "".join(parts).replace("**", "")
    return text.replace(processor.image_token * processor.num_image_tokens, "<image>")


def test_plain_is_the_image_the_caption_and_a_line_break():
    segments = segments_of("plain", TURNS, "<eos>")
    assert joined(segments) == "<image>two\n"
    assert answers(segments) == ["two\n"]


def test_gemma_is_the_public_mgm_format():
    segments = segments_of("gemma", TURNS, "<eos>")
    assert joined(segments) == (
        "<start_of_turn>user\n<image>\nHow many?<end_of_turn>\n<start_of_turn>model\ntwo<end_of_turn>\n<eos>"
    )


def test_gemma_repeats_for_every_turn():
    segments = segments_of("gemma", TURNS + MORE, "<eos>")
    assert joined(segments) == (
        "<start_of_turn>user\n<image>\nHow many?<end_of_turn>\n<start_of_turn>model\ntwo<end_of_turn>\n<eos>"
        "<start_of_turn>user\nWhere?<end_of_turn>\n<start_of_turn>model\nleft<end_of_turn>\n<eos>"
    )
    assert answers(segments) == ["two<end_of_turn>\n<eos>", "left<end_of_turn>\n<eos>"]


def test_loss_is_taken_on_the_answers_tokens_only():
    assert readable_mask(segments_of("plain", TURNS, "<eos>")) == "<bos><image>*two\\n*"
    assert readable_mask(segments_of("gemma", TURNS + MORE, "<eos>")) == (
        "<bos><start_of_turn>user\\n<image>\\nHow many?<end_of_turn>\\n<start_of_turn>model\\n"
        "*two<end_of_turn>\\n<eos>*"
        "<start_of_turn>user\\nWhere?<end_of_turn>\\n<start_of_turn>model\\n"
        "*left<end_of_turn>\\n<eos>*"
    )


def test_loss_is_taken_on_the_answers_tokens_only_in_qwens_format():
    mask = readable_mask(segments_of("chatml", TURNS + MORE, "<|im_end|>"), tiny_qwen_processor())
    print(mask)
    assert mask == (
        "<|im_start|>user\\n<image>\\nHow many?<|im_end|>\\n<|im_start|>assistant\\n*two<|im_end|>\\n*"
        "<|im_start|>user\\nWhere?<|im_end|>\\n<|im_start|>assistant\\n*left<|im_end|>\\n*"
    )


def test_stage_one_of_a_gemma_asks_the_pairs_own_question():
    """As the published MGM-2B was pretrained: `--version gemma` in both stages, questions restored."""
    turns = [{"from": "human", "value": "Give a brief description.\n<image>"}, {"from": "gpt", "value": "two"}]
    mask = readable_mask(segments_of("gemma", turns, "<eos>"))
    print(mask)
    assert mask == (
        "<bos><start_of_turn>user\\n<image>\\nGive a brief description.<end_of_turn>\\n<start_of_turn>model\\n"
        "*two<end_of_turn>\\n<eos>*"
    )


def test_labels_are_the_input_ids_where_they_are_not_ignored():
    encoded = tiny_processor().encode(segments_of("gemma", TURNS + MORE, "<eos>"))
    pairs = list(zip(encoded["input_ids"], encoded["labels"], strict=True))
    assert all(label in (IGNORED, token) for token, label in pairs)


@pytest.mark.parametrize(("template", "question"), [("plain", ""), ("gemma", "How many?"), ("gemma", "")])
def test_a_prompt_is_the_training_text_up_to_the_answer(template, question):
    human = {"from": "human", "value": f"<image>\n{question}" if question else "<image>"}
    segments = segments_of(template, [human, {"from": "gpt", "value": "two"}], "<eos>")
    prompt = prompt_of(template, question)
    assert joined(segments).removeprefix(prompt) == answers(segments)[0]
    processor = tiny_processor()
    encoded = processor.encode(segments)
    prompt_ids = processor.encode([(prompt, False)])["input_ids"]
    assert encoded["input_ids"][: len(prompt_ids)] == prompt_ids
    before, after = encoded["labels"][: len(prompt_ids)], encoded["labels"][len(prompt_ids) :]
    assert set(before) == {IGNORED} and IGNORED not in after


@pytest.mark.parametrize(
    ("template", "processor"),
    [("plain", tiny_processor), ("gemma", tiny_processor), ("chatml", tiny_qwen_processor)],
)
def test_generation_stops_at_a_token_that_training_put_behind_the_answer(template, processor):
    (answer,) = answers(segments_of(template, TURNS, "<eos>"))
    (stop,) = stop_tokens(template)
    assert answer.startswith(f"two{stop}")
    assert len(processor().tokenizer(stop, add_special_tokens=False).input_ids) == 1


def test_an_unknown_template_names_the_known_ones():
    with pytest.raises(InputError, match="template: unknown .* 'vicuna'; known are .*chatml.*gemma.*plain"):
        segments_of("vicuna", TURNS)
