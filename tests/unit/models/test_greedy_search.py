"""Greedy search of all families, compared with transformers' `generate` for the same prompts."""

from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from dj2mgm.data.formats import build_conversation
from dj2mgm.models import greedy_search
from dj2mgm.models.generators import load_family
from dj2mgm.models.greedy_search import DecodingStep, GreedySearch, Prompts, supports_static_cache
from dj2mgm.models.questions import cut_at_stop
from dj2mgm.models.vlm.vlm_generator import TransformersGenerator
from dj2mgm.storage.files import read_json, write_json
from tiny_families import BUILDERS, save_tiny_families
from tiny_models import save_image

SIZES = [(48, 40), (90, 60), (33, 77)]
ABOUT = [0, 1, 1, 2, 0]
QUESTIONS = ["What is shown?", "Which color is it?", "", "How many shapes are there in the picture?", "Where?"]
WITH_WINDOW = ["gemma3", "paligemma"]
TOKENS = 7
VALUE_DEPENDENT = {"_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "lift_fresh"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return save_tiny_families(tmp_path_factory.mktemp("families"))


def load_generator(folder: Path, window: int = 512) -> TransformersGenerator:
    """Load a model whose answers differ, by default with an attention window that is longer than all prompts."""
    config = read_json(folder / "config.json")
    if "sliding_window" in config["text_config"]:
        config["text_config"]["sliding_window"] = window
        write_json(folder / "config.json", config)
    family = load_family(folder)
    model = family.load_trained_model(None, torch.float32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    head = model.get_output_embeddings()  # a tied one would repeat the last token
    head.weight = torch.nn.Parameter(torch.randn_like(head.weight))
    return TransformersGenerator(model, family.make_encoder("", max_length=4096))


def make_prompts(generator: TransformersGenerator, folder: Path, rows: slice = slice(None)) -> Prompts:
    """Return the prompts of questions about images of different sizes, some about the same image."""
    paths = [save_image(folder / f"{n}.png", (90 * n, 30, 90), size) for n, size in enumerate(SIZES)]
    encoded = list(generator._encode_images(paths))
    recorded = []
    generator._answer_rows(
        [(encoded[n], question) for n, question in list(zip(ABOUT, QUESTIONS, strict=True))[rows]],
        lambda prompts: recorded.append(prompts) or [[]] * len(prompts.tokens),
    )
    return recorded[0]


def generate(search: GreedySearch, prompts: Prompts) -> list[list[int]]:
    """Return the answers of transformers' search, which repeats an image for each prompt."""
    with torch.inference_mode():
        return [cut_at_stop(answer, search.stops) for answer in search._generate(prompts).tolist()]


@pytest.mark.parametrize("family", BUILDERS)
def test_prompts_are_tokenized_as_in_training(folders, family):
    """Gemma's tokenizer joins the line breaks before an image with those of the chat template."""
    encoder = load_family(folders[family]).make_encoder("", max_length=4096)
    replacement = encoder.process_image(Image.new("RGB", SIZES[0]))[1]
    for question, prompt in zip(QUESTIONS, encoder.tokenize_prompts([replacement] * 5, QUESTIONS), strict=True):
        trained = encoder.encode_text(build_conversation("", "", question, "red"), replacement)["input_ids"]
        assert trained[: len(prompt)] == prompt


IN_PARTS = [(family, 100) for family in ("qwen3_vl", "gemma3")]


@pytest.mark.parametrize(("family", "at_once"), [*((family, 2**14) for family in BUILDERS), *IN_PARTS])
def test_answers_equal_those_of_generate(folders, tmp_path, monkeypatch, family, at_once):
    """Rows end early, and a batch of the same shape uses the step of the batch before it."""
    monkeypatch.setattr(greedy_search, "TOKENS_AT_ONCE", at_once)
    generator = load_generator(folders[family])
    prompts = make_prompts(generator, tmp_path)
    assert supports_static_cache(generator.model, max(map(len, prompts.tokens)) + TOKENS)
    whole = generate(GreedySearch(generator.model, [0], 0, TOKENS), prompts)
    stops = [whole[0][2], whole[3][4]]
    search = GreedySearch(generator.model, stops, 0, TOKENS)
    answers = search(prompts)
    assert answers == generate(search, prompts)
    assert len(set(map(len, answers))) > 1 and len(set(map(tuple, answers))) > 2
    step = search._step
    reversed_prompts = prompts._replace(
        **{name: getattr(prompts, name)[::-1] for name in ("tokens", "prefixes", "images")}
    )
    assert search(reversed_prompts) == answers[::-1] and search._step is step
    for rows in (slice(0, 1), slice(2, 4)):
        part = make_prompts(generator, tmp_path, rows)
        assert search(part) == answers[rows]
    assert GreedySearch(generator.model, [], 0, 1)(prompts) == [answer[:1] for answer in whole]


class Operations(TorchDispatchMode):
    """Records the names of PyTorch's operations."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", BUILDERS)
def test_steps_wait_for_no_values_and_images_are_read_once(folders, tmp_path, family):
    """A GPU cannot record an operation whose result the program or a tensor's size depends on."""
    generator, read = load_generator(folders[family]), []
    prompts = make_prompts(generator, tmp_path)
    make_inputs = prompts.make_inputs
    prompts = prompts._replace(make_inputs=lambda ids, *rest: read.append(tuple(ids.shape)) or make_inputs(ids, *rest))
    search = GreedySearch(generator.model, [], 0, 3)
    search(prompts)
    if family != "paligemma":  # whose image sees the question
        assert read[0] == (len(SIZES), max(prompts.prefixes)) and len(read) == 2
    with torch.inference_mode(), Operations() as operations:
        search._step(torch.ones_like(search._step.tokens))
    assert "embedding" in operations.names and operations.names.isdisjoint(VALUE_DEPENDENT)


@pytest.mark.parametrize("family", WITH_WINDOW)
def test_short_windows_use_generate(folders, tmp_path, monkeypatch, family):
    generator = load_generator(folders[family], window=16)
    prompts = make_prompts(generator, tmp_path)
    assert not supports_static_cache(generator.model, max(map(len, prompts.tokens)))
    monkeypatch.setattr(DecodingStep, "__call__", None)
    assert len(GreedySearch(generator.model, [], 0, TOKENS)(prompts)[0]) == TOKENS


@pytest.mark.parametrize("fault", [{"rope_type": "dynamic"}, {"full_attention": {"rope_type": "longrope"}}])
def test_position_embeddings_that_depend_on_values_use_generate(folders, fault):
    model = load_generator(folders["internvl"]).model
    assert supports_static_cache(model, 100)
    model.config.get_text_config().rope_parameters = fault
    assert not supports_static_cache(model, 100)


def test_other_attention_uses_generate(folders):
    model = load_generator(folders["llava"]).model
    model.config.get_text_config()._attn_implementation = "flash_attention_2"
    assert not supports_static_cache(model, 100)


def test_memory_of_the_step_is_free_after_an_error(folders, tmp_path, monkeypatch):
    generator = load_generator(folders["qwen3_vl"])
    prompts, search = make_prompts(generator, tmp_path), GreedySearch(generator.model, [], 0, 3)
    search(prompts)
    assert search._step

    def fail(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(DecodingStep, "write", fail)
    with pytest.raises(torch.OutOfMemoryError):
        search(prompts)
    assert search._step is None


@pytest.mark.parametrize("works", [True, False])
def test_steps_are_recorded_once_or_run_without_a_graph(folders, tmp_path, monkeypatch, capsys, works):
    """Operations do not run while a GPU records them; here, a graph runs them on the CPU."""
    generator, recorded = load_generator(folders["qwen3_vl"]), []
    prompts = make_prompts(generator, tmp_path)
    search = GreedySearch(generator.model, [], 0, TOKENS)
    expected = search(prompts)
    run = DecodingStep._run

    @contextmanager
    def record(graph):
        monkeypatch.setattr(DecodingStep, "_run", lambda step: recorded.append(step))
        try:
            yield
            if not works:
                raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            monkeypatch.setattr(DecodingStep, "_run", run)

    replay = SimpleNamespace(replay=lambda: run(search._step))
    cuda = SimpleNamespace(CUDAGraph=lambda: replay, graph=record, device=nullcontext)
    monkeypatch.setattr(torch, "cuda", cuda)
    search._step.can_record = True
    assert search(prompts) == search(prompts) == expected
    assert recorded == [search._step] and (search._step.graph is replay) == works
    assert ("cannot record its steps" in capsys.readouterr().err) != works
