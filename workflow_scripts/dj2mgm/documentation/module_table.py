"""Tables of the library's modules and of the scripts in docs/architecture.md, generated from the code."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from dj2mgm.documentation.page_tables import renew_tables
from dj2mgm.script_modules import SCRIPTS

LIBRARY = SCRIPTS / "dj2mgm"
PAGE = Path("docs/architecture.md")
RULE = re.compile(r"^ *(?:rule|checkpoint) (\w+):\n((?: +.*\n|\n)+)", re.MULTILINE)


def build_architecture_page() -> str:
    """Return docs/architecture.md with its tables of modules and scripts renewed."""
    modules = ["| layer | module | content |", "|---|---|---|", *_list_modules()]
    scripts = ["| script | called by | what it does |", "|---|---|---|", *_list_scripts()]
    return renew_tables(PAGE, modules, scripts)


def _list_modules() -> Iterator[str]:
    project = tomllib.loads((SCRIPTS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contract, *_ = project["tool"]["importlinter"]["contracts"]
    for number, layer in enumerate(contract["layers"], start=1):
        for name in re.split(r"\W+", layer):
            folder = LIBRARY / name
            for path in sorted(folder.rglob("__init__.py")) or [folder.with_suffix(".py")]:
                module = path.relative_to(LIBRARY)
                title = f"{module.parent}/" if path.name == "__init__.py" else module
                yield f"| {number} | `{title}` | {_read_summary(path)} |"


def _list_scripts() -> Iterator[str]:
    """Yield a row per script: the rules that run it, else the file that starts it, else you."""
    root = SCRIPTS.parent
    files = [*sorted(root.glob("rules/**/*.smk")), root / "Makefile", *sorted(SCRIPTS.glob("*.py"))]
    texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in files}
    snakefiles = "".join(text for file, text in texts.items() if file.endswith(".smk"))
    rules = RULE.findall(snakefiles)
    derived_rules = re.findall(r"^ *use rule (\w+) as (\w+) with:", snakefiles, re.MULTILINE)
    rules += [(name, body) for base, name in derived_rules for rule, body in rules if rule == base]
    for path in sorted(SCRIPTS.glob("*.py")):
        pattern = re.compile(rf"""["']{path.name}["']|^\t.*python workflow_scripts/{path.name}\b""", re.MULTILINE)
        callers = [name for name, body in rules if pattern.search(body)]
        callers = callers or [file for file, text in texts.items() if pattern.search(text)]
        yield f"| `{path.name}` | {', '.join(f'`{caller}`' for caller in callers) or 'you'} | {_read_summary(path)} |"


def _read_summary(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its period."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.split("\n")[0].removesuffix(".")
