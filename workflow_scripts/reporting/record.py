"""How the experiments were run, as their stages recorded it: settings of the engine, versions and times."""

from reporting.experiment import STAGES, Experiment, Run

LEFT_OUT = {"versions", "train_seconds", "seed", "loss_first", "loss_last"}  # shown elsewhere on the page


def flatten(record: dict, prefix: str = "") -> dict[str, object]:
    """Nested settings as {"engine zero_stage": 3, …}; lists are left out."""
    flat: dict[str, object] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key} ")
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


def training_table(run: Run) -> list[tuple[str, list[str]]]:
    """Rows (setting, [value in stage 1, value in stage 2]) of what the stages recorded."""
    records = [{key: value for key, value in run.records[stage].items() if key not in LEFT_OUT} for stage in STAGES]
    flat = [flatten(record) for record in records]
    keys = list(dict.fromkeys(key for stage in flat for key in stage))
    return [(key, [show(stage.get(key)) for stage in flat]) for key in keys]


def versions(experiments: list[Experiment]) -> list[tuple[str, str]]:
    """(package, version) of everything that any stage recorded; several versions if the runs differ in it."""
    found: dict[str, set[str]] = {}
    for run in (run for experiment in experiments for run in experiment.runs):
        records = [*run.records.values(), run.clip, run.vqa, {"versions": {"data-juicer": run.filter["data_juicer"]}}]
        for record in records:
            for package, version in record.get("versions", {}).items():
                found.setdefault(package, set()).add(str(version))
    return [(package, " and ".join(sorted(values))) for package, values in sorted(found.items())]


def duration(seconds: float) -> str:
    """3725 → "1 h 02 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


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


def _seconds(run: Run) -> dict[str, float]:
    seconds = {"filter": sum(operator["seconds"] for operator in run.filter["operators"])}
    if run.synthesize:
        seconds["synthesize"] = sum(operator["seconds"] for operator in run.synthesize["operators"])
    seconds |= {stage: run.records[stage]["train_seconds"] for stage in STAGES}
    return seconds | {"CLIP scores": run.clip["seconds"]}
