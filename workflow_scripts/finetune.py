"""Stage 2: LoRA on the language model, plus the projector, on instructions.

    deepspeed workflow_scripts/finetune.py --config results/baseline/finetune/config.yaml \\
        --data results/baseline/jsonl/finetune.jsonl --model results/models/tiny \\
        --projector results/baseline/pretrain/projector.safetensors --output-dir results/baseline/finetune

Writes adapter/ (PEFT), projector.safetensors, metrics.jsonl and metrics.json; resumes from its own checkpoints.
"""

from functools import partial
from pathlib import Path

import deepspeed
import torch
from peft import PeftModel
from torch import nn

from command_line import command_line, path_arguments
from files import replace_folder
from mgm.projector_weights import load_projector, projector_parameters
from training.lora import wrap_with_lora
from training.settings import LoraSettings, load_training_settings
from training.stage import run_stage
from training.trained_weights import save_weights


def add_lora(model: nn.Module, lora: LoraSettings, projector: Path) -> PeftModel:
    """Load the stage-1 projector and wrap the language model's projections; everything else stays frozen."""
    load_projector(model, projector, gathered=partial(deepspeed.zero.GatheredParameters, modifier_rank=0))
    return wrap_with_lora(model, lora)


def save_adapter_and_projector(model: PeftModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    projector = {name: weights[by_id[id(p)]] for name, p in projector_parameters(model).items()}
    save_weights(projector, folder / "projector.safetensors")
    lora = {name: tensor for name, tensor in weights.items() if "lora_" in name}
    with replace_folder(folder / "adapter") as adapter:
        model.save_pretrained(adapter, state_dict=lora, save_embedding_layers=False)


def train_language_model(model: nn.Module, projector: Path) -> nn.Module:
    """Load the stage-1 projector; it and all of the language model are trained."""
    load_projector(model, projector, gathered=partial(deepspeed.zero.GatheredParameters, modifier_rank=0))
    model.requires_grad_(True)
    for tower in (model.model.vision_tower, model.model.vision_tower_aux):
        tower.requires_grad_(False)
    return model


@command_line
def main() -> None:
    args = path_arguments(__doc__, "--config", "--data", "--model", "--projector", "--output-dir", launched=True)
    settings = load_training_settings(args.config)
    inputs = {"data": args.data, "model": args.model, "projector": args.projector}
    prepare = partial(add_lora, lora=settings.lora, projector=args.projector)
    run_stage(settings, inputs, args.output_dir, prepare, save_adapter_and_projector)


if __name__ == "__main__":
    main()
