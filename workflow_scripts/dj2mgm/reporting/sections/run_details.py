"""Settings of experiments and their differences, versions of packages, and times of stages."""

from dataclasses import dataclass

from dj2mgm.cli.messages import format_duration
from dj2mgm.records import ABSENT, find_differences
from dj2mgm.reporting.experiment_results import ExperimentResults, RunResults
from dj2mgm.reporting.rendering import Cell, Table, TableRow
from dj2mgm.runs.pages import sum_seconds
from dj2mgm.runs.stages import STAGES


@dataclass(frozen=True)
class SettingRow:
    """A row of the table of differences, as text."""

    name: str
    reference: str
    value: str
    default: str
    same_weights: bool  # whether another value gives the same weights


def list_config_differences(experiment: ExperimentResults, reference: ExperimentResults) -> list[SettingRow]:
    """Return the settings, and arguments of recipes, that differ from the reference's; "–" stands for a missing one."""
    differences = find_differences(reference.config, experiment.config)
    recipes = [
        {
            label: arguments
            for stage, recipe in results.recipes
            for label, arguments in label_operators(f"{stage} recipe", (recipe or {}).get("process") or []).items()
        }
        for results in (reference, experiment)
    ]
    rows = [*differences, *find_differences(*recipes)]
    return [SettingRow(row.name, *map(show_setting, (*row.values, row.default)), not row.retrains) for row in rows]


def label_operators(recipe: str, process: list[dict]) -> dict[str, object]:
    """Return a recipe's arguments by operator; a second operator of the same name is `<name> (2)`."""
    arguments_by_label: dict[str, object] = {}
    counts: dict[str, int] = {}
    for step in process:
        [(name, arguments)] = step.items()
        counts[name] = counts.get(name, 0) + 1
        label = f"{recipe}: {name}" + (f" ({counts[name]})" if counts[name] > 1 else "")
        arguments_by_label[label] = arguments or "no arguments"
    return arguments_by_label


def show_setting(value: object) -> str:
    """Return the value of a setting as text."""
    if value is ABSENT or value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(show_setting(item) for item in value) or "none"
    return "none" if value == {} else str(value)


LEFT_OUT = {"versions", "train_seconds", "seed", "loss_first", "loss_last"}  # shown in other parts of the report


def flatten_record(record: dict, prefix: str = "") -> dict[str, object]:
    """Join nested keys by spaces, {"engine zero_stage": 3, …}, and leave out lists."""
    flat: dict[str, object] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= flatten_record(value, f"{prefix}{key} ")
        elif not isinstance(value, list):
            flat[f"{prefix}{key}"] = value
    return flat


def format_cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def build_training_table(run: RunResults) -> list[tuple[str, list[str]]]:
    """Return rows (setting, [value in each training stage]) of the stages' metrics.json."""
    records = [record.as_dict() for record in run.records.values()]
    flat = [flatten_record({key: record[key] for key in record if key not in LEFT_OUT}) for record in records]
    keys = list(dict.fromkeys(key for stage in flat for key in stage))
    return [(key, [format_cell(stage.get(key)) for stage in flat]) for key in keys]


def list_versions(experiments: list[ExperimentResults]) -> list[tuple[str, str]]:
    """Return (package, version) as recorded by the stages; several versions if the runs differ."""
    versions_by_package: dict[str, set[str]] = {}
    for run in (run for experiment in experiments for run in experiment.runs):
        for versions in run.versions:
            for package, version in versions.items():
                versions_by_package.setdefault(package, set()).add(str(version))
    return [(package, " and ".join(sorted(values))) for package, values in sorted(versions_by_package.items())]


def build_times_table(experiments: list[ExperimentResults]) -> Table:
    """Tabulate each experiment's mean time per run in the stages whose time was measured, and its seeds."""
    seconds = [[_read_seconds(run) for run in experiment.runs] for experiment in experiments]
    recorded = dict.fromkeys(stage for runs in seconds for run in runs for stage in run)
    stages = [*(stage for stage in STAGES if stage in recorded), *(stage for stage in recorded if stage not in STAGES)]
    rows = []
    for experiment, runs in zip(experiments, seconds, strict=True):
        times = [[run[stage] for run in runs if stage in run] for stage in stages]
        texts = [format_duration(sum(part) / len(part)) if part else "–" for part in times]
        rows.append(TableRow(experiment.name, list(map(Cell, [*texts, ", ".join(map(str, experiment.seeds))]))))
    return Table("Times", ["mean time per run", *stages, "seeds"], rows, colored=True)


def _read_seconds(run: RunResults) -> dict[str, float]:
    """Return the time of each stage, as Snakemake measured it; a resumed training has at least its recorded time."""
    seconds = {stage: sum_seconds([folder]) for stage, folder in run.stages.items()}
    recorded = {stage: record.train_seconds for stage, record in run.records.items()}  # of all attempts
    return {stage: max(time, recorded.get(stage, 0)) for stage, time in seconds.items() if time is not None}
