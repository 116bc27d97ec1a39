"""Chat templates: labels, prompts, stop tokens, control tokens, and the tokenizer's own template."""

import shutil
from copy import deepcopy

import pytest

from dj2mgm.data.chat_template import ChatTemplate
from dj2mgm.data.formats import build_conversation
from dj2mgm.errors import InputError
from dj2mgm.models.mgm.mgm_family import MGMEncoder
from dj2mgm.models.mgm.processing_mgm import MGMProcessor
from dj2mgm.models.vision_language import IGNORE_INDEX
from dj2mgm.settings.models import check_chat_templates, list_chat_template_names, read_chat_template
from dj2mgm.settings.string_formats import CONTROL_TOKEN_PATTERN
from dj2mgm.storage.files import write_jsonl
from dj2mgm.training.training_data import ConversationDataset
from paths import PROJECT
from tiny_models import NUM_IMAGE_TOKENS, save_image, tiny_processor, tiny_qwen_processor, tiny_qwen_tokenizer

TURNS = [{"from": "human", "value": "<image>\nHow many?"}, {"from": "gpt", "value": "two"}]
MORE = [{"from": "human", "value": "Where?"}, {"from": "gpt", "value": "left"}]


def gemma_template(name: str) -> ChatTemplate:
    return ChatTemplate.load(name, tiny_processor().tokenizer)


def qwen_template(name: str) -> ChatTemplate:
    return ChatTemplate.load(name, tiny_qwen_tokenizer())


def joined(segments) -> str:
    return "".join(text for text, _ in segments)


def answers(segments) -> list[str]:
    return [text for text, is_answer in segments if is_answer]


def readable_mask(segments, processor=None) -> str:
    """Return the conversation as the model reads it, with one image token, and supervised tokens in *stars*."""
    processor = processor or tiny_processor()
    encoded = processor.encode(segments)
    parts = []
    for token, label in zip(encoded["input_ids"], encoded["labels"], strict=True):
        assert label in (IGNORE_INDEX, token)
        text = processor.tokenizer.decode([token], skip_special_tokens=False).replace("\n", "\\n")
        parts.append(text if label == IGNORE_INDEX else f"*{text}*")
    text = "".join(parts).replace("**", "")
    return text.replace(processor.image_token * processor.num_image_tokens, "<image>")


def test_only_answer_tokens_have_labels():
    assert readable_mask(gemma_template("plain").render_segments(TURNS)) == "<bos><image>*two\\n*"
    # stage 1 with `--version gemma` uses the pairs' questions, like the published MGM-2B
    asked = [{"from": "human", "value": "Give a card description.\n<image>"}, TURNS[1]]
    assert readable_mask(gemma_template("gemma").render_segments(asked)) == (
        "<bos><start_of_turn>user\\n<image>\\nGive a card description.<end_of_turn>\\n<start_of_turn>model\\n"
        "*two<end_of_turn>\\n<eos>*"
    )
    assert readable_mask(gemma_template("gemma").render_segments(TURNS + MORE)) == (
        "<bos><start_of_turn>user\\n<image>\\nHow many?<end_of_turn>\\n<start_of_turn>model\\n"
        "*two<end_of_turn>\\n<eos>*"
        "<start_of_turn>user\\nWhere?<end_of_turn>\\n<start_of_turn>model\\n"
        "*left<end_of_turn>\\n<eos>*"
    )


def test_loss_covers_only_answers_in_qwens_template():
    mask = readable_mask(qwen_template("chatml").render_segments(TURNS + MORE), tiny_qwen_processor())
    assert mask == (
        "<|im_start|>user\\n<image>\\nHow many?<|im_end|>\\n<|im_start|>assistant\\n*two<|im_end|>\\n*"
        "<|im_start|>user\\nWhere?<|im_end|>\\n<|im_start|>assistant\\n*left<|im_end|>\\n*"
    )


def test_question_is_refused_by_a_template_without_questions():
    with pytest.raises(InputError, match="template plain leaves out the question 'How many"):
        gemma_template("plain").render_prompt("How many?")


@pytest.mark.parametrize(("template", "question"), [("plain", ""), ("gemma", "How many?"), ("gemma", "")])
def test_a_prompt_equals_the_training_text_before_the_answer(template, question):
    human = {"from": "human", "value": f"<image>\n{question}" if question else "<image>"}
    segments = gemma_template(template).render_segments([human, {"from": "gpt", "value": "two"}])
    prompt = gemma_template(template).render_prompt(question)
    assert joined(segments).removeprefix(prompt) == "".join(answers(segments))
    processor = tiny_processor()
    encoded = processor.encode(segments)
    prompt_ids = processor.encode([(prompt, False)])["input_ids"]
    assert encoded["input_ids"][: len(prompt_ids)] == prompt_ids
    before, after = encoded["labels"][: len(prompt_ids)], encoded["labels"][len(prompt_ids) :]
    assert set(before) == {IGNORE_INDEX} and IGNORE_INDEX not in after


@pytest.mark.parametrize(
    ("name", "processor"),
    [("plain", tiny_processor), ("gemma", tiny_processor), ("chatml", tiny_qwen_processor)],
)
def test_generation_stops_at_end_tokens_of_training(name, processor):
    template = ChatTemplate.load(name, processor().tokenizer)
    answer = "".join(answers(template.render_segments(TURNS)))
    (stop,) = template.stop_tokens
    assert answer.startswith(f"two{stop}")
    assert len(processor().tokenizer(stop, add_special_tokens=False).input_ids) == 1


ASKED = "{% for message in messages %}{{ 'Q: ' + message.content + ' A: ' if message.role == 'user' }}"
ASKED += "{% if message.role != 'user' %}{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
ASKED += "{% endif %}{% endfor %}"


def describe_template(source: str) -> dict:
    return read_chat_template("gemma") | {"name": "mine", "chat_template": source, "stop_tokens": []}


def test_an_answer_begins_after_its_prompt():
    """The blank is not in the prompt, so the model must generate it, as in upstream LLaVA's labels."""
    tokenizer = tiny_processor().tokenizer
    prompts_end = "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
    once = ASKED.replace(" A: '", " ' + ('A: ' if not loop.last else '')")
    template = ChatTemplate.load(describe_template(once + prompts_end), tokenizer)
    assert template.render_prompt("How many?").endswith("How many? A:")
    assert answers(template.render_segments(TURNS + MORE)) == [" two<eos>", " left<eos>"]
    # marks that begin too early, inside the prompt
    early = ASKED.replace(" A: '", " '").replace("{{ message.content + eos", "{{ 'A:' + message.content + eos")
    assert answers(ChatTemplate.load(describe_template(early + prompts_end), tokenizer).render_segments(TURNS)) == [
        "two<eos>"
    ]


def test_template_with_different_prompt_in_training_is_refused():
    source = ASKED + "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
    with pytest.raises(InputError, match="template mine: its prompts and its marked answers do not match: .*'Q: .*A: "):
        ChatTemplate.load(describe_template(source), tiny_processor().tokenizer)


@pytest.mark.parametrize("end", ["", "{% if loop.last %}{{ eos_token }}{% endif %}"])
def test_template_without_end_of_every_answer_is_refused(end):
    source = read_chat_template("gemma")["chat_template"].replace(" + '<end_of_turn>\\n' + eos_token }}", f" }}}}{end}")
    assert source.count("eos_token") == end.count("eos_token")
    with pytest.raises(InputError, match="template mine: no token ends the answer 'answer'; write `eos_token` or one"):
        ChatTemplate.load(describe_template(source), tiny_processor().tokenizer)


def test_the_final_line_break_is_a_separate_token():
    """Qwen's tokenizer has a token for a full stop with a line break, which would not end generation."""
    tokenizer = deepcopy(tiny_qwen_tokenizer())
    tokenizer = tokenizer.train_new_from_iterator([["A dog.\n"] * 9], 300)
    tokenizer.eos_token = "<|im_end|>"
    assert len(tokenizer(".\n").input_ids) == 1
    processor = MGMProcessor(tiny_processor().image_processor, tokenizer, "<|image_pad|>", NUM_IMAGE_TOKENS)
    template = ChatTemplate.load("plain", tokenizer)
    turns = [TURNS[0], {"from": "gpt", "value": "A dog."}]
    assert processor.encode(template.render_segments(turns))["labels"][-1] in template.stop_ids(tokenizer)


def test_an_unknown_template_names_the_known_ones():
    with pytest.raises(InputError, match="template: unknown .* 'vicuna'; known are .*chatml.*gemma.*plain.*tokenizer"):
        gemma_template("vicuna")


def test_a_model_file_needs_known_templates_with_questions():
    model = {"pretrain_template": "plain", "template": "gemma"}
    check_chat_templates("m.yaml", model)
    names = "chatml, gemma, plain, tokenizer, found 'vicuna'; a file in config/chat_templates"
    with pytest.raises(InputError, match=f"m.yaml: 'pretrain_template' must be one of {names}"):
        check_chat_templates("m.yaml", model | {"pretrain_template": "vicuna"})
    with pytest.raises(InputError, match="m.yaml: 'template' must be one of chatml, gemma, tokenizer, found 'plain'"):
        check_chat_templates("m.yaml", model | {"template": "plain"})


def test_control_tokens_of_every_template_are_refused_in_data():
    for name in list_chat_template_names():
        content = read_chat_template(name)
        assert all(CONTROL_TOKEN_PATTERN.fullmatch(token) for token in content["control_tokens"])
        assert {token for token in content["stop_tokens"] if token.strip()} <= set(content["control_tokens"])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("asks: true", "asks: unknown key; known are asks_question, chat_template"),
        ("asks_question: maybe", "asks_question: expected true or false, found 'maybe'"),
        ("asks_question: true\nchat_template: x\nstop_tokens: []", "control_tokens: the key is missing"),
    ],
)
def test_an_error_in_a_template_file_names_the_key(tmp_path, monkeypatch, line, problem):
    folder = tmp_path / "config/chat_templates"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(line, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        read_chat_template("mine")
    assert "mine.yaml" in str(error.value) and problem in str(error.value)


# A fourth template


def phi3_processor() -> MGMProcessor:
    tokenizer = deepcopy(tiny_qwen_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|end|>"]})
    return MGMProcessor(tiny_processor().image_processor, tokenizer, "<|image_pad|>", NUM_IMAGE_TOKENS)


@pytest.fixture
def phi3(tmp_path, monkeypatch) -> str:
    """Write the documented example as a file of the current folder's config/."""
    folder = tmp_path / "config/chat_templates"
    folder.mkdir(parents=True)
    shutil.copy(PROJECT / "docs/examples/chat_template.yaml", folder / "phi3.yaml")
    monkeypatch.chdir(tmp_path)
    return "phi3"


def test_a_new_template_needs_only_one_file(phi3, tmp_path):
    processor = phi3_processor()
    row = build_conversation("1", str(save_image(tmp_path / "a.png")), "How many?", "two")
    write_jsonl(tmp_path / "data.jsonl", [row | {"conversations": row["conversations"] + MORE}])
    item = ConversationDataset(tmp_path / "data.jsonl", MGMEncoder(processor, phi3, 256))[0]
    template = ChatTemplate.load(phi3, processor.tokenizer)
    mask = readable_mask(template.render_segments(row["conversations"] + MORE), processor)
    assert mask == (
        "<|user|>\\n<image>\\nHow many?<|end|>\\n<|assistant|>\\n*two<|end|>\\n*"
        "<|user|>\\nWhere?<|end|>\\n<|assistant|>\\n*left<|end|>\\n*"
    )
    prompt = processor.encode_prompts([template.render_prompt("How many?")])["input_ids"][0].tolist()
    assert item["input_ids"][: len(prompt)] == prompt and set(item["labels"][: len(prompt)]) == {IGNORE_INDEX}
    assert item["labels"][len(prompt)] != IGNORE_INDEX
    (stop,) = template.stop_tokens
    assert processor.tokenizer.convert_tokens_to_ids(stop) in item["labels"]
    check_chat_templates("m.yaml", {"pretrain_template": phi3, "template": phi3})
    assert ChatTemplate.load(read_chat_template(phi3), processor.tokenizer) == template, "content instead of a name"


def test_control_tokens_are_refused_in_data_and_questions(tmp_path):
    template = read_chat_template("chatml") | {"control_tokens": ["[INST]"]}
    write_jsonl(tmp_path / "data.jsonl", [build_conversation("1", "a.png", "Q [INST]", "A")])
    with pytest.raises(InputError, match=r"row 1: its text contains the control token \[INST\]; fix or delete"):
        ConversationDataset(tmp_path / "data.jsonl", MGMEncoder(tiny_qwen_processor(), template, 256))
    with pytest.raises(InputError, match=r"contains the control token \[INST\]; remove it"):
        ChatTemplate.load(template, tiny_qwen_tokenizer()).render_prompt("Q [INST]")


# The tokenizer's own chat template


def own_template(source: str | None) -> ChatTemplate:
    tokenizer = deepcopy(tiny_processor().tokenizer)
    tokenizer.chat_template = source
    return ChatTemplate.load("tokenizer", tokenizer)


MARKED = read_chat_template("gemma")["chat_template"]
UNMARKED = MARKED.replace("{%- generation %}{{", "{{-").replace("{% endgeneration %}", "")


@pytest.mark.parametrize("source", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_the_tokenizers_own_template_gives_the_same_segments(source):
    own, gemma = own_template("{{- bos_token }}" + source), gemma_template("gemma")
    assert own.render_segments(TURNS + MORE) == gemma.render_segments(TURNS + MORE)
    assert own.render_prompt("How many?") == gemma.render_prompt("How many?")
    assert own.stop_tokens == gemma.stop_tokens


def test_missing_marks_or_templates_have_a_remedy():
    for source in ("{{ messages | length }}", "{{ messages[-1].content }}"):
        with pytest.raises(InputError, match="an answer cannot be determined; write the template as a file"):
            own_template(source)
    with pytest.raises(InputError, match="marks no answer; write the template as a file"):
        own_template("{% if false %}{% generation %}{% endgeneration %}{% endif %}")
    with pytest.raises(InputError, match="the model's tokenizer has no chat template; write the template as a file"):
        own_template(None)


def test_the_tokenizers_template_is_saved_with_the_model(tmp_path):
    processor = tiny_processor()
    processor.tokenizer = deepcopy(processor.tokenizer)
    processor.tokenizer.chat_template = UNMARKED
    processor.save_pretrained(tmp_path)
    loaded = MGMProcessor.from_pretrained(tmp_path)
    assert ChatTemplate.load("tokenizer", loaded.tokenizer).render_segments(TURNS) == gemma_template(
        "gemma"
    ).render_segments(TURNS)
