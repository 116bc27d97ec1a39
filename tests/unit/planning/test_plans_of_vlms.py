"""The memory plan of transformers' vision-language models, traced without data and compared with a real step."""

from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, LlavaConfig, MllamaConfig, PaliGemmaConfig

from dj2mgm.data.formats import build_conversation
from dj2mgm.models.generators import load_family
from dj2mgm.models.tuning import wrap_with_lora
from dj2mgm.models.vlm.vlm_family import supports_sdpa
from dj2mgm.planning.architecture import PlanningError, VLMArchitecture, load_architecture
from dj2mgm.planning.live_memory import LiveMemory
from dj2mgm.planning.plan_table import plan_images
from dj2mgm.planning.step import Workload, build_meta_model, count_parameters, trace_memory
from dj2mgm.settings.training_stages import LoraSettings
from dj2mgm.storage.files import write_json, write_jsonl, write_yaml
from dj2mgm.training.memory_plan import build_architecture
from dj2mgm.training.training_data import ConversationDataset
from tiny_families import BUILDERS, save_tiny_families
from tiny_models import save_image

# one family of each kind of image: one size, tiles, patches of any size, and a mask of image tokens
TYPICAL = {"llava", "smolvlm", "qwen3_vl", "gemma3"}
FAMILIES = [name if name in TYPICAL else pytest.param(name, marks=pytest.mark.slow) for name in BUILDERS]
LORA = LoraSettings(r=4, alpha=8, dropout=0.0, targets=["q_proj", "v_proj"])
BATCH, ANSWERS = 3, 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return save_tiny_families(tmp_path_factory.mktemp("families"))


def planned(folder: Path, tuning: str = "lora", **more) -> Workload:
    architecture = load_architecture("tiny", folder)
    sequence = architecture.image_tokens + ANSWERS
    lora = LORA if tuning == "lora" else None
    return Workload(architecture, tuning, sequence, ANSWERS, torch.float32, lora=lora, projector=False, **more)


def with_data(workload: Workload, folder: Path) -> tuple[int, int]:
    """Return peak bytes and FLOPs of the same step on the CPU."""
    family = load_family(folder)
    model = family.load(torch.float32, "eager")
    wrapped = wrap_with_lora(model, LORA, family.find_parts(model).decoder, projector=False).train()
    model.set_attn_implementation("eager")
    inputs = workload.architecture.prepare_inputs(workload.batch(BATCH), "cpu")
    memory = LiveMemory(("all",), lambda tensor: "all")
    memory.exclude([*wrapped.parameters(), *wrapped.buffers(), *inputs.values()])
    with memory:
        wrapped(**{name: value.clone() for name, value in inputs.items()}).loss.backward()
    return memory.stack_moments().sum(axis=1).max(), memory.flops


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_without_data_equals_one_with_data(folders, family, monkeypatch):
    monkeypatch.setattr("dj2mgm.planning.step.ATTENTION", "eager")  # the only implementation on both devices
    monkeypatch.setattr(VLMArchitecture, "attention", "eager")
    workload = planned(folders[family])
    step = trace_memory(workload, 0, BATCH)
    again = trace_memory.__wrapped__(workload, 0, BATCH)  # with the recordings of the first trace
    assert again.flops == step.flops and again.sizes.sum(axis=1).max() == step.sizes.sum(axis=1).max()
    peak, flops = with_data(workload, folders[family])
    assert step.sizes.sum(axis=1).max() == pytest.approx(peak, rel=0.03)
    assert step.flops == flops


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_layers_need_as_much_as_executed_layers(folders, family, monkeypatch):
    replayed, run = planned(folders[family], "full"), planned(folders[family], "full")
    trace = trace_memory(replayed, 2, BATCH)
    monkeypatch.setattr("dj2mgm.planning.step.replay_layers", lambda model: None)
    expected = trace_memory(run, 2, BATCH)
    assert trace.flops == expected.flops and (trace.sizes.max(axis=0) == expected.sizes.max(axis=0)).all()
    assert trace.sizes.sum(axis=1).max() == expected.sizes.sum(axis=1).max()


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_larger_batches_and_less_checkpointing_need_more(folders, family):
    workload = planned(folders[family])
    peaks = [trace_memory(workload, every, batch).sizes.sum(axis=1).max() for every, batch in ((1, 4), (0, 4), (0, 8))]
    assert peaks == sorted(peaks) and peaks[1] > 1.02 * peaks[0] and peaks[2] > 1.5 * peaks[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_planned_parameters_equal_the_loaded_ones(folders, family):
    workload = planned(folders[family], "stage1")
    loaded = load_family(folders[family]).load(torch.float32, "eager")
    assert isinstance(workload.architecture, VLMArchitecture)
    shapes = {name: parameter.shape for name, parameter in build_meta_model(workload).named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in loaded.named_parameters()}
    counted = count_parameters(workload)
    assert 0 < sum(counted.trained_sizes) < sum(counted.all_sizes) / 2
    assert trace_memory(workload, 0, 2).accumulated[-1] == sum(counted.trained_sizes)


def test_masks_of_pixels_are_planned_without_their_values(folders, monkeypatch):
    values, none = planned(folders["smolvlm"]), planned(folders["smolvlm"])
    expected = trace_memory(values, 1, BATCH)
    monkeypatch.setattr("dj2mgm.planning.architecture.MAX_VALUES_OF_IMAGE", 500)  # less than the masks of small images
    trace = trace_memory(none, 1, BATCH)
    mask = none.architecture.prepare_inputs(none.batch(BATCH), "meta")["pixel_attention_mask"]
    assert mask.is_meta
    assert trace.flops == expected.flops and (trace.sizes.max(axis=0) == expected.sizes.max(axis=0)).all()
    assert trace.sizes.sum(axis=1).max() == expected.sizes.sum(axis=1).max()


def test_masked_attention_keeps_masks_keys_and_values(folders):
    """Gemma 3, whose image tokens attend to each other, is compared with an attention kernel without a mask."""
    workload = planned(folders["gemma3"])
    batch, tokens, layers = 4, workload.sequence_length, 2
    with_mask = trace_memory(workload, 0, batch).sizes.sum(axis=1).max()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.models.gemma3.modeling_gemma3.create_causal_mask", lambda **inputs: None)
        patch.setattr(
            "transformers.models.gemma3.modeling_gemma3.create_sliding_window_causal_mask", lambda **inputs: None
        )
        without = trace_memory.__wrapped__(workload, 0, batch).sizes.sum(axis=1).max()
    heads, shared, size = 4, 2, 16
    saved_bytes = batch * tokens * (tokens + 2 * (heads - shared) * size) * 4
    assert with_mask - without >= layers * saved_bytes


def test_unknown_language_models_are_assumed_to_have_sdpa():
    assert supports_sdpa(MllamaConfig()) and supports_sdpa(LlavaConfig())
    assert not supports_sdpa(PaliGemmaConfig(text_config=Gemma2Config()))


def test_planning_does_not_change_the_configuration(folders):
    workload = planned(folders["llava"])
    before = workload.architecture.config.to_json_string(use_diff=False)
    trace_memory(workload, 0, 1)
    assert workload.architecture.config.to_json_string(use_diff=False) == before


def test_a_model_whose_code_needs_data_is_not_planned(folders, monkeypatch):
    workload = planned(folders["llava"])
    monkeypatch.setattr(
        "transformers.models.llava.modeling_llava.LlavaModel.forward", lambda self, *args, **kwargs: 1 / 0
    )
    with pytest.raises(PlanningError, match=r"the memory plan cannot follow models of type llava \(division by zero\)"):
        trace_memory(workload, 1, 1)


def test_a_stage_is_planned_with_its_largest_images(folders, tmp_path):
    small, large = (str(save_image(tmp_path / f"{side}.png", (9, 9, 9), (side, side))) for side in (40, 150))
    long = build_conversation("1", small, "What?", "blue " * 200)
    rows = [long, build_conversation("2", large, "What?", "blue"), build_conversation("3", small, "What?", "red")]
    family, planned_for = load_family(folders["qwen3_vl"]), []
    for chosen in (rows, [long], [{"id": "4", "conversations": rows[2]["conversations"]}]):
        if "image" not in chosen[0]:
            chosen[0]["conversations"][0]["value"] = "What?"
        write_jsonl(tmp_path / "data.jsonl", chosen)
        dataset = ConversationDataset(tmp_path / "data.jsonl", family.make_encoder("", 4096))
        planned_for.append(build_architecture(family, dataset).item["input_ids"].count(family.config.image_token_id))
    assert planned_for == [16, 4, 4]


def test_a_plan_reads_the_image_sizes_of_a_dataset(folders, tmp_path):
    """A damaged image is left out; the largest image needs the most tokens, and the median is a usual one."""
    architecture = load_architecture("tiny", folders["qwen3_vl"])
    for name, side in {"a": 40, "b": 80, "c": 150}.items():
        save_image(tmp_path / f"{name}.png", (9, 9, 9), (side, side))
    (tmp_path / "d.png").write_bytes(b"damaged")
    rows = [{"id": name, "text": "blue", "images": [f"{name}.png"]} for name in "abcd"]
    write_jsonl(tmp_path / "pretrain.jsonl", rows)
    write_json(tmp_path / "finetune.json", [build_conversation("1", "b.png", "What?", "blue")])
    write_json(tmp_path / "summary.json", {"pretrain": 4, "finetune": 1})
    description = {"pretrain": {"file": str(tmp_path / "pretrain.jsonl"), "images": str(tmp_path)}}
    write_yaml(tmp_path / "config.yaml", description)
    images = plan_images(architecture, tmp_path)
    expected = [len(architecture.encoder.build_sample((side, side))["input_ids"]) for side in (150, 80)]
    assert [images.largest.image_tokens, images.usual.image_tokens] == expected and expected[0] > expected[1]
    assert "4 rows" in images.sentence and "150 × 150" in images.sentence and "80 × 80" in images.sentence
    assert "640 × 480" in plan_images(architecture, None).sentence


def test_tiles_decide_which_images_are_the_largest(folders, tmp_path):
    """The wide image has more pixels, but the processor divides the square one into more tiles."""
    sizes = [(600, 30), (120, 120)]
    images = [str(save_image(tmp_path / f"{width}.png", (9, 9, 9), (width, height))) for width, height in sizes]
    write_jsonl(tmp_path / "data.jsonl", [build_conversation(image, image, "What?", "blue") for image in images])
    family = load_family(folders["smolvlm"])
    dataset = ConversationDataset(tmp_path / "data.jsonl", family.make_encoder("", 4096))
    tiles = [item["pixel_values"].shape[1] for item in (dataset[0], dataset[1])]
    assert build_architecture(family, dataset).item["pixel_values"].shape[1] == tiles[1] == max(tiles) > tiles[0]
