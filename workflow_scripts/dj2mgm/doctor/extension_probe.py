"""Compile (if needed) and load DeepSpeed's CPU optimizer; print the seconds that it took as JSON.

python -m dj2mgm.doctor.extension_probe
"""

import json
import time


def load_cpu_adam() -> float:
    """Return the seconds that loading took."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    start = time.monotonic()
    CPUAdamBuilder().load(verbose=False)
    return time.monotonic() - start


if __name__ == "__main__":
    print(f"\n{json.dumps({'seconds': load_cpu_adam()})}")
