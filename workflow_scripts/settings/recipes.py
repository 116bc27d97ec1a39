"""An experiment's Data-Juicer recipes: of the filter stage and, where it has one, of the synthesize stage."""

from errors import InputError
from settings.layers import named_file, read_config


def read_recipes(config: dict) -> dict[str, dict | None]:
    """{"filter": recipe, "synthesize": recipe or None}, contents of config/recipes/<name>.yaml, less `without`.

    Raises:
        InputError: an unknown recipe, or `without` names an operator that neither recipe has.
    """
    names = {
        "filter": ("recipe", config["recipe"]),
        "synthesize": ("synthesize.recipe", config["synthesize"]["recipe"]),
    }
    recipes = {
        stage: read_config(named_file("recipes", name, key)) if name is not None else None
        for stage, (key, name) in names.items()
    }
    known = [operator for recipe in recipes.values() if recipe for operator in operators_of(recipe)]
    for operator in config["without"]:
        if operator not in known:
            raise InputError(f"without: no recipe of this experiment has the operator {operator!r}; {', '.join(known)}")
    return {stage: recipe and _left(recipe, config["without"]) for stage, recipe in recipes.items()}


def operators_of(recipe: dict) -> list[str]:
    """The operators' names. A recipe that is not well formed is left to the stage, which explains it."""
    process = recipe.get("process")
    steps = process if isinstance(process, list) else []
    return [str(next(iter(step))) for step in steps if isinstance(step, dict) and step]


def needs_clip(recipe: dict) -> bool:
    return any("image_text_similarity" in operator for operator in operators_of(recipe))


def _left(recipe: dict, without: list[str]) -> dict:
    if not without:
        return recipe
    return recipe | {"process": [step for step in recipe["process"] if next(iter(step)) not in without]}
