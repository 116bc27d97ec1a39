"""The catalogue of operators: config/schemas/operators.yaml, and the list of the Data-Juicer that was reviewed.

Both files are always the workflow's own. Kinds of arguments tell which files a recipe reads in addition to its data.

Also: names and labels of each filter's statistics, and the arguments that limit them. The limits' values are in
juicer/filter_limits.py.
"""

import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dj2mgm.recipes.argument_kinds import FOLDER_KINDS
from dj2mgm.settings.config_files import SHIPPED, read_config

REVIEWED_FILE = SHIPPED / "schemas/operators.yaml"
INSTALLED_FILE = SHIPPED / "schemas/operators.installed.json"
NOT_PLAIN = "<not plain>"  # replaces a default that JSON cannot hold
REQUIRED_MARK = "<required>"  # replaces the default of an argument that has none
PAIRS, INSTRUCTIONS = "pairs", "instructions"
ROW_KINDS = (PAIRS, INSTRUCTIONS)
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
SERVER_CAPTIONER = "openai_captioning_mapper"
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
FOLDER_FILES = (".json", ".txt", ".safetensors")  # in a folder of models or word lists
# arguments set by the stage; their files are not inputs of the recipe
STAGE_PATHS = {"image_root", "captions_folder", *DATASET_FILES}
ARGUMENT_RULES = ("exactly_one", "at_least_one", "at_most_one", "same_length", "below")
LIMIT_PREFIXES = {"min": "min_", "max": "max_"}  # names of arguments for the ends of a range begin with these
OPERATOR_STATISTICS = {  # by operator
    "text_length_filter": ("text_len",),
    "words_num_filter": ("num_words",),
    "token_num_filter": ("num_token",),
    "alphanumeric_filter": ("alnum_ratio",),
    "special_characters_filter": ("special_char_ratio",),
    "word_repetition_filter": ("word_rep_ratio",),
    "character_repetition_filter": ("char_rep_ratio",),
    "average_line_length_filter": ("avg_line_length",),
    "maximum_line_length_filter": ("max_line_length",),
    "stopwords_filter": ("stopwords_ratio",),
    "flagged_words_filter": ("flagged_words_ratio",),
    "language_id_score_filter": ("lang_score",),
    "perplexity_filter": ("perplexity",),
    "text_action_filter": ("num_action",),
    "image_shape_filter": ("image_width", "image_height"),
    "image_aspect_ratio_filter": ("aspect_ratios",),
    "image_size_filter": ("image_sizes",),
    "image_face_ratio_filter": ("face_ratios",),
    "image_face_count_filter": ("face_counts",),
    "image_aesthetics_filter": ("image_aesthetics_scores",),
    "image_nsfw_filter": ("image_nsfw_score",),
    "image_text_similarity_filter": ("image_text_similarity",),
    "image_text_matching_filter": ("image_text_matching_score",),
    "phrase_grounding_recall_filter": ("phrase_grounding_recall",),
    "caption_log_likelihood_filter": ("caption_log_likelihood",),
    "likelihood_gain_filter": ("likelihood_gain",),
    "vlm_rating_filter": (
        "rating_relevance",
        "rating_visual_dependency",
        "rating_formatting",
        "rating_image_correspondence",
    ),
    "caption_agreement_filter": ("caption_agreement",),
    "blind_answer_filter": ("blind_likelihood",),
    "round_trip_filter": ("round_trip_agreement",),
}
STATISTIC_LABELS = {  # with units, for pages; other statistics are shown by name
    "text_len": "text length (characters)",
    "num_words": "number of words",
    "num_token": "number of tokens",
    "alnum_ratio": "letters and digits (share of characters)",
    "special_char_ratio": "special characters (share of characters)",
    "word_rep_ratio": "repeated word sequences (share)",
    "char_rep_ratio": "repeated character sequences (share)",
    "avg_line_length": "mean line length (characters)",
    "max_line_length": "longest line (characters)",
    "stopwords_ratio": "stop words (share of words)",
    "flagged_words_ratio": "flagged words (share of words)",
    "lang_score": "certainty of the language (0 to 1)",
    "num_action": "number of verbs",
    "image_width": "image width (px)",
    "image_height": "image height (px)",
    "aspect_ratios": "image width / height",
    "image_sizes": "size of the image's file (bytes)",
    "face_ratios": "largest face (share of the image)",
    "face_counts": "number of faces",
    "image_aesthetics_scores": "aesthetics score (0 to 1)",
    "image_nsfw_score": "unsafe content (probability)",
    "image_text_similarity": "CLIP similarity of image and text",
    "image_text_matching_score": "image and text match (probability)",
    "phrase_grounding_recall": "phrases found in the image (share)",
    "caption_log_likelihood": "log-likelihood of the caption (nats per token)",
    "likelihood_gain": "gain in log-likelihood by the image (nats per token)",
    "rating_relevance": "rating of relevance (1 to 5)",
    "rating_visual_dependency": "rating of visual dependency (1 to 5)",
    "rating_formatting": "rating of formatting (1 to 5)",
    "rating_image_correspondence": "rating of image correspondence (1 to 5)",
    "caption_agreement": "agreement with the caption (0 or 1)",
    "blind_likelihood": "likelihood of the answer without the image (probability)",
    "round_trip_agreement": "agreement with another answer (probability)",
}


@dataclass(frozen=True)
class AllowedOperator:
    """An operator that a recipe may use.

    Attributes:
        name: name of the operator.
        arguments: kind of each argument that a recipe may give.
        defaults: default of each argument of the operator, or `REQUIRED_MARK` or `NOT_PLAIN`.
        rules: groups of arguments for each of `ARGUMENT_RULES`.
        writes_captions: whether it may be the captioner of another operator.
        is_own: whether it is not one of Data-Juicer's.
    """

    name: str
    arguments: dict[str, str]
    defaults: dict[str, object]
    rules: dict[str, list[list[str]]] = field(default_factory=dict)
    writes_captions: bool = False
    is_own: bool = False


@cache
def read_allowed_operators() -> dict[str, AllowedOperator]:
    """Return the operators that a recipe may use, by name."""
    reviewed, installed = _read_reviewed(), _read_installed()
    operators = {}
    for name, entry in reviewed["operators"].items():
        arguments, defaults = dict(reviewed["every_operator"]), dict(installed["every_operator"])
        if name.endswith("_filter"):
            arguments |= reviewed["every_filter"]
            defaults |= installed["every_filter"]
        arguments |= entry["arguments"]
        defaults |= installed["arguments"].get(name, {})  # unknown for an operator that was added by hand
        rules = {rule: entry[rule] for rule in ARGUMENT_RULES if rule in entry}
        is_own = name not in installed["operators"]
        operators[name] = AllowedOperator(name, arguments, defaults, rules, entry.get("writes_captions", False), is_own)
    return operators


@cache
def read_refused_operators() -> dict[str, str]:
    """Return the reasons why reviewed operators are not allowed, by the operator's name."""
    return {name: reason for reason, names in _read_reviewed()["refused"].items() for name in names}


def read_defaults(name: str) -> dict[str, object]:
    """Return the plain defaults of an operator's own arguments; none if it was not reviewed."""
    defaults = _read_installed()["arguments"].get(name, {})
    return {key: value for key, value in defaults.items() if value not in (REQUIRED_MARK, NOT_PLAIN)}


def list_arguments(name: str) -> list[str]:
    """Return the names of an operator's own arguments; none if it was not reviewed."""
    return list(_read_installed()["arguments"].get(name, {}))


@cache
def _read_reviewed() -> dict:
    return read_config(REVIEWED_FILE)


@cache
def _read_installed() -> dict:
    return json.loads(Path(INSTALLED_FILE).read_text(encoding="utf-8"))


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


def label_statistic(name: str) -> str:
    """Return the plain label of a statistic, with its unit."""
    return STATISTIC_LABELS.get(name, name.replace("_", " "))


def find_limit_arguments(arguments: Collection[str], statistic: str, alone: bool) -> dict[str, str]:
    """Return the names of the arguments that limit a statistic, by side.

    It is empty if the operator has no such arguments.

    Args:
        arguments: names of the operator's arguments.
        statistic: name of one of its statistics.
        alone: whether the operator has no other statistic. Otherwise the name of an argument without its prefix is
            part of the statistic's name (min_width, image_width).
    """
    ranges = {
        name[len(prefix) :] for name in arguments for prefix in LIMIT_PREFIXES.values() if name.startswith(prefix)
    }
    words = ranges if alone and len(ranges) == 1 else {word for word in ranges if word in statistic}
    if len(words) != 1:
        return {}
    [word] = words
    return {side: prefix + word for side, prefix in LIMIT_PREFIXES.items() if prefix + word in arguments}


@cache
def read_statistic_operators() -> dict[str, tuple[str, dict[str, str]]]:
    """Return the operator of each statistic of `OPERATOR_STATISTICS`, and the arguments that limit it by side."""
    limits = {
        statistic: (operator, find_limit_arguments(list_arguments(operator), statistic, len(statistics) == 1))
        for operator, statistics in OPERATOR_STATISTICS.items()
        for statistic in statistics
    }
    return limits | {"image_watermark_prob": ("image_watermark_filter", {"max": "prob_threshold"})}  # without a prefix
