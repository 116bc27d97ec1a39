"""Names say what a value is: no pronouns, and no participles as nouns."""

import ast
from collections.abc import Iterator

import pytest

from paths import PROJECT

FOLDERS = ("workflow_scripts", "benchmarks", "tests", "docs/examples")
VAGUE = {
    *("found", "kept", "known", "given", "said", "place", "places", "where", "one", "each", "stated", "named"),
    *("asked", "listed", "wanted", "told", "held", "gone"),
}


def defined_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the names that a module defines, with their lines: variables, parameters, fields, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_is_vague(folder):
    vague = [
        f"{file.relative_to(PROJECT)}:{line}: {name}"
        for file in sorted((PROJECT / folder).rglob("*.py"))
        for name, line in defined_names(ast.parse(file.read_text(encoding="utf-8")))
        if name.strip("_") in VAGUE
    ]
    assert not vague, "name the value by what it is, such as `candidates` instead of `found`"
