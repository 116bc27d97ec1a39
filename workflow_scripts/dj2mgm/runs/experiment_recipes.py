"""The Data-Juicer recipes of an experiment, for the filter stage and optionally for the synthesize stage."""

from copy import deepcopy
from functools import lru_cache
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.recipes.recipe_parsing import parse_recipe
from dj2mgm.recipes.recipe_step import INSTRUCTIONS, WITH_CAPTIONER, WITH_CLIP
from dj2mgm.settings.config_files import locate_existing_file, read_config, read_config_text, suggest_name
from dj2mgm.settings.configuration import Experiment


def read_recipes(config: Experiment) -> dict[str, dict | None]:
    """Return the checked contents of config/recipes/<name>.yaml for each stage, with `arguments` and without `without`.

    Raises:
        InputError: there is no such recipe, if something in it is not allowed, if `arguments` or `without` names an
            operator that neither recipe has, or if `without` names all operators of a recipe.
    """
    names = {
        "filter": ("recipe", config.recipe),
        "synthesize": ("synthesize.recipe", config.synthesize.recipe),
    }
    recipes = {
        stage: _read(locate_existing_file("recipes", name, key), config) if name is not None else None
        for stage, (key, name) in names.items()
    }
    recipe_operators = [operator for recipe in recipes.values() if recipe for operator in _list_operators(recipe)]
    for key, operators in (("without", config.without), ("arguments", filter(config.arguments.get, config.arguments))):
        for operator in operators:
            if operator not in recipe_operators:
                raise InputError(
                    f"{key}: no recipe of this experiment has the operator {operator!r}; "
                    f"{suggest_name(operator, recipe_operators)}"
                )
    return {stage: None if recipe is None else _remove(recipe, config.without) for stage, recipe in recipes.items()}


def needs_clip(recipe: dict) -> bool:
    return any(operator in WITH_CLIP for operator in _list_operators(recipe))


def is_for_instructions(recipe: dict) -> bool:
    return recipe.get("rows") == INSTRUCTIONS


def list_operators_without_captioner(recipe: dict) -> list[str]:
    """Return the operators that need a captioner and for which the recipe names none."""
    steps = [(name, arguments or {}) for step in recipe["process"] for name, arguments in step.items()]
    return [name for name, arguments in steps if name in WITH_CAPTIONER and arguments.get(WITH_CAPTIONER[name]) is None]


def needs_trust(recipe: dict) -> bool:
    """Return whether a recipe uses something that only a trusted recipe may use."""
    try:
        parse_recipe("recipe", recipe)
    except InputError:
        return True
    return False


def list_model_folders(config: Experiment) -> list[str]:
    """Return the folders that may contain a recipe's models: the results, and the run's own models."""
    model, evaluate = config.model, config.evaluate
    models = [model.whole_model, *model.parts.values(), model.clip, evaluate.judge_clip, evaluate.second_judge]
    models.append(config.synthesize.blip2.model)
    return ["results", *(part for part in models if isinstance(part, str) and part)]


def _read(path: Path, config: Experiment) -> dict:
    # a copy, because YAML files would name equal parts of several settings by aliases
    folders = tuple(list_model_folders(config))
    recipe = deepcopy(_check(path, read_config_text(path), folders, config.trusted_recipes))
    changed_operators = [name for name in _list_operators(recipe) if config.arguments.get(name)]
    if duplicate := next((name for name in changed_operators if changed_operators.count(name) > 1), None):
        raise InputError(f"arguments: {path} has {duplicate} twice; write a recipe of its own instead")
    if not changed_operators:
        return recipe
    steps = [(name, arguments or {}) for step in recipe["process"] for name, arguments in step.items()]
    process = [{name: old | (config.arguments.get(name) or {})} for name, old in steps]
    return _parse(f"{path} with `arguments`", recipe | {"process": process}, folders, config.trusted_recipes)


@lru_cache(maxsize=64)  # all seeds of an experiment have the same recipes, and several stages read each
def _check(path: Path, text: str, folders: tuple[str, ...], trusted: bool) -> dict:
    """Return a checked recipe; `text` is the content of its file, so that a changed file is read again."""
    return _parse(path, read_config(path), folders, trusted)


def _parse(location: object, recipe: dict, folders: tuple[str, ...], trusted: bool) -> dict:
    parsed = parse_recipe(location, recipe, folders=folders, trusted=trusted)
    return recipe | {"process": [step.as_dict() for step in parsed.steps]}


def _list_operators(recipe: dict) -> list[str]:
    return [next(iter(step)) for step in recipe["process"]]


def _remove(recipe: dict, without: list[str]) -> dict:
    process = [step for step in recipe["process"] if next(iter(step)) not in without]
    if not process:
        raise InputError(
            f"without: it removes all operators of a recipe. Keep one of {', '.join(_list_operators(recipe))}"
        )
    return recipe | {"process": process}
