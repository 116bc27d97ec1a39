"""Published models give the workflow's own answers in a process without this project."""

import subprocess
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, GemmaForCausalLM

from dj2mgm.errors import InputError
from dj2mgm.features.publish.cards import describe_usage
from dj2mgm.features.publish.publish_settings import ADAPTER_FOLDER, STAGE, PublishSettings
from dj2mgm.features.publish.stock_weights import write_adapter, write_merged
from dj2mgm.models.generators import load_family
from dj2mgm.models.trained_weights import find_projector_parameters
from dj2mgm.models.tuning import wrap_with_lora
from forked_python import forked_python
from tiny_families import LORA, save_tiny_family
from tiny_models import save_image, tiny_mgm, tiny_processor

QUESTION, TOKENS = "What is shown in the picture?", 12
SETTINGS = PublishSettings.model_construct(mgm=False, question=QUESTION, adapter_base=None, weights="merged")


def train(base: Path, stage: Path, connector: bool = True) -> None:
    """Write the output of a fine-tuning, with weights different from the base model's."""
    family = load_family(base)
    model = family.load(torch.float32, "eager")
    wrapped = wrap_with_lora(model, LORA, family.find_parts(model).decoder, projector=connector)
    trained = {name: parameter for name, parameter in wrapped.named_parameters() if "lora_" in name}
    torch.manual_seed(1)
    for parameter in [*trained.values(), *(find_projector_parameters(wrapped).values() if connector else ())]:
        torch.nn.init.normal_(parameter, std=0.2)
    wrapped.save_pretrained(stage / "adapter", state_dict=trained, save_embedding_layers=False)
    if connector:
        weights = {name: value.detach().contiguous() for name, value in find_projector_parameters(wrapped).items()}
        save_file(weights, stage / "projector.safetensors")


def answer_alone(folder: Path, settings: PublishSettings) -> str:
    """Return the output of the card's code in a process that cannot import this project."""
    lines = describe_usage(settings, adapter=True, chat=True)
    code = "\n".join(lines).split("```python\n")[1].split("```")[0]
    check = "import sys; assert not any('workflow_scripts' in path for path in sys.path)\n"
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    done = subprocess.run(
        [forked_python(), "-c", check + code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.rstrip("\n").splitlines()[-1] if done.stdout.strip() else ""


@pytest.fixture(params=[pytest.param("llava", marks=pytest.mark.slow), "gemma3"])
def family(request, tmp_path) -> str:
    save_tiny_family(request.param, tmp_path / "base")
    train(tmp_path / "base", tmp_path / "stage")
    return request.param


@pytest.fixture
def own_answer(family, tmp_path) -> str:
    """Return the answer of the workflow itself."""
    image = save_image(tmp_path / "photo.jpg", (200, 30, 90), (48, 40))
    generator = load_family(tmp_path / "base").make_generator(tmp_path / "stage", "cpu")
    [answer] = generator.answer([image], [QUESTION], "", TOKENS, 1)
    [before] = load_family(tmp_path / "base").make_generator(None, "cpu").answer([image], [QUESTION], "", TOKENS, 1)
    assert answer != before and answer
    return answer


def test_merged_model_gives_the_same_answer_in_transformers(own_answer, tmp_path):
    folder = tmp_path / "merged"
    write_merged(load_family(tmp_path / "base"), tmp_path / "stage", TOKENS, folder)
    (tmp_path / "photo.jpg").rename(folder / "photo.jpg")
    assert answer_alone(folder, SETTINGS) == own_answer


@pytest.mark.parametrize("family", ["llava"], indirect=True)
def test_adapter_with_connector_gives_the_same_answer_in_peft(own_answer, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    write_adapter(load_family(base), tmp_path / "stage", str(base), TOKENS, folder)
    (tmp_path / "photo.jpg").rename(folder / "photo.jpg")
    assert answer_alone(folder, SETTINGS.model_copy(update={"weights": "adapter"})) == own_answer


def test_connector_of_several_modules_loads_in_peft(tmp_path):
    save_tiny_family("qwen3_vl", tmp_path / "base")
    train(tmp_path / "base", tmp_path / "stage")
    write_adapter(load_family(tmp_path / "base"), tmp_path / "stage", "me/base", TOKENS, tmp_path / "adapter")
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    trained = load_family(tmp_path / "base").load_trained_model(tmp_path / "stage", torch.float32).state_dict()
    assert any("deepstack_merger_list" in name for name in merged)
    torch.testing.assert_close(merged, trained, rtol=1e-5, atol=1e-5)


def test_adapter_refuses_parameter_outside_modules(tmp_path):
    save_tiny_family("llava_onevision", tmp_path / "base")
    train(tmp_path / "base", tmp_path / "stage")
    with pytest.raises(InputError, match="image_newline is trained, but an adapter of PEFT cannot hold it; choose"):
        write_adapter(load_family(tmp_path / "base"), tmp_path / "stage", "me/base", TOKENS, tmp_path / "adapter")


@pytest.fixture
def mgm(tmp_path) -> Path:
    """Save an MGM, its separate language model, and a stage."""
    model = tiny_mgm()
    model.save_pretrained(tmp_path / "base")
    tiny_processor().save_pretrained(tmp_path / "base")
    language = GemmaForCausalLM(model.config.text_config)
    language.model.load_state_dict(model.model.language_model.state_dict())
    language.save_pretrained(tmp_path / "language")
    train(tmp_path / "base", tmp_path / "stage")
    return tmp_path


@pytest.mark.parametrize("weights", ["merged", "adapter"])
def test_adapter_of_mgms_language_model_loads_in_peft(mgm, weights):
    base, stage, folder = mgm / "base", mgm / "stage", mgm / weights
    if weights == "merged":
        write_merged(load_family(base), stage, TOKENS, folder)
    else:
        write_adapter(load_family(base), stage, "me/language-model", TOKENS, folder)
    trained = load_family(base).load_trained_model(stage, torch.float32)
    stock = GemmaForCausalLM.from_pretrained(mgm / "language")
    ids = torch.arange(5, 15)[None]
    before = stock(ids).logits
    tuned = PeftModel.from_pretrained(stock, folder / ADAPTER_FOLDER if weights == "merged" else folder)
    expected = trained(input_ids=ids).logits
    torch.testing.assert_close(tuned(ids).logits, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-2)
    # like the complete model in this project
    whole = (
        load_family(folder).load_trained_model(None, "auto")
        if weights == "merged"
        else load_family(base).load_trained_model(folder / STAGE, "auto")
    )
    again = dict(whole.named_parameters())
    assert all(torch.equal(again[name], parameter) for name, parameter in trained.named_parameters())
