r"""Look at an experiment and an opponent after some seeds: write the verdict that the interval of this look allows.

    python workflow_scripts/take_look.py --config results/shapes/tiny/dj_synth/decide/seeds-2/config.yaml \
        --budget results/shapes/tiny/dj_synth/decide/budget.yaml \
        --output results/shapes/tiny/dj_synth/decide/seeds-2/look.yaml

`--earlier` takes the looks after fewer seeds. evaluation/contrast_verdicts.py explains the intervals. If the
experiment's report has several of the seeds already, it counts as an earlier look.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser
from dj2mgm.cli.messages import note
from dj2mgm.features.decide.look_verdict import describe_decision, take_look, was_reported
from dj2mgm.features.decide.looks import LookRecord
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.settings.targets import DecisionBudget
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_yaml


def _find_results(look: Path) -> Path:
    """Return the experiment's folder of results; looks at opponents other than the baseline are one folder deeper."""
    return next(folder.parent for folder in look.parents if folder.name == "decide")


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--budget", type=Path, required=True)
    parser.add_argument("--earlier", type=Path, nargs="*", default=[])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    budget = load_settings(DecisionBudget, args.budget)
    earlier = [load_settings(LookRecord, path) for path in args.earlier]
    experiments = load_experiments(args.config)
    reported = not earlier and was_reported(experiments, _find_results(args.output))
    look = take_look(experiments, earlier, budget, reported=reported)
    write_yaml(args.output, look.model_dump())
    note(describe_decision(look, budget))


if __name__ == "__main__":
    main()
