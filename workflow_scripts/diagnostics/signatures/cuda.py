"""cuBLAS, mismatched CUDA versions, NCCL."""

import re

from diagnostics.signature import Explanation, Found, Signature, says

DOCTOR = "python workflow_scripts/doctor.py"


def explain_mismatch(found: Found) -> Explanation:
    toolkit, torch = re.findall(r"\d+\.\d+", found.match[0])[:2]
    return Explanation(
        f"the CUDA toolkit found first (nvcc {toolkit}) is not of the version that torch was built with ({torch}), "
        "so that DeepSpeed cannot compile for it",
        "use the pinned environment (`--sdm conda` brings nvcc 12.4 and torch built for it), or install the CUDA "
        f"{torch} toolkit and let `{DOCTOR} --fix` point CUDA_HOME to it",
    )


SIGNATURES = (
    Signature(
        "CUDA toolkit and torch do not match",
        r"Installed CUDA version [\d.]+ does not match the\s+version torch was compiled with [\d.]+, unable to compile"
        r"|The detected CUDA version \([\d.]+\) mismatches the version that was used to compile\s*PyTorch \([\d.]+\)"
        r"|The detected CUDA version \(%s\) mismatches .*'[\d.]+', '[\d.]+'\)",
        explain_mismatch,
    ),
    Signature(
        "CUBLAS_STATUS_EXECUTION_FAILED",
        r"CUBLAS_STATUS_EXECUTION_FAILED(?: when calling `(?P<call>\w+))?",
        says(
            "the GPU could not run a matrix multiplication ({call}). Either an earlier kernel failed (GPU errors "
            "are reported late), or the cuBLAS that was loaded is not the one that torch was built with, or the "
            "GPU itself fails",
            f"run `{DOCTOR}`, which multiplies two matrices alone. If that fails too: `unset LD_LIBRARY_PATH`, so "
            "that torch loads its own cuBLAS, and look for Xid errors with `sudo dmesg | grep -i xid`. If it "
            "passes: run the stage's command again with CUDA_LAUNCH_BLOCKING=1, which stops at the kernel that "
            "failed",
        ),
    ),
    Signature(
        "NCCL time-out",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, OpType=(?P<operation>\w+)"
        r".*?Timeout\(ms\)=(?P<limit>\d+)",
        says(
            "the processes of this job waited {limit} ms for each other in {operation}: one of them had stopped, "
            "hung or was in another step",
            "look for an error of another rank above this line: that is the first one. If there is none, run again "
            "with NCCL_DEBUG=INFO; where the GPUs cannot reach each other directly, NCCL_P2P_DISABLE=1 helps",
        ),
        symptom=True,
    ),
)
