"""Files of rules: input functions are next to the rules that use them, and each file imports the names that it uses."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from paths import PROJECT

FILES = [PROJECT / "Snakefile", *sorted((PROJECT / "rules").rglob("*.smk"))]
INPUT_FILES = [path for path in FILES if path.parent.name == "inputs"]
RULE_FILES = [path for path in FILES if path.parent.name in ("rules", "features")]
DEFINITION = re.compile(r"^def (\w+)", re.MULTILINE)
IMPORT = re.compile(r"^(?:from [\w.]+ )?import (?:\([^)]*\)|.*)$", re.MULTILINE)
RULE = re.compile(r"^ *(use )?(rule|checkpoint)\b.*:$", re.MULTILINE)


def used_names(path: Path) -> Iterator[str]:
    """Yield the names that a file of rules reads or calls, also in f-strings; each as often as it occurs."""
    text = IMPORT.sub("", path.read_text(encoding="utf-8"))
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if token.type == tokenize.NAME:
            if before.string not in (".", "def", "rule", "checkpoint", "as") and after.string != "=":
                yield token.string
        elif token.type == tokenize.STRING and "f" in token.string.split(token.string[-1])[0].lower():
            yield from (node.id for node in ast.walk(ast.parse(token.string)) if isinstance(node, ast.Name))


def defined_functions(path: Path) -> list[str]:
    return DEFINITION.findall(path.read_text(encoding="utf-8"))


def imported_names(path: Path) -> set[str]:
    statements = "\n".join(IMPORT.findall(path.read_text(encoding="utf-8")))
    return {alias.asname or alias.name for statement in ast.parse(statements).body for alias in statement.names}


def users() -> dict[str, set[Path]]:
    """Return the files that use each name."""
    files = defaultdict(set)
    for path in FILES:
        for name in used_names(path):
            files[name].add(path)
    return files


def test_input_functions_are_in_the_file_of_their_rules():
    using_files = users()
    misplaced = [
        f"{path.name}: {name}"
        for path in INPUT_FILES
        for name in defined_functions(path)
        if not using_files[name] & {path, path.parents[1] / path.name} and len(using_files[name]) < 2
    ]
    assert not misplaced, "move it into the file in rules/inputs with the name of the rule file that uses it"


def test_shared_functions_serve_several_rule_files():
    using_files = users()
    single = [
        f"{path.name}: {name}"
        for path in RULE_FILES
        for name in defined_functions(path)
        if path not in using_files[name] and len({user.name for user in using_files[name]}) < 2
    ]
    assert not single, "move it into the file in rules/inputs with the name of the rule file that uses it"


def test_rule_files_include_their_input_functions():
    for path in RULE_FILES:
        text = path.read_text(encoding="utf-8")
        assert f'include: "inputs/{path.name}"' in text or not (path.parent / "inputs" / path.name).exists(), path.name
        assert not (RULE.search(text) and DEFINITION.search(text)), path.name
    assert {path.parents[1] / path.name for path in INPUT_FILES} <= {*RULE_FILES}


def test_each_file_imports_the_names_that_it_uses():
    """All files share their global names, so Snakemake does not notice a missing import."""
    imported = {path: imported_names(path) for path in FILES}
    importable = set().union(*imported.values())
    for path in FILES:
        assert imported[path] == importable & set(used_names(path)), path.relative_to(PROJECT)
