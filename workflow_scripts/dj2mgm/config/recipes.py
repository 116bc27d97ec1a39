"""An experiment's Data-Juicer recipes: of the filter stage and, where it has one, of the synthesize stage."""

from pathlib import Path

from dj2mgm.config.layers import named_file
from dj2mgm.config.reading import read_config
from dj2mgm.config.recipe_check import WITH_CAPTIONER, WITH_CLIP, check_operators, check_shape, with_home
from dj2mgm.errors import InputError

# keys of a model's file, and of the configuration, that name folders of models
MODEL_PARTS = ("assembled", "transformers", "language_model", "vision_tower", "vision_tower_aux", "clip_score")


def read_recipes(config: dict) -> dict[str, dict | None]:
    """{"filter": recipe, "synthesize": recipe or None}, contents of config/recipes/<name>.yaml, less `without`.

    Raises:
        InputError: an unknown recipe; one that is not well formed, or has an operator, argument or value that is not
            allowed; or `without` names an operator that neither recipe has, or all of a recipe's.
    """
    names = {
        "filter": ("recipe", config["recipe"]),
        "synthesize": ("synthesize.recipe", config["synthesize"]["recipe"]),
    }
    recipes = {
        stage: _read(named_file("recipes", name, key), config) if name is not None else None
        for stage, (key, name) in names.items()
    }
    known = [operator for recipe in recipes.values() if recipe for operator in _operators_of(recipe)]
    for operator in config["without"]:
        if operator not in known:
            raise InputError(f"without: no recipe of this experiment has the operator {operator!r}; {', '.join(known)}")
    return {stage: recipe and _left(recipe, config["without"]) for stage, recipe in recipes.items()}


def needs_clip(recipe: dict) -> bool:
    return any(operator in WITH_CLIP for operator in _operators_of(recipe))


def asking_captioner(recipe: dict) -> list[str]:
    """The operators that ask a captioner which the recipe does not name: to write captions, or how likely some are."""
    steps = [(name, arguments or {}) for step in recipe["process"] for name, arguments in step.items()]
    return [name for name, arguments in steps if name in WITH_CAPTIONER and arguments.get(WITH_CAPTIONER[name]) is None]


def needs_trust(recipe: dict) -> bool:
    """Return whether a recipe uses what is only open to trusted ones."""
    try:
        check_shape("recipe", recipe)
        check_operators("recipe", recipe["process"])
    except InputError:
        return True
    return False


def model_folders(config: dict) -> list[str]:
    """Return the places in which a recipe's models may lie: the results, and the folders of the run's own models."""
    model, evaluate = config["model"], config["evaluate"]
    named = [model.get(key) for key in MODEL_PARTS] + [evaluate["judge_clip"], evaluate["second_judge"]]
    named.append(config["synthesize"]["blip2"]["model"])
    return ["results", *(part for part in named if isinstance(part, str) and part)]


def _read(path: Path, config: dict) -> dict:
    recipe, trusted = read_config(path), config["trusted_recipes"]
    check_shape(path, recipe, trusted=trusted)
    check_operators(path, recipe.get("process"), model_folders(config), trusted)
    return recipe | {"process": with_home(recipe["process"])}


def _operators_of(recipe: dict) -> list[str]:
    return [next(iter(step)) for step in recipe["process"]]


def _left(recipe: dict, without: list[str]) -> dict:
    process = [step for step in recipe["process"] if next(iter(step)) not in without]
    if not process:
        raise InputError(f"without: it leaves a recipe no operator; keep one of {', '.join(_operators_of(recipe))}")
    return recipe | {"process": process}
