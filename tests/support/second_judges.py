"""Results of a report with other judges of captions, or with a second one."""

from dj2mgm.storage.files import read_json, read_jsonl, write_json, write_jsonl

SIGLIP = {"name": "models/siglip", "kind": "SigLIP", "selects": [], "sees": False}


def change_judges(config, name: str, judges) -> None:
    """Replace the judges of all runs of an experiment by `judges(judges)`."""
    for file in config.parent.parent.glob(f"{name}/**/evaluate_clip/metrics.json"):
        metrics = read_json(file)
        write_json(file, metrics | {"judges": judges(metrics["judges"])})


def add_second_judge(config, score) -> None:
    """Add a second judge with the scores `score(first judge's score, row)`."""
    for name in ("baseline", "dj_synth"):
        change_judges(config, name, lambda judges: [*judges, SIGLIP])
        for file in config.parent.parent.glob(f"{name}/**/evaluate_clip/scores.jsonl"):
            rows = list(read_jsonl(file))
            for row in rows:
                value, count = row["values"]["clip_score"]
                row["values"]["second_clip_score"] = [score(value, row), count]
            write_jsonl(file, rows)
