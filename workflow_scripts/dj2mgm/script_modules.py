"""Search for the modules that a script imports, so that a rule re-runs if one changes, and for features' modules."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

IMPORT_BY_NAME = "importlib.import_module("
# features' modules that run in a stage of the core; others only declare what a feature adds
FEATURE_CODE = re.compile(r'import_feature_modules\("(operators|questions)"\)')
# a statement begins a line or follows a colon or semicolon; it ends with its line or its parentheses
IMPORT = re.compile(
    r"(?:^|[:;])[ \t]*((?:from\b[\w. \t\\\n]+?)?\bimport\b[ \t]*(?:\([^)]*\)|(?:\\\n|[^\n;#])*))", re.MULTILINE
)
SCRIPTS = Path(__file__).resolve().parents[1]


def find_modules(script: Path) -> list[Path]:
    """Return the script and, for Python, all project modules that it imports directly or indirectly, sorted."""
    modules: set[Path] = set()
    pending = [Path(script).resolve()]
    while pending:
        path = pending.pop()
        if path not in modules:
            modules.add(path)
            pending += _find_imported_files(path) if path.suffix == ".py" else []
    return sorted(modules)


@cache
def _find_imported_files(path: Path) -> list[Path]:
    """Return the project's modules that a file imports itself, also those that it imports by name."""
    source = path.read_text(encoding="utf-8")
    files: list[Path] = []
    for statement in _find_imports(source):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        else:
            package = _find_package(path, statement.level)
            module = ".".join(filter(None, [package, statement.module]))
            names = [module, *(f"{module}.{alias.name}" for alias in statement.names)]
        for name in names:
            files += _find_module_files(SCRIPTS, name)
        if "pkgutil" in names:  # a package that imports all modules of its folder
            files += path.parent.rglob("*.py")
    if path.name == "__init__.py" and IMPORT_BY_NAME in source:  # a package that imports any of its modules by name
        files += path.parent.glob("*.py")
    for part in FEATURE_CODE.findall(source):
        files += _find_feature_files(part)
    return files


def _find_imports(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of a file, and possibly some that only its strings contain.

    Snakemake reads every module of the project at each start. Parsing whole files would take half of the start's time.
    """
    try:
        tree = ast.parse("\n".join(IMPORT.findall(source)))
    except SyntaxError:  # a match may be prose in a string
        tree = ast.parse(source)
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def _find_package(path: Path, level: int) -> str:
    """Return the package that a relative import of `level` dots starts from; empty for an absolute import."""
    return ".".join(path.parents[level - 1].relative_to(SCRIPTS).parts) if level else ""


@cache
def _find_module_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a module and its parent packages if they are in the project's folder."""
    parent, _, _ = name.rpartition(".")
    files = _find_module_files(folder, parent) if parent else []
    if parent and not files:  # a module of another library
        return []
    path = folder.joinpath(*name.split("."))
    return files + [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]


def import_feature_modules(part: str) -> list[ModuleType]:
    """Import <name>_<part>.py of every feature, or the modules of its folder <part>, if it has them."""
    paths = (path.relative_to(SCRIPTS).with_suffix("") for path in _find_feature_files(part))
    return [import_module(".".join(path.parts)) for path in paths]


def _find_feature_files(part: str) -> list[Path]:
    features = SCRIPTS / "dj2mgm/features"
    files = [file for file in features.glob(f"*/*_{part}.py") if file.stem == f"{file.parent.name}_{part}"]
    return sorted([*files, *features.glob(f"*/{part}/[!_]*.py")])
