"""Compile DeepSpeed's CPU extensions for this machine's processor, which takes a minute or two once.

    python workflow_scripts/compile_extensions.py

Otherwise the first training stage compiles them.
"""

from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from dj2mgm.training.build_locks import guard_wait_for_locks, remove_stale_locks


def main() -> None:
    remove_stale_locks()
    with guard_wait_for_locks():
        CPUAdamBuilder().load(verbose=False)
        build_shm_op()


if __name__ == "__main__":
    main()
