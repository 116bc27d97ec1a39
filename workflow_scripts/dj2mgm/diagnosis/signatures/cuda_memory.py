"""Failures for lack of GPU memory: the request, the free memory, its other users, and the tensor."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from dj2mgm.config.training import AUTO
from dj2mgm.diagnosis.signature import Evidence, Explanation, Signature
from dj2mgm.memory.memory_csv import format_gib, parse_size

SIZE = r"[\d.]+ (?:bytes|[KMGT]iB)"
REQUEST = rf"CUDA out of memory\. Tried to allocate (?P<requested>{SIZE})(?P<rest>.*)"
NUMBERS = {
    "total": rf"total capac\w+ of ({SIZE})",
    "free": rf"of which ({SIZE}) is free",
    "own": rf"this process has ({SIZE}) memory in use",
    "allocated": rf"({SIZE}) is allocated by PyTorch",
    "unallocated": rf"({SIZE}) is reserved by PyTorch but unallocated",
}
OTHERS = rf"Process \d+ has ({SIZE}) memory in use"
MUCH = 2**30  # bytes; other processes that hold less are not mentioned

BLOCK = 2 * 2**20  # PyTorch rounds large requests up to a multiple of this
VOCABULARIES = {"Gemma's": 256000, "Qwen2.5's": 151936}
PLAIN_LENGTH = 256  # tokens; other numbers of tokens than its multiples are taken for chance
LESS = (
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
    requested, numbers = _parse_request(evidence)
    cause = f"the GPU was full: {evidence.match['requested']} were requested"
    if "total" in numbers and "free" in numbers:
        cause += f", {format_gib(numbers['free'])} of {format_gib(numbers['total'])} were free"
    if "allocated" in numbers:
        cause += f", and this process's tensors held {format_gib(numbers['allocated'])}"
    stage = read_stage(evidence)
    if tensor := name_tensor(requested, stage):
        cause += f". {evidence.match['requested']} is {tensor}"
    remedy = FEWER_ANSWERS if "greedy_search.py" in evidence.before else LESS
    others = sum(map(parse_size, re.findall(OTHERS, evidence.match["rest"])))
    if "own" in numbers and others > MUCH:
        cause += f". Other processes held {format_gib(others)} of this GPU"
        remedy = f"end them, if they are yours (`python workflow_scripts/doctor.py` lists them); otherwise {remedy}"
    if stage.micro_batch_size:
        remedy += f". Now {stage.name}.micro_batch_size is {stage.micro_batch_size}, max_length {stage.max_length}"
    return Explanation(cause, remedy)


def explain_no_room_for_cublas(evidence: Evidence) -> Explanation:
    return Explanation("the GPU was full when cuBLAS requested memory for itself", LESS)


def name_tensor(requested: int, stage: TrainingStage) -> str | None:
    """Return a description of the logits if the request has their size: tokens × vocabulary × bytes per number.

    Requests are rounded up to BLOCK, so several numbers of tokens fit; only a full batch or a multiple of PLAIN_LENGTH
    is taken as a match.
    """
    vocabularies = {"this model's": stage.vocabulary} if stage.vocabulary else VOCABULARIES
    full_batch = (stage.micro_batch_size or 0) * (stage.max_length or 0)
    for width, precision in ((2, "bf16"), (4, "fp32")):
        for model, size in vocabularies.items():
            for tokens in range((requested - BLOCK) // (size * width) + 1, requested // (size * width) + 1):
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
    if micro_batch_size == AUTO:
        chosen = _load(path.parent / "checkpoints" / "arrangement.json", json.loads).get("arrangement", {})
        micro_batch_size = chosen.get("micro_batch")
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
    return parse_size(evidence.match["requested"]), {name: parse_size(m[1]) for name, m in matches.items() if m}


SIGNATURES = (
    Signature("GPU memory is fragmented", REQUEST, explain_fragments),
    Signature("CUDA out of memory", REQUEST, explain_out_of_memory),
    Signature("cuBLAS found no GPU memory", r"CUBLAS_STATUS_ALLOC_FAILED", explain_no_room_for_cublas),
)
