"""Names that experiments, studies and datasets cannot have, all in lower case.

A test compares them with the rules of the parsed workflow and with the paths in its rules.
"""

import re

from dj2mgm.script_modules import SCRIPTS

# rules of settings have no `rule` line: Snakefile makes them from SETTINGS_FILES
RULE = re.compile(r'^(?:rule|checkpoint) (\w+):|^use rule \w+ as (\w+) |"(configure_\w+)"', re.MULTILINE)
RULES = frozenset(
    next(filter(None, names))
    for path in (SCRIPTS.parent / "rules").rglob("*.smk")
    for names in RULE.findall(path.read_text(encoding="utf-8"))
)

# folders in results/ without a rule of their name
FOLDERS = frozenset({"captions", "datasets", "evaluations", "foundation", "models", "published", "report"})

RESERVED_NAMES = RULES | FOLDERS
