"""A recipe: Data-Juicer's `process` list, checked, and turned into its operators."""

from pathlib import Path

import juicer.operators  # noqa: F401  (registers this workflow's own operators)
from errors import InputError
from juicer.library import (
    OP,
    OPERATORS,
    UNFORKABLE,
    Deduplicator,
    Filter,
    Mapper,
    MissingPackage,
    PipelineConfigError,
    Selector,
    load_ops,
    pre_instantiation_check,
    update_op_attr,
)
from settings.recipe_shape import check_steps, merges_rows, nearest

KEEP_OR_DROP = (Filter, Mapper, Deduplicator, Selector)  # the others merge or group rows


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
    """Check the shape of a `process` list, its operators' names, and their arguments' names and types.

    Raises:
        InputError: names the step, and for a misspelt name the nearest known one.
    """
    for place, name, arguments in check_steps("recipe", process):
        _check_operator(place, name, arguments)
        if not issubclass(OPERATORS.modules[name], KEEP_OR_DROP):
            raise merges_rows(place, name)


def _check_operator(where: str, name: str, arguments: dict) -> None:
    if name not in OPERATORS.modules:
        known = nearest(name, OPERATORS.modules)
        raise InputError(f"{where}: unknown operator {name!r}; the nearest known one is {known!r}")
    try:
        pre_instantiation_check([{name: arguments}])
    except PipelineConfigError as error:
        problems = "; ".join(str(problem) for problem in error.errors)
        raise InputError(f"{where}: {problems}; see Data-Juicer's page of the operator") from None


def operator_settings(processes: int, working: Path) -> dict:
    """Data-Juicer's settings of every operator: it runs `processes`-fold, and stops at what it cannot do."""
    return {
        "skip_op_error": False,
        "auto_op_parallelism": False,
        "num_proc": processes,
        "work_dir": str(working),
    }


def build_operators(process: list[dict], processes: int, working: Path) -> list[OP]:
    """Data-Juicer's operators for a checked `process` list.

    Raises:
        InputError: names the operator that cannot be built and why.
    """
    # One at a time: Data-Juicer names no operator in its errors.
    return [build_operator(step, operator_settings(processes, working)) for step in process]


def build_operator(step: dict, settings: dict) -> OP:
    """One of them. Those that hold a GPU or cannot be forked run in this process, whatever the settings say."""
    [(name, arguments)] = step.items()
    try:
        # copied: Data-Juicer fills the lists it is given
        [operator] = load_ops(update_op_attr([{name: dict(arguments or {})}], settings))
    except MissingPackage as error:
        raise missing_package(name, error) from None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"recipe: operator {name} cannot be built: {type(error).__name__}: {error}") from error
    if operator.use_cuda() or name in UNFORKABLE.modules or operator.num_proc == 1:
        operator.num_proc = None
    return operator
