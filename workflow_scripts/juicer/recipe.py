"""A recipe: Data-Juicer's `process` list, checked, and turned into its operators."""

import difflib
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
from juicer.operators.image_integrity_filter import NAME as IMAGE_INTEGRITY_FILTER

KEEP_OR_DROP = (Filter, Mapper, Deduplicator, Selector)  # the others merge or group rows


def missing_package(operator: str, error: MissingPackage) -> InputError:
    return InputError(
        f"operator {operator} needs the package {error.package}, which is not installed; "
        "install it in envs/filter.yaml (nothing is installed at run time) or take the operator out of the recipe"
    )


def check_process(process: object) -> None:
    """Check the shape of a `process` list, its operators' names, and their arguments' names and types.

    Raises:
        InputError: names the step, and for a misspelt name the nearest known one.
    """
    if not isinstance(process, list) or not process:
        raise InputError(
            "recipe: 'process' must be a list of at least one operator, as in config/recipes/baseline.yaml"
        )
    for number, step in enumerate(process, start=1):
        if not isinstance(step, dict) or len(step) != 1 or not isinstance(next(iter(step.values())), dict | None):
            raise InputError(f"recipe, step {number}: expected 'operator: {{argument: value}}', found {step!r}")
        name = next(iter(step))
        if name not in OPERATORS.modules:
            nearest = difflib.get_close_matches(str(name), OPERATORS.modules, n=1, cutoff=0)[0]
            raise InputError(f"recipe, step {number}: unknown operator {name!r}; the nearest known one is {nearest!r}")
        if not issubclass(OPERATORS.modules[name], KEEP_OR_DROP):
            raise InputError(
                f"recipe, step {number}: {name} merges or groups rows; this stage only keeps, drops or edits them: "
                "use a filter, mapper, deduplicator or selector"
            )
        try:
            pre_instantiation_check([step])
        except PipelineConfigError as error:
            problems = "; ".join(str(problem) for problem in error.errors)
            raise InputError(f"recipe, step {number}: {problems}; see Data-Juicer's page of the operator") from None


def build_operators(process: list[dict], image_root: Path, processes: int, working: Path) -> list[OP]:
    """Data-Juicer's operators for a checked `process` list.

    Each gets the run's settings where the recipe leaves them open, and each runs `processes`-fold, except those that
    hold a GPU or cannot be forked, which run in this process.

    Raises:
        InputError: names the operator that cannot be built and why.
    """
    settings = {
        "skip_op_error": False,
        "auto_op_parallelism": False,
        "num_proc": processes,
        "work_dir": str(working),
    }
    # Copied: Data-Juicer fills the lists it is given. One at a time: it names no operator in its errors.
    operators = []
    for step in process:
        [(name, arguments)] = step.items()
        arguments = dict(arguments or {})
        if name == IMAGE_INTEGRITY_FILTER:
            arguments.setdefault("image_root", str(image_root))
        try:
            [operator] = load_ops(update_op_attr([{name: arguments}], settings))
        except MissingPackage as error:
            raise missing_package(name, error) from None
        except Exception as error:
            raise InputError(f"recipe: operator {name} cannot be built: {type(error).__name__}: {error}") from error
        if operator.use_cuda() or name in UNFORKABLE.modules or operator.num_proc == 1:
            operator.num_proc = None
        operators.append(operator)
    return operators
