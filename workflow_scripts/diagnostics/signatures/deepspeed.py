"""DeepSpeed's configuration, and the extensions that it compiles at first use."""

import re

from diagnostics.signature import Explanation, Found, Signature, says

DOCTOR = "python workflow_scripts/doctor.py"
COMPILER_ERROR = re.compile(r"^.*(?:\berror: |cannot find -l|undefined reference|Killed signal|No space left).*$", re.M)
REMEDIES = (  # by what the compiler said
    (r"Python\.h", "install Python's headers (Debian: `apt-get install python3.11-dev`)"),
    (
        r"cannot find -lcu|cuda\w*\.h|curand",
        f"install the CUDA toolkit that torch was built with; `{DOCTOR} --fix` finds it",
    ),
    (r"unsupported GNU version", "use a host compiler that this nvcc takes (CUDA 12.4: up to GCC 13)"),
    (r"Killed signal", "compiling in parallel took too much memory: set MAX_JOBS=1"),
    (r"No space left", "free space on the disk of ~/.cache/torch_extensions and /tmp"),
)


def explain_build(found: Found) -> Explanation:
    """The compiler's first error is the cause; torch's own message only says that there was one."""
    start = max(found.before.rfind("Building extension module cpu_adam"), 0)
    error = COMPILER_ERROR.search(found.log.text, start)
    words = f": {error[0].strip()}" if error else ""
    remedies = [remedy for pattern, remedy in REMEDIES if re.search(pattern, words)]
    return Explanation(
        f"DeepSpeed's CPU optimizer (cpu_adam), which offloading uses, could not be compiled{words}",
        f"{(remedies or ['mend what the compiler complains of'])[0]}; then run `{DOCTOR}`, which compiles it alone",
    )


SIGNATURES = (
    Signature(
        "stage3_prefetch_bucket_size is not an integer",
        r"stage3_prefetch_bucket_size\s*\n.*Input should be a valid integer, got a number with a fractional part"
        r".*input_value=(?P<value>[\d.]+)",
        says(
            "the DeepSpeed configuration gives stage3_prefetch_bucket_size the fraction {value}: transformers makes "
            "0.9 · hidden_size² of `auto`, and DeepSpeed takes whole numbers only",
            "write the number without its fraction into the config/deepspeed file; this workflow's own stages round "
            "`auto` themselves",
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
        says(
            "DeepSpeed's CPU optimizer could not be loaded; this message is only what its clean-up says "
            "afterwards, and the log does not hold the reason",
            f"run `{DOCTOR}`, which loads it alone and shows the compiler's or CUDA's own message",
        ),
        symptom=True,
    ),
    Signature(
        "Waiting on a stale build lock",
        r"file_baton\.py\", line \d+, in wait|Waited on lock file \"(?P<lock>[^\"]+)\"",
        says(
            "the process was waiting for another one to finish compiling an extension. One that was killed while it "
            "compiled leaves its lock behind, on which everybody then waits for ever",
            "if nothing is compiling, delete the `lock` files below ~/.cache/torch_extensions (or "
            f"TORCH_EXTENSIONS_DIR); `{DOCTOR}` lists those that nobody holds",
        ),
    ),
)
