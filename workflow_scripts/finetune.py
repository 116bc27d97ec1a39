r"""Stage 2: train the projector and the language model (by LoRA or full fine-tuning) on instructions.

    bash workflow_scripts/launch.sh 1 1 workflow_scripts/finetune.py \
        --config results/shapes/tiny/baseline/finetune/config.yaml \
        --data results/shapes/tiny/baseline/jsonl/finetune.jsonl --model results/models/tiny/mgm \
        --projector results/shapes/tiny/baseline/pretrain/projector.safetensors \
        --evaluation results/datasets/shapes/evaluation.jsonl \
        --generate-config results/shapes/tiny/baseline/generate/config.yaml \
        --output-dir results/shapes/tiny/baseline/finetune

Writes adapter/ (PEFT) or, if `lora` is null, language_model.safetensors; in both cases projector.safetensors,
metrics.jsonl (per logging step), scores.jsonl (per checkpoint) and metrics.json. Resumes from its own checkpoints.
A model without stage 1 has no --projector and is also trained on the pairs (--pairs); its connector between towers and
language model is trained in full fine-tuning only. Without --evaluation and --generate-config, nothing is scored.
"""

import shutil
from functools import partial
from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    import deepspeed
    import torch
    from peft import PeftModel
    from torch import nn

    from dj2mgm.errors import InputError
    from dj2mgm.models.trained_weights import (
        LANGUAGE_MODEL_FILE,
        find_language_parameters,
        find_projector_parameters,
        load_projector,
    )
    from dj2mgm.models.tuning import choose_tuning, select_trained_parameters
    from dj2mgm.models.vision_language import ModelParts
    from dj2mgm.settings.training_stages import LoraSettings
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import replace_folder
    from dj2mgm.training.library_patches import apply_library_patches
    from dj2mgm.training.outputs import save_projector, save_weights
    from dj2mgm.training.settings import TrainingSettings
    from dj2mgm.training.stage import StageRun, locate_held_out_files


def load_stage_1(model: nn.Module, parts: ModelParts, projector: Path | None) -> None:
    """Load the projector that stage 1 has trained, if there was a stage 1."""
    if projector is None and parts.initialized_in_stage_1:
        raise InputError("stage 1 trains this model's projector; name its file with --projector")
    if projector:
        load_projector(model, projector, gathered=partial(deepspeed.zero.GatheredParameters, modifier_rank=0))


def prepare_stage_2(
    model: nn.Module, parts: ModelParts, lora: LoraSettings | None, projector: Path | None
) -> nn.Module:
    """Load the projector of stage 1, and freeze everything that LoRA or full fine-tuning does not train."""
    load_stage_1(model, parts, projector)
    tuning = choose_tuning("finetune", lora)
    return select_trained_parameters(model, parts.decoder, tuning, lora, projector=projector is not None)


def save_adapter_and_projector(model: PeftModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    if any(parameter.requires_grad for parameter in find_projector_parameters(model).values()):
        save_projector(model, weights, folder)
    (folder / LANGUAGE_MODEL_FILE).unlink(missing_ok=True)  # from an earlier full fine-tuning
    lora = {name: tensor for name, tensor in weights.items() if "lora_" in name}
    with replace_folder(folder / "adapter") as adapter:
        model.save_pretrained(adapter, state_dict=lora, save_embedding_layers=False)


def save_language_model_and_projector(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    save_projector(model, weights, folder)
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    save_weights({name: weights[name] for name in find_language_parameters(model)}, folder / LANGUAGE_MODEL_FILE)


@command_line
def main() -> None:
    apply_library_patches()
    required = ("--config", "--data", "--model", "--output-dir")
    optional = ("--projector", "--pairs", "--evaluation", "--generate-config")
    args = parse_paths(__doc__, *required, optional=optional, launched=True)
    settings = load_settings(TrainingSettings, args.config)
    inputs = {"data": args.data, "model": args.model}
    inputs |= {name: path for name in ("projector", "pairs") if (path := getattr(args, name))}
    tuning = choose_tuning("finetune", settings.lora)
    prepare = partial(prepare_stage_2, lora=settings.lora, projector=args.projector)
    save = save_adapter_and_projector if settings.lora else save_language_model_and_projector
    StageRun(tuning, settings, inputs, args.output_dir, prepare, save, locate_held_out_files(args)).run()


if __name__ == "__main__":
    main()
