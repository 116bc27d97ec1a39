"""Completes a config/deepspeed file for one model.

What transformers fills in from the training arguments stays "auto" (batch sizes, precision, optimizer). Bucket sizes
are filled in here, as integers: transformers' own "auto" gives 0.9·hidden² as a float, which DeepSpeed refuses.
"""

import copy


def complete_deepspeed_config(config: dict, hidden_size: int) -> dict:
    """Replace the "auto" sizes of `zero_optimization` by integers derived from the model's hidden size."""
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
    return config


def engine_record(engine) -> dict:
    """What a running DeepSpeed engine reports about itself, for the run's record."""
    offload_optimizer, offload_param = engine.zero_offload_optimizer(), engine.zero_offload_param()
    return {
        "zero_stage": engine.zero_optimization_stage(),
        "offload_optimizer": str(offload_optimizer.device) if offload_optimizer else "none",
        "offload_param": str(offload_param.device) if offload_param else "none",
        "world_size": engine.world_size,
        "micro_batch_size": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "global_batch_size": engine.train_batch_size(),
        "optimizer": type(engine.basic_optimizer).__name__,
        "zero_optimizer": type(engine.optimizer).__name__,
        "bf16": bool(engine.bfloat16_enabled()),
    }
