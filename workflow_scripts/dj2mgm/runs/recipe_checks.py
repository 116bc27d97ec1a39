"""Checks of the synthesize stage's recipe, which must fit its rows, its captioner and the dataset."""

from dj2mgm.errors import InputError, UnsuitableDatasetError
from dj2mgm.recipes.catalogue import read_allowed_operators
from dj2mgm.recipes.recipe_step import (
    ANSWERING_OPERATORS,
    INSTRUCTION_OPERATOR,
    MEASURING_OPERATORS,
    RATING_OPERATOR,
    RECAPTION_OPERATOR,
    WITH_QUESTIONS,
)
from dj2mgm.runs.experiment_recipes import is_for_instructions, list_operators_without_captioner
from dj2mgm.settings.chat_templates import read_chat_template
from dj2mgm.settings.data import CAPTIONERS, SynthesizeSettings


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
