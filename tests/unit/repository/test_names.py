"""Names say what a value is and what a function does: no pronouns, no participles as nouns, verbs for functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import PROJECT

FOLDERS = ("workflow_scripts", "benchmarks", "tests", "docs/examples")
VAGUE = {
    *("found", "kept", "known", "given", "said", "place", "places", "where", "one", "each", "stated", "named"),
    *("asked", "listed", "wanted", "told", "held", "gone"),
}

# Last words of names of results. A function with such a name begins with a verb: `build_page_settings`.
RESULTS = {"settings", "files", "folder", "folders", "names", "table", "card", "command", "note", "config", "values"}
METHOD_RESULTS = RESULTS | {"address", "batches", "columns", "commands", "counts", "owner", "scores", "seconds"}
VERBS = set(
    """
    add allow answer assemble build change check choose collect combine complete compute convert copy count
    describe detect discard drop enumerate estimate export fetch find fit format get group has hash is iterate
    join limit list load locate make match measure merge move name note open pair parse plan push quote read
    recognize remove replace require resolve round save select set share show split sum take update validate
    verify watch write
    """.split()
)
RULE_FILES = sorted((PROJECT / "rules").rglob("*.smk"))


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


def defined_functions(rule_file: Path) -> Iterator[ast.FunctionDef]:
    """Yield the functions of a file of rules, which is no Python as a whole."""
    text = rule_file.read_text(encoding="utf-8")
    for source in re.findall(r"^def .*?(?=^\w|^@|\Z)", text, re.MULTILINE | re.DOTALL):
        yield ast.parse(source).body[0]


def serves_as_input(function: ast.FunctionDef) -> bool:
    """Return whether Snakemake calls a function with wildcards, or the function that it returns."""
    inner = {node.name for node in function.body if isinstance(node, ast.FunctionDef)}
    values = [node.value for node in function.body if isinstance(node, ast.Return)]
    returns_function = any(isinstance(value, ast.Lambda) or getattr(value, "id", "") in inner for value in values)
    return returns_function or [parameter.arg for parameter in function.args.args][:1] == ["wildcards"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_name_is_vague(folder):
    vague = [
        f"{file.relative_to(PROJECT)}:{line}: {name}"
        for file in sorted((PROJECT / folder).rglob("*.py"))
        for name, line in defined_names(ast.parse(file.read_text(encoding="utf-8")))
        if name.strip("_") in VAGUE
    ]
    assert not vague, "name the value by what it is, such as `candidates` instead of `found`"


def functions_and_methods(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, set[str]]]:
    """Yield the functions and methods of a module, without properties, with names of results for each."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, RESULTS
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    decorators = " ".join(map(ast.unparse, method.decorator_list))
                    if "property" not in decorators and not method.name.startswith(("by_", "from_", "with_")):
                        yield method, METHOD_RESULTS


def test_functions_begin_with_verbs():
    nouns = [
        f"{file.relative_to(PROJECT)}:{node.lineno}: {node.name}"
        for file in sorted((PROJECT / "workflow_scripts").rglob("*.py"))
        for node, results in functions_and_methods(ast.parse(file.read_text(encoding="utf-8")))
        if (words := node.name.strip("_").split("_"))[-1] in results and words[0] not in VERBS
    ]
    assert not nouns, "begin with what the function does, such as `build_page_settings` instead of `page_settings`"


def test_functions_in_rules_begin_with_verbs_unless_inputs():
    nouns = [
        f"{file.relative_to(PROJECT)}: {function.name}"
        for file in RULE_FILES
        for function in defined_functions(file)
        if not serves_as_input(function) and function.name.split("_")[0] not in VERBS | {"is", "raising"}
    ]
    assert not nouns, "begin with what the function does, such as `list_model_files` instead of `model_files`"
