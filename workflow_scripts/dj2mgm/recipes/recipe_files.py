"""Files that a recipe reads in addition to its data."""

import os
import re

from dj2mgm.recipes.argument_kinds import FOLDER_KINDS
from dj2mgm.recipes.catalogue import read_allowed_operators
from dj2mgm.recipes.recipe_step import CAPTIONER_ARGUMENT, DATASET_FILES

FOLDER_FILES = (".json", ".txt", ".safetensors")  # in a folder of models or word lists
# arguments set by the stage; their files are not inputs of the recipe
STAGE_PATHS = {"image_root", "captions_folder", *DATASET_FILES}


def find_recipe_files(recipe: dict | list | None) -> list[str]:
    """Return the files that a recipe's arguments name, and the files of named folders.

    Args:
        recipe: a checked recipe, its `process` list, or None.
    """
    process = recipe.get("process") if isinstance(recipe, dict) else recipe
    steps = [(name, arguments or {}) for step in process or () for name, arguments in step.items()]
    return [file for name, arguments in steps for file in _list_step_files(name, arguments)]


def select_file_arguments(name: str, arguments: dict) -> dict:
    """Return the arguments of an operator that may name files.

    Args:
        name: name of the operator. If it is not in the list of allowed operators, any argument may name a file.
        arguments: arguments of the recipe and the stage.
    """
    operator = read_allowed_operators().get(name)
    kinds = operator.arguments if operator else {}
    return {
        key: value
        for key, value in arguments.items()
        if key not in STAGE_PATHS
        and (key == CAPTIONER_ARGUMENT or key not in kinds or is_folder_argument(kinds[key], value))
    }


def _list_step_files(name: str, arguments: dict) -> list[str]:
    files = []
    for key, value in select_file_arguments(name, arguments).items():
        files += (
            find_recipe_files([value])
            if key == CAPTIONER_ARGUMENT and isinstance(value, dict)
            else _list_files_in(value)
        )
    return files


def _list_files_in(value: object) -> list[str]:
    """Return the files that a value names at any depth, and the files of named folders."""
    if isinstance(value, str):
        path = re.sub("/+", "/", value)  # Snakemake does not find paths with `//`
        if os.path.isdir(path):
            names = sorted(name for name in os.listdir(path) if name.endswith(FOLDER_FILES))
            return [file for name in names if os.path.isfile(file := os.path.join(path, name))]
        return [path] if os.path.isfile(path) else []
    if isinstance(value, dict):
        value = list(value.values())
    items = value if isinstance(value, list) else ()
    return [file for item in items for file in _list_files_in(item)]


def is_folder_argument(kind: str, value: object) -> bool:
    return isinstance(value, str) and kind.split(" or ")[0] in FOLDER_KINDS
