r"""Train all weights of a causal language model on text; `train_deepspeed.py` writes its configuration and starts it.

    bash workflow_scripts/launch.sh 6 1 workflow_scripts/train_text_model.py \
        --config results/presets/7b_mamba/config.yaml --data data/corpus.jsonl --model model_zoo/mamba-7b \
        --output-dir results/presets/7b_mamba

Writes model/ (safetensors and tokenizer) and metrics.json, and resumes from its own checkpoints.
"""

import sys

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dj2mgm.compute import set_seed, use_cpu_threads, use_own_gpu
    from dj2mgm.errors import InputError
    from dj2mgm.features.presets.text_dataset import TextDataset
    from dj2mgm.planning.architecture import load_architecture
    from dj2mgm.settings.training_stages import FROZEN
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import write_json
    from dj2mgm.training.arguments import build_training_arguments, choose_optimizer
    from dj2mgm.training.checkpoints import discard_checkpoints, find_checkpoint
    from dj2mgm.training.deepspeed_config import describe_engine
    from dj2mgm.training.library_patches import apply_library_patches
    from dj2mgm.training.processes import decide_together, join_process_group, leave_process_group
    from dj2mgm.training.settings import TrainingSettings, compute_fingerprint, compute_input_digest
    from dj2mgm.training.trainer import ResumableTrainer


@command_line
def main() -> None:
    apply_library_patches()
    args = parse_paths(__doc__, "--config", "--data", "--model", "--output-dir", launched=True)
    settings = load_settings(TrainingSettings, args.config)
    if settings.precision in FROZEN:
        raise InputError(
            f"precision: {settings.precision} applies to frozen layers, but a text model trains all layers; set bf16"
        )
    use_own_gpu()
    use_cpu_threads(settings.cpu_threads)
    set_seed(settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    dataset = TextDataset(args.data, tokenizer, settings.max_length)
    settings = settings.with_enough_steps(len(dataset))
    hidden_size = load_architecture(args.model.name, args.model, text=True).hidden_size
    # created before the model, so that transformers loads the model directly into ZeRO-3's partitions
    checkpoints = args.output_dir / "checkpoints"
    arguments = build_training_arguments(settings, checkpoints, hidden_size)
    join_process_group()
    fingerprint = compute_fingerprint(settings, compute_input_digest({"data": args.data, "model": args.model}))
    checkpoint, reason = decide_together(lambda: find_checkpoint(checkpoints, fingerprint, arguments.world_size))
    trainer = ResumableTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            args.model, dtype=settings.dtype, trust_remote_code=False, use_safetensors=True
        ),
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=choose_optimizer(settings),
        fingerprint=fingerprint,
        global_batch_size=settings.global_batch_size,
    )
    if trainer.is_world_process_zero():
        if reason:
            print(reason, file=sys.stderr, flush=True)
        discard_checkpoints(checkpoints, newest=checkpoint)
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model(str(args.output_dir / "model"))
    if trainer.is_world_process_zero():
        record = {"steps": result.global_step, "loss": result.training_loss, "seed": settings.seed}
        engine = describe_engine(trainer.model_wrapped, settings.global_batch_size)
        write_json(args.output_dir / "metrics.json", record | {"engine": engine})
    leave_process_group()


if __name__ == "__main__":
    main()
