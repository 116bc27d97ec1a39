"""The language of docstrings and messages: complete sentences, standard terms, and existing files."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import PROJECT

# first words of fragments
FRAGMENT = re.compile(
    r"(Of|What|Where|Which|Whether|Who|As|In|At|With|From|How|By|To|On|So|Beside|Behind|Until|Than|Because|Since|That|"
    r"Those)\b"
)
# first words of docstrings of modules and classes that are not noun phrases, and verbs that are nouns before some words
VERB_IN_THIRD_PERSON = re.compile(
    r"(?:Chooses|Compares|Composes|Converts|Describes|Detects|Finds|Keeps|Locates|Merges|Opens|Prepares|Prints|Reads|"
    r"Recognizes|Refuses|Renders|Replaces|Shows|Silences|Tells|Writes|Checks (?:that|whether)|"
    r"(?:Checks|Clusters|Downloads|Exports|Marks|Measures|Numbers|Probes|Pushes|Runs|Scores|Searches)"
    r"(?! (?:about|after|against|and|at|by|for|from|in|of|on|that|to|with|without)\b|[,.:;]))\b"
)
# first words of entries of Args and Attributes that are not noun phrases
PARTIAL_ENTRY = re.compile(
    r"(of|in|for|as|with|by|from|to|at|on|like|where|which|what|has|have|is|are|does|takes|returns|begins|gives|"
    r"replaces|sets|writes|converts|freezes|identifies|called|moves|makes|reads)\b",
    re.IGNORECASE,
)
# first words of docstrings of properties that are not noun phrases
VERB_OF_PROPERTY = re.compile(
    r"(Build|Check|Choose|Collect|Compute|Count|Create|Describe|Find|Get|List|Load|Make|Read|Returns?|Select|Yield)\b"
)
# properties in modules that are about to be split
DIALECT = re.compile(
    r"\b(whoever|whatever|so many|as good as|naught|nobody|somebody|everybody|told apart|stands? apart|"
    r"what is (?:asked|kept|read|written|said)|"
    r"(?<!there )is no (?:name|file|share|number|folder|text|list|table|image|row))\b",
    re.IGNORECASE,
)
SOURCES = sorted(
    path for folder in ("workflow_scripts", "benchmarks", "tests") for path in (PROJECT / folder).rglob("*.py")
)
REFERRING = sorted([*SOURCES, *(PROJECT / "rules").rglob("*.smk")])
REFERENCE = re.compile(r"[\w./-]*\b\w+\.py\b")
LIBRARY_FILES = {  # of DeepSpeed
    "deepspeed/ops/adam/cpu_adam.py",
    "deepspeed/ops/op_builder/builder.py",
    "runtime/fp16/fused_optimizer.py",
    "runtime/zero/stage3.py",
    "runtime/zero/stage_1_and_2.py",
}
LONG_FUNCTION = 16  # lines; `main` is described by its script's docstring, `__init__` by its class's
MESSAGES = {"InputError", "warn", "note", "progress", "Finding", "RuntimeError", "ValueError"}


def is_property(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("property" in ast.unparse(item) for item in node.decorator_list)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and summary of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield getattr(node, "lineno", 1), text.split("\n\n")[0].replace("\n", " ")


def properties(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield each property that has a docstring, with the first line of the docstring."""
    for node in ast.walk(tree):
        if is_property(node) and (text := ast.get_docstring(node)):
            yield node, text.partition("\n")[0]


def outer_functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions and methods of a module, without functions inside of functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from outer_functions(child)


def described_entries(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each entry of Args and Attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for section in re.findall(
                r"^(?:Args|Attributes):\n((?: .*\n?)+)", ast.get_docstring(node) or "", re.MULTILINE
            ):
                for name, text in re.findall(r"^ {4}([*\w][*\w, ]*): (.*)$", section, re.MULTILINE):
                    yield node.lineno, f"{name}: {text}"


def message_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each literal in a call that makes a message."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", getattr(call.func, "attr", None)) in MESSAGES:
            for node in ast.walk(call):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.lineno, node.value


def defined_attributes(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's fields, properties, methods and parameters, and of attributes that methods set."""
    names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    for child in ast.walk(node):
        if isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Store):
            names.add(child.id if isinstance(child, ast.Name) else child.attr)
        elif isinstance(child, ast.arg):
            names.add(child.arg)
    return names


def referring_texts(path: Path, trees: dict[str, ast.Module]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring and comment of a module, or each line of a file of rules."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".smk":
        yield from enumerate(text.splitlines(), start=1)
        return
    for node in ast.walk(trees[str(path.relative_to(PROJECT))]):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(PROJECT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def test_docstrings_begin_with_a_sentence_or_a_noun_phrase(trees):
    wrong = [
        f"{path}:{line}: {summary}"
        for path, tree in trees.items()
        for line, summary in docstrings(tree)
        if FRAGMENT.match(summary) or not re.search(r"[.?!:]$|\.\)$", summary)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_and_classes_are_described_by_noun_phrases(trees):
    wrong = [
        f"{path}:{getattr(node, 'lineno', 1)}: {summary}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef)
        if (summary := (ast.get_docstring(node) or "").partition("\n")[0])
        if VERB_IN_THIRD_PERSON.match(summary)
    ]
    assert not wrong, "\n".join(wrong)


def test_properties_are_described_by_noun_phrases(trees):
    """The docstring of a boolean property begins with "True if"."""
    wrong = [
        f"{path}:{node.lineno}: {summary}"
        for path, tree in trees.items()
        for node, summary in properties(tree)
        if VERB_OF_PROPERTY.match(summary)
        or summary.startswith("True if ") != (node.returns is not None and ast.unparse(node.returns) == "bool")
    ]
    assert not wrong, "\n".join(wrong)


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


def test_entries_of_arguments_are_noun_phrases(trees):
    wrong = [
        f"{path}:{line}: {entry}"
        for path, tree in trees.items()
        for line, entry in described_entries(tree)
        if PARTIAL_ENTRY.match(entry.partition(": ")[2])
    ]
    assert not wrong, "\n".join(wrong)


def test_described_attributes_exist(trees):
    wrong = [
        f"{path}:{line}: {node.name}.{name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for line, entry in described_entries(ast.Module([node], []))
        if line == node.lineno
        for name in entry.partition(": ")[0].split(", ")
        if name.lstrip("*") not in defined_attributes(node)
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_and_messages_use_standard_terms(trees):
    wrong = [
        f"{path}:{line}: {text[:100]}"
        for path, tree in trees.items()
        for line, text in [*docstrings(tree), *message_texts(tree)]
        if DIALECT.search(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_python_files_named_in_docstrings_and_comments_exist(trees):
    folders = ("workflow_scripts", "benchmarks", "tests", "docs")
    files = {f"/{path.relative_to(PROJECT)}" for folder in folders for path in (PROJECT / folder).rglob("*.py")}
    wrong = [
        f"{path.relative_to(PROJECT)}:{line}: {name}"
        for path in REFERRING
        for line, text in referring_texts(path, trees)
        for name in REFERENCE.findall(text)
        if name not in LIBRARY_FILES and not any(file.endswith(f"/{name.lstrip('./')}") for file in files)
    ]
    assert not wrong, "\n".join(wrong)
