"""Switches off messages of libraries that are irrelevant to a run, as each library documents it.

The switches are environment variables, because most of these messages are printed on import. Snakemake sets them for
all jobs; a stage that is run by hand prints everything.
"""

SWITCHES = {
    # deprecations between libraries, which only their authors can resolve
    "PYTHONWARNINGS": "ignore:`is_gradient_checkpointing`:FutureWarning,ignore:`torch.distributed.:FutureWarning",
    "TORCH_LOGS": "-torch.utils._pytree",  # torchao registers enums in a deprecated way
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a loopback address has no host name
    "ACCELERATE_LOG_LEVEL": "ERROR",  # reports that DeepSpeed's gradient accumulation is used, as intended
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # progress bars of loading and writing weights
}
