"""List the operators of the installed Data-Juicer, for the review of what recipes may use.

    python workflow_scripts/tools/list_operators.py

Writes config/schemas/operators.installed.json: every operator with a digest of its source, the arguments and defaults
of filters and of the operators that config/schemas/operators.yaml allows, and digests of the modules that they share.
Read the changes before you commit them, and decide about new operators and arguments in operators.yaml.
"""

import hashlib
import inspect
import json
import sys
from pathlib import Path

import data_juicer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dj2mgm.cli.command_line import command_line
from dj2mgm.juicer import operators as _with_own_operators  # noqa: F401
from dj2mgm.juicer.patched_data_juicer import (
    OP,
    OPERATORS,
    Filter,
    __version__,
    list_valid_arguments,
    patch_data_juicer,
)
from dj2mgm.recipes.catalogue import (
    INSTALLED_FILE,
    NOT_PLAIN,
    REQUIRED_MARK,
    read_allowed_operators,
    read_refused_operators,
)
from dj2mgm.storage.files import write_text

DATA_JUICER = Path(data_juicer.__file__).parent
OWN_PACKAGE = "dj2mgm."
# modules that allowed operators use: loading of images and models, statistics, the base classes
SHARED_MODULES = (
    "ops/base_op.py",
    "ops/common/helper_func.py",
    "ops/common/special_characters.py",
    "ops/load.py",
    "utils/common_utils.py",
    "utils/lazy_loader.py",
    "utils/mm_utils.py",
    "utils/model_utils.py",
    "utils/sample.py",
)


def list_operators() -> dict:
    """Return the contents of operators.installed.json."""
    modules = {
        name: operator
        for name, operator in OPERATORS.modules.items()
        if not operator.__module__.startswith(OWN_PACKAGE)
    }
    return {
        "data_juicer": __version__,
        "shared": {name: _compute_digest(DATA_JUICER / name) for name in SHARED_MODULES},
        "operators": {name: _compute_digest(Path(inspect.getfile(modules[name]))) for name in sorted(modules)},
        "every_operator": _read_base_defaults(OP),
        "every_filter": _read_base_defaults(Filter),
        "arguments": {name: _read_defaults(name) for name in sorted(_find_described_operators())},
    }


def format_listing(listing: dict) -> str:
    """Return a listing as the text of the file."""
    return json.dumps(listing, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def list_unreviewed(listing: dict) -> list[str]:
    """Return a sentence for each difference between a listing and operators.yaml."""
    allowed, refused = read_allowed_operators(), read_refused_operators()
    reviewed = allowed.keys() | refused.keys()
    sentences = [f"{name}: decide about this operator" for name in sorted(listing["operators"].keys() - reviewed)]
    sentences += [f"{name}: there is no such operator" for name in sorted(reviewed - OPERATORS.modules.keys())]
    for name in sorted(allowed.keys() & listing["arguments"].keys()):
        arguments = listing["arguments"][name]
        valid = arguments.keys() | listing["every_operator"].keys() | listing["every_filter"].keys()
        unknown = sorted(allowed[name].arguments.keys() - valid)
        sentences += [f"{name}: there is no argument {argument}" for argument in unknown]
    return sentences


def _find_described_operators() -> set[str]:
    """Return the operators whose arguments are listed: allowed operators, and all filters, which the explorer shows."""
    filters = {name for name, operator in OPERATORS.modules.items() if issubclass(operator, Filter)}
    return (read_allowed_operators().keys() & OPERATORS.modules.keys()) | filters


def _read_base_defaults(base: type[OP]) -> dict:
    return {key: _convert_default(default) for key, (_, default) in base._BASE_PARAMS.items()}


def _read_defaults(name: str) -> dict:
    """Return the defaults of the arguments that an operator has in addition to the arguments of every operator."""
    defaults: dict[str, object] = {}
    for base in OPERATORS.modules[name].__mro__:
        if "__init__" in vars(base):
            for key, parameter in inspect.signature(base.__init__).parameters.items():
                defaults.setdefault(key, parameter.default)
    return {
        key: _convert_default(defaults[key]) for key in list_valid_arguments(OPERATORS.modules[name]) if key in defaults
    }


def _convert_default(value: object) -> object:
    if value is inspect.Parameter.empty:
        return REQUIRED_MARK
    if isinstance(value, str) and value.startswith("/"):  # a folder on this machine
        return NOT_PLAIN
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return value if is_plain or isinstance(value, list) and all(isinstance(item, str) for item in value) else NOT_PLAIN


def _compute_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@command_line
def main() -> None:
    patch_data_juicer()
    listing = list_operators()
    write_text(INSTALLED_FILE, format_listing(listing))
    for sentence in list_unreviewed(listing):
        print(f"config/schemas/operators.yaml: {sentence}", file=sys.stderr)
    print(
        f"{len(listing['operators'])} operators of Data-Juicer {__version__}, {len(read_allowed_operators())} allowed"
    )


if __name__ == "__main__":
    main()
