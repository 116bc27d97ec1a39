r"""Print the decisions about an experiment from the looks at it, and write their pages.

    python workflow_scripts/write_decision.py --budget results/shapes/tiny/dj_synth/decide/budget.yaml \
        --looks results/shapes/tiny/dj_synth/decide/seeds-2/look.yaml

take_look.py writes the looks. They are given in the order of their seeds. Each opponent's page is next to its looks.
If there are several opponents, the last line states whether the experiment is better than all of them.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.features.decide.look_verdict import (
    build_decision_page,
    build_decision_record,
    describe_conclusion,
    describe_decision,
)
from dj2mgm.features.decide.looks import LookRecord
from dj2mgm.records import DECISION_FILE
from dj2mgm.reporting.variants_page import write_variants_page
from dj2mgm.settings.targets import DecisionBudget
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_json


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--budget", lists=("--looks",))
    budget = load_settings(DecisionBudget, args.budget)
    looks_by_folder: dict[Path, list[LookRecord]] = {}
    for path in args.looks:
        looks_by_folder.setdefault(path.parents[1], []).append(load_settings(LookRecord, path))
    lines = []
    for folder, looks in looks_by_folder.items():
        write_variants_page(build_decision_page(looks, budget), folder / "decision.html")
        write_json(folder / DECISION_FILE, build_decision_record(looks[-1], budget))
        lines += [describe_decision(looks[-1], budget), looks[-1].command]
    if len(looks_by_folder) > 1:
        lines.append(describe_conclusion([looks[-1] for looks in looks_by_folder.values()]))
    lines.append(f"All looks: {', '.join(str(folder / 'decision.html') for folder in looks_by_folder)}")
    print("\n".join(filter(None, lines)), flush=True)


if __name__ == "__main__":
    main()
