"""What differs between two experiments' settings, key by key, recipes operator by operator; nothing else."""

from reporting.experiment import Experiment

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
