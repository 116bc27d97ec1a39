"""Small results of experiments, written by hand, with the scores of a test."""

from collections.abc import Iterable
from pathlib import Path

from dj2mgm.runs.stages import STAGES
from dj2mgm.storage.files import write_json, write_jsonl, write_text, write_yaml
from recipe_summaries import write_recipe_summary
from training_records import write_training_record

JUDGE = {"name": "models/clip", "kind": "CLIP", "selects": [], "sees": False}
# {group: {metric: {image id: (sum, count)}}}
Values = dict[str, dict[str, dict[str, tuple[float, int]]]]


def write_scores(path: Path, values: Values) -> Path:
    rows = []
    for group, metrics in values.items():
        model, _, images = group.partition("/")
        for identifier in dict.fromkeys(identifier for image_values in metrics.values() for identifier in image_values):
            measurements = {
                name: list(image_values[identifier])
                for name, image_values in metrics.items()
                if identifier in image_values
            }
            rows.append({"model": model, "images": images or "own", "id": identifier, "values": measurements})
    write_jsonl(path, rows)
    return path


def write_dataset(folder: Path, faults: Iterable[tuple[str, str, str]] = ()) -> Path:
    """Write a dataset without images; `faults` are (id, fault, true caption) of its ground truth, if any."""
    write_json(folder / "summary.json", {"pretrain": 100, "finetune": 60, "evaluation": 1})
    write_jsonl(
        folder / "evaluation.jsonl",
        [{"id": "e0", "image": "images/e0.png", "captions": ["a cat"], "objects": [], "questions": []}],
    )
    if truth := [dict(zip(("id", "fault", "caption"), row, strict=True)) for row in faults]:
        write_jsonl(folder / "ground_truth.jsonl", truth)
    return folder


def write_run(folder: Path, clip: Values, vqa: Values, filtered: int = 80, synthesized: int | None = None) -> dict:
    """Write a run's results; return its stages for the configuration. `filtered` and `synthesized` are rows kept."""
    names = ["filter", "jsonl", "pretrain", "finetune", "generate", "evaluate_clip", "evaluate_vqa"]
    stages = {name: folder / name for name in names}
    write_recipe_summary(folder / "filter", 100, filtered)
    if synthesized is not None:
        stages["synthesize"] = folder / "synthesize"
        write_recipe_summary(folder / "synthesize", filtered, synthesized)
        write_yaml(folder / "synthesize/config.yaml", {})
    for stage in stages.keys() & {"filter", "synthesize"}:
        for name in (name for name in STAGES[stage].outputs if name.endswith(".jsonl")):
            write_jsonl(folder / stage / name, [])
    counts = {"rows_in": 0, "rows_out": 0, "dropped": {}}
    write_json(folder / "jsonl/summary.json", {"pretrain": counts, "finetune": counts})
    for name in ("pretrain.jsonl", "finetune.jsonl"):
        write_jsonl(folder / "jsonl" / name, [])
    for stage in ("pretrain", "finetune"):
        write_training_record(folder / stage)
        write_jsonl(folder / stage / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
        for name in ("scores.jsonl", "scored.jsonl"):
            write_jsonl(folder / stage / name, [])
        write_memory(folder / stage / "memory.csv", [1.0, 2.0])
    write_jsonl(folder / "generate/captions.jsonl", [])
    write_jsonl(folder / "generate/answers.jsonl", [])
    write_yaml(folder / "evaluate_clip/config.yaml", {"image_root": str(folder)})
    for stage, values in (("evaluate_clip", clip), ("evaluate_vqa", vqa)):
        record = {"groups": {}, "judges": [JUDGE], "prompt": "", "questions": 1 if vqa else 0}
        write_json(folder / stage / "metrics.json", record)
        write_scores(folder / stage / "scores.jsonl", values)
    return {name: str(path) for name, path in stages.items()}


def write_memory(path: Path, host: list[float], gpu: list[float] | None = None) -> None:
    """Write memory readings in GiB of the job and of one GPU, one per second: each phase once, and then training."""
    lines = ["attempt,time,seconds,phase,job_gib,host_gib,cgroup_gib" + (",gpu0_gib" if gpu else "")]
    for second, size in enumerate(host):
        phase = ("loading", "training")[min(second, 1)] if second < len(host) - 1 else "saving"
        lines.append(f"1,2026-01-01T00:00:00+00:00,{second},{phase},{size},9.0," + (f",{gpu[second]}" if gpu else ""))
    write_text(path, "\n".join(lines) + "\n")


def build_entry(name: str, dataset: Path, runs: dict[int, dict], **config: object) -> dict:
    """Return an experiment's entry in the configuration, from its stages by seed."""
    fields = {"name": name, "description": f"What {name} is for.", "dataset": str(dataset), "leaks": None}
    fields["licenses"] = {"pretrain": None}
    fields["config"] = {"model": {"name": "tiny"}} | config
    run_entries = [{"seed": seed, "stages": stages} for seed, stages in runs.items()]
    return fields | {"recipes": {"filter": {"process": []}, "synthesize": None}, "runs": run_entries}
