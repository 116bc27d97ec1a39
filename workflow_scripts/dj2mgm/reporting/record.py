"""How experiments were run: settings and their differences, versions and times."""

from dj2mgm.messages import duration
from dj2mgm.reporting.experiment import Experiment, RunResults

# What differs between two experiments' settings, key by key, recipes operator by operator; nothing else.

ABSENT = object()


def config_difference(experiment: Experiment, reference: Experiment) -> list[tuple[str, str, str]]:
    """Rows (dotted key, the reference's value, the experiment's value); what one of them lacks is shown as "–"."""
    ours, theirs = settings(experiment), settings(reference)
    keys = list(dict.fromkeys([*theirs, *ours]))
    pairs = [(key, theirs.get(key, ABSENT), ours.get(key, ABSENT)) for key in keys]
    return [(key, _show(old), _show(new)) for key, old, new in pairs if old is ABSENT or new is ABSENT or old != new]


def settings(experiment: Experiment) -> dict[str, object]:
    """The merged configuration and the recipes, flat. Seeds and names of recipes are shown elsewhere on the page."""
    flat = flatten(experiment.config)
    for stage, recipe in experiment.recipes.items():
        flat |= operators(f"{stage} recipe", (recipe or {}).get("process") or [])
    return flat


def flatten(values: dict, prefix: str = "") -> dict[str, object]:
    """{"lora": {"r": 16}} → {"lora.r": 16}; lists are values."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def operators(recipe: str, process: list[dict]) -> dict[str, object]:
    """A recipe's arguments by operator; the second operator of one name is `<name> (2)`. Order is not compared."""
    flat: dict[str, object] = {}
    seen: dict[str, int] = {}
    for step in process:
        [(name, arguments)] = step.items()
        seen[name] = seen.get(name, 0) + 1
        label = f"{recipe}: {name}" + (f" ({seen[name]})" if seen[name] > 1 else "")
        flat |= flatten({label: arguments or "no arguments"})
    return flat


def _show(value: object) -> str:
    if value is ABSENT or value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_show(item) for item in value) or "none"
    return "none" if value == {} else str(value)


# How the experiments were run, as their stages recorded it: settings of the engine, versions and times.

LEFT_OUT = {"versions", "train_seconds", "seed", "loss_first", "loss_last"}  # shown elsewhere on the page


def flatten_record(record: dict, prefix: str = "") -> dict[str, object]:
    """Nested settings as {"engine zero_stage": 3, …}; lists are left out."""
    flat: dict[str, object] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= flatten_record(value, f"{prefix}{key} ")
        elif not isinstance(value, list):
            flat[f"{prefix}{key}"] = value
    return flat


def show(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def training_table(run: RunResults) -> list[tuple[str, list[str]]]:
    """Rows (setting, [value in each stage]) of what the training stages recorded."""
    records = [{key: value for key, value in record.items() if key not in LEFT_OUT} for record in run.records.values()]
    flat = [flatten_record(record) for record in records]
    keys = list(dict.fromkeys(key for stage in flat for key in stage))
    return [(key, [show(stage.get(key)) for stage in flat]) for key in keys]


def versions(experiments: list[Experiment]) -> list[tuple[str, str]]:
    """(package, version) of everything that any stage recorded; several versions if the runs differ in it."""
    versions_by_package: dict[str, set[str]] = {}
    for run in (run for experiment in experiments for run in experiment.runs):
        records = [*run.records.values(), run.clip, run.vqa, {"versions": {"data-juicer": run.filter["data_juicer"]}}]
        for record in records:
            for package, version in record.get("versions", {}).items():
                versions_by_package.setdefault(package, set()).add(str(version))
    return [(package, " and ".join(sorted(values))) for package, values in sorted(versions_by_package.items())]


def times_table(experiments: list[Experiment]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Stages that measure themselves, and for each experiment the mean time of one run in them."""
    measured = [[_seconds(run) for run in experiment.runs] for experiment in experiments]
    stages = list(dict.fromkeys(stage for runs in measured for run in runs for stage in run))
    stages.sort(key=list(_ORDER).index)
    rows = []
    for experiment, runs in zip(experiments, measured, strict=True):
        means = [sum(run[stage] for run in runs) / len(runs) if stage in runs[0] else None for stage in stages]
        rows.append((experiment.name, ["–" if mean is None else duration(mean) for mean in means]))
    return stages, rows


_ORDER = ("filter", "synthesize", "pretrain", "finetune", "CLIP scores")


def _seconds(run: RunResults) -> dict[str, float]:
    seconds = {"filter": sum(operator["seconds"] for operator in run.filter["operators"])}
    if run.synthesize:
        seconds["synthesize"] = sum(operator["seconds"] for operator in run.synthesize["operators"])
    seconds |= {stage: record["train_seconds"] for stage, record in run.records.items()}
    return seconds | {"CLIP scores": run.clip["seconds"]}
