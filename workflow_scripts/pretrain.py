r"""Stage 1: train the projector between towers and language model on captions.

Towers and language model stay frozen. In MGM, patch info mining is trained, too.

    bash workflow_scripts/launch.sh 1 1 workflow_scripts/pretrain.py \
        --config results/shapes/tiny/baseline/pretrain/config.yaml \
        --data results/shapes/tiny/baseline/jsonl/pretrain.jsonl --model results/models/tiny/mgm \
        --evaluation results/datasets/shapes/evaluation.jsonl \
        --generate-config results/shapes/tiny/baseline/generate/config.yaml \
        --output-dir results/shapes/tiny/baseline/pretrain

Writes projector.safetensors, metrics.jsonl (per logging step), scores.jsonl (per checkpoint) and metrics.json; resumes
from its own checkpoints. Without --evaluation and --generate-config, nothing is scored.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    import deepspeed
    from torch import nn

    from dj2mgm.models.tuning import select_trained_parameters
    from dj2mgm.models.vision_language import ModelParts
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.training.library_patches import apply_library_patches
    from dj2mgm.training.outputs import save_projector
    from dj2mgm.training.settings import TrainingSettings
    from dj2mgm.training.stage import StageRun, locate_held_out_files


def train_projector_only(model: nn.Module, parts: ModelParts) -> nn.Module:
    """Freeze all other parameters, and initialize the projector from the run's seed."""
    for module in parts.initialized_in_stage_1:
        with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
            for layer in module.modules():
                if hasattr(layer, "reset_parameters"):
                    layer.reset_parameters()
    return select_trained_parameters(model, parts.decoder, "stage1")


@command_line
def main() -> None:
    optional = ("--evaluation", "--generate-config")
    apply_library_patches()
    args = parse_paths(__doc__, "--config", "--data", "--model", "--output-dir", optional=optional, launched=True)
    settings = load_settings(TrainingSettings, args.config)
    inputs = {"data": args.data, "model": args.model}
    held_out = locate_held_out_files(args)
    StageRun("stage1", settings, inputs, args.output_dir, train_projector_only, save_projector, held_out).run()


if __name__ == "__main__":
    main()
