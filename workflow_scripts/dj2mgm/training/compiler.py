"""Training without DeepSpeed's extensions for CPUs, if there is no C++ compiler or they cannot be compiled.

PyTorch's AdamW replaces DeepSpeed's, and processes on CPUs exchange gradients without DeepSpeed's shared memory.
"""

import os
import shutil
import subprocess

import deepspeed
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
from torch.utils.cpp_extension import get_cxx_compiler

from dj2mgm.cli.messages import note
from dj2mgm.torch_environment import locate_extensions

MAX_REASON_LENGTH = 200  # characters


def use_available_extensions(config: dict) -> dict:
    """Return a DeepSpeed configuration without extensions that cannot be compiled or loaded here.

    Extensions are compiled now if they are not yet. It is called before the process group is initialized, which loads
    the extension for shared memory.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu and _find_failure(ShareMemCommBuilder()):
        deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False
    optimizer, offload = config.get("optimizer"), config["zero_optimization"].get("offload_optimizer", {})
    on_cpu = not has_gpu or offload.get("device") == "cpu"
    if not optimizer or optimizer["params"].get("torch_adam") or not on_cpu:
        return config
    failure = _find_failure(CPUAdamBuilder())
    if failure is None:
        return config
    if _is_first_here():
        note(
            f"{failure}, so PyTorch's AdamW on the CPU replaces DeepSpeed's, which would be several times faster "
            "for large models; install g++ to have it"
        )
    return config | {
        "optimizer": optimizer | {"params": optimizer["params"] | {"torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }


def _is_first_here() -> bool:
    """Return whether this is the first process of this node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _find_failure(builder: OpBuilder) -> str | None:
    """Load an extension, and return the reason in one line if that fails."""
    if not (locate_extensions() / builder.name / f"{builder.name}.so").exists() and _is_first_here():
        note(f"compiling DeepSpeed's {builder.name} for this environment and processor: once, a minute or two")
    try:
        builder.load(verbose=False)
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:
        if not shutil.which(get_cxx_compiler()):
            return "there is no C++ compiler"
        return f"{get_cxx_compiler()} cannot compile DeepSpeed's {builder.name} ({_find_reason(str(error))})"
    return None


def _find_reason(printed: str) -> str:
    """Return the compiler's first error in the output of a build, or its last line."""
    lines = printed.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error:" in line), lines[-1]).strip()[:MAX_REASON_LENGTH]
