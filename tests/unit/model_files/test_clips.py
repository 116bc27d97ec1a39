"""Judges of a configuration, and models by which its recipes select."""

import json
import shutil

import pytest

from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import check_judge, check_made, list_clip_files, list_selecting_clips
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.runs.stage_settings import build_evaluate_clip_settings
from tiny_clip import save_tiny_clip, save_tiny_siglip

KEY = "evaluate.judge_clip"
COMMIT = "0" * 40  # of a repository in the hub's cache


@pytest.mark.parametrize("save", [save_tiny_clip, save_tiny_siglip])
def test_all_files_of_a_clip_are_inputs(save, tmp_path):
    name = f"{save(tmp_path / 'judge')}/"
    assert list_clip_files(name) == sorted(
        str(file) for file in (tmp_path / "judge").iterdir() if file.suffix != ".vocab"
    )
    check_judge(name, KEY)
    (tmp_path / "judge/model.safetensors").unlink()
    with pytest.raises(InputError, match=r"evaluate.judge_clip: .*judge/ has no weights \(model.safetensors\); save"):
        check_judge(name, KEY)


def test_folders_that_cannot_be_judges_are_refused_by_name(tmp_path):
    save_tiny_clip(tmp_path)
    for model_type in ("blip", "siglip2", None):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(
            InputError, match=f"{tmp_path} is a model of type {model_type!r}, and only a CLIP or a SigLIP"
        ):
            check_judge(str(tmp_path), KEY)
    shutil.rmtree(tmp_path)
    with pytest.raises(InputError, match=f"evaluate.judge_clip: there is no folder {tmp_path}; name a folder"):
        check_judge(str(tmp_path), KEY)


def test_a_hub_id_is_accepted_unless_its_kind_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    check_judge("owner/name", KEY)
    repository = tmp_path / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    check_judge("owner/name", KEY)
    assert list_clip_files("owner/name") == []
    (repository / "snapshots" / COMMIT / "config.json").write_text('{"model_type": "blip"}')
    with pytest.raises(InputError, match="owner/name is a model of type 'blip'"):
        check_judge("owner/name", KEY)


def test_a_clip_made_by_the_workflow_is_a_dependency():
    assert list_clip_files("results/foundation/tiny/clip") == ["results/foundation/tiny/clip/model.safetensors"]
    check_judge("results/foundation/tiny/clip", KEY)


def test_a_clip_of_a_model_without_a_rule_is_refused():
    check_made("results/foundation/tiny/clip", KEY, {"tiny"})
    check_made("somebody/clip", KEY, {"tiny"})
    with pytest.raises(InputError, match="judge_clip: results/foundation/other/clip is not made.* CLIP of tiny$"):
        check_made("results/foundation/other/clip", KEY, {"tiny"})


def test_the_judge_defaults_to_the_models_clip():
    images = {"evaluation": "images"}
    config = merge_experiment("dj_synth", {})
    settings = build_evaluate_clip_settings(config, images)
    assert settings.clip == config.model.clip and settings.second_judge is None
    assert settings.selecting == [config.model.clip]
    judges = {"judge_clip": "a/judge", "second_judge": "b/judge"}
    with_judges = build_evaluate_clip_settings(merge_experiment("dj_synth", {"evaluate": judges}), images)
    assert with_judges.file_content() == settings.file_content() | {"clip": "a/judge", "second_judge": "b/judge"}


def test_selecting_clips_are_found_in_operators():
    recipes = {
        "filter": {"process": [{"text_length_filter": {"min_len": 1}}, {"image_text_similarity_filter": None}]},
        "synthesize": {"process": [{"low_similarity_recaption_mapper": {"hf_clip": "another"}}]},
    }
    assert list_selecting_clips(recipes, "given") == ["another", "given"]
    recipes["filter"]["process"].pop()
    assert list_selecting_clips(recipes, "given") == ["another"]
    assert list_selecting_clips(recipes | {"synthesize": None}, "given") == []
