r"""Score the generated captions with CLIPScore, RefCLIPScore and, for known objects, attribute accuracy.

    python workflow_scripts/evaluate_clip.py --config results/shapes/tiny/baseline/evaluate_clip/config.yaml \
        --model results/models/tiny/mgm --captions results/shapes/tiny/baseline/generate/captions.jsonl \
        --evaluation results/datasets/shapes/evaluation.jsonl --output-dir results/shapes/tiny/baseline/evaluate_clip

Writes metrics.json, and scores.jsonl with the values of every image.

For each judge, metrics.json lists the CLIPs that selected the data with the same image tower, and whether the evaluated
model has it, too.
"""

import platform
import time
from dataclasses import asdict
from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.storage.files import read_jsonl
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    import numpy
    import torch
    import transformers

    from dj2mgm.compute import use_cpu_threads
    from dj2mgm.evaluation.caption_metrics import (
        CaptionJudge,
        Embedder,
        has_same_image_tower,
        measure_captions,
        select_captioned,
    )
    from dj2mgm.evaluation.groups import estimate_groups, iterate_score_rows, read_paired_rows
    from dj2mgm.records import Judge
    from dj2mgm.settings.evaluation import JudgeSettings
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import compute_sha256, write_json, write_jsonl


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--model", "--captions", "--evaluation", "--output-dir")
    settings = load_settings(JudgeSettings, paths.config)
    start = time.monotonic()
    use_cpu_threads(settings.cpu_threads)

    models = read_paired_rows(paths.captions, key=("id",))
    rows = select_captioned(models, list(read_jsonl(paths.evaluation)))
    judges = {"clip": settings.clip, "second_judge": settings.second_judge}
    embedders = [Embedder(name, key) for key, name in judges.items() if name]
    judge = CaptionJudge(rows, settings.image_root, embedders, settings.prompt)
    measurements, counts = measure_captions(models, judge)
    groups = estimate_groups(measurements)

    for group, estimates in groups.items():
        figures = "  ".join(f"{name} {value.mean:.3f}" for name, value in estimates.items())
        print(f"{group:20} {figures}", flush=True)
    record = {
        "judges": [asdict(describe_judge(embedder, settings.selecting, paths.model)) for embedder in embedders],
        "prompt": settings.prompt,
        "device": str(embedders[0].device),
        "seconds": round(time.monotonic() - start, 2),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
        "inputs": {"captions": compute_sha256(paths.captions), "evaluation": compute_sha256(paths.evaluation)},
    }
    write_jsonl(paths.output_dir / "scores.jsonl", iterate_score_rows(measurements))
    write_json(paths.output_dir / "metrics.json", {"groups": groups, "counts": counts} | record)


def describe_judge(judge: Embedder, selecting_clips: list[str], model: Path) -> Judge:
    return Judge(
        name=judge.name,
        kind=judge.kind,
        selects=[clip for clip in selecting_clips if has_same_image_tower(judge.name, clip)],
        sees=has_same_image_tower(judge.name, str(model)),
    )


if __name__ == "__main__":
    main()
