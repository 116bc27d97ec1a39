"""Probe of torch, or of DeepSpeed's CPU optimizer, with the result as JSON.

python -m dj2mgm.health.torch_probe torch      # how torch was built; multiplies matrices and communicates once
python -m dj2mgm.health.torch_probe deepspeed  # compiles (if needed) and loads the CPU optimizer; prints its seconds
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from dj2mgm.settings.training_stages import FP8_CAPABILITY


@dataclass(frozen=True)
class TorchProbe:
    """State of torch on this machine; an error is None if its test passed or, without a GPU, did not run."""

    version: str
    cuda: str | None  # version that torch was built with, as "12.4"; None: a CPU build
    gpus: int  # number of GPUs that torch can use
    bf16: bool
    fp8: bool
    matmul_error: str | None
    nccl: str | None  # version
    nccl_error: str | None
    flash_attention: str | None  # version
    flash_attention_error: str | None


def probe_torch() -> TorchProbe:
    """Return torch's versions and abilities; each test on the GPU stores its error instead of raising it."""
    import torch  # imported here, so that TorchProbe can be used without loading torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    flash_attention, flash_attention_error = None, None
    try:
        flash_attention = importlib.import_module("flash_attn").__version__  # optional, so not in any environment file
    except ImportError as error:
        flash_attention_error = str(error)
    return TorchProbe(
        version=torch.__version__,
        cuda=torch.version.cuda,
        gpus=gpus,
        bf16=bool(gpus and torch.cuda.is_bf16_supported()),
        fp8=bool(gpus and torch.cuda.get_device_capability() >= FP8_CAPABILITY),
        matmul_error=_catch_error(_multiply) if gpus else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        nccl_error=_catch_error(_communicate) if gpus else None,
        flash_attention=flash_attention,
        flash_attention_error=flash_attention_error,
    )


def _multiply() -> None:
    """Multiply matrices on every GPU in float32 and bfloat16, and compare with the CPU's result."""
    import torch

    left, right = torch.randn(512, 512), torch.randn(512, 512)
    expected = left @ right
    for index in range(torch.cuda.device_count()):
        for dtype in (torch.float32, torch.bfloat16):
            product = (left.to(f"cuda:{index}", dtype) @ right.to(f"cuda:{index}", dtype)).float().cpu()
            error = ((product - expected).norm() / expected.norm()).item()
            if not error < 0.02:  # bfloat16 has 8 bits; NaN fails too
                raise RuntimeError(f"GPU {index}: a matrix product in {dtype} differs from the CPU's by {error:.0%}")


def _communicate() -> None:
    import torch
    from torch import distributed

    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        value = torch.ones(1, device="cuda")
        distributed.all_reduce(value)
        torch.cuda.synchronize()
    finally:
        distributed.destroy_process_group()


def _catch_error(attempt: Callable[[], None]) -> str | None:
    try:
        attempt()
    except Exception as error:  # any error is a finding
        return f"{type(error).__name__}: {error}"
    return None


def load_cpu_adam() -> float:
    """Return the seconds that loading took."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    start = time.monotonic()
    CPUAdamBuilder().load(verbose=False)
    return time.monotonic() - start


if __name__ == "__main__":
    result = asdict(probe_torch()) if sys.argv[1] == "torch" else {"seconds": load_cpu_adam()}
    print(f"\n{json.dumps(result)}")
