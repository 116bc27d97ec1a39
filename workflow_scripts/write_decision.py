r"""Print the decision about an experiment from the looks at it, and write its page.

    python workflow_scripts/write_decision.py --budget results/shapes/tiny/dj_synth/decide/budget.yaml \
        --output-dir results/shapes/tiny/dj_synth/decide --looks results/shapes/tiny/dj_synth/decide/seeds-2/look.yaml

take_look.py writes the looks. They are given in the order of their seeds.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser
from dj2mgm.records.look_records import DECISION_FILE, LookRecord
from dj2mgm.reporting.decision_page import build_decision_page, build_decision_record, describe_decision
from dj2mgm.reporting.variants_page import write_variants_page
from dj2mgm.settings.targets import DecideSection
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_json


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--budget", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--looks", type=Path, nargs="+", required=True, help="in the order of their seeds")
    args = parser.parse_args()
    budget = load_settings(DecideSection, args.budget)
    looks = [load_settings(LookRecord, path) for path in args.looks]
    write_variants_page(build_decision_page(looks, budget), args.output_dir / "decision.html")
    write_json(args.output_dir / DECISION_FILE, build_decision_record(looks[-1], budget))
    lines = [describe_decision(looks[-1], budget), looks[-1].command]
    lines.append(f"All looks: {args.output_dir / 'decision.html'}")
    print("\n".join(filter(None, lines)), flush=True)


if __name__ == "__main__":
    main()
