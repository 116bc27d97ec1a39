"""The operators of a recipe, each built once, and errors that name the failing operator and row."""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.data.formats import extract_caption, replace_caption
from dj2mgm.data.images import BadImageError
from dj2mgm.errors import InputError, quote_value
from dj2mgm.juicer.operators.declarations import get_declarations, keeps_or_drops_rows
from dj2mgm.juicer.patched_data_juicer import (
    OP,
    OPERATORS,
    MissingPackageError,
    SpecialTokens,
    check_arguments,
    load_step,
)
from dj2mgm.recipes.operator_checks import make_row_merge_error
from dj2mgm.recipes.recipe_step import RecipeStep, find_nearest_name

# the engine shares rows among processes, and an operator that fails stops the stage
IN_THIS_PROCESS = {"skip_op_error": False, "auto_op_parallelism": False, "num_proc": 1}
CHANGE_REMEDY = "Change the operator's arguments or remove it from the recipe"


@dataclass(frozen=True)
class Step:
    """One operator of a recipe."""

    number: int  # its position in the recipe, from 1
    operator: OP
    only_measures: bool = False  # True: here it drops and edits no rows

    @property
    def name(self) -> str:
        return self.operator._name


def check_installed(steps: Sequence[RecipeStep]) -> None:
    """Check that the installed Data-Juicer has the operators and accepts their arguments.

    `parse_recipe` has checked before which operators and values a recipe may use.
    """
    for step in (step for top in steps for step in top.list_with_captioner()):
        if step.name not in OPERATORS.modules:
            nearest_name = find_nearest_name(step.name, OPERATORS.modules)
            raise InputError(
                f"{step.location}: unknown operator {step.name!r}; the nearest known one is {nearest_name!r}"
            )
        if problems := check_arguments(step.name, step.arguments):
            raise InputError(f"{step.location}: {'; '.join(problems)}; see Data-Juicer's page of the operator")
        if not keeps_or_drops_rows(OPERATORS.modules[step.name]):
            raise make_row_merge_error(step.location, step.name)


def build_operators(steps: Sequence[RecipeStep], working: Path) -> list[OP]:
    """Return a recipe's operators; refuse two that would send the same requests."""
    operators = [_build(step, working) for step in steps]
    spenders: dict[str, int] = {}
    for number, operator in enumerate(operators, start=1):
        budget = get_declarations(operator).budget
        if budget and (first := spenders.setdefault(budget, number)) != number:
            raise InputError(
                f"recipe, steps {first} and {number}: {operator._name} would send the same requests to the same server "
                "twice. Remove one of the steps"
            )
    return operators


def _build(step: RecipeStep, working: Path) -> OP:
    try:
        operator = load_step(step.name, step.arguments, IN_THIS_PROCESS | {"work_dir": str(working)})
    except MissingPackageError as error:
        raise make_package_error(step.name, error) from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"recipe: operator {step.name} cannot be built: {type(error).__name__}: {error}") from error
    operator.num_proc = None  # with 1, datasets would still start a process
    return operator


def make_package_error(operator: str, error: MissingPackageError) -> InputError:
    return InputError(
        f"operator {operator} needs the package {error.package}, which is not installed; "
        "install it in envs/data_juicer.yaml (nothing is installed at run time) or remove the operator from the recipe"
    )


@contextmanager
def naming_operator(name: str) -> Iterator[None]:
    """Turn any exception of the operator into an `InputError` that names it."""
    try:
        yield
    except MissingPackageError as error:
        raise make_package_error(name, error) from None
    except ModuleNotFoundError as error:
        raise make_package_error(name, MissingPackageError(error.name)) from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"operator {name} failed: {type(error).__name__}: {error}. {CHANGE_REMEDY}") from error


def name_failing_row(name: str, method: Callable[..., dict]) -> Callable[..., dict]:
    """Wrap an operator's method for a batch, so that its errors name the row on which it fails."""

    @functools.wraps(method)
    def on_batch(samples: dict, *args, **kwargs) -> dict:
        try:
            return method(samples, *args, **kwargs)
        except (InputError, ModuleNotFoundError):
            raise
        except Exception as error:
            row = _find_failing_row(lambda row: method(row, *args, **kwargs), samples)
            location = "" if row is None else f" on row {quote_value(row)}"
            remedy = "No row fails alone, so run it again" if row is None else "Fix the row"
            if isinstance(error, BadImageError):
                remedy = "Put `image_integrity_filter: {}` before it, which drops such rows, fix the row"
            raise InputError(
                f"operator {name} failed{location}: {type(error).__name__}: {error}. "
                f"{remedy}, change the operator's arguments or remove it from the recipe"
            ) from error

    return on_batch


def _find_failing_row(method: Callable[[dict], object], samples: dict) -> str | None:
    for position, identifier in enumerate(samples["id"]):
        try:
            method({key: [samples[key][position]] for key in samples})
        except Exception:
            return identifier
    return None


TOKEN_NAMES = {"SpecialTokens", "remove_special_tokens", "remove_non_special_tokens"}  # of data_juicer.utils.mm_utils


@functools.cache
def handles_tokens(operator: type[OP]) -> bool:
    """Return whether an operator's module uses the names by which Data-Juicer's operators find tokens in texts."""
    return any(not TOKEN_NAMES.isdisjoint(vars(sys.modules[base.__module__])) for base in operator.__mro__)


def show_text(operator: OP, text: str) -> str:
    """Return a row's text as the operator gets it.

    It is the caption alone, so that limits in words and characters are those of the caption. Operators that match the
    chunks of a text with images get the whole text, with image token and end of chunk.
    """
    return text if handles_tokens(type(operator)) else extract_caption(text)


def restore_text(operator: OP, text: str, shown: str) -> str:
    """Return a row's whole text after an operator that got it from `show_text` and returned `shown`."""
    return shown if handles_tokens(type(operator)) else replace_caption(text, extract_caption(shown))


def check_ids(name: str, before: set[str], after: dict) -> None:
    """Raise InputError if an operator has added or repeated rows, or removed their ids.

    `before` has the ids of its input rows, `after` the columns of its output rows.
    """
    if "id" not in after:
        raise InputError(f"operator {name} removed the column 'id'. Remove it from the recipe")
    ids = set(after["id"])
    if len(ids) != len(after["id"]) or not ids <= before:
        raise InputError(
            f"operator {name} added rows ({len(after['id'])} rows, {len(ids & before)} of them from the {len(before)} "
            "input rows). This stage keeps, drops or edits rows. Switch that off or remove the operator from the recipe"
        )


def check_special_tokens(name: str, before: dict, after: dict) -> None:
    """Check that an operator keeps the number of image tokens in each text, and the end of its chunk.

    Otherwise the row could not be matched with its images, or its caption would end in a damaged token. This is an
    error and not a reason to drop the row, since an operator that takes a token for text does so in every row.
    """
    texts_before = dict(zip(before["id"], before["text"], strict=True))
    for row, text in zip(after["id"], after["text"], strict=True):
        expected, actual = (value.count(SpecialTokens.image) for value in (texts_before[row], text))
        if expected != actual:
            raise InputError(
                f"operator {name} changed the image tokens of row {quote_value(row)}: its text had {expected} times "
                f"{SpecialTokens.image}, and now has it {actual} times. {CHANGE_REMEDY}"
            )
        if SpecialTokens.eoc in texts_before[row] and SpecialTokens.eoc not in text:
            raise InputError(
                f"operator {name} changed the {SpecialTokens.eoc} at the end of row {quote_value(row)}. {CHANGE_REMEDY}"
            )
