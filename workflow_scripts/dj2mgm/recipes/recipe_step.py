"""Steps of a recipe: operators with their arguments, read from a `process` list and checked for their form."""

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass

from dj2mgm.errors import InputError
from dj2mgm.recipes.argument_kinds import shorten_value

PAIRS, INSTRUCTIONS = "pairs", "instructions"
ROW_KINDS = (PAIRS, INSTRUCTIONS)
MAX_VALUES = 10_000
MAX_NAME_LENGTH = 100  # characters of a name that are compared and shown; names of operators are shorter
DATASET_FILES = ("question_file", "held_out_file")  # arguments that the stage adds: files of the dataset
# operators to which a stage adds the CLIP of the model's file, unless the recipe names one
WITH_CLIP = (
    "batched_image_text_similarity_filter",
    "image_text_similarity_filter",
    "image_embedding_deduplicator",
    "cluster_balance_filter",
)
LIKELIHOOD_GAIN = "likelihood_gain_filter"
RECAPTION_OPERATOR = "low_similarity_recaption_mapper"
INSTRUCTION_OPERATOR = "instruction_synthesis_mapper"
RATING_OPERATOR = "vlm_rating_filter"
# operators whose captioner answers questions
ANSWERING_OPERATORS = (INSTRUCTION_OPERATOR, RATING_OPERATOR)
# operators that measure texts with a trained model
MEASURING_OPERATORS = (LIKELIHOOD_GAIN, "blind_answer_filter", "round_trip_filter")
# operators that measure a text once, and not again after a mapper has changed it
MEASURED_ON_INPUT_TEXT = (*MEASURING_OPERATORS, RATING_OPERATOR, "caption_agreement_filter")
# operators that read images only
READING_IMAGES = (
    "image_aspect_ratio_filter",
    "image_integrity_filter",
    "image_nsfw_filter",
    "image_shape_filter",
    "image_size_filter",
    "image_watermark_filter",
)
# operators that read questions
WITH_QUESTIONS = (
    INSTRUCTION_OPERATOR,
    "blind_answer_filter",
    "round_trip_filter",
    "caption_agreement_filter",
)
CAPTIONER_ARGUMENT = "captioner"  # an argument that is an operator itself
# operators to which a stage adds a captioner, by the argument with which a recipe names its own model instead: an
# operator (`captioner`), or the folder of a finished training stage (`stage`)
WITH_CAPTIONER = dict.fromkeys((RECAPTION_OPERATOR, *ANSWERING_OPERATORS), CAPTIONER_ARGUMENT) | dict.fromkeys(
    MEASURING_OPERATORS, "stage"
)


@dataclass(frozen=True)
class RecipeStep:
    """An operator of a recipe, or the captioner of another operator.

    Attributes:
        location: file and step, for messages.
        name: name of the operator.
        arguments: arguments that the recipe gives.
        captioner: the captioning operator in this step's argument `captioner`.
        is_captioner: whether it is the argument of another operator.
    """

    location: str
    name: str
    arguments: dict
    captioner: "RecipeStep | None" = None
    is_captioner: bool = False

    def list_with_captioner(self) -> list["RecipeStep"]:
        return [self, self.captioner] if self.captioner else [self]

    def with_defaults(self, arguments: dict) -> "RecipeStep":
        """Return the step with further arguments; those of the recipe take precedence."""
        return _make_step(self.location, self.name, arguments | self.arguments)

    def as_dict(self) -> dict:
        """Return the step as Data-Juicer writes it, {operator: {argument: value}}."""
        return {self.name: self.arguments or None}


def find_nearest_name(name: object, candidates: Collection[str]) -> str:
    """Return the candidate that is most similar to a name."""
    return difflib.get_close_matches(str(name)[:MAX_NAME_LENGTH], sorted(candidates), n=1, cutoff=0)[0]


def parse_steps(location: object, process: object) -> list[RecipeStep]:
    """Return the steps of a `process` list after a check of their form only.

    Raises:
        InputError: a step is not well-formed.
    """
    if not isinstance(process, list) or not process:
        raise InputError(
            f"{location}: 'process' must be a list of at least one operator, as in config/recipes/baseline.yaml"
        )
    return [_parse_step(f"{location}, step {number}", step) for number, step in enumerate(process, start=1)]


def _parse_step(location: str, step: object, is_captioner: bool = False) -> RecipeStep:
    _check_plain(location, step)
    name, arguments = next(iter(step.items())) if isinstance(step, dict) and len(step) == 1 else ("", "")
    if not name or not isinstance(arguments, dict | None):
        raise InputError(f"{location}: expected 'operator: {{argument: value}}', found {shorten_value(step)}")
    for key in (name, *(arguments or ())):
        if len(key) > MAX_NAME_LENGTH:
            raise InputError(
                f"{location}: {shorten_value(key)} is longer than any name of an operator or argument. Correct it"
            )
    return _make_step(location, name, arguments or {}, is_captioner)


def _make_step(location: str, name: str, arguments: dict, is_captioner: bool = False) -> RecipeStep:
    captioner = None
    if not is_captioner and arguments.get(CAPTIONER_ARGUMENT) is not None:
        captioner = _parse_step(f"{location}, {CAPTIONER_ARGUMENT}", arguments[CAPTIONER_ARGUMENT], is_captioner=True)
    return RecipeStep(location, name, arguments, captioner, is_captioner)


def _check_plain(location: str, value: object) -> None:
    """Raise InputError for values that JSON cannot hold, because they would be converted on the way to the operator."""
    pending, count = [value], 0
    while pending:
        value, count = pending.pop(), count + 1
        if count > MAX_VALUES:
            raise InputError(
                f"{location}: the step has more than {MAX_VALUES} values, or contains itself. Use fewer values"
            )
        if isinstance(value, dict):
            if non_strings := [key for key in value if not isinstance(key, str)]:
                raise InputError(f"{location}: the key {non_strings[0]!r} is not a string. Put it in quotes")
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{location}: {value} is not a finite number. Omit the argument for no limit")
        elif not isinstance(value, str | int | float | None):
            raise InputError(f"{location}: {shorten_value(value)} is a {type(value).__name__}. Put strings in quotes")
