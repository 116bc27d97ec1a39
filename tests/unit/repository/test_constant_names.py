"""Constants that docstrings and comments name."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from paths import PROJECT

CONSTANT = re.compile(r"\b[A-Z]{2,}_[A-Z_]{2,}\b")
ASSIGNMENT = re.compile(r"^ *((?:[A-Z_]+, )*[A-Z_]+)(?:: [^=\n]+)? =", re.MULTILINE)
KEY = re.compile(r'"([A-Z_]+)"')  # of the environment
OF_LIBRARIES = {
    "HF_TOKEN",  # of huggingface_hub
    "PR_SET_PDEATHSIG",  # of <linux/prctl.h>
    "SQLITE_TMPDIR",
}


def read_sources(folder: str) -> dict[str, str]:
    """Return the text of each module by its path."""
    paths = sorted((PROJECT / folder).rglob("*.py"))
    return {str(path.relative_to(PROJECT)): path.read_text(encoding="utf-8") for path in paths}


def find_definitions(text: str) -> set[str]:
    """Return the constants that a module assigns, and the environment's variables that it reads or sets."""
    assigned = {name for names in ASSIGNMENT.findall(text) for name in names.split(", ")}
    return assigned | set(KEY.findall(text))


def describing_texts(text: str) -> Iterator[str]:
    """Yield each docstring and comment of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_constants_in_docstrings_and_comments_exist():
    sources = read_sources("workflow_scripts")
    defined = OF_LIBRARIES.union(*map(find_definitions, [*sources.values(), *read_sources("benchmarks").values()]))
    wrong = [
        f"{path}: {name}"
        for path, text in sources.items()
        if set(CONSTANT.findall(text)) - defined  # only these modules are parsed, which is slow
        for described in describing_texts(text)
        for name in CONSTANT.findall(described)
        if name not in defined
    ]
    assert not wrong, "\n".join(wrong)
