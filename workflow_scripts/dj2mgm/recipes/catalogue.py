"""The catalogue of operators: config/schemas/operators.yaml, and the list of the Data-Juicer that was reviewed.

Both files are always the workflow's own.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dj2mgm.settings.config_files import SHIPPED, read_config

REVIEWED_FILE = SHIPPED / "schemas/operators.yaml"
INSTALLED_FILE = SHIPPED / "schemas/operators.installed.json"
NOT_PLAIN = "<not plain>"  # replaces a default that JSON cannot hold
REQUIRED_MARK = "<required>"  # replaces the default of an argument that has none
ARGUMENT_RULES = ("exactly_one", "at_least_one", "at_most_one", "same_length", "below")


@dataclass(frozen=True)
class AllowedOperator:
    """An operator that a recipe may use.

    Attributes:
        name: name of the operator.
        arguments: kind of each argument that a recipe may give.
        defaults: default of each argument of the operator, or `REQUIRED_MARK` or `NOT_PLAIN`.
        rules: groups of arguments for each of `ARGUMENT_RULES`.
        writes_captions: whether it may be the captioner of another operator.
    """

    name: str
    arguments: dict[str, str]
    defaults: dict[str, object]
    rules: dict[str, list[list[str]]] = field(default_factory=dict)
    writes_captions: bool = False


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
        operators[name] = AllowedOperator(name, arguments, defaults, rules, entry.get("writes_captions", False))
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
