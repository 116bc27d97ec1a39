"""Names of classes and modules, and imports of tests."""

import ast
from collections import defaultdict

from paths import PROJECT

MODULES = sorted((PROJECT / "workflow_scripts/dj2mgm").rglob("*.py"))


def shared(paths_by_name: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: paths for name, paths in paths_by_name.items() if len(paths) > 1}


def test_no_two_classes_share_a_name():
    paths_by_name = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                paths_by_name[node.name].append(str(path.relative_to(PROJECT)))
    assert shared(paths_by_name) == {}


def test_no_two_modules_share_a_name():
    paths_by_name = defaultdict(list)
    for path in MODULES:
        if path.name != "__init__.py":
            paths_by_name[path.name].append(str(path.relative_to(PROJECT)))
    assert shared(paths_by_name) == {}


def test_no_test_imports_another_test():
    """Helpers of several tests are in tests/support."""
    importing = [
        f"{path.relative_to(PROJECT)}:{node.lineno}: {name}"
        for path in sorted((PROJECT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.startswith("test_")
    ]
    assert importing == []
