"""Which kind of vision-language model a folder holds."""

from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.files import FIX, read_json
from dj2mgm.mgm.configuration_mgm import MGMConfig
from dj2mgm.mgm.family import MGM
from dj2mgm.vision_language import Family

FAMILIES = {MGMConfig.model_type: MGM}  # by model type, as transformers names it


def family_of(folder: Path) -> Family:
    """
    Raises:
        InputError: it holds no model, or one of another kind.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds no config.json, so it is no folder of a model; name another one")
    kind = read_json(folder / "config.json", remedy=FIX).get("model_type")
    if kind not in FAMILIES:
        raise InputError(f"{folder} holds a model of type {kind}; known are {', '.join(FAMILIES)}")
    return FAMILIES[kind](folder)
