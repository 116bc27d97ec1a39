"""Answers, captions and likelihoods of trained models, and shuffled images as a control."""

import multiprocessing
import random
import shutil
import sys
import tarfile
import threading
import time
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import chat
import merge_adapter
from dj2mgm.data.chat_template import ChatTemplate
from dj2mgm.data.images import load_image
from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import draw_control_paths, draw_other_images, locate_row_images
from dj2mgm.models import generators, greedy_search
from dj2mgm.models.generators import _end_with_parent, open_generators
from dj2mgm.models.mgm import mgm_generator
from dj2mgm.models.mgm.assemble import assemble
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.models.mgm.mgm_generator import MGMGenerator, beam_search
from dj2mgm.models.questions import batch_questions, restore_order
from dj2mgm.settings.training_stages import LoraSettings
from dj2mgm.storage.image_files import compute_image_digest, read_file, read_members
from dj2mgm.training.outputs import gather_weights, save_projector
from finetune import prepare_stage_2, save_adapter_and_projector
from tiny_models import (
    NUM_IMAGE_TOKENS,
    pixels,
    randomize,
    save_image,
    save_parts,
    text_config,
    tiny_mgm,
    tiny_parts,
    tiny_processor,
    tiny_qwen_tokenizer,
)

LORA = LoraSettings(r=4, alpha=8, dropout=0.1, targets=["q_proj", "v_proj", "o_proj"])


def test_shuffled_images_are_a_derangement_by_seed():
    for count in (2, 3, 10, 500):
        order = draw_other_images(count, seed=0)
        assert sorted(order) == list(range(count))
        assert all(other != index for index, other in enumerate(order))
    assert draw_other_images(50, 1) == draw_other_images(50, 1) != draw_other_images(50, 2)


def test_all_other_images_are_equally_likely():
    counts = [[0] * 4 for _ in range(4)]
    for seed in range(3000):
        for index, other in enumerate(draw_other_images(4, seed)):
            counts[index][other] += 1
    for index, row in enumerate(counts):
        assert row[index] == 0
        assert all(900 < count < 1100 for other, count in enumerate(row) if other != index)


def test_image_paths_are_in_order_and_must_exist(tmp_path):
    for red, name in enumerate(("b.png", "a.png")):
        save_image(tmp_path / name, (red, 0, 0))
    rows = [{"image": "b.png"}, {"image": "a.png"}]
    assert locate_row_images(tmp_path, rows) == [tmp_path / "b.png", tmp_path / "a.png"]
    with pytest.raises(InputError, match="evaluation row 7: missing: 'c.png'.*; fix the image or delete the row"):
        locate_row_images(tmp_path, [{"id": "7", "image": "c.png"}])
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "a.png", "a.png")
    [member] = read_members(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(bytes(20_000))
    with pytest.raises(InputError, match="evaluation row 7: .*a.tar has changed or is truncated"):
        locate_row_images(tmp_path, [{"id": "7", "image": str(member).removeprefix(f"{tmp_path}/")}])


def test_rows_with_the_same_image_share_its_control():
    paths = [Path(f"{number % 4}.png") for number in range(20)]
    control = draw_control_paths(paths, seed=0)
    assert all(path != other for path, other in zip(paths, control, strict=True))
    assert len(set(zip(paths, control, strict=True))) == 4 and set(control) == set(paths)
    apart = [Path(f"{number}.png") for number in range(20)]
    assert draw_control_paths(apart, seed=3) == [apart[other] for other in draw_other_images(20, seed=3)]


def test_the_control_is_not_a_copy_of_the_rows_image(tmp_path):
    """Copies have another name or are in a link's target or a tar file; other images keep their control."""
    for red in range(4):
        save_image(tmp_path / f"{red}.png", (60 * red, 0, 0))
    shutil.copy(tmp_path / "0.png", tmp_path / "copy.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "1.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "2.png", "2.png")
    [member] = read_members(tmp_path / "a.tar")
    in_tar = str(member).removeprefix(f"{tmp_path}/")
    names = ["0.png", "1.png", "2.png", "3.png", "./0.png", "copy.png", "link.png", in_tar]
    paths = locate_row_images(tmp_path, [{"id": name, "image": name} for name in names])
    assert list(map(read_file, paths)) == [read_file(tmp_path / name) for name in names]
    for seed in range(20):
        control = draw_control_paths(paths, seed)
        assert all(
            compute_image_digest(path) != compute_image_digest(other)
            for path, other in zip(paths, control, strict=True)
        )
        assert control[:4] == [paths[other] for other in draw_other_images(4, seed)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return folders of a base model and of both stages, and the wrapped model of stage 2."""
    root = tmp_path_factory.mktemp("trained")
    base = tiny_mgm()
    base.save_pretrained(root / "base")
    tiny_processor().save_pretrained(root / "base")
    randomize(base.model.projector, seed=4)
    save_projector(base, gather_weights(find_projector(base)), root / "pretrain")
    wrapped = prepare_stage_2(
        base, MGMFamily.find_parts(base), LORA, root / "pretrain" / "projector.safetensors"
    ).eval()
    moved = {name: p for name, p in wrapped.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in moved.values():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    save_adapter_and_projector(wrapped, gather_weights(moved), root / "finetune")
    return root, wrapped


def find_projector(model) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if ".projector." in n or ".patch_info_mining." in n}


def test_a_fine_tuned_stage_loads_with_its_trained_weights(trained):
    root, wrapped = trained
    inputs = tiny_processor().encode_prompts(
        [ChatTemplate.load("gemma", tiny_processor().tokenizer).render_prompt("How many?")]
    ) | {"pixel_values": pixels(1)}
    with torch.inference_mode():
        loaded = MGMGenerator(root / "base", root / "finetune").model(**inputs).logits
        before = MGMGenerator(root / "base", root / "pretrain").model(**inputs).logits
        torch.testing.assert_close(loaded, wrapped(**inputs).logits, rtol=1e-3, atol=1e-3)
    assert (loaded - before).abs().max() > 0.1
    names = {path.name for path in (root / "finetune").rglob("*") if path.is_file()}
    assert names >= {"projector.safetensors", "adapter_model.safetensors", "adapter_config.json"}
    assert not any(name.endswith((".bin", ".pt", ".pth")) for name in names)


def test_an_image_is_encoded_once_for_all_its_questions(trained, tmp_path, monkeypatch):
    generator, encoded = MGMGenerator(trained[0] / "base", trained[0] / "finetune"), []
    encode = generator.model.model.get_image_features
    monkeypatch.setattr(
        generator.model.model, "get_image_features", lambda pixels: encoded.append(len(pixels)) or encode(pixels)
    )
    images = color_images(tmp_path, 3)
    arguments = {"template": "gemma", "max_new_tokens": 4, "batch_size": 4}
    repeated = [image for _ in range(3) for image in images]  # alternating, so that equal images are not adjacent
    questions = [question for question in ("How many?", "Where?", "How many?") for _ in images]
    answers = list(generator.answer(repeated, questions, **arguments))
    assert encoded == [3] and len(generator._cache) == 3
    assert answers[:3] == answers[6:]  # repeated questions are answered once

    monkeypatch.setattr(mgm_generator, "VISUAL_BYTES", 2 * next(iter(generator._cache.values())).nbytes)
    assert list(generator.answer(images, ["How many?"] * 3, **arguments)) == answers[:3]
    assert list(generator._cache) == [str(image) for image in images[1:]]
    content = BytesIO(images[0].read_bytes())
    assert list(generator.answer([content], ["How many?"], **arguments)) == answers[:1]
    assert sum(encoded) == 4 and len(generator._cache) == 2


def test_captioned_batches_are_encoded_without_gradients(trained, tmp_path, monkeypatch):
    """A repeated image stays in its batch, because the batch size changes the last bits of other captions."""
    generator, encoded = MGMGenerator(trained[0] / "base", trained[0] / "pretrain"), []
    encode = generator.model.model.get_image_features

    def observed(pixels):
        encoded.append((len(pixels), encode(pixels).requires_grad))
        return encode(pixels)

    monkeypatch.setattr(generator.model.model, "get_image_features", observed)
    images = color_images(tmp_path, 3)
    with_repeats = [*images, images[2], images[0], images[1]]
    candidates = list(
        generator.generate_candidates(with_repeats, "", "plain", num_beams=2, max_new_tokens=4, batch_size=4)
    )
    assert encoded == [(4, False), (2, False)] and not generator._cache
    assert len(candidates) == 6 and [text for text, _ in candidates[3]] == [text for text, _ in candidates[2]]


def test_answers_without_an_image_use_the_text_only(trained):
    """The prompt equals that of training without an image, and answers do not depend on the batch size."""
    generator = MGMGenerator(trained[0] / "base", trained[0] / "finetune")
    questions = ["How many?", "What color is it?", "two"]
    chat = ChatTemplate.load("gemma", generator.processor.tokenizer)
    expected = []
    for question in questions:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "x"}]
        (text, _), *_ = chat.render_segments(turns)
        ids = torch.tensor([generator.processor.encode([(text, False)])["input_ids"]])
        generated = generator.model.generate(
            input_ids=ids,
            max_new_tokens=5,
            do_sample=False,
            eos_token_id=chat.stop_ids(generator.processor.tokenizer),
            pad_token_id=0,
        )
        tokens = generated[0, ids.shape[1] :]
        expected.append(generator.processor.tokenizer.decode(tokens, skip_special_tokens=True).strip())
    for batch_size in (1, 3):
        answers = generator.answer([None] * 3, questions, "gemma", max_new_tokens=5, batch_size=batch_size)
        assert list(answers) == expected
    with pytest.raises(ValueError, match="separate calls"):
        list(generator.answer([None, "a.png"], questions[:2], "gemma", max_new_tokens=5, batch_size=2))


def color_images(folder, count: int) -> list:
    return [save_image(folder / f"{i}.png", (i * 40 % 256, 250 - i * 30 % 250, i * 90 % 256)) for i in range(count)]


@pytest.fixture
def prompted(trained, tmp_path):
    """Return a model, six images with prompts, and stop tokens, which are the second and third generated tokens."""
    generator = MGMGenerator(trained[0] / "base", trained[0] / "pretrain", "cpu")
    processor = generator.processor
    inputs = processor.encode_prompts([ChatTemplate.load("plain", processor.tokenizer).render_prompt("")] * 6)
    inputs["pixel_values"] = processor.build_pixel_values([load_image(path) for path in color_images(tmp_path, 6)])
    generated = generator.model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)[:, -2:]
    return generator.model, inputs, [generator.processor.tokenizer.eos_token_id, *generated.unique().tolist()]


def visual_tokens(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        return model.model.get_image_features(inputs["pixel_values"])


@pytest.mark.parametrize(("template", "at_once"), [("plain", 2**14), ("gemma", 40)], ids=["together", "in parts"])
def test_greedy_answers_equal_those_of_transformers(trained, tmp_path, template, at_once, monkeypatch):
    """Compare with transformers, which uses left-padded complete prompts and encodes an image per question."""
    monkeypatch.setattr(greedy_search, "TOKENS_AT_ONCE", at_once)
    generator = MGMGenerator(trained[0] / "base", trained[0] / "pretrain", "cpu")
    processor, chat = generator.processor, ChatTemplate.load(template, generator.processor.tokenizer)
    about = [0, 1, 1, 2, 0, 3]
    questions = (
        [""] * 6 if template == "plain" else ["How many?", "", "What color is the circle?", "Where?", "a b c", "Who?"]
    )
    images = [color_images(tmp_path, 4)[number] for number in about]
    inputs = processor.encode_prompts([chat.render_prompt(question) for question in questions])
    inputs["pixel_values"] = processor.build_pixel_values([load_image(path) for path in images])
    first = generator.model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)
    stops = [processor.tokenizer.eos_token_id, first[0, -1].item()]
    monkeypatch.setattr(ChatTemplate, "stop_ids", lambda chat, tokenizer: stops)
    generated = generator.model.generate(
        **inputs,
        max_new_tokens=9,
        do_sample=False,
        eos_token_id=chat.stop_ids(generator.processor.tokenizer),
        pad_token_id=0,
    )
    expected = processor.tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = list(generator.answer(images, questions, template, max_new_tokens=9, batch_size=5))
    last = processor.tokenizer.decode([first[0, -1].item()])  # generate keeps the token that ends an answer
    assert answers == [text.split(last)[0].strip() for text in expected]
    assert len(set(map(len, answers))) > 1, "some must end before the others"
    assert list(generator.answer([], [], template, max_new_tokens=9, batch_size=5)) == []


def test_sliding_attention_answers_do_not_depend_on_batches(tmp_path):
    """Padding would occupy positions of an attention window that is shorter than a prompt."""
    model = tiny_mgm("mistral")
    assert model.config.text_config.sliding_window < NUM_IMAGE_TOKENS + 8
    model.save_pretrained(tmp_path / "mgm")
    tiny_processor().save_pretrained(tmp_path / "mgm")
    generator = MGMGenerator(tmp_path / "mgm", None, "cpu")
    images = [color_images(tmp_path, 3)[number] for number in (0, 1, 1, 2, 0, 2)]
    questions = ["How many?", "", "What color is the circle?", "Where?", "a b c", "How many are there?"]
    singly, batched = (list(generator.answer(images, questions, "gemma", 9, batch_size=size)) for size in (1, 6))
    assert singly == batched and len(set(singly)) > 1


@pytest.mark.parametrize(("free", "size"), [(-0.5, 1), (2.1, 2), (3.0, 32), (20.0, 256), (70.0, 256)])
def test_the_batch_size_follows_free_gpu_memory(free, size, trained, monkeypatch):
    """MGM-2B uses 2 GiB of free memory for visual tokens and half of the rest for a batch."""
    generator = MGMGenerator(trained[0] / "base", trained[0] / "pretrain", "cpu")
    shape = {"num_hidden_layers": 18, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256_000}
    text = SimpleNamespace(**shape)
    generator.model = SimpleNamespace(dtype=torch.bfloat16, config=SimpleNamespace(get_text_config=lambda: text))
    generator.processor, generator.device = SimpleNamespace(num_image_tokens=576), torch.device("cuda")
    reserved = 2**30  # reserved by PyTorch's allocator but unused; the driver does not count it as free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * 2**30) - reserved, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * reserved)
    assert generator.choose_batch_size(max_new_tokens=64) == size


@pytest.mark.parametrize("size", [1, 3, 20])
def test_batches_keep_questions_about_an_image_together(size):
    rng = random.Random(size)
    images = [f"{rng.randrange(6)}.png" for _ in range(20)]
    questions = ["?" * rng.randrange(4) for _ in images]
    numbers, batches = batch_questions(images, questions, size)
    answers = [
        [f"{batch.images[index]} {question}" for index, question in zip(batch.about, batch.questions, strict=True)]
        for batch in batches
    ]
    assert list(restore_order(numbers, answers)) == [f"{i} {q}" for i, q in zip(images, questions, strict=True)]
    flat = [answer for batch in answers for answer in batch]
    assert len(flat) == len(set(flat)), "a repeated question is answered once"
    assert all(len(batch.questions) == size for batch in batches[:-1]) and len(batches[-1].questions) <= size
    order = [image for batch in batches for image in (batch.images[index] for index in batch.about)]
    assert sum(a != b for a, b in zip(order, order[1:], strict=False)) == len(set(images)) - 1


@pytest.mark.parametrize(("num_beams", "max_new_tokens"), [(2, 3), (4, 9), (5, 1)])
def test_beams_equal_those_of_transformers(prompted, num_beams, max_new_tokens):
    """Compare tokens, order and log-likelihood; transformers' score is the log-likelihood per token."""
    model, inputs, stops = prompted
    output = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        eos_token_id=stops,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    expected: list[list] = [[] for _ in inputs["input_ids"]]
    tokens = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    for index, (row, score) in enumerate(zip(tokens, output.sequences_scores.tolist(), strict=True)):
        if score > -1e8:  # lower scores mark a free slot
            end = next((i for i, token in enumerate(row) if token in stops), len(row))
            expected[index // num_beams].append((row[:end], score * min(end + 1, max_new_tokens)))
    rows = beam_search(model, inputs["input_ids"], visual_tokens(model, inputs), num_beams, stops, max_new_tokens)
    assert [[tokens for tokens, _ in row] for row in rows] == [[tokens for tokens, _ in row] for row in expected]
    values = [[value for row in table for _, value in row] for table in (rows, expected)]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    lengths = {len(tokens) for row in rows for tokens, _ in row}
    assert max_new_tokens == 1 or len(lengths) > 1, "some must end before the others"


def test_one_beam_equals_greedy_search(trained, tmp_path):
    generator = MGMGenerator(trained[0] / "base", trained[0] / "pretrain", "cpu")
    images = color_images(tmp_path, 3)
    answers = list(generator.answer(images, [""] * 3, "plain", max_new_tokens=6, batch_size=3))
    candidates = generator.generate_candidates(images, "", "plain", num_beams=1, max_new_tokens=6, batch_size=3)
    assert [row[0][0] for row in candidates] == answers


def run(monkeypatch, script, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
    script.main()


def test_answers_of_a_merged_folder_equal_base_and_stage(trained, tmp_path, monkeypatch):
    root, _ = trained
    stage, output = root / "finetune", tmp_path / "merged"
    run(monkeypatch, merge_adapter, "--model", root / "base", "--stage", stage, "--output-dir", output)
    assert not [path for path in output.rglob("*") if "adapter" in path.name or path.suffix in (".bin", ".pt")]
    together, merged = MGMGenerator(root / "base", stage), MGMGenerator(output, None)
    inputs = tiny_processor().encode_prompts(
        [ChatTemplate.load("gemma", tiny_processor().tokenizer).render_prompt("How many?")]
    ) | {"pixel_values": pixels(1)}
    with torch.inference_mode():
        logits, expected = merged.model(**inputs).logits, together.model(**inputs).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    images = [save_image(tmp_path / f"{index}.png", (90 * index, 200, 30)) for index in range(3)]
    call = (images, ["How many?", "What color?", ""], "gemma", 12, 2)
    answers = list(merged.answer(*call))
    assert answers == list(together.answer(*call)) != list(MGMGenerator(root / "base", root / "pretrain").answer(*call))
    plain = AutoModelForImageTextToText.from_pretrained(output)
    assert plain.state_dict().keys() == tiny_mgm().state_dict().keys()


def test_a_merged_folder_keeps_the_bases_dtype(trained, tmp_path, monkeypatch):
    root, _ = trained
    half = tiny_mgm(dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "base")
    tiny_processor().save_pretrained(tmp_path / "base")
    output = tmp_path / "merged"
    run(monkeypatch, merge_adapter, "--model", tmp_path / "base", "--stage", root / "finetune", "--output-dir", output)
    assert {tensor.dtype for tensor in load_file(output / "model.safetensors").values()} == {torch.bfloat16}


def test_one_question_about_one_image_is_answered(trained, tmp_path, monkeypatch, capsys):
    root, _ = trained
    image = save_image(tmp_path / "a.png")
    cases = (
        ((), None, "gemma", "How many?"),
        (("--stage", root / "finetune"), root / "finetune", "gemma", "How many?"),
        (("--stage", root / "pretrain", "--template", "plain"), root / "pretrain", "plain", ""),
    )
    for flags, stage, template, question in cases:
        shared = ("--model", root / "base", "--image", image, "--max-new-tokens", 6)
        run(monkeypatch, chat, *shared, *flags, *(("--question", question) if question else ()))
        [expected] = MGMGenerator(root / "base", stage).answer([image], [question], template, 6, 1)
        assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--image", "missing.png"), "--image missing.png: there is no such file"),
        (("--model", "nowhere"), "nowhere contains no config.json, so it is not a model folder"),
        (
            ("--stage", "nowhere"),
            "nowhere contains no projector.safetensors, so it is not the folder of a",
        ),
        (("--template", "chatml"), "template chatml: the model's tokenizer has no token <|im_end|>"),
    ],
)
def test_unanswerable_questions_are_refused_in_one_line(trained, tmp_path, monkeypatch, capsys, flags, message):
    root, _ = trained
    arguments = {"--model": root / "base", "--image": save_image(tmp_path / "a.png"), "--question": "Why?"}
    arguments |= dict([flags])
    with pytest.raises(SystemExit):
        run(monkeypatch, chat, *[word for pair in arguments.items() for word in pair])
    errors = capsys.readouterr().err.strip().splitlines()
    assert errors[-1].startswith(f"error: {message}")


def test_qwen_is_assembled_with_its_own_tokenizer_and_format(tmp_path):
    save_parts(tmp_path)
    tokenizer = tiny_qwen_tokenizer()
    config = text_config("qwen2")
    config.vocab_size = len(tokenizer) + 8  # Qwen's vocabulary is padded
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "qwen2.5")
    tokenizer.save_pretrained(tmp_path / "qwen2.5")
    parts = tiny_parts(tmp_path, "qwen2.5") | {"image_token": "<|image_pad|>", "dtype": "float32"}
    model, processor = assemble(**parts)
    model.save_pretrained(tmp_path / "mgm")
    processor.save_pretrained(tmp_path / "mgm")
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    prompt = ChatTemplate.load("chatml", tokenizer).render_prompt("How many?")
    ids = processor.encode([(prompt, False)])["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")  # Qwen has no beginning-of-sequence token
    generator = MGMGenerator(tmp_path / "mgm", None)
    assert generator.processor.encode([(prompt, False)])["input_ids"] == ids
    assert len(list(generator.answer([save_image(tmp_path / "a.png")], ["How many?"], "chatml", 5, 1))) == 1


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_two_processes_give_the_answers_of_one(tmp_path, monkeypatch, method):
    """New processes import torch and transformers for seconds; forks have both, but cannot use OpenMP's threads."""
    context = multiprocessing.get_context(method)
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": context}.__getitem__)
    monkeypatch.setattr(generators, "use_cpu_threads", lambda _: torch.set_num_threads(1))
    model = tiny_mgm()
    model.save_pretrained(tmp_path / "mgm")
    tiny_processor().save_pretrained(tmp_path / "mgm")
    trained = find_projector(model)
    with torch.no_grad():
        for weight in trained.values():
            weight.neg_()
    save_projector(model, gather_weights(trained), tmp_path / "stage")
    images = [tmp_path / f"{index}.png" for index in range(7)]
    for index, image in enumerate(images):
        save_image(image, (30 * index, 60, 200 - 20 * index))
    questions = ["what is it?", "where?", "how many of them are there?", "why?", "who?", "", "which colour is it?"]
    answers = []
    for processes in (1, 2):  # 3 batches, which 2 processes cannot divide evenly
        with open_generators(tmp_path / "mgm", processes) as load:
            for stage in (None, tmp_path / "stage"):
                stage_answers = load(stage).answer(images, questions, "gemma", max_new_tokens=6, batch_size=3)
                answers.append(list(stage_answers))
    assert answers[:2] == answers[2:] and [len(part) for part in answers] == [7] * 4
    assert answers[0] != answers[1]


def test_two_processes_accept_an_empty_list_of_questions(tmp_path):
    with open_generators(tmp_path, 2) as load:
        assert list(load(tmp_path).answer([], [], "gemma", max_new_tokens=6, batch_size=2)) == []


def wait_for_parent() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    time.sleep(600)


def start_child(method: str, pipe: Connection) -> None:
    child = multiprocessing.get_context(method).Process(target=wait_for_parent)
    child.start()
    pipe.send(child.pid)
    child.join()


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_end_when_their_parent_is_killed(method):
    """Each process occupies a GPU, and only its parent could end it."""
    answers, pipe = multiprocessing.Pipe()
    parent = multiprocessing.get_context("fork").Process(target=start_child, args=(method, pipe))
    parent.start()
    child = psutil.Process(answers.recv())
    time.sleep(1)
    parent.kill()
    parent.join()
    assert not psutil.wait_procs([child], timeout=60)[1]
