r"""Merge the LoRAs of single sources for each mixture, and score the merged models on the held-out questions.

    python workflow_scripts/score_mixtures.py --config results/my_mixtures/merged/config.yaml \
        --generate-config results/baseline/generate/config.yaml --model results/models/tiny/mgm \
        --evaluation results/datasets/shapes/evaluation.jsonl --output-dir results/my_mixtures/merged

The configuration names a folder of stage 2 for each source, and the shares of the mixtures. Writes scores.yaml.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    import numpy as np

    from dj2mgm.cli.messages import Progress
    from dj2mgm.compute import set_seed, use_cpu_threads
    from dj2mgm.evaluation.held_out_rows import HeldOutRows
    from dj2mgm.models.generators import open_generators
    from dj2mgm.models.merged_adapters import merge_stages
    from dj2mgm.records.mixture_records import MergeSettings, MixtureScores, ScoredMixture
    from dj2mgm.settings.evaluation import GenerateSettings
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import write_yaml


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--generate-config", "--model", "--evaluation", "--output-dir")
    merging, settings = load_settings(MergeSettings, args.config), load_settings(GenerateSettings, args.generate_config)
    use_cpu_threads(settings.cpu_threads)
    set_seed(settings.seed)
    held_out = HeldOutRows(args.evaluation, settings)
    scored = []
    with open_generators(args.model, settings.gpus) as load:
        for mixture in Progress("mixtures", len(merging.mixtures)).follow(merging.mixtures):
            weights = {Path(folder): mixture.shares[name] / merging.total for name, folder in merging.sources.items()}
            with TemporaryDirectory(dir=args.output_dir) as folder:
                merge_stages(weights, Path(folder))
                likelihoods = list(held_out.measure_answers(load(Path(folder))))
            scored.append(ScoredMixture(**mixture.model_dump(), score=float(np.exp(likelihoods).mean())))
    scores = MixtureScores(sources=len(merging.sources), mixtures=scored)
    write_yaml(args.output_dir / "scores.yaml", scores.model_dump())


if __name__ == "__main__":
    main()
