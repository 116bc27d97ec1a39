"""Patches of DeepSpeed engines (tested with DeepSpeed 0.19.8), applied to an engine before it loads a checkpoint."""

from deepspeed.ops.adam import DeepSpeedCPUAdam

from dj2mgm.training.arguments import repeat_products_of_betas


def load_into_host_memory(engine) -> None:
    """Load checkpoint files with map_location="cpu".

    DeepSpeed passes a function as map_location, which torch.load refuses for torchao's 8-bit optimizer states.
    """
    load = engine.checkpoint_engine.load
    engine.checkpoint_engine.load = lambda file, map_location=None: load(file, map_location="cpu")


def restore_bias_corrections(engine) -> None:
    """Restore the bias corrections of DeepSpeed's CPU Adam, which checkpoints do not contain."""
    if isinstance(engine.basic_optimizer, DeepSpeedCPUAdam):
        repeat_products_of_betas(engine.basic_optimizer)
