"""Tiny models of transformers' classes, assembled from parts of the embedded default."""

import pytest
import torch
from transformers import AutoModelForImageTextToText, GemmaForCausalLM

import make_tiny_vlm
from dj2mgm.errors import InputError
from dj2mgm.features.foundation.tiny_vlms import BUILDERS
from dj2mgm.models.generators import load_family
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.experiments import find_variant_sources
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.runs.stages import STAGES
from dj2mgm.settings.config_files import read_config
from dj2mgm.settings.models import TransformersModel
from dj2mgm.settings.validation import Layer
from dj2mgm.storage.files import write_yaml
from paths import PROJECT
from tiny_families import save_tiny_family
from tiny_models import save_image
from unpack_foundation import copy_parts


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foundation")
    copy_parts(PROJECT / "config/foundation/tiny", folder)
    return folder


@pytest.fixture(scope="module", params=BUILDERS)
def made(request, parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    settings = {"tiny": request.param, "language_model": f"{parts}/language_model", "vision_tower": f"{parts}/clip"}
    write_yaml(folder / "config.yaml", settings)
    with pytest.MonkeyPatch.context() as patch:
        flags = ["make_tiny_vlm.py", "--config", folder / "config.yaml", "--output-dir", folder / "vlm"]
        patch.setattr("sys.argv", list(map(str, flags)))
        make_tiny_vlm.main()
    return folder / "vlm"


def test_their_language_model_equals_the_trained_gemma(made, parts):
    ids = torch.randint(8, 540, (2, 60), generator=torch.Generator().manual_seed(0))
    models = (
        GemmaForCausalLM.from_pretrained(parts / "language_model"),
        AutoModelForImageTextToText.from_pretrained(made),
    )
    with torch.inference_mode():
        gemma, tiny = (model.eval()(input_ids=ids).logits.log_softmax(-1) for model in models)
    torch.testing.assert_close(tiny, gemma, atol=1e-4, rtol=1e-4)


def test_an_image_has_one_token_per_word_of_a_board(made, tmp_path):
    family = load_family(made)
    encoder, path = family.make_encoder("", 256), save_image(tmp_path / "a.png", (9, 9, 9), (128, 128))
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "a red circle"}]
    item = encoder.encode_row({"id": "1", "image": str(path), "conversations": turns})
    assert item["input_ids"].count(family.config.image_token_id) == 16
    text = encoder.tokenizer.decode([label for label in item["labels"] if label >= 0])
    assert text == "a red circle<end_of_turn>\n<eos>"


@pytest.mark.parametrize("kind", BUILDERS)
def test_their_model_files_give_every_stage_its_settings(kind):
    config = merge_experiment("dj_synth", {"model": f"tiny-{kind}"})
    images = dict.fromkeys(("pretrain", "finetune", "evaluation"), "images")
    settings = {name: stage.settings(config, images) for name, stage in STAGES.items()}
    assert settings["pretrain"].template["name"] == settings["finetune"].template["name"] == "tokenizer"
    assert settings["jsonl"].question == settings["synthesize"].captioner.question == "Describe the image."
    parts = {"language_model": "results/foundation/tiny/language_model", "vision_tower": "results/foundation/tiny/clip"}
    assert config.model.build_assembly_settings().file_content() == {"tiny": kind} | parts


@pytest.mark.parametrize("name", ["mgm-2b", "tiny-llava"])
def test_parts_of_an_untrained_model_are_refused(name, monkeypatch):
    def changed(path, *schema):
        values = read_config(path, *schema)
        return values | {"foundation": name} if path.stem == "tiny-smolvlm" else values

    monkeypatch.setattr("dj2mgm.runs.layers.read_config", changed)
    with pytest.raises(InputError, match=f"tiny-smolvlm.yaml: foundation: {name} is not trained here"):
        merge_experiment("baseline", {"model": "tiny-smolvlm"})


def test_special_tokens_are_refused_in_text(tmp_path, monkeypatch):
    save_tiny_family("smolvlm", tmp_path / "vlm")
    model = TransformersModel(transformers=str(tmp_path / "vlm"), clip="clip")
    monkeypatch.setattr("dj2mgm.runs.layers.read_model", lambda name: (model.with_name(name), Layer("", {})))
    config = merge_experiment("baseline", {"model": "mine"})
    settings = STAGES["jsonl"].settings(config, dict.fromkeys(("pretrain", "finetune", "evaluation"), "images"))
    assert {"<end_of_utterance>", "<fake_token_around_image>", "<row_1_col_2>"} <= set(settings.control_tokens)


@pytest.mark.parametrize(("family", "takes"), [("paligemma", "one_question"), ("qwen3_vl", "several_images")])
def test_a_model_states_its_accepted_conversations(family, takes, tmp_path, monkeypatch):
    save_tiny_family(family, tmp_path / "vlm")
    model = TransformersModel(transformers=str(tmp_path / "vlm"), clip="clip")
    monkeypatch.setattr("dj2mgm.runs.layers.read_model", lambda name: (model.with_name(name), Layer("", {})))
    config = merge_experiment("baseline", {"model": "mine"})
    settings = STAGES["jsonl"].settings(config, dict.fromkeys(("pretrain", "finetune", "evaluation"), "images"))
    assert {"several_images", "one_question"} & settings.file_content().keys() == {takes}


def test_all_targets_of_variants_can_be_requested():
    runs = Runs({"model": "tiny-llava"}, find_variant_sources())
    assert not runs.experiments.errors
    full = runs.first_seed("baseline-full").settings["finetune"]
    assert full.lora is None and full.deepspeed_choices
    assert set(runs.models) == {"tiny-llava", "tiny"}
