"""What a user is told when an operator fails: which operator, on which row, and what to do."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from errors import InputError
from juicer.library import MissingPackage
from juicer.recipe import missing_package


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
    """An operator's work on a batch that, when it raises, finds the row that it raises on."""

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
    """Refuse an operator that has added or repeated rows, or taken their ids away.

    Args:
        before: ids of the rows that it was given.
        after: columns of those that it gave back.
    """
    if "id" not in after:
        raise InputError(f"operator {name} removed the column 'id'; take it out of the recipe")
    left = set(after["id"])
    if len(left) != len(after["id"]) or not left <= before:
        raise InputError(
            f"operator {name} added rows ({len(after['id'])} rows, of which {len(left & before)} of the {len(before)} "
            "it was given); this stage keeps, drops or edits rows, so switch that off or take the operator out of the "
            "recipe"
        )
