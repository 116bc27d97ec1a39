"""Data-Juicer's operators and their arguments, from its source files: importing it takes seconds, at every `snakemake`.

Where Snakemake runs without Data-Juicer, each rule in its own environment, nothing is known here, and the stage checks.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from errors import InputError
from settings.recipe_shape import merges_rows, nearest

OWN = Path(__file__).resolve().parents[1] / "juicer/operators"
MERGING = {"aggregator", "grouper", "pipeline"}  # folders
REGISTERED = re.compile(r"^@OPERATORS\.register_module\(\s*(f?[\"'][\w{}]+[\"']|\w+)\)", re.M)
TYPES = {"int": int, "float": int | float, "bool": bool, "str": str}
Parameters = dict[str, str | None]  # argument → its annotation where that is one word


def check_operator(place: str, name: str, arguments: dict) -> None:
    """Check the operator's name, and the names and plain types of its arguments, as Data-Juicer's own check does it.

    Raises:
        InputError: names the nearest known operator or argument.
    """
    if not _stems():
        return
    path = _stems().get(name)
    if path is None or name not in _registered(path):
        path = _all_registered().get(name)
    if path is None:
        if entry_points(group="data_juicer.ops"):  # other packages' operators, which Data-Juicer imports
            return
        raise InputError(
            f"{place}: unknown operator {name!r}; the nearest known one is {nearest(name, _all_registered())!r}"
        )
    if path.parent.name in MERGING:
        raise merges_rows(place, name)
    for argument, value in arguments.items():
        _check_argument(place, name, argument, value, _parameters(path, _registered(path)[name]))


def _check_argument(place: str, name: str, argument: str, value: object, classes: Iterator[Parameters | None]) -> None:
    known: Parameters = {}
    for parameters in classes:
        if parameters is None:
            return
        if argument in parameters:
            if not _fits(value, kind := parameters[argument]):
                raise InputError(f"{place}: {name}: {argument!r} must be of type {kind}, found {value!r}")
            return
        known |= parameters
    raise InputError(
        f"{place}: {name} has no argument {argument!r}; the nearest that it has is {nearest(argument, known)!r}"
    )


def _fits(value: object, annotation: str | None) -> bool:
    if value is None or annotation not in TYPES:
        return True
    if annotation == "int" and isinstance(value, float):
        return value == int(value)
    return isinstance(value, TYPES[annotation]) and isinstance(value, bool) == (annotation == "bool")


def _parameters(path: Path, name: str) -> Iterator[Parameters | None]:
    """What a class takes and then what its bases take; None for one that is found nowhere."""
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield _own_parameters(node)
            for base in map(ast.unparse, node.bases):
                if base not in ("object", "ABC"):
                    yield from _parameters(path, base)
            return
        if isinstance(node, ast.ImportFrom) and name in (alias.asname or alias.name for alias in node.names):
            source = _stems().get((node.module or "").rpartition(".")[2]) or _module_of(name)
            yield from (None,) if source in (None, path) else _parameters(source, name)
            return
    yield None


def _module_of(operator_class: str) -> Path | None:
    return next((path for path in _stems().values() if operator_class in _registered(path).values()), None)


def _own_parameters(node: ast.ClassDef) -> Parameters:
    found: Parameters = {}
    for member in node.body:
        if isinstance(member, ast.Assign) and ast.unparse(member.targets[0]) == "_BASE_PARAMS":
            pairs = zip(member.value.keys, member.value.values, strict=True)
            found |= {key.value: ast.unparse(value.elts[0]) for key, value in pairs if key is not None}
        elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
            arguments = [*member.args.posonlyargs, *member.args.args, *member.args.kwonlyargs][1:]
            found |= {one.arg: one.annotation and ast.unparse(one.annotation) for one in arguments}
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _stems() -> dict[str, Path]:
    """Modules with operators, most of which are named like their operator."""
    spec = find_spec("data_juicer")
    folders = [Path(spec.submodule_search_locations[0]) / "ops", OWN] if spec else []
    return {path.stem: path for folder in folders for path in folder.rglob("*.py")}


@cache
def _registered(path: Path) -> dict[str, str]:
    """Class by operator, of a module."""
    text = path.read_text(encoding="utf-8")
    constants = dict(re.findall(r"^(\w+) = [\"'](\w+)[\"']", text, re.M))
    return {
        _name(match[1], constants): re.search(r"^class (\w+)", text[match.end() :], re.M)[1]
        for match in REGISTERED.finditer(text)
    }


def _name(written: str, constants: dict[str, str]) -> str:
    """An operator's name, which is written as a constant, a text, or a text with a constant in braces."""
    if written.isidentifier():
        return constants.get(written, written)
    return re.sub(r"{(\w+)}", lambda match: constants.get(match[1], match[1]), written.lstrip("f")[1:-1])


@cache
def _all_registered() -> dict[str, Path]:
    return {name: path for path in _stems().values() for name in _registered(path)}
