r"""Merge the LoRAs of single sources for each mixture, and score the merged models on the held-out questions.

    python workflow_scripts/score_mixtures.py --config results/shapes/tiny/my_mixtures/merged/config.yaml \
        --generate-config results/shapes/tiny/baseline/generate/config.yaml --model results/models/tiny/mgm \
        --evaluation results/datasets/shapes/evaluation.jsonl --output-dir results/shapes/tiny/my_mixtures/merged

The configuration names a folder of stage 2 for each source, and the shares of the mixtures. Writes scores.yaml. Each
score is also appended to scored.jsonl, so that a restart reuses the scores of equal weights and questions.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    import numpy as np

    from dj2mgm.cli.messages import Progress
    from dj2mgm.compute import set_seed, use_cpu_threads
    from dj2mgm.errors import InputError
    from dj2mgm.evaluation.held_out_rows import HeldOutRows
    from dj2mgm.features.studies.merged_adapters import list_weights, merge_stages
    from dj2mgm.features.studies.study_records import MergeSettings, MixtureScores, ScoredMixture
    from dj2mgm.models.generators import open_generators
    from dj2mgm.settings.evaluation import GenerateSettings
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import compute_sha256, read_jsonl, write_jsonl, write_yaml


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--generate-config", "--model", "--evaluation", "--output-dir")
    merging, settings = load_settings(MergeSettings, args.config), load_settings(GenerateSettings, args.generate_config)
    use_cpu_threads(settings.cpu_threads)
    set_seed(settings.seed)
    held_out = HeldOutRows(args.evaluation, settings)
    if not held_out.questions:
        raise InputError(f"{args.evaluation} has no questions, by which merged models are scored; remove `merged`")
    stages = {source: Path(folder) for source, folder in merging.sources.items()}
    digest = hash_inputs(stages, args.evaluation, args.generate_config)
    file = args.output_dir / "scored.jsonl"
    rows = [row for row in read_jsonl(file) if row["inputs"] == digest] if file.is_file() else []
    scores = {json.dumps(row["shares"]): row["score"] for row in rows}
    with open_generators(args.model, settings.gpus) as load:
        for mixture in Progress("mixtures", len(merging.mixtures)).follow(merging.mixtures):
            key = json.dumps(mixture.shares)
            if key in scores:
                continue
            with TemporaryDirectory() as folder:
                merge_stages(weigh_stages(stages, mixture.shares), Path(folder))
                likelihoods = list(held_out.measure_answers(load(Path(folder))))
            scores[key] = float(np.exp(likelihoods).mean())
            rows.append({"inputs": digest, "shares": mixture.shares, "score": scores[key]})
            write_jsonl(file, rows)
    scored = [
        ScoredMixture(**mixture.model_dump(), score=scores[json.dumps(mixture.shares)]) for mixture in merging.mixtures
    ]
    write_yaml(args.output_dir / "scores.yaml", MixtureScores(sources=len(stages), mixtures=scored).model_dump())


def weigh_stages(stages: Mapping[str, Path], shares: Mapping[str, float]) -> dict[Path, float]:
    """Return the weight of each source's stage; the sum is 1."""
    total = sum(shares.values())
    return {folder: shares[source] / total for source, folder in stages.items()}


def hash_inputs(stages: Mapping[str, Path], *files: Path) -> str:
    """Return a digest of everything that decides the score of a mixture."""
    weights = {source: [compute_sha256(file) for file in list_weights(folder)] for source, folder in stages.items()}
    return sha256(json.dumps([weights, *map(compute_sha256, files)]).encode()).hexdigest()


if __name__ == "__main__":
    main()
