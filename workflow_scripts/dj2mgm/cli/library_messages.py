"""Switches that silence irrelevant messages of libraries, as each library documents them.

The switches are environment variables, because most of these messages are printed on import. Snakemake sets them for
all jobs; a stage that is run by hand prints everything. Scripts whose output a person reads silence all but errors.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

SWITCHES = {
    # deprecations between libraries, which only their authors can resolve
    "PYTHONWARNINGS": "ignore:`is_gradient_checkpointing`:FutureWarning,ignore:`torch.distributed.:FutureWarning",
    "TORCH_LOGS": "-torch.utils._pytree",  # torchao registers enums in a deprecated way
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # a warning that a loopback address has no host name
    "ACCELERATE_LOG_LEVEL": "ERROR",  # a message that DeepSpeed's gradient accumulation is used, as intended
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # progress bars of loading and writing weights
}


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Switch off warnings and progress bars of libraries, which are imported or used inside the context."""
    os.environ.update(SWITCHES | os.environ)  # the user's own values come first
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous_level)
