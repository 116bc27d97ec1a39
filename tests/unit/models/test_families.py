"""Recognition of a model family by its folder."""

import json

import pytest

from dj2mgm.errors import InputError
from dj2mgm.models.generators import load_family
from dj2mgm.models.mgm.mgm_family import MGMFamily
from tiny_models import tiny_mgm, tiny_processor


def test_a_folder_of_an_mgm_is_recognized(tmp_path):
    tiny_mgm().save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    family = load_family(tmp_path)
    assert isinstance(family, MGMFamily) and family.config.model_type == "mgm"


def test_other_folders_are_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path} contains no config.json, so it is not a model folder"):
        load_family(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(InputError, match="type mamba, which transformers does not load for images and text;"):
        load_family(tmp_path)
