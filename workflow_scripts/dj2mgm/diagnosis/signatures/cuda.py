"""Failures of cuBLAS, CUDA versions and NCCL, of DeepSpeed's configuration and of its compiled extensions."""

import re

from dj2mgm.diagnosis.signature import Evidence, Explanation, Signature, fixed_explanation

# cuBLAS, mismatched CUDA versions, NCCL.

DOCTOR = "python workflow_scripts/doctor.py"


def explain_mismatch(evidence: Evidence) -> Explanation:
    toolkit, torch = re.findall(r"\d+\.\d+", evidence.match[0])[:2]
    return Explanation(
        f"the first CUDA toolkit on the path (nvcc {toolkit}) differs from torch's CUDA version ({torch}), "
        "so DeepSpeed cannot compile for it",
        "use the pinned environment (`--sdm conda` provides nvcc 12.4 and a matching torch), or install the CUDA "
        f"{torch} toolkit and let `{DOCTOR} --fix` set CUDA_HOME",
    )


CUDA_SIGNATURES = (
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
        fixed_explanation(
            "a matrix multiplication on the GPU failed ({call}). Either an earlier kernel failed (GPU errors are "
            "reported late), or the loaded cuBLAS is not the one that torch was built with, or the GPU is faulty",
            f"run `{DOCTOR}`, which only multiplies two matrices. If that fails too, `unset LD_LIBRARY_PATH`, so that "
            "torch loads its own cuBLAS, and search for Xid errors with `sudo dmesg | grep -i xid`. If it passes, run "
            "the stage's command again with CUDA_LAUNCH_BLOCKING=1, which stops at the failing kernel",
        ),
    ),
    Signature(
        "NCCL time-out",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, OpType=(?P<operation>\w+)"
        r".*?Timeout\(ms\)=(?P<limit>\d+)",
        fixed_explanation(
            "the processes of this job waited {limit} ms for each other in {operation}; one of them had stopped, hung "
            "or was in another step",
            "look for an error of another rank above this line, which is the first error. If there is none, run again "
            "with NCCL_DEBUG=INFO. If the GPUs cannot reach each other directly, set NCCL_P2P_DISABLE=1",
        ),
        symptom=True,
    ),
)


# DeepSpeed's configuration, and the extensions that it compiles at their first use.

COMPILER_ERROR = re.compile(r"^.*(?:\berror: |cannot find -l|undefined reference|Killed signal|No space left).*$", re.M)
REMEDIES = (  # by the compiler's message
    (r"Python\.h", "install Python's headers (Debian: `apt-get install python3.11-dev`)"),
    (
        r"cannot find -lcu|cuda\w*\.h|curand",
        f"install the CUDA toolkit that torch was built with; `{DOCTOR} --fix` finds it",
    ),
    (r"unsupported GNU version", "use a host compiler that this nvcc supports (CUDA 12.4: up to GCC 13)"),
    (r"Killed signal", "compiling in parallel took too much memory; set MAX_JOBS=1"),
    (r"No space left", "free space on the disk of ~/.cache/torch_extensions and /tmp"),
)


def explain_build(evidence: Evidence) -> Explanation:
    """Explain a failed build by the compiler's first error, which torch's own message does not repeat."""
    start = max(evidence.before.rfind("Building extension module cpu_adam"), 0)
    error = COMPILER_ERROR.search(evidence.log.text, start)
    message = f": {error[0].strip()}" if error else ""
    remedies = [remedy for pattern, remedy in REMEDIES if re.search(pattern, message)]
    return Explanation(
        f"DeepSpeed's CPU optimizer (cpu_adam), which offloading uses, could not be compiled{message}",
        f"{(remedies or ['fix the compiler error'])[0]}; then run `{DOCTOR}`, which only compiles this extension",
    )


DEEPSPEED_SIGNATURES = (
    Signature(
        "stage3_prefetch_bucket_size is not an integer",
        r"stage3_prefetch_bucket_size\s*\n.*Input should be a valid integer, got a number with a fractional part"
        r".*input_value=(?P<value>[\d.]+)",
        fixed_explanation(
            "the DeepSpeed configuration sets stage3_prefetch_bucket_size to {value}, which is not an integer: "
            "transformers replaces `auto` by 0.9 · hidden_size², and DeepSpeed accepts integers only",
            "write an integer into the config/deepspeed file; this workflow's own stages round the value of `auto`",
        ),
    ),
    Signature(
        "cpu_adam could not be built",
        r"FAILED: (?:\[code=\d+\] )?cpu_adam|Error building extension 'cpu_adam'|Unable to JIT load the cpu_adam op"
        r"|cpu_adam\.so: cannot open shared object file",
        explain_build,
    ),
    Signature(
        "DeepSpeedCPUAdam has no attribute ds_opt_adam",
        r"'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",
        fixed_explanation(
            "DeepSpeed's CPU optimizer could not be loaded; this message comes from its clean-up, and the log does not "
            "contain the reason",
            f"run `{DOCTOR}`, which only loads this extension and shows the compiler's or CUDA's own message",
        ),
        symptom=True,
    ),
    Signature(
        "Waiting on a stale build lock",
        r"file_baton\.py\", line \d+, in wait|Waited on lock file \"(?P<lock>[^\"]+)\"",
        fixed_explanation(
            "the process waited for another one to finish compiling an extension. A process that was killed while "
            "compiling leaves its lock behind, and all others then wait forever",
            "if nothing is compiling, delete the `lock` files below ~/.cache/torch_extensions (or "
            f"TORCH_EXTENSIONS_DIR); `{DOCTOR}` lists the stale ones",
        ),
    ),
)

SIGNATURES = CUDA_SIGNATURES + DEEPSPEED_SIGNATURES
