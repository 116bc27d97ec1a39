"""Conversion of published checkpoints and back, byte for byte."""

import io
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import ConvNextModel

import convert_mgm_checkpoint
from dj2mgm.errors import InputError
from dj2mgm.features.fetch.conversion import (
    CONVNEXT,
    LAST_NORM,
    MGM_NAMES,
    Shard,
    convert_from_mgm,
    convert_openclip_convnext,
    convert_projector_from_mgm,
    convert_projector_to_mgm,
    convert_to_mgm,
    convert_to_safetensors,
    open_shards,
    rename_tensor,
    reverse_pairs,
)
from dj2mgm.model_files.model_folders import WEIGHTS_INDEX
from dj2mgm.models.mgm import MGMForConditionalGeneration
from dj2mgm.models.trained_weights import load_projector
from dj2mgm.storage.files import read_json, write_json
from fuzzing import fuzzed
from published_mgm import MGM_2B, list_convnext_shapes, list_published_shapes, make_random_weights
from tiny_models import TINY_SIZES, mgm_config, pixels, save_parts, text_config, tiny_mgm, tiny_parts, tiny_processor

UNUSED = CONVNEXT + LAST_NORM


def write_checkpoint(folder, weights: dict[str, torch.Tensor], shards: int = 1, pickled: bool = False) -> None:
    """Write weights in shards with an index, like transformers."""
    folder.mkdir()
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    files = {}
    for number in range(shards):
        name = f"{stem}-{number + 1:05d}-of-{shards:05d}.{suffix}"
        part = {key: weights[key] for key in list(weights)[number::shards]}
        torch.save(part, folder / name) if pickled else save_file(part, folder / name)
        files |= dict.fromkeys(part, name)
    write_json(folder / f"{stem}.{suffix}.index.json", {"weight_map": files})
    write_json(folder / "config.json", {"model_type": "mgm_gemma", "mm_vision_select_layer": -2, "image_grid": 1})


def read_checkpoint(folder) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    assert read_json(folder / WEIGHTS_INDEX)["weight_map"].keys() == tensors.keys()
    return tensors


def have_equal_bytes(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    def raw(tensor):
        return tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).numpy().tobytes()

    return left.keys() == right.keys() and all(raw(left[name]) == raw(right[name]) for name in left)


@pytest.fixture(scope="module")
def weights():
    return make_random_weights(list_published_shapes(TINY_SIZES), dtype=torch.bfloat16)


@pytest.fixture
def parts(tmp_path):
    save_parts(tmp_path / "parts")
    return tiny_parts(tmp_path / "parts")


@pytest.mark.parametrize(("shards", "pickled"), [(3, False), (2, True)])
def test_round_trip_of_a_published_checkpoint_keeps_all_bytes(weights, parts, tmp_path, shards, pickled):
    write_checkpoint(tmp_path / "theirs", weights, shards, pickled)
    assert convert_from_mgm(tmp_path / "theirs", tmp_path / "ours", parts) == len(weights)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) == shards + 1  # one tensor for the unused norm
    assert convert_to_mgm(tmp_path / "ours", tmp_path / "again") == len(weights)
    assert have_equal_bytes(read_checkpoint(tmp_path / "again"), weights)
    assert not list(tmp_path.glob("ours/*.bin"))
    model, info = MGMForConditionalGeneration.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = tiny_processor().encode_prompts(["<image>\nHow many?"])
    assert model.generate(**inputs, pixel_values=pixels(1), max_new_tokens=3, do_sample=False).shape[0] == 1
    config, text = read_json(tmp_path / "again/config.json"), text_config("gemma")
    assert (config["model_type"], config["torch_dtype"]) == ("mgm_gemma", "bfloat16")
    assert (config["hidden_size"], config["num_hidden_layers"]) == (text.hidden_size, text.num_hidden_layers)
    assert (config["mm_hidden_size"], config["mm_hidden_size_aux"], config["image_size_aux"]) == (24, 60, 64)


def test_round_trip_keeps_all_bytes_except_the_unused_norm(parts, tmp_path):
    model = tiny_mgm(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "ours")
    tiny_processor().save_pretrained(tmp_path / "ours")
    convert_to_mgm(tmp_path / "ours", tmp_path / "theirs")
    convert_from_mgm(tmp_path / "theirs", tmp_path / "again", parts)
    before, after = load_file(tmp_path / "ours/model.safetensors"), read_checkpoint(tmp_path / "again")
    norms = {name: after.pop(name) for name in [name for name in after if name.startswith(UNUSED)]}
    assert have_equal_bytes(after, {name: before[name] for name in before if not name.startswith(UNUSED)})
    assert {name: tensor.unique().tolist() for name, tensor in norms.items()} == {
        f"{UNUSED}weight": [1.0],
        f"{UNUSED}bias": [0.0],
    }


def test_all_names_of_the_released_mgm_2b_are_known():
    """The model has the real size, on the meta device; published_mgm.py lists the names."""
    with torch.device("meta"):
        model = MGMForConditionalGeneration(mgm_config(sizes=MGM_2B, image_side=768))
    ours = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    theirs = list_published_shapes(MGM_2B)
    assert len(theirs) == 911
    assert {rename_tensor(name, MGM_NAMES): shape for name, shape in theirs.items()} == {
        name: shape for name, shape in ours.items() if not name.startswith(UNUSED)
    }
    assert [rename_tensor(rename_tensor(name, MGM_NAMES), reverse_pairs(MGM_NAMES)) for name in theirs] == list(theirs)


def test_derived_tensors_of_old_versions_are_omitted(weights, parts, tmp_path):
    more = {
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.vision_tower.vision_tower.vision_model.embeddings.position_ids": torch.arange(17)[None],
    }
    write_checkpoint(tmp_path / "theirs", weights | more, shards=2)
    convert_from_mgm(tmp_path / "theirs", tmp_path / "ours", parts)
    convert_to_mgm(tmp_path / "ours", tmp_path / "again")
    assert have_equal_bytes(read_checkpoint(tmp_path / "again"), weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.vlm_uni_pos.weight": torch.ones(1)}, "tensor model.vlm_uni_pos.weight is unknown"),
        ({"model.mm_projector.4.bias": torch.ones(1)}, "does not have 1 tensors, .* model.projector.4.bias"),
        ({"model.norm.weight": None}, "1 tensors are missing, the first is model.language_model.norm.weight"),
        ({"model.norm.weight": torch.ones(7)}, r"model.language_model.norm.weight has shape \(7,\), expected"),
        ({"lm_head.weight": torch.ones(412, 32)}, "lm_head.weight differs from the embeddings"),
    ],
)
def test_invalid_tensors_are_named_and_nothing_is_written(weights, parts, tmp_path, change, message):
    changed = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
    write_checkpoint(tmp_path / "theirs", changed, shards=2)
    with pytest.raises(InputError, match=f"theirs: .*{message}"):
        convert_from_mgm(tmp_path / "theirs", tmp_path / "ours", parts)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(("key", "value"), [("image_grid", 2), ("image_size_aux", 1536), ("rms_norm_eps", 1e-5)])
def test_checkpoints_with_other_settings_are_refused(weights, parts, tmp_path, key, value):
    write_checkpoint(tmp_path / "theirs", weights)
    write_json(tmp_path / "theirs/config.json", {key: value})
    with pytest.raises(InputError, match=f"config.json: {key} is {value}"):
        convert_from_mgm(tmp_path / "theirs", tmp_path / "ours", parts)


def test_unreadable_files_are_named(weights, parts, tmp_path):
    write_checkpoint(tmp_path / "theirs", weights, shards=2)
    second = tmp_path / "theirs/model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:1000])
    with pytest.raises(InputError, match="model-00002-of-00002.safetensors cannot be read as weights .*download"):
        convert_from_mgm(tmp_path / "theirs", tmp_path / "ours", parts)
    second.unlink()
    with pytest.raises(InputError, match="names model-00002-of-00002.safetensors, which is missing"):
        convert_from_mgm(tmp_path / "theirs", tmp_path / "ours", parts)
    with pytest.raises(InputError, match="parts contains neither model.safetensors nor pytorch_model.bin"):
        convert_to_safetensors(tmp_path / "parts", tmp_path / "new")


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    class Harm:
        def __reduce__(self):
            return print, ("harm",)

    torch.save({"model.mm_projector.0.weight": Harm()}, tmp_path / "mm_projector.bin")
    with pytest.raises(InputError, match="mm_projector.bin cannot .*publisher.s safetensors") as refused:
        convert_projector_from_mgm(tmp_path / "mm_projector.bin", tmp_path / "pretrain")
    assert "weights_only" not in str(refused.value)


@fuzzed(900)
@given(st.sampled_from([True, False]), st.floats(0, 1, exclude_max=True), st.none() | st.integers(0, 255))
def test_damaged_pickle_message_does_not_disable_the_check(tmp_path, zipped, position, value):
    """The pickle is truncated or has a changed byte."""
    whole = io.BytesIO()
    torch.save({"a": torch.ones(3), "b": torch.zeros(2, 2)}, whole, _use_new_zipfile_serialization=zipped)
    contents = whole.getvalue()
    index = int(position * len(contents))
    contents = contents[:index] if value is None else contents[:index] + bytes([value]) + contents[index + 1 :]
    (tmp_path / "weights.bin").write_bytes(contents)
    try:
        Shard(tmp_path / "weights.bin")
    except InputError as refused:
        assert "use its publisher's safetensors" in str(refused) and "weights_only" not in str(refused)


def test_only_gemma_is_converted_to_the_published_layout(tmp_path):
    tiny_mgm("qwen2").save_pretrained(tmp_path / "ours")
    with pytest.raises(InputError, match="no MGM with the language model qwen2"):
        convert_to_mgm(tmp_path / "ours", tmp_path / "theirs")


def test_published_stage_1_round_trip_keeps_all_bytes(weights, tmp_path):
    trained = {name: tensor for name, tensor in weights.items() if "mm_projector" in name or "vlm_uni" in name}
    towers = {name: tensor for name, tensor in weights.items() if "vision_tower" in name}
    torch.save(trained | towers, tmp_path / "mm_projector.bin")
    assert convert_projector_from_mgm(tmp_path / "mm_projector.bin", tmp_path / "pretrain") == len(trained) == 16
    model = tiny_mgm(dtype=torch.bfloat16)
    load_projector(model, tmp_path / "pretrain/projector.safetensors")
    assert torch.equal(model.model.patch_info_mining.key[1].weight, weights["model.vlm_uni_aux_projector.1.weight"])
    convert_projector_to_mgm(tmp_path / "pretrain", tmp_path / "again.bin")
    assert have_equal_bytes(torch.load(tmp_path / "again.bin", weights_only=True), trained)
    del trained["model.mm_projector.2.bias"]
    torch.save(trained, tmp_path / "less.bin")
    with pytest.raises(InputError, match="less.bin: 1 tensors are missing, the first is projector.2.bias"):
        convert_projector_from_mgm(tmp_path / "less.bin", tmp_path / "other")


@pytest.mark.parametrize("pickled", [False, True])
def test_a_convnext_of_openclip_is_converted(tmp_path, pickled):
    convnext = make_random_weights(list_convnext_shapes(TINY_SIZES, "visual.trunk.stem", "visual.trunk.stages"))
    other_parts = {"visual.trunk.head.norm.weight", "visual.head.mlp.fc1.weight", "logit_scale", "text_projection"}
    other_parts |= {"transformer.resblocks.0.ln_1.weight", "token_embedding.weight", "positional_embedding"}
    everything = convnext | {name: torch.ones(2) for name in other_parts}
    (tmp_path / "theirs").mkdir()
    if pickled:
        torch.save(everything, tmp_path / "theirs/open_clip_pytorch_model.bin")
    else:
        save_file(everything, tmp_path / "theirs/open_clip_model.safetensors")
    assert convert_openclip_convnext(tmp_path / "theirs", tmp_path / "ours") == len(convnext)
    model, info = ConvNextModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (tuple(model.config.hidden_sizes), tuple(model.config.depths)) == (TINY_SIZES.widths, TINY_SIZES.depths)
    block = model.encoder.stages[2].layers[0]
    assert torch.equal(block.layer_scale_parameter, convnext["visual.trunk.stages.2.blocks.0.gamma"])


def test_pickled_weights_become_safetensors(tmp_path):
    model = ConvNextModel.from_pretrained(save_and_name_convnext(tmp_path))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    model.config.save_pretrained(pickled)
    torch.save(model.state_dict() | {"alias": model.state_dict()["layernorm.bias"]}, pickled / "pytorch_model.bin")
    (pickled / "preprocessor_config.json").write_text("{}")
    convert_to_safetensors(pickled, tmp_path / "new")
    assert {path.suffix for path in (tmp_path / "new").iterdir()} == {".json", ".safetensors"}
    assert (tmp_path / "new/preprocessor_config.json").read_text() == "{}"
    again = ConvNextModel.from_pretrained(tmp_path / "new", use_safetensors=True)
    assert have_equal_bytes(again.state_dict(), model.state_dict())


def save_and_name_convnext(root):
    save_parts(root / "parts")
    return root / "parts/convnext"


def test_the_script_converts_and_overwrites_nothing(weights, parts, tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "theirs", weights)
    write_json(tmp_path / "model.yaml", parts | {"clip_score": "other keys are not read"})
    arguments = ["from-mgm", tmp_path / "theirs", tmp_path / "ours", "--config", tmp_path / "model.yaml"]
    monkeypatch.setattr(sys, "argv", ["convert_mgm_checkpoint.py", *map(str, arguments)])
    convert_mgm_checkpoint.main()
    assert f"{len(weights)} tensors" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        convert_mgm_checkpoint.main()
    assert "ours already exists" in capsys.readouterr().err


def test_an_index_cannot_name_files_outside_its_folder(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    write_json(folder / WEIGHTS_INDEX, {"weight_map": {"a": "../outside.safetensors"}})
    with pytest.raises(InputError, match="weight_map must name files of this folder"):
        open_shards(folder)
