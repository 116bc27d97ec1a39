"""`model=<folder or hub id>` for a model without a file in config/models."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import MissingModelError, check_clip_folder, check_model_folders
from dj2mgm.model_files.model_folders import VISION_LANGUAGE_TYPES, find_damaged_weights
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.settings.config_files import list_config_names, locate_config_file, read_config
from dj2mgm.settings.models import CLIP, TransformersModel
from dj2mgm.storage.files import write_json

HUB_ID = "Somebody/Their-VLM-2B"
COMMIT = "0" * 40  # of a repository in the hub's cache


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Make an empty cache of the hub, and a current folder without a project."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def write_model(folder: Path, **keys) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {"model_type": "smolvlm", "vision_config": {"hidden_size": 8}} | keys)
    for name in ("tokenizer.json", "processor_config.json", "tokenizer_config.json"):
        write_json(folder / name, {"chat_template": "{{ messages }}"} if name.startswith("processor") else {})
    save_torch_state_dict({name: torch.ones(8, 8) for name in "abc"}, folder, max_shard_size=256)
    return folder


def truncate(file: Path, left_out: int) -> None:
    with open(file, "r+b") as content:
        content.truncate(file.stat().st_size - left_out)


def put_in_cache(cache: Path, hub_id: str, **keys) -> Path:
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    return write_model(repository / "snapshots" / COMMIT, **keys)


def resolve(value: str) -> TransformersModel:
    return merge_experiment("baseline", {"model": value}).model


@pytest.mark.parametrize("spelled", ["{}", "{}/", "../here/their vlm"])
def test_a_folder_is_a_model(cache, spelled):
    folder = write_model(cache.parent / "here/their vlm")
    model = resolve(spelled.format(folder))
    assert isinstance(model, TransformersModel) and not model.has_stage_1 and not model.is_mgm
    assert Path(model.whole_model).resolve() == folder.resolve() and model.hub_ids == []
    check_model_folders(model)


def test_a_hub_id_is_a_model_in_the_cache(cache):
    folder = put_in_cache(cache, HUB_ID)
    model = resolve(HUB_ID)
    assert (model.name, model.whole_model, model.hub_ids) == (HUB_ID, str(folder), [HUB_ID])
    check_model_folders(model)
    with pytest.raises(InputError, match=rf"downloads 1.7 GB: {CLIP} \(1.7 GB"):
        check_clip_folder(model)
    put_in_cache(cache, CLIP)
    check_clip_folder(model)


@pytest.mark.parametrize("commit", ["../../../elsewhere", "{folder}", "é", ""])
def test_a_branch_without_a_commit_is_not_followed(cache, commit):
    folder = write_model(cache.parent / "elsewhere")
    snapshot = put_in_cache(cache, HUB_ID)
    (snapshot.parents[1] / "refs/main").write_text(commit.format(folder=folder))
    assert resolve(HUB_ID).whole_model == HUB_ID


def test_a_missing_hub_id_is_refused_before_its_first_job(cache):
    with pytest.raises(InputError, match=f"model {HUB_ID}: {HUB_ID} is neither.*hf download {HUB_ID}"):
        check_model_folders(resolve(HUB_ID))


KNOWN = [
    name
    for name in list_config_names("models")
    if read_config(locate_config_file("models", f"{name}.yaml")).get("size_gb")
]


@pytest.mark.parametrize("name", KNOWN)
def test_a_missing_known_model_names_its_size_and_license(cache, name):
    model = resolve(name)
    assert model.hub_ids == [model.whole_model] and model.license and model.clip == CLIP
    gated = ", gated" if model.gated else ""
    with pytest.raises(MissingModelError) as raised:
        check_model_folders(model)
    message = str(raised.value)
    assert f"`snakemake fetch --config model={name}` downloads {model.size_gb + 1.7:.1f} GB: " in message
    assert f"{model.whole_model} ({model.size_gb:.1f} GB, license {model.license}{gated}), {CLIP} (1.7 GB" in message
    put_in_cache(cache, CLIP)
    with pytest.raises(MissingModelError, match=rf"downloads {model.size_gb:.1f} GB: "):
        check_model_folders(model)


def test_a_missing_mgm_names_the_sizes_of_all_parts(cache):
    sizes = r"downloads 8.1 GB: google/gemma-2b-it \(5.0 GB, .*, gated\), openai"
    for check in (check_model_folders, check_clip_folder):
        with pytest.raises(MissingModelError, match=sizes):
            check(resolve("mgm-2b"))


def test_a_fetched_known_model_is_read_from_the_cache(cache):
    folder = put_in_cache(cache, "Qwen/Qwen3-VL-2B-Instruct")
    model = resolve("qwen3-vl-2b")
    assert (model.whole_model, model.hub_ids) == (str(folder), ["Qwen/Qwen3-VL-2B-Instruct"])
    check_model_folders(model)


SHARD = "model-00002-of-00003.safetensors"


def test_incomplete_weights_are_named(tmp_path):
    folder = write_model(tmp_path / "model")
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert find_damaged_weights(folder) is None and (folder / "model.safetensors.index.json").exists()
    size = (folder / SHARD).stat().st_size
    truncate(folder / SHARD, 1)
    assert str(find_damaged_weights(folder)) == f"{folder / SHARD} has {size - 1} of {size} bytes"
    for left in (50, 7, 0):
        truncate(folder / SHARD, (folder / SHARD).stat().st_size - left)
        assert str(find_damaged_weights(folder)) == f"{folder / SHARD} has no header of safetensors in its {left} bytes"
    (folder / names[2]).unlink()
    assert str(find_damaged_weights(folder)) == f"{folder / names[2]} is missing"
    (folder / names[1]).unlink()
    assert str(find_damaged_weights(folder)) == f"{folder / names[1]} is missing (2 of 3 shards are)"
    (folder / "model.safetensors.index.json").unlink()
    assert str(find_damaged_weights(folder)) == f"{folder}/model.safetensors.index.json is missing"
    (folder / names[0]).unlink()
    assert str(find_damaged_weights(folder)) == f"{folder}/model.safetensors is missing"


@pytest.mark.parametrize("value", ["qwen3-vl-2b", "Qwen/Qwen3-VL-2B-Instruct"])
def test_an_interrupted_download_is_refused_with_its_remedy(cache, value):
    folder = put_in_cache(cache, "Qwen/Qwen3-VL-2B-Instruct")
    blob = cache / "models--Qwen--Qwen3-VL-2B-Instruct/blobs/1234"
    blob.parent.mkdir()
    os.replace(folder / SHARD, blob)
    commands = f"run `snakemake fetch --config model={value}` first, or (docs/models.md): "
    commands += "hf download Qwen/Qwen3-VL-2B-Instruct"
    with pytest.raises(InputError) as raised:
        check_model_folders(resolve(value))
    assert str(raised.value) == f"model {value}: {folder / SHARD} is missing; {commands}"
    (folder / SHARD).symlink_to(blob)
    check_model_folders(resolve(value))
    truncate(blob, 5)
    with pytest.raises(InputError, match=rf"has \d+ of \d+ bytes; delete {blob}, and {re.escape(commands)}"):
        check_model_folders(resolve(value))


def test_an_incomplete_folder_of_the_user_is_refused(cache):
    folder = write_model(cache.parent / "here/one")
    (folder / SHARD).unlink()
    with pytest.raises(
        InputError,
        match=f"model ./one: one/{SHARD} is missing; save the model and its processor there again, or.*hf download",
    ):
        check_model_folders(resolve("./one"))


def test_incomplete_parts_of_an_mgm_are_refused(cache):
    """Incomplete weights that the workflow converted are converted again and replaced."""
    model = resolve("mgm-2b")
    for part in model.parts.values():
        write_model(cache.parent / "here" / part)
    check_model_folders(model)
    tower = Path(model.parts["vision_tower"])
    for folder in (Path(model.parts["language_model"]), tower):
        truncate(folder / SHARD, 5)
    with pytest.raises(InputError) as raised:
        check_model_folders(model)
    message = str(raised.value)
    assert (
        f"{tower / SHARD} has" in message and f"convert_mgm_checkpoint.py safetensors downloads/{tower.name}" in message
    )
    assert "hf download google/gemma-2b-it --local-dir model_zoo/gemma-2b-it" in message
    assert f"delete {cache.parent / 'here/model_zoo/gemma-2b-it' / SHARD}, and run `snakemake fetch" in message


def test_properties_of_a_model_do_not_rerun_stages(cache):
    assert resolve("smolvlm2-2.2b").model_dump().keys() == {"name", "transformers", "license", "hub_ids"}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 11422654\n"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "tokenizer.json",
            POINTER,
            "one/tokenizer.json is a pointer of Git LFS, not the file itself; save the model and",
        ),
        (SHARD, POINTER, f"one/{SHARD} is a pointer of Git LFS"),
        ("tokenizer.json", '{"model": {', "one/tokenizer.json is not complete JSON"),
        ("tokenizer_config.json", "", "one/tokenizer_config.json is empty"),
        (
            "tokenizer.json",
            None,
            r"one has no tokenizer \(tokenizer.json\); save the model and its processor there again",
        ),
        ("processor_config.json", None, r"one has no image processor \(processor_config.json\); save the model"),
        (
            "processor_config.json",
            '{"chat_template": null}',
            "one has no chat template, without which.*Name the instruction-tuned model",
        ),
    ],
)
def test_unusable_files_are_found_before_the_first_job(cache, file, content, message):
    folder = write_model(cache.parent / "here/one")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(InputError, match=message) as raised:
        check_model_folders(resolve("./one"))
    assert ("download" in str(raised.value)) == ("chat template" not in message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llava_llama"}, "such as llava-hf/llava-1.5-7b-hf"),
        ({"model_type": "llava", "architectures": ["LlavaLlamaForCausalLM"]}, "such as llava-hf/llava-1.5-7b-hf"),
        ({"model_type": "llava_mpt", "mm_vision_tower": "clip"}, "no vision-language model of the type llava_mpt"),
        ({"model_type": "phi3_v", "auto_map": {}}, "type phi3_v, and the code in its folder is never run"),
        ({"model_type": ["a"], "architectures": 5, "vision_config": {}}, "no vision-language model of the type None"),
    ],
)
def test_unknown_types_are_refused_with_the_form_that_works(cache, config, message):
    (folder := cache.parent / "here/one").mkdir()
    write_json(folder / "config.json", config)
    with pytest.raises(InputError, match=message):
        resolve("./one")


def test_a_folder_that_looks_like_a_hub_id_is_saved_again(cache):
    """`fetch` would download another model into the hub's cache."""
    folder = write_model(cache.parent / "here/models/llava")
    (folder / "tokenizer.json").write_text(POINTER)
    with pytest.raises(InputError, match="save the model and its processor there again") as raised:
        check_model_folders(resolve("models/llava"))
    assert "snakemake fetch" not in str(raised.value)


def test_types_are_those_of_the_installed_transformers():
    assert {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} == VISION_LANGUAGE_TYPES


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "mgm"}, "is a whole MGM, whose chat template no file states"),
        ({"vision_config": None}, ""),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
    ],
)
def test_folders_of_other_models_are_refused(cache, keys, message):
    folder = write_model(cache.parent / "here/one", **keys)
    if not message:
        (folder / "config.json").write_text(json.dumps({"model_type": "gemma"}))
        message = r"one \(model_type gemma\) has no vision_config, so it takes no images"
    with pytest.raises(InputError, match=message):
        resolve("./one")


def test_a_wrong_path_or_folder_without_a_model_is_named(cache):
    (cache.parent / "here/empty").mkdir()
    for value, message in (("empty", "empty holds no config.json"), ("./absent", "there is no folder ./absent")):
        with pytest.raises(InputError, match=message):
            resolve(value)


def test_a_model_file_precedes_a_folder(cache):
    write_model(cache.parent / "here/tiny")
    assert resolve("tiny").is_mgm
