"""Training without a C++ compiler, which DeepSpeed needs once for its extensions for CPUs.

PyTorch's AdamW replaces DeepSpeed's, and processes on CPUs exchange gradients without DeepSpeed's shared memory.
"""

import os
import shutil

import deepspeed
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
from torch.utils.cpp_extension import get_cxx_compiler

from dj2mgm.messages import note


def use_available_extensions(config: dict) -> dict:
    """Return a DeepSpeed configuration that needs no extension that is neither compiled nor can be compiled here.

    It is called before the process group is initialized, which loads the extension for shared memory.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not _is_available(ShareMemCommBuilder()):
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
    optimizer, offload = config.get("optimizer"), config["zero_optimization"].get("offload_optimizer", {})
    on_cpu = not has_gpu or offload.get("device") == "cpu"
    if not optimizer or optimizer["params"].get("torch_adam") or not on_cpu or _is_available(CPUAdamBuilder()):
        return config
    if os.environ.get("LOCAL_RANK", "0") == "0":
        note(
            "there is no C++ compiler, so PyTorch's AdamW on the CPU replaces DeepSpeed's, which is several times "
            "faster for large models; install g++ to have it"
        )
    return config | {
        "optimizer": optimizer | {"params": optimizer["params"] | {"torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }


def _is_available(builder: OpBuilder) -> bool:
    """Return whether an extension is compiled, or there is a compiler for it."""
    if shutil.which(get_cxx_compiler()):
        return True
    try:
        builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError):
        return False
    return True
