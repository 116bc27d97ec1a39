import json

import pytest
from tiny_models import tiny_mgm, tiny_processor

from dj2mgm.errors import InputError
from dj2mgm.families import family_of
from dj2mgm.mgm.family import MGM


def test_a_folder_of_an_mgm_is_one(tmp_path):
    tiny_mgm().save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    family = family_of(tmp_path)
    assert isinstance(family, MGM) and family.config.model_type == "mgm"


def test_other_folders_are_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=f"{tmp_path} contains no config.json, so it is not a model folder"):
        family_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(InputError, match="type mamba, which transformers does not load for images and text;"):
        family_of(tmp_path)
