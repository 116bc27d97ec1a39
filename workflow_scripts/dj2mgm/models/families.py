"""Detection of the family of the vision-language model in a folder."""

from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import check_model_folder
from dj2mgm.models.mgm.configuration_mgm import MGMConfig
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.models.vision_language import ModelFamily
from dj2mgm.models.vlm.vlm_family import TransformersFamily
from dj2mgm.storage.files import FIX_FILE_REMEDY, read_json


def load_family(folder: Path) -> ModelFamily:
    """Return the family for the model type of a folder; raise InputError if no family supports it."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} contains no config.json, so it is not a model folder; name another one")
    check_model_folder(folder)
    kind = read_json(folder / "config.json", remedy=FIX_FILE_REMEDY).get("model_type")
    if kind == MGMConfig.model_type:
        return MGMFamily(folder)
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        raise InputError(
            f"{folder} contains a model of type {kind}, which transformers does not load for images and text; name "
            "another one"
        )
    return TransformersFamily(folder)
