"""Names of classes and modules, imports of tests, and names in docstrings and comments."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from paths import PROJECT

SOURCES = sorted(
    path for folder in ("workflow_scripts", "benchmarks", "tests") for path in (PROJECT / folder).rglob("*.py")
)
RULE_FILES = sorted((PROJECT / "rules").rglob("*.smk"))
REFERENCE = re.compile(r"[\w./-]*\b\w+\.py\b")
LIBRARY_FILES = {  # of DeepSpeed
    "deepspeed/ops/adam/cpu_adam.py",
    "deepspeed/ops/op_builder/builder.py",
    "runtime/fp16/fused_optimizer.py",
    "runtime/zero/stage3.py",
    "runtime/zero/stage_1_and_2.py",
}
CONSTANT = re.compile(r"\b[A-Z]{2,}_[A-Z_]{2,}\b")
ASSIGNMENT = re.compile(r"^ *((?:[A-Z_]+, )*[A-Z_]+)(?:: [^=\n]+)? =", re.MULTILINE)
KEY = re.compile(r'"([A-Z_]+)"')  # of the environment
LIBRARY_CONSTANTS = {
    "HF_TOKEN",  # of huggingface_hub
    "PR_SET_PDEATHSIG",  # of <linux/prctl.h>
    "SQLITE_TMPDIR",
}
LONG_FUNCTION = 16  # lines; `main` is described by its script's docstring, `__init__` by its class's

Texts = list[tuple[int, str]]
COMMENT = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
MODULE_DOCSTRING = re.compile(r'r?"""(.*?)"""', re.DOTALL)


def outer_functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions and methods of a module, without functions inside of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from outer_functions(child)


def described_attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names in the sections Args and Attributes of a class's docstring."""
    for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?)+)", ast.get_docstring(node) or "", re.MULTILINE):
        for names in re.findall(r"^ {4}([*\w][*\w, ]*): ", section, re.MULTILINE):
            yield from names.replace("*", "").split(", ")


def defined_attributes(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields, properties, methods and parameters, and of attributes that methods set."""
    names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    for child in ast.walk(node):
        if isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Store):
            names.add(child.id if isinstance(child, ast.Name) else child.attr)
        elif isinstance(child, ast.arg):
            names.add(child.arg)
    return names


def find_texts(source: str, tree: ast.Module | None) -> Texts:
    """Return line and text of each comment and docstring; without a tree, only of the module's docstring.

    A tokenizer would take ten times as long.
    """
    comments = [(source.count("\n", 0, found.start()) + 1, found[0]) for found in COMMENT.finditer(source)]
    if tree is None:
        return [*comments, (1, found[1] if (found := MODULE_DOCSTRING.match(source)) else "")]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    return [*comments, *((getattr(node, "lineno", 1), ast.get_docstring(node, clean=False) or "") for node in nodes)]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Return the text of each module by its path."""
    return {str(path.relative_to(PROJECT)): path.read_text(encoding="utf-8") for path in SOURCES}


@pytest.fixture(scope="module")
def trees(sources) -> dict[str, ast.Module]:
    """Return the parsed modules, without those of tests, which are half of all lines."""
    return {path: ast.parse(text) for path, text in sources.items() if not path.startswith("tests/")}


@pytest.fixture(scope="module")
def texts(sources, trees) -> dict[str, Texts]:
    """Return docstrings and comments of each module, and the lines of each file of rules."""
    of_rules = {
        str(path.relative_to(PROJECT)): [*enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)]
        for path in RULE_FILES
    }
    return {path: find_texts(text, trees.get(path)) for path, text in sources.items()} | of_rules


def test_long_functions_have_docstrings(trees):
    undescribed = [
        f"{path}:{node.lineno}: {node.name}"
        for path, tree in trees.items()
        if path.startswith("workflow_scripts/")
        for node in outer_functions(tree)
        if node.end_lineno - node.lineno + 1 >= LONG_FUNCTION and node.name not in {"main", "__init__"}
        if not ast.get_docstring(node)
    ]
    assert not undescribed, "\n".join(undescribed)


def test_described_attributes_exist(trees):
    wrong = [
        f"{path}:{node.lineno}: {node.name}.{name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for name in set(described_attributes(node)) - defined_attributes(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_python_files_named_in_docstrings_and_comments_exist(texts):
    files = {f"/{path}" for path in texts} | {
        f"/{path.relative_to(PROJECT)}" for path in (PROJECT / "docs").rglob("*.py")
    }
    wrong = [
        f"{path}:{line}: {name}"
        for path, entries in texts.items()
        for line, text in entries
        for name in REFERENCE.findall(text)
        if name not in LIBRARY_FILES and not any(file.endswith(f"/{name.lstrip('./')}") for file in files)
    ]
    assert not wrong, "\n".join(wrong)


def test_constants_in_docstrings_and_comments_exist(sources, texts):
    modules = {path: text for path, text in sources.items() if not path.startswith("tests/")}
    assigned = {names for text in modules.values() for names in ASSIGNMENT.findall(text)}
    keys = {key for text in modules.values() for key in KEY.findall(text)}
    defined = keys.union(LIBRARY_CONSTANTS, *(names.split(", ") for names in assigned))
    wrong = [
        f"{path}:{line}: {name}"
        for path in modules
        if path.startswith("workflow_scripts/")
        for line, text in texts[path]
        for name in CONSTANT.findall(text)
        if name not in defined
    ]
    assert not wrong, "\n".join(wrong)


def shared(paths_by_name: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: paths for name, paths in paths_by_name.items() if len(paths) > 1}


def test_no_two_classes_or_modules_share_a_name(trees):
    classes, modules = defaultdict(list), defaultdict(list)
    for path, tree in trees.items():
        if path.startswith("workflow_scripts/dj2mgm/"):
            modules[path.rpartition("/")[2]].append(path)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    classes[node.name].append(path)
    del modules["__init__.py"]
    assert shared(classes) == {} and shared(modules) == {}


def test_no_test_imports_another_test(sources):
    """Helpers of several tests are in tests/support."""
    statement = re.compile(r"^\s*(?:from|import) test_\w+", re.MULTILINE)
    tests = {path: text for path, text in sources.items() if path.startswith("tests/")}
    importing = {path: found for path, text in tests.items() if (found := statement.findall(text))}
    assert importing == {}
