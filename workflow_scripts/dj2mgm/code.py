"""Finds the project's modules that a script imports, so that a rule re-runs if one of them changes."""

import ast
from functools import cache
from pathlib import Path

BY_NAME = "importlib.import_module"
SCRIPTS = Path(__file__).resolve().parents[1]


def find_modules(script: Path) -> list[Path]:
    """Return the script and, for Python, all project modules that it imports directly or indirectly, sorted."""
    found: set[Path] = set()
    waiting = [Path(script).resolve()]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imported_files(path) if path.suffix == ".py" else []
    return sorted(found)


@cache
def _imported_files(path: Path) -> list[Path]:
    files: list[Path] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = _package(path, node.level)
            module = ".".join(filter(None, [package, node.module]))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif path.name == "__init__.py" and isinstance(node, ast.Call) and ast.unparse(node.func) == BY_NAME:
            files += sorted(path.parent.glob("*.py"))  # a package that imports any of its modules by name
            continue
        else:
            continue
        for name in names:
            files += _module_files(name)
        if "pkgutil" in names:  # a package that imports all modules of its folder
            files += path.parent.rglob("*.py")
    return files


def _package(path: Path, level: int) -> str:
    """Return the package that a relative import of `level` dots starts from; empty for an absolute import."""
    return ".".join(path.parents[level - 1].relative_to(SCRIPTS).parts) if level else ""


def _module_files(name: str) -> list[Path]:
    """Return the files of a module and its parent packages if they belong to the project."""
    path, files = SCRIPTS, []
    for part in name.split("."):
        path = path / part
        files += [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return files
