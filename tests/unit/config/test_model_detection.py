"""`model=<folder or hub id>`: a model without a file in config/models."""

import json
from pathlib import Path

import pytest

from dj2mgm.config.layers import merge_experiment
from dj2mgm.config.missing_models import check_clip_folder, check_model_folders
from dj2mgm.config.reading import config_file, names_in, read_config
from dj2mgm.config.settings.models import CLIP, TransformersModel
from dj2mgm.errors import InputError
from dj2mgm.files import write_json

HUB_ID = "Somebody/Their-VLM-2B"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Make an empty hub's cache, and a current folder without a project."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "hub"


def write_model(folder: Path, **keys) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / "config.json", {"model_type": "smolvlm", "vision_config": {"hidden_size": 8}} | keys)
    return folder


def put_in_cache(cache: Path, hub_id: str, **keys) -> Path:
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    return write_model(repository / "snapshots/abc", **keys)


def model_of(value: str) -> TransformersModel:
    return merge_experiment("baseline", {"model": value}).model


@pytest.mark.parametrize("spelled", ["{}", "{}/", "../here/their vlm"])
def test_a_folder_is_a_model(cache, spelled):
    folder = write_model(cache.parent / "here/their vlm")
    model = model_of(spelled.format(folder))
    assert isinstance(model, TransformersModel) and not model.has_stage_1 and not model.is_mgm
    assert Path(model.given).resolve() == folder.resolve() and model.hub_ids == []
    check_model_folders(model)


def test_a_hub_id_is_a_model_and_is_read_from_the_cache(cache):
    folder = put_in_cache(cache, HUB_ID)
    model = model_of(HUB_ID)
    assert (model.name, model.given, model.hub_ids) == (HUB_ID, str(folder), [HUB_ID])
    check_model_folders(model)
    with pytest.raises(InputError, match=f"{CLIP} is neither a folder nor in the hub's cache.*`?hf download {CLIP}"):
        check_clip_folder(model)
    put_in_cache(cache, CLIP)
    check_clip_folder(model)


def test_a_missing_hub_id_is_refused_before_its_first_job(cache):
    with pytest.raises(InputError, match=f"model {HUB_ID}: {HUB_ID} is neither.*hf download {HUB_ID}"):
        check_model_folders(model_of(HUB_ID))


KNOWN = [name for name in names_in("models") if read_config(config_file("models", f"{name}.yaml")).get("size_gb")]


@pytest.mark.parametrize("name", KNOWN)
def test_a_missing_known_model_names_its_size_and_license(cache, name):
    model = model_of(name)
    assert model.hub_ids == [model.given] and model.license and model.clip_score == CLIP
    gated = ", gated" if model.gated else ""
    message = (
        f"run `snakemake fetch --config model={name}` first: {model.size_gb:.1f} GB, license {model.license}{gated}"
    )
    with pytest.raises(InputError) as raised:
        check_model_folders(model)
    assert str(raised.value) == f"model {name}: {model.given} is not on this machine; {message}"


def test_a_fetched_known_model_is_read_from_the_cache(cache):
    folder = put_in_cache(cache, "Qwen/Qwen3-VL-2B-Instruct")
    model = model_of("qwen3-vl-2b")
    assert (model.given, model.hub_ids) == (str(folder), ["Qwen/Qwen3-VL-2B-Instruct"])
    check_model_folders(model)


def test_facts_about_a_model_rerun_nothing(cache):
    assert model_of("smolvlm2-2.2b").model_dump().keys() == {"name", "transformers", "license", "hub_ids"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "mgm"}, "is a whole MGM, whose chat format no file states"),
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
        model_of("./one")


def test_a_folder_without_a_model_or_a_wrong_path_is_named(cache):
    (cache.parent / "here/empty").mkdir()
    for value, message in (("empty", "empty holds no config.json"), ("./absent", "there is no folder ./absent")):
        with pytest.raises(InputError, match=message):
            model_of(value)


def test_a_configuration_file_comes_before_a_folder(cache):
    write_model(cache.parent / "here/tiny")
    assert model_of("tiny").is_mgm
