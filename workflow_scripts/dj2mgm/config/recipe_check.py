"""What a recipe may hold: its shape, its operators and their arguments; asked before a run and again by the stage.

Operators and arguments are read from Data-Juicer's source files: importing it takes seconds, at every `snakemake`.
Where Snakemake runs without Data-Juicer, each rule in its own environment, they are not known, and the stage checks.

A recipe is data: whoever is handed one can run it. So operators that run code, start programs, write files or send them
elsewhere are refused by what their source does, and arguments by their names and values, however deep they are.
"""

import ast
import difflib
import math
import os
import re
from collections.abc import Collection, Iterator
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from dj2mgm.config.endpoints import ADDRESS, VARIABLE, is_address, is_variable
from dj2mgm.control_tokens import CONTROL
from dj2mgm.errors import InputError

KEYS = {"process", "executor", "ray_address"}
EXECUTORS = ("default", "ray")  # Data-Juicer's words
MAX_VALUES = 10_000
FOLDER_FILES = (".json", ".txt", ".safetensors")  # of a folder of models or lists of words
# names of arguments, at any depth
REFUSED_ARGUMENTS = {
    "trust_remote_code": "a model's folder could run code of its own",
    "skip_op_error": "rows on which an operator fails would be lost; an operator that fails stops the stage",
    "runtime_env": "Ray would install packages while it runs",
}
FORMATS = {"base_url": (is_address, ADDRESS), "key_variable": (is_variable, VARIABLE)}
WRITES = re.compile(
    r"(save|output|export|frame|temp|visualization)_(\w+_)?(dir|path)|batch_meta_export_path|\w+_temp_path"
)
RUNS = re.compile(
    r"eval|exec|os\.(system|popen)|subprocess\.\w+|pickle\.loads?|importlib\.util\.spec_from_file_location"
)
STORES = re.compile(r"aws_\w+|s3_\w+")  # arguments of operators that send files to a store of objects, or fetch them
SERVERS = re.compile(r"api_(model|or_hf_model|endpoint|url|key)|\w*base_url")  # of those that ask a server
ABSOLUTE = re.compile(r"\s*[a-z][a-z0-9+.-]*://", re.I)  # an address
LAMBDA = re.compile(r"\s*lambda\b")
OWN_OPERATOR = "write an operator in workflow_scripts/dj2mgm/juicer/operators/ instead"
FUSED = ("general_fused_op", "fused_sequential_batch_op")  # operators in an argument, which nothing would check
OWN = Path(__file__).resolve().parents[1] / "juicer/operators"
MERGING = {"aggregator", "grouper", "pipeline"}  # folders
REGISTERED = re.compile(r"^@OPERATORS\.register_module\(\s*(f?[\"'][\w{}]+[\"']|\w+)\)", re.M)
# it evaluates an argument only if that is a lambda, which is refused
EVALUATES_LAMBDA = "remove_repeat_sentences_mapper"
TYPES = {"int": int, "float": int | float, "bool": bool, "str": str}
# operators for which a stage fills in what a recipe leaves open: the model file's CLIP; and a captioner, here with the
# argument in which a recipe names its own
WITH_CLIP = (
    "batched_image_text_similarity_filter",
    "image_text_similarity_filter",
    "image_embedding_deduplicator",
    "cluster_balance_filter",
)
LIKELIHOOD_GAIN = "likelihood_gain_filter"
WITH_CAPTIONER = {"low_similarity_recaption_mapper": "captioner", LIKELIHOOD_GAIN: "stage"}
Parameters = dict[str, str | None]  # argument → its annotation where that is one word


def files_named(value: object) -> list[str]:
    """Files that a recipe's arguments name, such as a list of words, and files of folders that they name, such as a
    model's: a stage reads them beside its data."""
    if isinstance(value, str):
        path = re.sub("/+", "/", value)  # Snakemake would look for a path with `//` and not find it
        if os.path.isdir(path):
            names = sorted(name for name in os.listdir(path) if name.endswith(FOLDER_FILES))
            return [file for name in names if os.path.isfile(file := os.path.join(path, name))]
        return [path] if os.path.isfile(path) else []
    if isinstance(value, dict):
        value = [item for key, item in value.items() if key != "image_root"]  # which may have a text for each image
    items = value if isinstance(value, list) else ()
    return [file for item in items for file in files_named(item)]


def nearest(name: object, known: Collection[str]) -> str:
    return difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0)[0]


def check_keys(where: object, values: dict, known: set[str], prefix: str = "") -> None:
    """Raise InputError, with the nearest known key, for one that is not known."""
    for key in values:
        if key not in known:
            raise InputError(
                f"{where}: unknown key '{prefix}{key}'; the nearest known one is '{prefix}{nearest(key, known)}'"
            )


def check_shape(where: object, recipe: dict, prefix: str = "") -> None:
    """Check a recipe's keys and all but its `process`.

    Args:
        where: the file, for messages.
        prefix: of the keys in that file.

    Raises:
        InputError: names the key and what belongs there.
    """
    for key in recipe:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "data, outputs and processes are set in config/"
            keys = ", ".join(sorted(KEYS))
            raise InputError(f"{where}: a recipe has the keys {keys}, and no '{prefix}{key}'; {remedy}")
    if (executor := recipe.get("executor", EXECUTORS[0])) not in EXECUTORS:
        raise InputError(f"{where}: '{prefix}executor' must be {' or '.join(EXECUTORS)}, found {executor!r}")
    address = recipe.get("ray_address")
    if address is not None and (not isinstance(address, str) or executor != "ray"):
        raise InputError(f"{where}: '{prefix}ray_address' must be a text beside 'executor: ray', found {address!r}")


def check_steps(where: object, process: object) -> list[tuple[str, str, dict]]:
    """Place, name and arguments of every operator of a `process` list, and of those that are arguments of others.

    Raises:
        InputError: names the step and what belongs there.
    """
    if not isinstance(process, list) or not process:
        raise InputError(
            f"{where}: 'process' must be a list of at least one operator, as in config/recipes/baseline.yaml"
        )
    operators = []
    for number, step in enumerate(process, start=1):
        place = f"{where}, step {number}"
        operators.append((place, *_operator(place, step)))
        if (captioner := operators[-1][2].get("captioner")) is not None:
            operators.append((f"{place}, captioner", *_operator(f"{place}, captioner", captioner)))
    return operators


def merges_rows(place: str, name: str) -> InputError:
    return InputError(
        f"{place}: {name} merges or groups rows; this stage only keeps, drops or edits them: "
        "use a filter, mapper, deduplicator or selector"
    )


def _operator(place: str, step: object) -> tuple[str, dict]:
    _check_plain(place, step)
    name, arguments = next(iter(step.items())) if isinstance(step, dict) and len(step) == 1 else ("", "")
    if not name or not isinstance(arguments, dict | None):
        raise InputError(f"{place}: expected 'operator: {{argument: value}}', found {step!r}")
    _check_arguments_harmless(place, name, arguments or {})
    return name, arguments or {}


def _check_arguments_harmless(place: str, name: str, arguments: dict) -> None:
    for key, value in _walk(arguments):
        if key in REFUSED_ARGUMENTS and value:
            raise InputError(f"{place}: {name}: {key!r} is not allowed, since {REFUSED_ARGUMENTS[key]}; leave it out")
        if WRITES.fullmatch(key) and value:
            raise InputError(f"{place}: {name}: {key!r} is not allowed: an operator writes no files; leave it out")
        if key == "batch_size" and isinstance(value, int | float) and value < 1:
            raise InputError(f"{place}: {name}: 'batch_size' must be 1 or more, found {value!r}")
        if isinstance(value, str) and LAMBDA.match(value):
            raise InputError(f"{place}: {name}: {key!r} is Python code, which a recipe may not run; {OWN_OPERATOR}")
        if key not in FORMATS and isinstance(value, str) and ABSOLUTE.match(value):
            raise InputError(
                f"{place}: {name}: {key!r} names a server, which would be sent data; leave it out, and set "
                "OPENAI_BASE_URL in your environment"
            )
        if key in FORMATS and isinstance(value, str) and not FORMATS[key][0](value):
            raise InputError(f"{place}: {name}: {key!r} must {FORMATS[key][1]}")
        if key == "question" and isinstance(value, str) and (control := CONTROL.search(value)):
            raise InputError(f"{place}: {name}: 'question' holds the control token {control.group()}; take it out")


def _walk(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Every value in a tree, with the name of the argument that it stands under."""
    yield key, value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item, key)


def _check_plain(place: str, value: object) -> None:
    """Refuse what JSON has no word for: such a value would reach the operator as another one."""
    waiting, seen = [value], 0
    while waiting:
        value, seen = waiting.pop(), seen + 1
        if seen > MAX_VALUES:
            raise InputError(f"{place}: it holds more than {MAX_VALUES} values, or itself; use fewer")
        if isinstance(value, dict):
            if odd := [key for key in value if not isinstance(key, str)]:
                raise InputError(f"{place}: the key {odd[0]!r} is not a text; put it in quotes")
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{place}: {value} is no number to compare with; leave the argument out for no limit")
        elif not isinstance(value, str | int | float | None):
            raise InputError(f"{place}: {value!r} is a {type(value).__name__}; a text needs quotes")


def check_operator(place: str, name: str, arguments: dict) -> None:
    """Check the operator's name, and the names and plain types of its arguments, as Data-Juicer's own check does it.

    Raises:
        InputError: names the nearest known operator or argument.
    """
    if not _stems():
        return
    path = _source_of(name)
    if path is None:
        if entry_points(group="data_juicer.ops"):  # other packages' operators, which Data-Juicer imports
            return
        raise InputError(
            f"{place}: unknown operator {name!r}; the nearest known one is {nearest(name, _all_registered())!r}"
        )
    if path.parent.name in MERGING:
        raise merges_rows(place, name)
    check_harmless(place, name)
    check_arguments(place, name, arguments)


def check_arguments(place: str, name: str, arguments: dict) -> None:
    """
    Raises:
        InputError: a known operator has no such argument, or takes values of another type there.
    """
    if path := _source_of(name):
        for argument, value in arguments.items():
            _check_argument(place, name, argument, value, _parameters(path, _registered(path)[name]))


def check_harmless(place: str, name: str) -> None:
    """
    Raises:
        InputError: it is an operator of Data-Juicer's that runs code, starts programs or writes files.
    """
    if (path := _source_of(name)) and (harm := _harm_of(path, name)):
        raise InputError(f"{place}: {name} {harm}, which a recipe may not; {OWN_OPERATOR}")


def asks_server(name: str) -> bool:
    """Whether it is an operator that may send data to a server of models."""
    path = _source_of(name)
    return bool(path) and any(map(SERVERS.fullmatch, _all_parameters(path, _registered(path)[name])))


def _source_of(name: str) -> Path | None:
    path = _stems().get(name)
    return path if path and name in _registered(path) else _all_registered().get(name)


@cache
def _harm_of(path: Path, name: str) -> str | None:
    """What an operator of Data-Juicer does that a recipe may not ask for, by its source; None if nothing."""
    if OWN in path.parents:
        return None
    if name in FUSED:
        return "runs operators that nothing has checked"
    parameters = _all_parameters(path, _registered(path)[name])
    if written := sorted(filter(WRITES.fullmatch, parameters)):
        return f"writes files ({written[0]})"
    if any(map(STORES.fullmatch, parameters)):
        return "sends files to servers, or fetches them"
    for call in (node for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)):
        if RUNS.fullmatch(ast.unparse(call.func)) and name != EVALUATES_LAMBDA:
            return "runs code or programs of its own"
        if any(word.arg == "trust_remote_code" and ast.unparse(word.value) == "True" for word in call.keywords):
            return "runs code that comes with a model"
    return None


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
    kinds = _kinds(annotation)
    if value is None or not kinds <= TYPES.keys():
        return True
    if isinstance(value, bool):
        return not kinds or "bool" in kinds
    if isinstance(value, float) and "int" in kinds and value == int(value):
        return True
    return not kinds or any(isinstance(value, TYPES[kind]) for kind in kinds - {"bool"})


def _kinds(annotation: str | None) -> set[str]:
    """`float | None` → {"float"}; nothing where any value is taken."""
    return set((annotation or "").split(" | ")) - {"None", ""}


def with_types(process: object) -> object:
    """The `process` list with whole numbers as their arguments take them: YAML's 1 is an int, and 3.0 a float.

    Args:
        process: of any shape; `check_steps` judges it.
    """
    if not isinstance(process, list) or not _stems():
        return process
    return [
        {name: _with_types(name, arguments) for name, arguments in step.items()} if isinstance(step, dict) else step
        for step in process
    ]


def _with_types(name: object, arguments: object) -> object:
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return arguments
    path = _source_of(name)
    known = _all_parameters(path, _registered(path)[name]) if path else {}
    return {key: _with_type(value, _kinds(known.get(key))) for key, value in arguments.items()}


def _with_type(value: object, kinds: set[str]) -> object:
    if type(value) is int and "float" in kinds and "int" not in kinds:
        return float(value)
    if isinstance(value, float) and "int" in kinds and "float" not in kinds and value == int(value):
        return int(value)
    return value


def _all_parameters(path: Path, name: str) -> Parameters:
    known: Parameters = {}
    for parameters in _parameters(path, name):
        known = (parameters or {}) | known  # a class's own come before its bases'
    return known


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


def defaults_of(name: str) -> dict[str, object]:
    """What an operator's arguments are where a recipe leaves them out; those of plain values, by its own source."""
    if (path := _source_of(name)) is None:
        return {}
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef) and node.name == _registered(path)[name]:
            for function in (member for member in node.body if isinstance(member, ast.FunctionDef)):
                if function.name == "__init__" and (values := function.args.defaults):
                    arguments = function.args.args[-len(values) :]
                    pairs = zip(arguments, values, strict=True)
                    return {key.arg: ast.literal_eval(value) for key, value in pairs if _is_plain(value)}
    return {}


def _is_plain(value: ast.expr) -> bool:
    """A number, with or without a sign, a text, or a word such as None."""
    return isinstance(value.operand if isinstance(value, ast.UnaryOp) else value, ast.Constant)


def _module_of(operator_class: str) -> Path | None:
    return next((path for path in _stems().values() if operator_class in _registered(path).values()), None)


def _own_parameters(node: ast.ClassDef) -> Parameters:
    parameters: Parameters = {}
    for member in node.body:
        if isinstance(member, ast.Assign) and ast.unparse(member.targets[0]) == "_BASE_PARAMS":
            pairs = zip(member.value.keys, member.value.values, strict=True)
            parameters |= {key.value: ast.unparse(value.elts[0]) for key, value in pairs if key is not None}
        elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
            arguments = [*member.args.posonlyargs, *member.args.args, *member.args.kwonlyargs][1:]
            parameters |= {
                argument.arg: argument.annotation and ast.unparse(argument.annotation) for argument in arguments
            }
    return parameters


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
