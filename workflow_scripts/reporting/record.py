"""How the models were trained, as the engine reported it: a table of settings, versions and times."""

from reporting.experiment import STAGES, Experiment


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


def training_table(experiment: Experiment) -> list[tuple[str, list[str]]]:
    """Rows (setting, [value in stage 1, value in stage 2]) of everything that the stages recorded."""
    flat = [flatten(experiment.records[stage]) for stage in STAGES]
    keys = list(dict.fromkeys(key for stage in flat for key in stage))
    return [(key, [show(stage.get(key)) for stage in flat]) for key in keys]


def duration(seconds: float) -> str:
    """3725 → "1 h 02 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def times(experiment: Experiment) -> list[tuple[str, str]]:
    """(stage, duration) of the stages that measure themselves."""
    seconds = {"filter": sum(operator["seconds"] for operator in experiment.filter["operators"])}
    seconds |= {stage: experiment.records[stage]["train_seconds"] for stage in STAGES}
    seconds["CLIP scores"] = experiment.clip["seconds"]
    return [(stage, duration(value)) for stage, value in seconds.items()]
