"""Recipes of an experiment: read with its changes, and checked against its rows, its captioner and its dataset."""

from copy import deepcopy
from functools import lru_cache
from pathlib import Path

from dj2mgm.errors import InputError, UnsuitableDatasetError
from dj2mgm.recipes.catalogue import (
    ANSWERING_OPERATORS,
    INSTRUCTION_OPERATOR,
    INSTRUCTIONS,
    MEASURING_OPERATORS,
    RATING_OPERATOR,
    RECAPTION_OPERATOR,
    WITH_CAPTIONER,
    WITH_CLIP,
    WITH_QUESTIONS,
    read_allowed_operators,
)
from dj2mgm.recipes.recipe_parsing import parse_recipe
from dj2mgm.settings.config_files import locate_existing_file, read_config, read_config_text, suggest_name
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.data import CAPTIONERS, SynthesizeSettings
from dj2mgm.settings.models import read_chat_template


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


def check_rows(recipe: dict) -> None:
    """Check that the operators of a recipe fit its rows, which are pairs or instructions."""
    names = [name for step in recipe["process"] for name in step]
    if is_for_instructions(recipe):
        writers = {
            RECAPTION_OPERATOR,
            *(name for name, operator in read_allowed_operators().items() if operator.writes_captions),
        }
        if writer := next((name for name in names if name in writers), None):
            raise InputError(
                f"synthesize.recipe: {writer} would replace the answers of instructions by captions; remove it (or "
                "rows: instructions)"
            )
    elif reader := next((name for name in names if name in WITH_QUESTIONS), None):
        raise InputError(f"synthesize.recipe: {reader} reads questions; add rows: instructions to the recipe")


def check_captioner(recipe: dict, captioner: str) -> None:
    """Check that the captioner of the settings suits the operators without a captioner of their own."""
    operators, settings = list_operators_without_captioner(recipe), CAPTIONERS[captioner]
    measuring_operators = [operator for operator in operators if operator in MEASURING_OPERATORS]
    if measuring_operators and not settings.tells_likelihood:
        raise InputError(
            f"synthesize.captioner: {captioner} gives no likelihoods, which {measuring_operators[0]} needs; choose "
            "mgm, or name the model's folders in the recipe (base_model and stage)"
        )
    if RATING_OPERATOR in operators and captioner == "mgm" and not is_for_instructions(recipe):
        raise InputError(
            f"synthesize.recipe: {RATING_OPERATOR} needs a model that answers questions, which stage 1 does not; add "
            "rows: instructions to the recipe, or choose synthesize.captioner: openai"
        )
    answering_operators = [operator for operator in operators if operator in ANSWERING_OPERATORS]
    if answering_operators and not settings.answers_questions:
        raise InputError(
            f"synthesize.captioner: {captioner} answers no questions, which {answering_operators[0]} needs; choose mgm "
            "or openai"
        )
    steps = {
        name: arguments or {} for step in recipe["process"] for name, arguments in step.items() if name in operators
    }
    if steps.get(INSTRUCTION_OPERATOR, {}).get("questions") == "dataset" and not settings.tells_likelihood:
        raise InputError(
            f"synthesize.captioner: {captioner} cannot answer questions of the dataset; choose mgm, or questions: "
            f"model for {INSTRUCTION_OPERATOR}"
        )


def check_templates(recipe: dict, captioner: str) -> None:
    """Check that operators with an MGM of their own name a chat template that has a place for questions."""
    for name, arguments in (item for step in recipe["process"] for item in step.items()):
        step_arguments = arguments or {}
        template = step_arguments.get("template", "plain" if not CAPTIONERS[captioner].tells_likelihood else None)
        own_model = name in MEASURING_OPERATORS and step_arguments.get("base_model") is not None
        if own_model and isinstance(template, str) and not read_chat_template(template)["asks_question"]:
            raise InputError(
                f"synthesize.recipe: {name}: template {template} leaves questions out; name the chat template of the "
                "model's stage 2, which its file in config/models/ has as template"
            )


def check_without_instructions(dataset: str, settings: SynthesizeSettings | None) -> None:
    """Check that the synthesize stage needs no instructions of the dataset, which has none."""
    if settings is None or not is_for_instructions(settings.recipe):
        return
    writing_steps = (
        step[INSTRUCTION_OPERATOR] or {} for step in settings.recipe["process"] if INSTRUCTION_OPERATOR in step
    )
    if not any(arguments.get("questions") != "dataset" for arguments in writing_steps):
        raise UnsuitableDatasetError(
            f"synthesize.recipe: the dataset {dataset} has no instructions, which this recipe needs; add them "
            f"(docs/data.md), or write them with {INSTRUCTION_OPERATOR} and questions: model"
        )
