r"""Write a variant of a study as an experiment's file, config/experiments/<name>.yaml.

    python workflow_scripts/keep_variant.py results/shapes/tiny/my_search/config.yaml baseline-4988a0e4d9 my_recipe

The experiment has seeds that the study did not use, because the scores by which it was chosen are too high by chance,
and a random subset as control if a search's trial trains on fewer rows than the baseline.
`snakemake decide --config experiment=<name>` then compares it with the baseline.
"""

from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser
from dj2mgm.errors import InputError
from dj2mgm.features.studies.axes import nest_changes
from dj2mgm.features.studies.study_records import StudyPageSettings, list_study_names
from dj2mgm.reporting.verdicts.verdict_sentences import build_snakemake_command
from dj2mgm.runs.layers import locate_experiment_file, merge
from dj2mgm.settings.base import build_schema
from dj2mgm.settings.config_files import CONFIG, read_config, suggest_name
from dj2mgm.settings.configuration import Configuration
from dj2mgm.settings.string_formats import check_format
from dj2mgm.settings.targets import RESERVED_NAMES
from dj2mgm.settings.validation import Layer, load_settings
from dj2mgm.storage.files import write_yaml

FRESH_SEEDS = 2


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("page", type=Path, help="config.yaml of a study's page")
    parser.add_argument("variant", help="as the page names it")
    parser.add_argument("name", help="name of the new experiment")
    args = parser.parse_args()
    settings = load_settings(StudyPageSettings, args.page)
    file = CONFIG / "experiments" / f"{args.name}.yaml"
    check_format("the experiment's name", "name", args.name)
    names = {name.lower() for name in (*list_study_names(), *(shown.name for shown in settings.experiments))}
    if file.exists() or args.name.lower() in RESERVED_NAMES | names:
        raise InputError(f"{args.name}: this name is in use; choose another one")
    write_yaml(file, describe_variant(settings, args.variant, args.page))
    if settings.study.search:
        next_step = "the other commands at the end of the search's page"
    else:
        next_step = build_snakemake_command(settings.experiments[0], "decide", experiment=args.name)
    print(f"wrote {file}; next: {next_step}", flush=True)


def describe_variant(settings: StudyPageSettings, variant: str, page: Path) -> dict:
    """Return the content of a variant's file: the keys of the study's experiment, with the changes."""
    experiments = {experiment.name: experiment for experiment in settings.experiments}
    if settings.study is None:
        raise InputError(f"{page} is not a study's page; name results/<dataset>/<model>/<study>/config.yaml")
    base_name, search = settings.study.experiment, settings.study.search
    variants = [name for name, experiment in experiments.items() if experiment.changes and name != base_name]
    if variant not in variants:
        raise InputError(f"{page}: there is no variant {variant!r}; {suggest_name(variant, variants)}")
    experiment, base = experiments[variant], experiments[base_name]
    differences = {key: value for key, value in experiment.changes.items() if base.changes.get(key) != value}
    # a change that replaces a whole section contains the changes of the section's keys
    changes = {
        key: value
        for key, value in differences.items()
        if not any(key.startswith(f"{section}.") for section in differences)
    }
    keys = read_config(locate_experiment_file(base_name), build_schema(Configuration))
    merged = merge([Layer(base_name, keys), Layer(variant, nest_changes(str(page), changes, base.config))])
    last_seed = max(run.seed for run in experiment.runs)
    if search and search.has_fewer_rows(variant):
        merged["controls"] = list(dict.fromkeys([*merged.get("controls", []), "random"]))
    text = ", ".join(f"{key} {value}" for key, value in changes.items())
    seeds = [last_seed + number for number in range(1, FRESH_SEEDS + 1)]
    return merged | {"description": f"{variant} of the study {page.parent.name}: {text}.", "seeds": seeds}


if __name__ == "__main__":
    main()
