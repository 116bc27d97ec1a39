"""Chat templates by name: the files in config/chat_templates, and `tokenizer` for the model's own.

A stage receives the content of the file, so that a change re-runs the stage, and a comment does not.
"""

from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dj2mgm.errors import InputError, quote_value
from dj2mgm.settings.base import Section, setting
from dj2mgm.settings.config_files import list_config_names, locate_config_file, read_config, suggest_name
from dj2mgm.settings.schema import build_schema
from dj2mgm.settings.validation import validate_settings

OF_THE_TOKENIZER = "tokenizer"
Text = Annotated[str, Field(min_length=1)]
WITHOUT_CHAT = ("paligemma",)  # types of models that take one question about one image, without a chat template


class ChatTemplateFile(Section):
    """A file in config/chat_templates."""

    asks_question: bool = setting(..., "whether the template has a place for a question, as stage 2 needs")
    chat_template: Text = setting(..., "Jinja, as transformers renders it; `{% generation %}` marks the answer")
    stop_tokens: list[Text] = setting(..., "end an answer, in addition to the tokenizer's end-of-sequence token")
    control_tokens: list[Text] = setting(..., "no question and no answer may contain one")


def list_chat_template_names() -> list[str]:
    """Return the names of the files, and `tokenizer`."""
    return sorted([OF_THE_TOKENIZER, *list_config_names("chat_templates")])


def read_chat_template(name: str) -> dict:
    """Return a chat template: {name, asks_question, chat_template, stop_tokens, control_tokens}.

    The tokenizer's own template is empty here; the stage fills it in.

    Raises:
        InputError: the name is unknown, or its file has a wrong key or value.
    """
    if name not in (names := list_chat_template_names()):
        raise InputError(f"template: unknown chat template {name!r}; {suggest_name(name, names)}")
    if name == OF_THE_TOKENIZER:
        return {"name": name, "asks_question": True, "chat_template": "", "stop_tokens": [], "control_tokens": []}
    return {"name": name} | _read_content(locate_config_file("chat_templates", f"{name}.yaml"))


def check_chat_templates(source: str, model: dict) -> None:
    """Check the two chat templates that a model file names.

    Raises:
        InputError: a name is unknown, or the template of stage 2 has no place for a question.
    """
    for key, needs_question in (("pretrain_template", False), ("template", True)):
        if key not in model:  # the model has its own
            continue
        names = list_chat_template_names()
        if model[key] in names and (not needs_question or read_chat_template(model[key])["asks_question"]):
            continue
        valid_names = [name for name in names if not needs_question or read_chat_template(name)["asks_question"]]
        raise InputError(
            f"{source}: {key!r} must be one of {', '.join(valid_names)}, found {quote_value(model[key])}; a file in "
            "config/chat_templates adds one"
        )


@cache  # every stage of every run needs it
def _read_content(path: Path) -> dict:
    return validate_settings(
        ChatTemplateFile, read_config(path, build_schema(ChatTemplateFile)), str(path)
    ).model_dump()
