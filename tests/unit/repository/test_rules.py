"""Each file of rules imports the names that it uses."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from paths import PROJECT

FILES = [PROJECT / "Snakefile", *sorted((PROJECT / "rules").rglob("*.smk"))]
IMPORT = re.compile(r"^(?:from [\w.]+ )?import (?:\([^)]*\)|.*)$", re.MULTILINE)


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


def imported_names(path: Path) -> set[str]:
    statements = "\n".join(IMPORT.findall(path.read_text(encoding="utf-8")))
    return {alias.asname or alias.name for statement in ast.parse(statements).body for alias in statement.names}


def test_each_file_imports_the_names_that_it_uses():
    """All files share their global names, so Snakemake does not notice a missing import."""
    imported = {path: imported_names(path) for path in FILES}
    importable = set().union(*imported.values())
    for path in FILES:
        assert imported[path] == importable & set(used_names(path)), path.relative_to(PROJECT)


def test_help_lists_existing_targets_in_80_columns():
    """The first week's targets come first, in the order in which a user needs them."""
    lines = (PROJECT / "workflow_scripts/help.txt").read_text(encoding="utf-8").splitlines()
    targets = [match[1] for line in lines if (match := re.match(r"  (\w+) {2,}\S", line))]
    rules = {
        name
        for path in (PROJECT / "rules").rglob("*.smk")
        for name in re.findall(r"^rule (\w+):", path.read_text("utf-8"), re.M)
    }
    assert targets[:5] == ["check", "plan", "fetch", "doctor", "explore"]
    experiments = {path.stem for path in (PROJECT / "config/experiments").glob("*.yaml")}
    assert {*targets} - rules - experiments == {"explore"} and all(len(line) <= 80 for line in lines)
