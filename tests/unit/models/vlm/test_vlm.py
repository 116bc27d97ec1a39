"""Eight families of transformers' models compared with training by transformers and PEFT."""

import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, ProcessorMixin

from dj2mgm.data.formats import build_conversation, build_text_conversation, list_images
from dj2mgm.data.images import load_image
from dj2mgm.errors import InputError
from dj2mgm.models.generators import load_family
from dj2mgm.models.questions import GivenAnswer
from dj2mgm.models.trained_weights import find_language_parameters
from dj2mgm.models.tuning import wrap_with_lora
from dj2mgm.models.vision_language import IGNORE_INDEX
from dj2mgm.models.vlm.encoder import TOKEN_FIELDS, TYPE_IDS
from dj2mgm.models.vlm.vlm_family import use_chunked_loss
from dj2mgm.models.vlm.vlm_generator import TransformersGenerator
from dj2mgm.settings.training_stages import read_deepspeed
from dj2mgm.storage.files import read_json, write_jsonl, write_yaml
from dj2mgm.training.model_preparation import compile_layers
from dj2mgm.training.scoring import Scorer, read_held_out_questions
from dj2mgm.training.training_data import Collator, ConversationDataset
from finetune import prepare_stage_2
from pretrain import train_projector_only
from tiny_families import BUILDERS, LORA, save_tiny_families, save_tiny_family
from tiny_models import save_image
from trained_stages import assert_equal_outcomes, build_flags

MORE = [{"from": "human", "value": "Which color?"}, {"from": "gpt", "value": "blue"}]
SIZES = [(48, 40), (90, 60), (33, 77)]
WITHOUT_CHAT = ("paligemma",)
CHATTING = [family for family in BUILDERS if family not in WITHOUT_CHAT]
ENDS = dict.fromkeys(BUILDERS, "<|im_end|>")
# families with one, several and packed images, and with a prefix; slow runs test the others at the same points
QUICK = ("smolvlm", "qwen3_vl", "paligemma")
SOME = [family if family in QUICK else pytest.param(family, marks=pytest.mark.slow) for family in BUILDERS]
ENDS |= {"llava": "</s>", "smolvlm": "<end_of_utterance>", "gemma3": "<end_of_turn>", "paligemma": "<eos>"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return save_tiny_families(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """Write each family's rows: one image, another size with two turns, and text; or three single questions."""
    folder = tmp_path_factory.mktemp("data")
    a, b = (str(save_image(folder / f"{w}.png", (w, 30, 90), (w, h))) for w, h in ((48, 40), (90, 60)))
    two_turns = build_conversation("2", b, "How many shapes are there?", "two green triangles and one dog")
    two_turns["conversations"] += MORE
    text = {"id": "3", "conversations": MORE}
    first = build_conversation("1", a, "What is shown?", "a red circle")
    write_jsonl(folder / "conversations.jsonl", [first, two_turns, text])
    second, third = (
        build_conversation("2", b, "How many?", "two green triangles and one dog"),
        build_conversation("3", a, "", "blue"),
    )
    write_jsonl(folder / "questions.jsonl", [first, second, third])
    files = dict.fromkeys(BUILDERS, folder / "conversations.jsonl")
    return files | dict.fromkeys(WITHOUT_CHAT, folder / "questions.jsonl")


def read_training_rows(data: Path) -> list[dict]:
    return [json.loads(line) for line in data.read_text().splitlines()]


@pytest.mark.parametrize("family", BUILDERS)
def test_labels_are_answers_and_lengths_need_no_decoding(folders, data, family):
    vlm = load_family(folders[family])
    dataset = ConversationDataset(data[family], vlm.make_encoder("", 512))
    items, decode = [dataset[number] for number in range(3)], vlm.processor.tokenizer.decode
    assert list(dataset.lengths) == [len(item["input_ids"]) for item in items]
    assert list(dataset.answers) == [sum(label != IGNORE_INDEX for label in item["labels"]) for item in items]
    labelled = [decode([label for label in item["labels"] if label != IGNORE_INDEX]) for item in items]
    answers = [["a red circle"], ["two green triangles and one dog", "blue"], ["blue"]]
    if family in WITHOUT_CHAT:
        answers[1].pop()
    for text, turns in zip(labelled, answers, strict=True):
        ended = "".join(answer + ENDS[family] for answer in turns)
        assert text.replace(" ", "") == ended.replace(" ", "")
    assert all(item["input_ids"].count(vlm.config.image_token_id) > 3 for item in items[:2])


@pytest.mark.parametrize("family", CHATTING)
def test_labels_exclude_equal_text_of_the_template(folders, family):
    encoder = load_family(folders[family]).make_encoder("", 512)
    for answer in ("a", "s", "I", "", " yes.\n", "the user says: model"):
        turns = [{"from": "human", "value": f"Which {answer}?"}, {"from": "gpt", "value": answer}]
        labels = encoder.encode_row({"id": "1", "conversations": turns})["labels"]
        text = encoder.tokenizer.decode([label for label in labels if label != IGNORE_INDEX])
        assert text.strip() == answer.strip() + ENDS[family]


@pytest.mark.parametrize("family", CHATTING)
def test_the_blank_image_of_a_text_batch_does_not_change_loss(folders, data, family):
    vlm = load_family(folders[family])
    dataset = ConversationDataset(data[family], vlm.make_encoder("", 512))
    model = train_projector_only(vlm.load(torch.float32, "eager"), vlm.find_parts(vlm.load(torch.float32, "eager")))
    length = len(dataset[2]["input_ids"])
    batch = dataset.encoder.batch([dataset[2]], length)
    assert batch["input_ids"].shape == (1, length + dataset.encoder.blank_tokens)
    assert dataset.longest >= length + dataset.encoder.blank_tokens and (batch["labels"][0, length:] < 0).all()
    model(**batch).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert gradients and not any(gradient.any() for gradient in gradients)
    stock = AutoModelForImageTextToText.from_pretrained(folders[family])
    loss, count = plain_loss(stock, dataset.encoder, read_training_rows(data[family])[2], dataset[2])
    assert model(**batch).loss.item() == pytest.approx(loss.item() / count, rel=1e-5)
    nothing = dataset.encoder.batch([dataset[None]], 1)
    assert model(**nothing).loss.item() == 0


def plain_loss(model, encoder, row: dict, item: dict) -> tuple[torch.Tensor, int]:
    """Return the model's own summed loss of one row from its processor, and the number of tokens."""
    images = [Image.open(image).convert("RGB") for image in list_images(row)]
    batch = encoder._process(row, images)
    ids, labels = (torch.tensor([item[name]]) for name in ("input_ids", "labels"))
    assert torch.equal(ids, batch.pop("input_ids"))
    count = int((labels[:, 1:] != IGNORE_INDEX).sum())
    return model(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids), **batch).loss * count, count


@pytest.mark.parametrize("family", BUILDERS)
def test_lora_losses_equal_transformers_and_peft(folders, data, family):
    """Compare a padded batch and the loss in chunks with the model's own loss row by row."""
    vlm, rows = load_family(folders[family]), read_training_rows(data[family])
    dataset = ConversationDataset(data[family], vlm.make_encoder("", 512))
    model = vlm.load(torch.float32, "eager")
    wrapped_model = wrap_with_lora(model, LORA, vlm.find_parts(model).decoder, projector=False).train()
    stock = AutoModelForImageTextToText.from_pretrained(folders[family])
    [within] = [name for name, module in stock.named_modules() if module is stock.get_decoder()]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=rf"{within}\..*\.(q_proj|v_proj)")
    plain = get_peft_model(stock, config).train()
    plain.load_state_dict(wrapped_model.state_dict())

    def losses(wrapped, loss) -> list[float]:
        optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-2)
        values = []
        for _ in range(5):
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            values.append(value.item())
        return values

    batch = Collator(dataset.encoder, max(dataset.lengths))([dataset[number] for number in range(3)])

    def one_by_one() -> torch.Tensor:
        parts = [plain_loss(plain, dataset.encoder, row, dataset[number]) for number, row in enumerate(rows)]
        return sum(loss for loss, _ in parts) / sum(count for _, count in parts)

    expected = losses(plain, one_by_one)
    assert losses(wrapped_model, lambda: wrapped_model(**batch).loss) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    trained = {name for name, parameter in wrapped_model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 8 and all(".layers." in name and "lora_" in name for name in trained)


@pytest.mark.parametrize("family", CHATTING)
def test_several_images_keep_their_positions(folders, tmp_path, family):
    """Compare images in several turns, batched with another row, with the model's own loss row by row."""
    paths = [str(save_image(tmp_path / f"{n}.png", (80 * n, 30, 90), size)) for n, size in enumerate(SIZES)]
    turns = build_conversation("", "", "of the picture, and <image> which color is it?", "blue")["conversations"]
    more = build_conversation("", "", "How many shapes are there?", "two green triangles")["conversations"]
    several = {"id": "1", "image": paths, "conversations": [*turns, *more]}
    rows = [several, build_conversation("2", paths[1], "What is shown?", "a red circle")]
    write_jsonl(tmp_path / "data.jsonl", rows)
    vlm = load_family(folders[family])
    dataset = ConversationDataset(tmp_path / "data.jsonl", vlm.make_encoder("", 2048))
    items = [dataset[0], dataset[1]]
    assert list(dataset.lengths) == [len(item["input_ids"]) for item in items]
    text = vlm.processor.tokenizer.decode(items[0]["input_ids"])
    assert text.index("picture") < text.index("color") < text.index("blue") < text.index("shapes are there")
    batch = Collator(dataset.encoder, max(dataset.lengths))(items)
    stock = AutoModelForImageTextToText.from_pretrained(folders[family])
    parts = [plain_loss(stock, dataset.encoder, row, item) for row, item in zip(rows, items, strict=True)]
    expected = sum(loss for loss, _ in parts) / sum(count for _, count in parts)
    assert vlm.load(torch.float32, "eager")(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("family", SOME)
def test_logits_equal_transformers(folders, data, family):
    vlm = load_family(folders[family])
    dataset = ConversationDataset(data[family], vlm.make_encoder("", 512))
    batch = Collator(dataset.encoder, max(dataset.lengths))([dataset[0]])
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "answer_positions")}
    stock = AutoModelForImageTextToText.from_pretrained(folders[family]).eval()
    with torch.inference_mode():
        own = vlm.load(torch.float32, "eager").eval()(**inputs).logits
        torch.testing.assert_close(own, stock(**inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", SOME)
def test_images_in_the_weights_dtype_do_not_change_the_loss(folders, data, family):
    vlm = load_family(folders[family])
    dataset = ConversationDataset(data[family], vlm.make_encoder("", 512))
    items, longest = [dataset[number] for number in range(3)], max(dataset.lengths)
    model = vlm.load(torch.bfloat16, "eager").eval()
    uncast, cast = (Collator(dataset.encoder, longest, dtype)(items) for dtype in (torch.float32, torch.bfloat16))
    assert cast["pixel_values"].dtype == torch.bfloat16 != uncast["pixel_values"].dtype
    with torch.inference_mode():
        assert torch.equal(model(**cast).loss, model(**uncast).loss)


@pytest.mark.parametrize("family", BUILDERS)
def test_stage_1_trains_the_whole_connector(folders, data, family):
    """The connector comprises everything except the towers and the language model."""
    vlm = load_family(folders[family])
    model = vlm.load(torch.float32, "eager")
    parts = vlm.find_parts(model)
    model = train_projector_only(model, parts)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    decoder = model.get_decoder()
    [tower] = {name for name, module in model.named_modules() if module is model.get_encoder(modality="image")}
    language = {id(parameter) for parameter in (*decoder.parameters(), *model.lm_head.parameters())}
    rest = {name for name, parameter in model.named_parameters() if id(parameter) not in language}
    assert {name for name in rest if not name.startswith(f"{tower}.")} == trained - {
        n for n in trained if "merger" in n
    }
    assert {id(parameter) for parameter in find_language_parameters(model).values()} == language
    dataset = ConversationDataset(data[family], vlm.make_encoder("", 512))
    batch = Collator(dataset.encoder, max(dataset.lengths))([dataset[number] for number in range(3)])
    model(**batch).loss.backward()
    gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == gradients != set()


@pytest.mark.parametrize(
    ("family", "deepspeed"),
    [
        pytest.param("qwen2_5_vl", "zero2", marks=pytest.mark.slow),
        ("smolvlm", "zero3_offload"),
        pytest.param("gemma3", "adamw_8bit", marks=pytest.mark.slow),
        pytest.param("paligemma", "zero2", marks=pytest.mark.slow),
    ],
)
def test_killed_fine_tune_resumes_and_loads_in_peft(folders, data, forks, tmp_path, family, deepspeed):
    settings = {"deepspeed": read_deepspeed(deepspeed, "finetune"), "max_length": 512, "max_steps": 4, "epochs": 4}
    settings["lora"] = {"r": 64, "alpha": 64, "dropout": 0.0, "targets": LORA.targets}
    settings |= {"projector_learning_rate": None, "global_batch_size": 3, "gradient_accumulation_steps": 3}

    def command(output: Path) -> dict:
        flagged = build_flags(folders[family], output, "LoRA", **settings) | {
            "--data": data[family],
            "--model": folders[family],
        }
        return {flag: value for flag, value in flagged.items() if flag != "--projector"}

    ended = forks.run("finetune.py", command(tmp_path / "undisturbed"))
    assert ended.ok, ended.printed[-3000:]
    assert forks.run("finetune.py", command(tmp_path / "killed"), kill_at=3).statuses == [-9]
    ended = forks.run("finetune.py", command(tmp_path / "killed"))
    assert ended.ok and "resuming from step 2" in ended.printed, ended.printed[-3000:]
    assert_equal_outcomes(tmp_path / "killed", tmp_path / "undisturbed")
    stock = AutoModelForImageTextToText.from_pretrained(folders[family])
    dataset = ConversationDataset(data[family], load_family(folders[family]).make_encoder("", 512))
    with torch.no_grad():  # a step has all rows, one per micro batch, and one loss over all their tokens
        parts = [
            plain_loss(stock, dataset.encoder, row, dataset[n])
            for n, row in enumerate(read_training_rows(data[family]))
        ]
    first = read_json(tmp_path / "killed/metrics.json")["loss_first"]
    assert first == pytest.approx(float(sum(loss for loss, _ in parts) / sum(count for _, count in parts)), rel=1e-3)
    assert not (tmp_path / "killed/projector.safetensors").exists()

    adapted = PeftModel.from_pretrained(stock, tmp_path / "killed/adapter")
    saved = load_file(tmp_path / "killed/adapter/adapter_model.safetensors")
    loaded = {name.replace(".default", ""): value for name, value in adapted.state_dict().items() if "lora_" in name}
    assert saved.keys() == loaded.keys()
    assert all(torch.allclose(saved[name].float(), loaded[name].float()) for name in saved)


@pytest.mark.slow
def test_layers_are_compiled_once_for_batches_of_any_size(folders, data, monkeypatch):
    # Dynamo and AOTAutograd determine the graphs; Inductor would only compile C++ for them
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    vlm, gradients = load_family(folders["qwen3_vl"]), []
    dataset = ConversationDataset(data["qwen3_vl"], vlm.make_encoder("", 512))
    for compiled in (False, True):
        model = vlm.load(torch.float32, "sdpa")
        parts = vlm.find_parts(model)
        torch.manual_seed(0)
        wrapped = wrap_with_lora(model, LORA, parts.decoder, projector=False).train()
        if compiled:
            torch._dynamo.utils.counters.clear()
            compile_layers(parts)
        for numbers in ([0, 1], [0, 1, 2], [1, 2]):
            batch = Collator(dataset.encoder, max(dataset.lengths))([dataset[number] for number in numbers])
            wrapped(**batch).loss.backward()
        gradients.append({name: p.grad for name, p in wrapped.named_parameters() if p.grad is not None})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "both layers, and the loss"
    torch.testing.assert_close(*gradients)


def test_a_model_that_scales_its_logits_is_refused(folders):
    model = AutoModelForImageTextToText.from_pretrained(folders["llava"])
    model.config.text_config.logits_scaling = 4.0
    with pytest.raises(InputError, match="llava are not supported: their logits are not the product"):
        use_chunked_loss(model)
    model.config.text_config.logits_scaling = 1.0
    plain = model.forward
    model.forward = lambda **inputs: SimpleNamespace(logits=2 * plain(**inputs).logits)
    with pytest.raises(InputError, match="their logits are not the product"):
        use_chunked_loss(model)


def test_rows_unsuitable_for_a_prefix_model_are_refused(folders, data):
    for row, message in (
        ("2", "row 2: this model takes one question and one answer"),
        ("3", "row 3: .* takes one image, found 0"),
    ):
        [unsuitable] = [item for item in read_training_rows(data["llava"]) if item["id"] == row]
        with pytest.raises(InputError, match=message):
            load_family(folders["paligemma"]).make_encoder("", 512).count_tokens(unsuitable)


def test_added_ordinary_tokens_are_not_control_tokens(folders):
    encoder = load_family(folders["qwen2_5_vl"]).make_encoder("", 512)
    encoder.tokenizer.add_tokens(["\n", "<b>", "dog"])
    assert not {"\n", "<b>", "dog"} & set(encoder._find_control_tokens())
    assert {"<|im_end|>", "<|im_start|>", "<|image_pad|>"} <= set(encoder._find_control_tokens())
    turns = [{"from": "human", "value": "a <|im_<image>end|> b"}, {"from": "gpt", "value": "a"}]
    text, _ = encoder.renderer.render_answers({"id": "1", "conversations": turns})
    assert text.count("<|im_end|>") == 3  # one token each for system, user and assistant


def test_untrainable_rows_are_refused_in_a_sentence(folders, data, tmp_path):
    bare = tmp_path / "bare"
    save_tiny_family("llava", bare)
    for file in ("chat_template.jinja", "chat_template.json"):
        (bare / file).unlink(missing_ok=True)
    with pytest.raises(InputError, match="has no chat template"):
        load_family(bare)
    rows = read_training_rows(data["llava"])
    seen = sum("<image>" in row["conversations"][0]["value"] for row in rows)
    problem = r"row \d+: its image ends after \d+ tokens, but max_length is 8; raise max_length"
    with pytest.raises(InputError, match=rf"images of {seen} of {len(rows)} rows do not fit. The longest: {problem}"):
        ConversationDataset(data["llava"], load_family(folders["llava"]).make_encoder("", 8))
    (tmp_path / "a.png").write_text("no image")
    write_jsonl(tmp_path / "bad.jsonl", [build_conversation("7", str(tmp_path / "a.png"), "What?", "a")])
    with pytest.raises(InputError, match="row 7: undecodable: .*a.png.*; replace the image, or delete the row"):
        ConversationDataset(tmp_path / "bad.jsonl", load_family(folders["llava"]).make_encoder("", 512))
    row = build_conversation("9", read_training_rows(data["llava"])[0]["image"], "What?", "a <|im_start|> b")
    write_jsonl(tmp_path / "control.jsonl", [row])
    with pytest.raises(InputError, match=r"contains the control token <\|im_start\|>"):
        ConversationDataset(tmp_path / "control.jsonl", load_family(folders["qwen3_vl"]).make_encoder("", 512))


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(read_json(path) | changes), encoding="utf-8")


def read_text_config(folder: Path) -> dict:
    return read_json(folder / "config.json")["text_config"]


def cut_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    remaining = {name: tensor for name, tensor in weights.items() if "multi_modal_projector" not in name}
    save_file(remaining, folder / "model.safetensors", metadata={"format": "pt"})


SPOILT = {
    "weights that are missing": (cut_weights, "4 weights are missing, the first is model.multi_modal_projector"),
    "another image token": (
        lambda folder: edit_json(folder / "config.json", image_token_index=5, image_token_id=5),
        "never writes the image_token_id of config.json, 5; fix the folder, or download it again",
    ),
    "a template that asks nothing": (
        lambda folder: (folder / "chat_template.jinja").write_text("hello"),
        "start of an answer cannot be found",
    ),
    "weights of another shape": (
        lambda folder: edit_json(folder / "config.json", text_config=read_text_config(folder) | {"hidden_size": 32}),
        "cannot be used",
    ),
    "an adapter": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "contains an adapter"),
    "a kernel of a hub": (
        lambda folder: edit_json(folder / "config.json", attn_implementation="owner/kernel"),
        "attn_implementation is 'owner/kernel'; delete it",
    ),
    "a template with a mistake": (
        lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"),
        "its chat template cannot be rendered .*; fix the folder, or download it again",
    ),
    "a template without an image": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages[0]['content'][-1]['text'] }}"),
        "writes no <image> for its image|start of an answer cannot be found",
    ),
    "no processor": (lambda folder: (folder / "processor_config.json").unlink(), "cannot be used"),
    "shards elsewhere": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../a.safetensors"}}'
        ),
        "weight_map must name files of this folder",
    ),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_an_unusable_folder_is_refused_in_a_sentence(fault, tmp_path):
    spoil, message = SPOILT[fault]
    save_tiny_family("llava", tmp_path)
    spoil(tmp_path)
    with pytest.raises(InputError, match=message):
        family = load_family(tmp_path)
        family.make_encoder("", 512)
        family.load(torch.float32, "eager")


def test_invalid_questions_are_refused_in_a_sentence(folders):
    encoder = load_family(folders["qwen2_5_vl"]).make_encoder("", 512)
    with pytest.raises(InputError, match=r"contains the control token <\|image_pad\|>; remove the token"):
        encoder.encode_prompts(["<|image_pad|>"], ["What is <|image_pad|>?"])
    with pytest.raises(InputError, match="an image of .*1, 5000.* pixels cannot be processed: .*; delete its rows"):
        encoder.process_image(Image.new("RGB", (1, 5000)))


def build_processor_turns(processor, image: Image.Image, question: str):
    if not processor.chat_template:
        return processor(images=image, text=f"<image>{question}", return_tensors="pt")
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


@pytest.mark.parametrize("family", BUILDERS)
def test_prompts_equal_those_of_the_processor(folders, tmp_path, family):
    vlm = load_family(folders[family])
    encoder, picture = vlm.make_encoder("", 512), Image.new("RGB", SIZES[1])
    prompt = encoder.encode_prompts([encoder.process_image(picture)[1]], ["What is shown?"])
    expected = build_processor_turns(vlm.processor, picture, "What is shown?")
    assert {name: values.tolist() for name, values in prompt.items()} == {
        name: values.tolist() for name, values in expected.items() if name in ("input_ids", "attention_mask", *TYPE_IDS)
    }


@pytest.mark.parametrize("family", BUILDERS)
def test_answers_of_a_batch_equal_those_of_generate(folders, tmp_path, family):
    paths = [save_image(tmp_path / f"{n}.png", (90 * n, 30, 90), size) for n, size in enumerate(SIZES)]
    about, questions = [0, 1, 1, 2], ["What is shown?", "Which color is it?", "", "How many shapes are there?"]
    vlm = load_family(folders[family])
    generator = vlm.make_generator(None, "cpu")
    ends = generator.encoder.tokenizer.convert_ids_to_tokens(generator.stops)
    assert ENDS[family] in ends and len(ends) < 4, "answers end with the end tokens of training"
    answers = list(generator.answer([paths[n] for n in about], questions, "", max_new_tokens=6, batch_size=4))
    stock = AutoModelForImageTextToText.from_pretrained(folders[family]).eval()
    for number, question, answer in zip(about, questions, answers, strict=True):
        inputs = build_processor_turns(vlm.processor, Image.open(paths[number]), question)
        generated = stock.generate(
            **inputs, max_new_tokens=6, do_sample=False, eos_token_id=generator.stops, pad_token_id=0
        )
        text = vlm.processor.tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == text.strip()


def test_rows_that_do_not_fit_together_are_halved(folders, tmp_path, monkeypatch, capsys):
    """A GPU's memory holds two rows at a time here; one image in the tower."""
    paths = [save_image(tmp_path / f"{n}.png", (90 * n, 200, 90), (48, 40)) for n in range(3)]
    about, questions = [0, 1, 2, 0, 1], [f"Is it {word}?" for word in ("red", "blue", "green", "large", "round")]
    images = [paths[number] for number in about]

    def run(generator) -> list:
        answers = list(generator.answer(images, questions, "", max_new_tokens=6, batch_size=5))
        likelihoods = list(generator.compute_log_likelihoods(images, questions, answers, ""))
        return [answers, [*map(len, likelihoods)], list(generator.generate_candidates(paths, "", "", 2, 4, 3))]

    expected = run(load_family(folders["qwen3_vl"]).make_generator(None, "cpu"))
    generator = load_family(folders["qwen3_vl"]).make_generator(None, "cpu")
    for name, most in (("_answer_rows", 2), ("_measure_rows", 2), ("_search_beams", 2), ("_encode", 1)):
        method = getattr(generator, name)

        def fail(rows, *args, method=method, most=most, **kwargs):
            if len(rows) > most:
                raise torch.OutOfMemoryError
            return method(rows, *args, **kwargs)

        monkeypatch.setattr(generator, name, fail)
    actual = run(generator)
    assert actual[:2] == expected[:2]
    texts = [[[text for text, _ in candidates] for candidates in result[2]] for result in (actual, expected)]
    assert texts[0] == texts[1] and "GPU memory is too small for 3 rows together" in capsys.readouterr().err


def test_images_get_the_memory_of_earlier_answers(folders, tmp_path, monkeypatch, capsys):
    """A GPU keeps keys and values for the next answers, until its memory is too small for the next images."""
    paths = [save_image(tmp_path / f"{n}.png", (90 * n, 200, 90), (48, 40)) for n in range(20)]
    generator = load_family(folders["qwen3_vl"]).make_generator(None, "cpu")
    expected = list(generator.answer(paths, ["What?"] * 20, "", max_new_tokens=3, batch_size=4))
    generator._cache.clear()
    encode = generator._encode

    def encode_in_free_memory(images: list) -> list:
        if generator._search._step:
            raise torch.OutOfMemoryError
        return encode(images)

    monkeypatch.setattr(generator, "_encode", encode_in_free_memory)
    assert list(generator.answer(paths, ["What?"] * 20, "", max_new_tokens=3, batch_size=4)) == expected
    assert "memory is too small" not in capsys.readouterr().err


@pytest.mark.parametrize("family", SOME)
def test_images_are_encoded_once_with_the_same_answers(folders, tmp_path, monkeypatch, family):
    paths = [save_image(tmp_path / f"{n}.png", (90 * n, 30, 90), size) for n, size in enumerate(SIZES[:2])]
    about, questions = [0, 1, 0, 1, 0], ["What is shown?", "Which color is it?", "How many?", "", "Where is the dog?"]
    images, processed = [paths[n] for n in about], []
    generator = load_family(folders[family]).make_generator(None, "cpu")
    process_image = generator.encoder.process_image
    monkeypatch.setattr(
        generator.encoder, "process_image", lambda image: processed.append(image) or process_image(image)
    )
    answers = list(generator.answer(images, questions, "", max_new_tokens=6, batch_size=2))
    assert list(generator.answer(images[::-1], questions[::-1], "", max_new_tokens=6, batch_size=5)) == answers[::-1]
    assert len(processed) == len(paths)

    monkeypatch.setattr(type(generator.model), "_supports_mm_encoder_outputs", lambda self: False)
    without_features = load_family(folders[family]).make_generator(None, "cpu")
    assert list(without_features.answer(images, questions, "", max_new_tokens=6, batch_size=2)) == answers


@pytest.mark.parametrize("family", SOME)
def test_processed_images_have_the_type_of_the_model(folders, tmp_path, family):
    """They pass through a pipe between two processes, so they take two bytes a number in bf16, and masks take one."""
    path = save_image(tmp_path / "a.png", (90, 30, 90), SIZES[1])
    generator = load_family(folders[family]).make_generator(None, "cpu")
    expected = generator._process(path).inputs
    generator.model.bfloat16()
    for name, array in generator._process(path).inputs.items():
        assert array.itemsize == {"i": array.itemsize, "b": 1}.get(expected[name].dtype.kind, 2)
        values = torch.from_numpy(expected[name])
        assert generator._unpack(array).equal(values.bfloat16() if values.is_floating_point() else values)


def test_an_images_text_is_tokenized_once_for_all_prompts(folders):
    encoder = load_family(folders["smolvlm"]).make_encoder("", 512)
    replacement = encoder.process_image(Image.new("RGB", SIZES[1]))[1]
    encoder._tokenize_replacement.cache_clear()
    encoder.tokenize_prompts([replacement] * 3, ["What is shown?", "", "Where?"])
    assert encoder._tokenize_replacement.cache_info()[:2] == (2, 1)  # hits, misses


@pytest.mark.parametrize("family", BUILDERS)
def test_answers_without_an_image_equal_generate_on_text(folders, family):
    questions = ["Which color is it?", "How many shapes are there?"]
    vlm = load_family(folders[family])
    generator, tokenizer = vlm.make_generator(None, "cpu"), vlm.processor.tokenizer
    answers = list(generator.answer([None, None], questions, "", max_new_tokens=6, batch_size=2))
    stock = AutoModelForImageTextToText.from_pretrained(folders[family]).eval()
    for question, answer in zip(questions, answers, strict=True):
        if vlm.processor.chat_template:
            turns = [{"role": "user", "content": [{"type": "text", "text": question}]}]
            text = vlm.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            bos = tokenizer.bos_token
            inputs = tokenizer(text, add_special_tokens=not (bos and text.startswith(bos)), return_tensors="pt")
        else:  # PaliGemma needs an image
            inputs = build_processor_turns(vlm.processor, Image.new("RGB", (56, 56)), question)
        generated = stock.generate(
            **inputs, max_new_tokens=6, do_sample=False, eos_token_id=generator.stops, pad_token_id=0
        )
        text = tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == text.strip()


@pytest.mark.parametrize("beams", [1, 3])
def test_candidates_have_their_log_likelihoods(folders, tmp_path, beams):
    """Compare with the log-likelihoods from the model's logits."""
    vlm = load_family(folders["qwen2_5_vl"])
    generator, path = vlm.make_generator(None, "cpu"), save_image(tmp_path / "a.png", (9, 200, 90), (48, 40))
    [candidates] = generator.generate_candidates([path], "What is shown?", "", beams, max_new_tokens=4, batch_size=2)
    inputs = build_processor_turns(vlm.processor, Image.open(path), "What is shown?")
    limits = {"max_new_tokens": 4, "num_beams": beams, "num_return_sequences": beams, "eos_token_id": generator.stops}
    sequences = generator.model.generate(**inputs, **limits, do_sample=False, pad_token_id=0)
    width, values = inputs["input_ids"].shape[1], {}
    for row in sequences:
        more = {"attention_mask": torch.ones_like(row[None]), "input_ids": row[None]}
        more["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(row) - width))
        with torch.inference_mode():
            logits = generator.model(**{**inputs, **more}).logits.log_softmax(dim=-1)[0, width - 1 : -1]
        text = vlm.processor.tokenizer.decode(row[width:], skip_special_tokens=True).strip()
        values.setdefault(text, logits.gather(1, row[width:, None]).sum().item())
    assert dict(candidates) == pytest.approx(values, rel=1e-4)


def test_likelihood_of_a_caption_ignores_longer_captions(folders, tmp_path):
    generator = load_family(folders["qwen2_5_vl"]).make_generator(None, "cpu")
    torch.manual_seed(0)
    for parameter in generator.model.parameters():  # makes captions differ
        parameter.data += 0.2 * torch.randn_like(parameter)
    paths = [save_image(tmp_path / f"{n}.png", (90 * n, 30, 90), size) for n, size in enumerate(SIZES)]
    captions = [candidates[0][0] for candidates in generator.generate_candidates(paths, "", "", 1, 6, 3)]
    tokens = [generator.encoder.tokenizer(text)["input_ids"] for text in captions]
    generator.stops = [next(token for token in tokens[0] if token not in tokens[1])]

    def ask(batch_size: int) -> list[tuple[str, float]]:
        return [candidates[0] for candidates in generator.generate_candidates(paths, "", "", 1, 6, batch_size)]

    assert len(ask(1)[0][0]) < len(captions[0])
    end = generator.encoder.tokenizer.decode(generator.stops).strip()
    assert end and not ask(1)[0][0].endswith(end), "the token that ends a caption is no part of it"
    for (text, alone), (same, batched) in zip(ask(1), ask(3), strict=True):
        assert text == same and batched == pytest.approx(alone, abs=1e-4)


HARD = ["3", "5", '"a"', "(b)"]  # tokenizers do not merge these with the preceding blank


@pytest.mark.parametrize("family", BUILDERS)
def test_answers_are_trained_after_their_generation_prompt(folders, tmp_path, family):
    encoder = load_family(folders[family]).make_encoder("", 512)
    image = save_image(tmp_path / "a.png", "red", (90, 40))
    replacement = encoder.process_image(load_image(image))[1]
    prompt = encoder.encode_prompts([replacement], [" What is shown?\n"])["input_ids"][0].tolist()
    for answer in ("a red circle", *HARD):
        row = build_conversation("1", str(image), " What is shown?\n", answer)
        item = encoder.encode_row(row)
        begin = next(position for position, label in enumerate(item["labels"]) if label != IGNORE_INDEX)
        assert item["input_ids"][:begin] == prompt
        text = encoder.encode_text(row, replacement)
        assert text == {name: values for name, values in item.items() if name in TOKEN_FIELDS}


@pytest.mark.parametrize("family", SOME)
def test_learned_answers_are_generated(folders, tmp_path, family):
    """Every token from the prompt to the end of an answer is learned, with any text before the answer."""
    vlm, questions = (
        load_family(folders[family]),
        ["What is shown?", "Which color?", "How many shapes?", "Which one?"],
    )
    encoder = vlm.make_encoder("", 512)
    images = [str(save_image(tmp_path / f"{n}.png", (60 * n, 30, 90), (40, 40))) for n in range(len(HARD))]
    rows = [build_conversation(str(n), *parts) for n, parts in enumerate(zip(images, questions, HARD, strict=True))]
    items = [encoder.encode_row(row) for row in rows]
    batch = Collator(encoder, max(len(item["input_ids"]) for item in items))(items)
    model = vlm.load(torch.float32, "sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    stock = AutoModelForImageTextToText.from_pretrained(folders[family])
    stock.load_state_dict(model.state_dict())
    generator = TransformersGenerator(stock, encoder)
    assert list(generator.answer(images, questions, "", max_new_tokens=8, batch_size=4)) == HARD
    answers = [GivenAnswer(n, "What is shown?", answer) for n, answer in enumerate(HARD)]
    values = generator.compute_answer_log_likelihoods(images, answers, "")
    labels = [item["labels"] for item in items]
    assert [len(row) for row in values] == [len(row) - row.count(IGNORE_INDEX) for row in labels]


# text before an answer: a blank, two line breaks (split by GPT-2's pattern before a word), none
LEADS = {"a blank": "Assistant: ", "two line breaks": "Assistant:\n\n", "nothing": "Assistant"}


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("family", ["llava", "smolvlm"])
def test_mergeable_prompt_tokens_are_kept(folders, tmp_path, family, lead):
    shutil.copytree(folders[family], tmp_path / "model")
    template = (
        "{% for message in messages %}{{ 'LEAD' if message['role'] == 'assistant' else 'User: ' }}"
        "{% for c in message['content'] %}{{ c['text'] if c['type'] == 'text' else '<image>' }}{% endfor %}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'LEAD' }}{% endif %}"
    )
    (tmp_path / "model/chat_template.jinja").write_text(template.replace("LEAD", LEADS[lead].replace("\n", "\\n")))
    encoder = load_family(tmp_path / "model").make_encoder("", 512)
    decode, image = encoder.tokenizer.decode, str(save_image(tmp_path / "a.png", "red", (40, 40)))
    replacement = encoder.process_image(load_image(image))[1]
    prompt = encoder.encode_prompts([replacement], ["What is shown?"])["input_ids"][0].tolist()
    for answer, turns in itertools.product(("shapes", "3", '"a"', "(b)", "system"), (1, 2)):
        row = build_conversation("1", image, "What is shown?", answer)
        row["conversations"] += MORE[: 2 * (turns - 1)]
        item = encoder.encode_row(row)
        ids, labels = item["input_ids"], item["labels"]
        assert ids[: len(prompt)] == prompt
        assert labels[len(prompt) - 1 : len(prompt) + 1] == [IGNORE_INDEX, ids[len(prompt)]]
        learned = "".join(decode([label]) for label in labels if label != IGNORE_INDEX)
        assert learned == f"{answer}{ENDS[family]}" + f"blue{ENDS[family]}" * (turns - 1)


THOUGHTS = "{{ '<think>\\n\\n</think>\\n\\n' }}"
THINKS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}" + THOUGHTS + "{% endif %}"
    "{% for c in message['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}SWITCH{% endif %}"
)


def test_a_saved_processor_keeps_files_for_videos(tmp_path):
    save_tiny_family("qwen3_vl", tmp_path / "base")
    (tmp_path / "base/video_preprocessor_config.json").write_text("{}")
    load_family(tmp_path / "base").save_processor(tmp_path / "merged")
    names = {file.name for file in (tmp_path / "merged").iterdir()}
    assert {"video_preprocessor_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert not {"config.json", "model.safetensors"} & names


def test_stage_1_needs_a_known_connector():
    model = torch.nn.ModuleDict({"aligner": torch.nn.Linear(2, 2), "language_model": torch.nn.Linear(2, 2)})
    parts = SimpleNamespace(initialized_in_stage_1=[], decoder=model)
    with pytest.raises(InputError, match="no known module connects .*; train LoRA instead"):
        prepare_stage_2(model, parts, None, None)


def test_thinking_is_disabled_in_training_and_generation(tmp_path):
    save_tiny_family("qwen3_vl", tmp_path)
    switch = "{% if enable_thinking is false %}" + THOUGHTS + "{% else %}{{ '<think>\\n' }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(THINKS.replace("SWITCH", switch))
    encoder = load_family(tmp_path).make_encoder("", 512)
    row = {"id": "1", "conversations": MORE}
    item = encoder.encode_row(row)
    begin = next(position for position, label in enumerate(item["labels"]) if label != IGNORE_INDEX)
    prompt = encoder.encode_prompts([None], [MORE[0]["value"]])["input_ids"][0].tolist()
    assert item["input_ids"][:begin] == prompt
    assert encoder.tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")


def test_a_model_that_always_thinks_is_refused(tmp_path):
    save_tiny_family("qwen3_vl", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(THINKS.replace("SWITCH", "{{ '<think>\\n' }}"))
    with pytest.raises(InputError, match="writes .*think.* before an answer for generation, but .* in training, as"):
        load_family(tmp_path).make_encoder("", 512)


def test_text_after_the_end_of_an_answer_has_no_loss(tmp_path):
    save_tiny_family("llava", tmp_path)
    file = tmp_path / "chat_template.jinja"
    file.write_text(file.read_text().replace("{% endfor %}{% if add", "{{ '</s> ' }}{% endfor %}{% if add"))
    encoder = load_family(tmp_path).make_encoder("", 512)
    labels = encoder.encode_row({"id": "1", "conversations": MORE})["labels"]
    assert encoder.tokenizer.decode([label for label in labels if label != IGNORE_INDEX]).split() == ["blue", "</s>"]


def test_missing_token_type_ids_are_not_requested(folders, monkeypatch):
    """Some processors need more inputs than tokens for them."""
    encoder = load_family(folders["llava"]).make_encoder("", 512)
    monkeypatch.delattr(ProcessorMixin, "create_mm_token_type_ids")
    assert encoder.encode_prompts([None], ["What is shown?"]).keys() == {"input_ids", "attention_mask"}


@pytest.mark.parametrize("family", BUILDERS)
def test_likelihoods_of_answers_equal_training_losses(folders, tmp_path, family):
    vlm = load_family(folders[family])
    answers = [
        GivenAnswer(0, "What is shown?", "a red circle"),
        GivenAnswer(1, "Which things are shown?", "two green triangles and one dog"),
        GivenAnswer(0, "What color is the circle?", "blue"),
    ]
    images = [save_image(tmp_path / f"{w}.png", (w, 200, 90), (w, 40)) for w in (48, 90)]
    generator = vlm.make_generator(None, "cpu")
    values = generator.compute_answer_log_likelihoods(images, answers, "")
    encoder, model = vlm.make_encoder("", 512), vlm.load(torch.float32, "sdpa").eval()
    for (image, question, answer), log_likelihoods in zip(answers, values, strict=True):
        item = encoder.encode_row(build_conversation("1", str(images[image]), question, answer))
        batch = encoder.batch([item], len(item["input_ids"]))
        assert -sum(log_likelihoods) / len(log_likelihoods) == pytest.approx(model(**batch).loss.item(), rel=1e-4)
    if encoder.reads_text_alone:
        [blind] = generator.compute_answer_log_likelihoods(
            [None], [GivenAnswer(0, "What is shown?", "a red circle")], ""
        )
        item = encoder.encode_row(build_text_conversation("What is shown?", "a red circle"))
        ids, labels = torch.tensor([item["input_ids"]]), torch.tensor(item["labels"])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0].log_softmax(dim=-1)
        expected = [logits[position - 1, token] for position, token in enumerate(labels) if token != IGNORE_INDEX]
        assert blind == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", SOME)
def test_scores_in_training_equal_those_of_the_trained_model(folders, tmp_path, family):
    """Compare the likelihoods of all answers; random state, mode and gradients must not change."""
    texts = ["a red circle", "two green triangles and one dog", "blue"]
    images = [save_image(tmp_path / f"{w}.png", (w, 200, 90), (w, 40)) for w in (48, 60, 90)]
    unasked = {"objects": [], "questions": []}
    rows = [{"id": str(n), "image": images[n].name, "captions": [text]} | unasked for n, text in enumerate(texts)]
    write_jsonl(tmp_path / "evaluation.jsonl", rows)
    captions = {"finetune": {"template": "tokenizer", "question": "What is shown?"}}
    write_yaml(
        tmp_path / "a.yaml", {"image_root": str(tmp_path), "question_prompt": "{question}", "captions": captions}
    )
    vlm = load_family(folders[family])
    model = vlm.load(torch.float32, "sdpa").train()
    held_out = read_held_out_questions(
        tmp_path / "evaluation.jsonl", tmp_path / "a.yaml", "lora", vlm.make_encoder("", 512), count=9
    )
    parts = vlm.find_parts(model)
    loading = {"micro_batch_size": 2, "longest": max(held_out.lengths), "workers": 0, "dtype": torch.float32}
    scorer = Scorer(held_out, parts.head, vlm.prepare_inputs, **loading)
    before = torch.get_rng_state()
    score = scorer.score(model, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before) and model.training
    answers = [GivenAnswer(int(row["of"]), "What is shown?", texts[int(row["of"])]) for row in held_out.rows]
    values = vlm.make_generator(None, "cpu").compute_answer_log_likelihoods(images, answers, "")
    tokens = [value for log_likelihoods in values for value in log_likelihoods]
    assert score.loss == pytest.approx(-sum(tokens) / len(tokens), rel=1e-4) and score.correct == "000"


def test_both_stages_give_a_model_that_answers(folders, data, forks, tmp_path):
    """Run stage 1, then fine-tuning, and merge both."""
    settings = {
        "deepspeed": read_deepspeed("zero2_offload", "pretrain"),
        "max_length": 512,
        "max_steps": 4,
        "epochs": 4,
    }
    settings |= {"global_batch_size": 3, "gradient_accumulation_steps": 3, "projector_learning_rate": None}

    def command(tuning: str, output: Path, **more) -> dict:
        flagged = build_flags(folders["llava"], output, tuning, **settings, **more)
        return flagged | {"--data": data["llava"], "--model": folders["llava"]}

    ended = forks.run("pretrain.py", command("stage 1", tmp_path / "pretrain"))
    assert ended.ok, ended.printed[-3000:]
    projector = tmp_path / "pretrain/projector.safetensors"
    lora = {"r": 8, "alpha": 8, "dropout": 0.0, "targets": LORA.targets}
    second = command("LoRA", tmp_path / "finetune", lora=lora) | {"--projector": projector}
    ended = forks.run("finetune.py", second)
    assert ended.ok, ended.printed[-3000:]
    before, after = load_file(projector), load_file(tmp_path / "finetune/projector.safetensors")
    assert before.keys() == after.keys() and not all(torch.equal(before[name], after[name]) for name in before)
    trained = load_family(folders["llava"]).load_trained_model(tmp_path / "finetune", torch.float32)
    weights = dict(trained.named_parameters())
    assert all(torch.equal(weights[f"model.{name}"], tensor) for name, tensor in after.items())
    stock = AutoModelForImageTextToText.from_pretrained(folders["llava"]).state_dict()
    changed = {name for name, tensor in trained.state_dict().items() if not torch.equal(tensor, stock[name])}
    adapted = {name for name in stock if "language_model" in name and name.split(".")[-2] in LORA.targets}
    assert changed == {f"model.{name}" for name in after} | adapted


def test_full_fine_tuning_works_without_stage_1(folders, data, forks, tmp_path):
    settings = {
        "deepspeed": read_deepspeed("zero2_offload", "finetune"),
        "max_length": 512,
        "max_steps": 2,
        "epochs": 2,
    }
    settings |= {"global_batch_size": 3, "gradient_accumulation_steps": 3}
    command = build_flags(folders["smolvlm"], tmp_path, "full", **settings) | {"--data": data["smolvlm"]}
    del command["--projector"]
    ended = forks.run("finetune.py", command | {"--model": folders["smolvlm"]})
    assert ended.ok, ended.printed[-3000:]
    trained = load_family(folders["smolvlm"]).load_trained_model(tmp_path, torch.float32).state_dict()
    stock = AutoModelForImageTextToText.from_pretrained(folders["smolvlm"]).state_dict()
    changed = {name for name, tensor in trained.items() if not torch.equal(tensor, stock[name])}
    assert changed == {name for name in stock if "vision_model" not in name}
