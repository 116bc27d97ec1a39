"""Failures of GPUs: memory, cuBLAS, CUDA versions, NCCL, DeepSpeed's configuration and its compiled extensions."""

import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import yaml

from dj2mgm.health.failure_signature import Evidence, Explanation, Signature
from dj2mgm.monitoring.memory_files import format_gib, parse_torch_size

SIZE_PATTERN = r"[\d.]+ (?:bytes|[KMGT]iB)"
REQUEST_PATTERN = rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate (?P<requested>{SIZE_PATTERN})(?P<rest>.*)"
NUMBERS = {
    "total": rf"total capac\w+ of ({SIZE_PATTERN})",
    "free": rf"of which ({SIZE_PATTERN}) is free",
    "own": rf"this process has ({SIZE_PATTERN}) memory in use",
    "allocated": rf"({SIZE_PATTERN}) is allocated by PyTorch",
    "unallocated": rf"({SIZE_PATTERN}) is reserved by PyTorch but unallocated",
}
OTHER_PROCESS = rf"Process \d+ has ({SIZE_PATTERN}) memory in use"
MIN_SHOWN_BYTES = 2**30  # bytes; other processes that hold less are not mentioned

ALLOCATION_BYTES = 2 * 2**20  # PyTorch rounds large requests up to a multiple of this
VOCABULARY_SIZES = {"Gemma's": 256000, "Qwen2.5's": 151936}
PLAIN_LENGTH = 256  # only multiples of this number of tokens count as a match
LESS_ON_THE_GPU = (
    "halve micro_batch_size and double gradient_accumulation_steps (the global batch size stays), lower max_length, "
    "set activation_checkpointing: true, or deepspeed: zero3_offload"
)

FEWER_ANSWERS = "set evaluate.batch_size to a number, such as 16; auto batches up to 256 questions"


@dataclass(frozen=True)
class TrainingStage:
    """Settings of the stage that wrote the log, read from the files next to the log and the command in it."""

    name: str
    micro_batch_size: int | None = None
    max_length: int | None = None
    vocabulary: int | None = None


def explain_fragments(evidence: Evidence) -> Explanation | None:
    requested, numbers = _parse_request(evidence)
    if numbers.get("unallocated", 0) < requested:
        return None
    return Explanation(
        f"the GPU's memory is fragmented: {evidence.match['requested']} were requested as one block, and PyTorch had "
        f"{format_gib(numbers['unallocated'])} reserved but unused in smaller blocks",
        "`export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` (`python workflow_scripts/doctor.py --fix` writes "
        "it to a file), then run the same command again",
    )


def explain_out_of_memory(evidence: Evidence) -> Explanation:
    """State who held the GPU's memory, and which tensor was requested."""
    requested, numbers = _parse_request(evidence)
    cause = f"the GPU was full: {evidence.match['requested']} were requested"
    if "total" in numbers and "free" in numbers:
        cause += f", {format_gib(numbers['free'])} of {format_gib(numbers['total'])} were free"
    if "allocated" in numbers:
        cause += f", and this process's tensors held {format_gib(numbers['allocated'])}"
    stage = read_stage(evidence)
    if tensor := name_tensor(requested, stage):
        cause += f". {evidence.match['requested']} is {tensor}"
    remedy = FEWER_ANSWERS if "greedy_search.py" in evidence.before else LESS_ON_THE_GPU
    others = sum(map(parse_torch_size, re.findall(OTHER_PROCESS, evidence.match["rest"])))
    if "own" in numbers and others > MIN_SHOWN_BYTES:
        cause += f". Other processes held {format_gib(others)} of this GPU"
        remedy = f"end them, if they are yours (`python workflow_scripts/doctor.py` lists them); otherwise {remedy}"
    if stage.micro_batch_size:
        remedy += f". Now {stage.name}.micro_batch_size is {stage.micro_batch_size}, max_length {stage.max_length}"
    return Explanation(cause, remedy)


def explain_no_room_for_cublas(evidence: Evidence) -> Explanation:
    return Explanation("the GPU was full when cuBLAS requested memory for itself", LESS_ON_THE_GPU)


def name_tensor(requested: int, stage: TrainingStage) -> str | None:
    """Return a description of the logits if the request has their size: tokens × vocabulary × bytes per number.

    Requests are rounded up to ALLOCATION_BYTES, so several numbers of tokens fit; only a full batch or a multiple
    of PLAIN_LENGTH is taken as a match.
    """
    vocabularies = {"this model's": stage.vocabulary} if stage.vocabulary else VOCABULARY_SIZES
    full_batch = (stage.micro_batch_size or 0) * (stage.max_length or 0)
    for width, precision in ((2, "bf16"), (4, "fp32")):
        for model, size in vocabularies.items():
            for tokens in range((requested - ALLOCATION_BYTES) // (size * width) + 1, requested // (size * width) + 1):
                if tokens > 0 and (tokens == full_batch or tokens % PLAIN_LENGTH == 0):
                    factors = f"{tokens} × {size} ({model} vocabulary) × {width} bytes ({precision})"
                    return f"the size of the logits of {tokens} tokens: {factors}"
    return None


def read_stage(evidence: Evidence) -> TrainingStage:
    """Read config.yaml next to the log, and config.json of the model named by the command in the log."""
    path, vocabulary = evidence.log.path, None
    if model := re.search(r"--model['\",\s=]+(?P<folder>[^'\",\s]+)", evidence.log.text):
        config = _load(Path(model["folder"]) / "config.json", json.loads)
        vocabulary = config.get("text_config", config).get("vocab_size")
    settings = _load(path.parent / "config.yaml", yaml.safe_load)
    micro_batch_size = settings.get("micro_batch_size")
    if micro_batch_size == "auto":
        plan = _load(path.parent / "checkpoints" / "training_plan.json", json.loads).get("plan", {})
        micro_batch_size = plan.get("micro_batch")
    return TrainingStage(path.parent.name, micro_batch_size, settings.get("max_length"), vocabulary)


def _load(path: Path, parse) -> dict:
    """Return the file's values, or {} if it cannot be read, because a diagnosis must not fail itself."""
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _parse_request(evidence: Evidence) -> tuple[int, dict[str, int]]:
    """Return the requested bytes and the other numbers of PyTorch's message."""
    matches = {name: re.search(pattern, evidence.match["rest"]) for name, pattern in NUMBERS.items()}
    return parse_torch_size(evidence.match["requested"]), {
        name: parse_torch_size(match[1]) for name, match in matches.items() if match
    }


# cuBLAS, mismatched CUDA versions, NCCL.

DOCTOR_COMMAND = "python workflow_scripts/doctor.py"


def explain_mismatch(evidence: Evidence) -> Explanation:
    toolkit, torch = re.findall(r"\d+\.\d+", evidence.match[0])[:2]
    return Explanation(
        f"the first CUDA toolkit on the path (nvcc {toolkit}) differs from torch's CUDA version ({torch}), "
        "so DeepSpeed cannot compile for it",
        "use the pinned environment (`--sdm conda` provides nvcc 12.4 and a matching torch), or install the CUDA "
        f"{torch} toolkit and let `{DOCTOR_COMMAND} --fix` set CUDA_HOME",
    )


def explain_port(evidence: Evidence) -> Explanation | None:
    """Name the port, and say whether it is still taken; None if the program took another port."""
    line = evidence.line
    if re.search(r"\b(?:trying|retry)", line, re.I):
        return None
    number = re.search(r"port: ?(\d+)|:(\d{4,5})\b", line)
    port = int(number[1] or number[2]) if number else None
    if port and _is_free(port):
        return Explanation(
            f"another process held the port {port}, at which the processes of a training meet. It is free now",
            "run the same command again",
        )
    name = f"the port {port}" if port else "the port"
    return Explanation(
        f"another process, such as the rest of a killed training, holds {name}, at which the processes of a training "
        "meet",
        f"end it (`ss -ltnp | grep {port or 'LISTEN'}` shows its number), then run the same command again. A script "
        "that is started by hand takes another port with MASTER_PORT=<number>",
    )


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


# DeepSpeed's configuration, and the extensions that it compiles at their first use.

COMPILER_ERROR = re.compile(r"^.*(?:\berror: |cannot find -l|undefined reference|Killed signal|No space left).*$", re.M)
REMEDIES = (  # by the compiler's message
    (r"Python\.h", "install Python's headers (Debian: `apt-get install python3-dev`)"),
    (
        r"cannot find -lcu|cuda\w*\.h|curand",
        f"install the CUDA toolkit that torch was built with; `{DOCTOR_COMMAND} --fix` finds it",
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
        f"{(remedies or ['fix the compiler error'])[0]}; then run `{DOCTOR_COMMAND}`, which only compiles this "
        "extension",
    )


GPU_SIGNATURES = (
    Signature("GPU memory is fragmented", REQUEST_PATTERN, explain_fragments),
    Signature("CUDA out of memory", REQUEST_PATTERN, explain_out_of_memory),
    Signature("cuBLAS found no GPU memory", r"CUBLAS_STATUS_ALLOC_FAILED", explain_no_room_for_cublas),
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
        "a matrix multiplication on the GPU failed ({call}). Either an earlier kernel failed (GPU errors are "
        "reported late), or the loaded cuBLAS is not the one that torch was built with, or the GPU is faulty",
        f"run `{DOCTOR_COMMAND}`, which only multiplies two matrices. If that fails too, `unset "
        "LD_LIBRARY_PATH`, so that torch loads its own cuBLAS, and search for Xid errors with "
        "`sudo dmesg | grep -i xid`. If it passes, run "
        "the stage's command again with CUDA_LAUNCH_BLOCKING=1, which stops at the failing kernel",
    ),
    Signature(
        "CUDA: illegal memory access",
        r"an illegal memory access was encountered|CUDA error: (?:misaligned address|unspecified launch failure)",
        "a kernel on the GPU used memory that is not its own. GPU errors are reported late, so the lines of "
        "the traceback may be unrelated",
        "run the stage's command again with CUDA_LAUNCH_BLOCKING=1, which stops at the kernel. Set compile: "
        "false and attn_implementation: sdpa to rule out compiled kernels. If it fails elsewhere each time, the "
        f"GPU may be faulty: `sudo dmesg | grep -i xid`, and `{DOCTOR_COMMAND}`",
    ),
    Signature(
        "CUDA: an index is out of range",
        r"CUDA error: device-side assert triggered|Assertion `.*(?:srcIndex|index|idx|target|t) .*` failed",
        "a kernel on the GPU received an index that is too large, usually the number of a token that the model's "
        "vocabulary does not have",
        "use the tokenizer that belongs to the model; CUDA_LAUNCH_BLOCKING=1 names the line",
    ),
    Signature(
        "The GPU is faulty",
        r"(?:CUDA error: |an )uncorrectable (?:ECC|NVLink) error|GPU has fallen off the bus|GPU is lost"
        r"|NVRM: Xid .*: (?:48|63|64|74|79|94|95|119|120),|CUDA error: (?:hardware|an ECC) .*",
        "the GPU or its connection reported a fault of the hardware",
        "`nvidia-smi -q | grep -iA 3 ecc` and `sudo dmesg | grep -i xid` show it. Restart the machine, or use "
        "another GPU (CUDA_VISIBLE_DEVICES); if the fault returns, the GPU has to be replaced",
    ),
    Signature(
        "The driver is older than torch's CUDA",
        r"The NVIDIA driver on your system is too old(?: \(found version (?P<version>\d+)\))?"
        r"|CUDA driver version is insufficient for CUDA runtime version",
        "the GPU's driver does not support the CUDA version that torch was built with",
        "install a newer driver (CUDA 12.4 needs 550 or newer), or a torch for an older CUDA: `--sdm conda` uses "
        "the pinned environment. `nvidia-smi` shows the driver and the newest CUDA that it supports",
    ),
    Signature(
        "A package was built for another torch",
        r"(?:ImportError|OSError): (?P<file>\S+\.so)\S*: undefined symbol: \S+",
        "{file} was compiled for another version of torch or CUDA than the installed one",
        "build the package again for this torch (flash-attn: `pip install --no-build-isolation --force-reinstall "
        "--no-deps flash-attn==2.8.3.post2`), use the pinned environment (`--sdm conda`), or uninstall the "
        "package; attn_implementation: sdpa needs no flash-attn",
    ),
    Signature(
        "Another training holds the port",
        r"EADDRINUSE.*|(?i:address) already in use.*|\[Errno 98\].*",
        explain_port,
    ),
    Signature(
        "Crash in a library",
        r"Fatal Python error: (?:Segmentation fault|Bus error|Illegal instruction|Floating-point exception|Aborted)"
        r"|Segmentation fault \(core dumped\)|is killed by signal: Segmentation fault"
        r"|(?:^exit status |exits with return code = |\bexitcode *: )(?:-11|-4|-8|139|132|136)\b|Signal 11 \(SIGSEGV\)",
        "compiled code of a library crashed, which Python cannot report as an error",
        f"run the same command again; `{DOCTOR_COMMAND}` checks that the packages fit each other and this "
        "processor. If it crashes again, `PYTHONFAULTHANDLER=1` shows the library's line, and the pinned "
        "environment (`--sdm conda`) rules out other versions",
        symptom=True,
    ),
    Signature(
        "NCCL time-out",
        r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, OpType=(?P<operation>\w+)"
        r".*?Timeout\(ms\)=(?P<limit>\d+)",
        "the processes of this job waited {limit} ms for each other in {operation}; one of them had stopped, hung "
        "or was in another step",
        "look for an error of another rank above this line, which is the first error. If there is none, run again "
        "with NCCL_DEBUG=INFO. If the GPUs cannot reach each other directly, set NCCL_P2P_DISABLE=1",
        symptom=True,
    ),
    Signature(
        "stage3_prefetch_bucket_size is not an integer",
        r"stage3_prefetch_bucket_size\s*\n.*Input should be a valid integer, got a number with a fractional part"
        r".*input_value=(?P<value>[\d.]+)",
        "the DeepSpeed configuration sets stage3_prefetch_bucket_size to {value}, which is not an integer: "
        "transformers replaces `auto` by 0.9 · hidden_size², and DeepSpeed accepts integers only",
        "write an integer into the config/deepspeed file; this workflow's own stages round the value of `auto`",
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
        "DeepSpeed's CPU optimizer could not be loaded; this message comes from its clean-up, and the log does not "
        "contain the reason",
        f"run `{DOCTOR_COMMAND}`, which only loads this extension and shows the compiler's or CUDA's own message",
        symptom=True,
    ),
    Signature(
        "Waiting on a stale build lock",
        r"file_baton\.py\", line \d+, in wait|Waited on lock file \"(?P<lock>[^\"]+)\"",
        "the process waited for another one to finish compiling an extension. A process that was killed while "
        "compiling leaves its lock behind, and all others then wait forever",
        "if nothing is compiling, delete the `lock` files below ~/.cache/torch_extensions (or "
        f"TORCH_EXTENSIONS_DIR); `{DOCTOR_COMMAND}` lists the stale ones",
    ),
)
