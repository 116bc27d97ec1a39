"""Compiles DeepSpeed's CPU extensions for this machine's processor, which takes a minute or two once.

    python workflow_scripts/compile_extensions.py

They are compiled at first use anyway; done beforehand, no training stage spends its time on it.
"""

from deepspeed.comm.torch import build_shm_op
from deepspeed.ops.op_builder import CPUAdamBuilder

from training.build_locks import remove_stale_locks


def main() -> None:
    remove_stale_locks()
    CPUAdamBuilder().load(verbose=False)
    build_shm_op()


if __name__ == "__main__":
    main()
