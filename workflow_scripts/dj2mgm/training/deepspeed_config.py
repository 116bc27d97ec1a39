"""Completion of a config/deepspeed file for one model.

Values that transformers fills in from the training arguments (batch sizes, precision, optimizer) stay "auto". Bucket
sizes are filled in here, as integers: transformers' own value, 0.9·hidden², is a float, which DeepSpeed refuses.
"""

import copy
from collections.abc import Mapping


def complete_deepspeed_config(config: dict, hidden_size: int) -> dict:
    """Replace the "auto" sizes of `zero_optimization` by integers derived from the model's hidden size.

    DeepSpeed's own timing and its search for gradients that overflow in bf16 are switched off unless the configuration
    has them, because both wait for the GPU. A step with such gradients is applied, and ResumableTrainer stops at its
    norm before it writes the weights.
    """
    sizes = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    config = copy.deepcopy(config)
    zero = config["zero_optimization"]
    for key, size in sizes.items():
        if zero.get(key) == "auto":
            zero[key] = size
    config.setdefault("timers", {"throughput": {"enabled": False}})
    if "bf16" in config:
        config["bf16"] = {"check_grad_overflow": False} | config["bf16"]
    return config


def with_batch(config: dict, sizes: Mapping[str, int]) -> dict:
    """Return a configuration with fixed batch sizes; `sizes` come from settings.training_stages.solve_batch."""
    return config | {
        "train_batch_size": sizes["global_batch_size"],
        "train_micro_batch_size_per_gpu": sizes["micro_batch_size"],
        "gradient_accumulation_steps": sizes["gradient_accumulation_steps"],
    }


def describe_engine(engine, global_batch_size: int) -> dict:
    """Return the properties of a running DeepSpeed engine for the run's record.

    The engine computes its global batch from full micro batches, so the real size is an argument.
    """
    offload_optimizer, offload_param = engine.zero_offload_optimizer(), engine.zero_offload_param()
    return {
        "zero_stage": engine.zero_optimization_stage(),
        "offload_optimizer": str(offload_optimizer.device) if offload_optimizer else "none",
        "offload_param": str(offload_param.device) if offload_param else "none",
        "world_size": engine.world_size,
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "global_batch_size": global_batch_size,
        "optimizer": type(engine.basic_optimizer).__name__,
        "zero_optimizer": type(engine.optimizer).__name__,
        "bf16": bool(engine.bfloat16_enabled()),
        "fp16": bool(engine.fp16_enabled()),
    }
