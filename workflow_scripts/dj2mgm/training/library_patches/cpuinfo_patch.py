"""Change to py-cpuinfo 9.0 (tested with 9.0.0): ask the processor once.

`get_cpu_info` starts a Python process each time. DeepSpeed calls it three times for its optimizer on the CPU
(deepspeed/ops/adam/cpu_adam.py, deepspeed/ops/op_builder/builder.py).
"""

from functools import cache

import cpuinfo


def apply() -> None:
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
