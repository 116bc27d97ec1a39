"""Messages of other libraries that say nothing about a run: switched off in the way that each library documents.

The switches are environment variables, since most of these messages are printed while a library is imported. Snakemake
sets them for all of its jobs; a stage that is run by hand prints everything.
"""

SWITCHES = {
    # deprecations between libraries, which only their authors can follow
    "PYTHONWARNINGS": "ignore:`is_gradient_checkpointing`:FutureWarning,ignore:`torch.distributed.:FutureWarning",
    "TORCH_LOGS": "-torch.utils._pytree",  # torchao registers enums in a deprecated way
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a loopback address has no host name
    "ACCELERATE_LOG_LEVEL": "ERROR",  # DeepSpeed's gradient accumulation counts, as it should
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # while weights are loaded and written
}
