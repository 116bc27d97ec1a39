"""A recipe: Data-Juicer's `process` list, checked and turned into operators, and the messages when one fails."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dj2mgm.config.recipe_check import check_steps, merges_rows, nearest
from dj2mgm.errors import InputError
from dj2mgm.juicer.data_juicer import (
    OP,
    OPERATORS,
    MissingPackage,
    PipelineConfigError,
    SpecialTokens,
    load_ops,
    pre_instantiation_check,
    update_op_attr,
)
from dj2mgm.juicer.operators import declarations  # and with it all of this workflow's own operators


def missing_package(operator: str, error: MissingPackage) -> InputError:
    return InputError(
        f"operator {operator} needs the package {error.package}, which is not installed; "
        "install it in envs/data_juicer.yaml (nothing is installed at run time) or take the operator out of the recipe"
    )


def complete(process: object, arguments: dict[str, dict]) -> object:
    """The `process` list with what a run knows and the recipe leaves open; what the recipe states wins.

    Args:
        process: of any shape; `check_process` judges it.
        arguments: by operator.
    """
    if not isinstance(process, list):
        return process
    completed = []
    for step in process:
        if isinstance(step, dict) and len(step) == 1 and isinstance(next(iter(step.values())), dict | None):
            [(name, given)] = step.items()
            step = {name: arguments.get(name, {}) | (given or {})}
        completed.append(step)
    return completed


def check_process(process: object) -> None:
    """Check that the installed Data-Juicer has the operators of a `process` list, and takes their arguments.

    What a recipe may use is checked before, by `check_operators`.

    Raises:
        InputError: names the step, and for a misspelled name the nearest known one.
    """
    for step in check_steps("recipe", process):
        _check_operator(step.place, step.name, step.arguments)
        if not declarations.keeps_or_drops_rows(OPERATORS.modules[step.name]):
            raise merges_rows(step.place, step.name)


def _check_operator(where: str, name: str, arguments: dict) -> None:
    if name not in OPERATORS.modules:
        known = nearest(name, OPERATORS.modules)
        raise InputError(f"{where}: unknown operator {name!r}; the nearest known one is {known!r}")
    try:
        pre_instantiation_check([{name: arguments}])
    except PipelineConfigError as error:
        problems = "; ".join(str(problem) for problem in error.errors)
        raise InputError(f"{where}: {problems}; see Data-Juicer's page of the operator") from None
    except AttributeError:  # its own message fails at annotations such as `float | None`
        raise InputError(
            f"{where}: {name}: a value is of another type than its argument, of {', '.join(arguments)}; see the "
            "operator's source"
        ) from None


def build_operators(process: list[dict], working: Path) -> list[OP]:
    """Data-Juicer's operators for a checked `process` list.

    Raises:
        InputError: names the operator that cannot be built and why, or two that would spend one budget.
    """
    # One at a time: Data-Juicer names no operator in its errors.
    operators = [build_operator(step, working) for step in process]
    spenders: dict[str, int] = {}
    for number, operator in enumerate(operators, start=1):
        if (budget := declarations.budget(operator)) and (first := spenders.setdefault(budget, number)) != number:
            raise InputError(
                f"recipe, steps {first} and {number}: {operator._name} asks the same server the same twice; take one "
                "of the steps out"
            )
    return operators


def build_operator(step: dict, working: Path) -> OP:
    """One of them. It runs in this process, as the engine shares rows among processes, and stops at an error."""
    [(name, arguments)] = step.items()
    settings = {"skip_op_error": False, "auto_op_parallelism": False, "num_proc": 1, "work_dir": str(working)}
    try:
        # copied: Data-Juicer fills the lists it is given
        [operator] = load_ops(update_op_attr([{name: dict(arguments or {})}], settings))
    except MissingPackage as error:
        raise missing_package(name, error) from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"recipe: operator {name} cannot be built: {type(error).__name__}: {error}") from error
    operator.num_proc = None  # with 1, datasets would still start a process
    return operator


@contextmanager
def operator_named(name: str) -> Iterator[None]:
    """Whatever the operator raises becomes an `InputError` that names it."""
    try:
        yield
    except MissingPackage as error:
        raise missing_package(name, error) from None
    except ModuleNotFoundError as error:
        raise missing_package(name, MissingPackage(error.name)) from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"operator {name} failed: {type(error).__name__}: {error}; "
            "change its arguments or take it out of the recipe"
        ) from error


def row_named(name: str, method: Callable[..., dict]) -> Callable[..., dict]:
    """An operator's method for a batch; where it raises, the error names the row."""

    @functools.wraps(method)
    def on_batch(samples: dict, *args, **kwargs) -> dict:
        try:
            return method(samples, *args, **kwargs)
        except (InputError, ModuleNotFoundError):
            raise
        except Exception as error:
            place = _failing_row(lambda row: method(row, *args, **kwargs), samples)
            first = "fix the row" if place else "no row fails alone, so run it again"
            raise InputError(
                f"operator {name} failed{place}: {type(error).__name__}: {error}; "
                f"{first}, change the operator's arguments or take it out of the recipe"
            ) from error

    return on_batch


def _failing_row(method: Callable[[dict], object], samples: dict) -> str:
    for position, identifier in enumerate(samples["id"]):
        try:
            method({key: [samples[key][position]] for key in samples})
        except Exception:
            return f" on row {identifier!r}"
    return ""


def check_ids(name: str, before: set[str], after: dict) -> None:
    """Refuse an operator that has added or repeated rows, or removed their ids.

    Args:
        before: ids of the rows that it was given.
        after: columns of those that it gave back.
    """
    if "id" not in after:
        raise InputError(f"operator {name} removed the column 'id'; take it out of the recipe")
    ids = set(after["id"])
    if len(ids) != len(after["id"]) or not ids <= before:
        raise InputError(
            f"operator {name} added rows ({len(after['id'])} rows, of which {len(ids & before)} of the {len(before)} "
            "it was given); this stage keeps, drops or edits rows, so switch that off or take the operator out of the "
            "recipe"
        )


CHANGE = "Change the operator's arguments or take it out of the recipe"


def check_special_tokens(name: str, before: dict, after: dict) -> None:
    """Refuse an operator that has changed how many image tokens a row's text has, or removed the end of its chunk.

    Such a row could not be matched with its images, or its caption would end in a damaged token. It is an error and no
    reason to drop the row: an operator that takes a token for text does so in every row.

    Args:
        name: of the operator.
        before: columns of the rows that it was given.
        after: columns of those that it gave back.

    Raises:
        InputError: names the operator and the row.
    """
    given = dict(zip(before["id"], before["text"], strict=True))
    for row, text in zip(after["id"], after["text"], strict=True):
        expected, found = (each.count(SpecialTokens.image) for each in (given[row], text))
        if expected != found:
            raise InputError(
                f"operator {name} changed the image tokens of row {row!r}: its text had {expected} times "
                f"{SpecialTokens.image}, and now has it {found} times. {CHANGE}"
            )
        if SpecialTokens.eoc in given[row] and SpecialTokens.eoc not in text:
            raise InputError(f"operator {name} changed the {SpecialTokens.eoc} at the end of row {row!r}. {CHANGE}")
