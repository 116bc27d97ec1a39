"""What one micro batch holds beside weights and optimizer, from moment to moment: the real model, on the meta device.

The model's own code runs, forward and backward, with its real shapes (memory/trace.py); only kernels that need
a GPU are stood in for (memory/trace.py).
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from dj2mgm.config.training import takes_nf4
from dj2mgm.memory.architecture import Architecture
from dj2mgm.memory.trace import ATTENTION, LiveMemory, fuse, scans_as_one_operation
from dj2mgm.mgm.lora import LoraSettings, wrap_with_lora
from dj2mgm.mgm.weights import projector_parameters

TUNINGS = ("stage1", "lora", "full")
KINDS = ("activations", "logits", "gradients")


@dataclass(frozen=True, eq=False)
class Workload:
    """What is trained on what.

    Args:
        tuning: stage1 (projector and mining), lora (those and LoRA matrices) or full (those and the language model).
        sequence: tokens of a sample, its image's included.
        answers: those of them that carry loss.
        images: for each such sample, in a micro batch: more than one where shorter samples take its place.
        precision: torch dtype of the weights.
        fused: whether layers and loss are compiled, so that what is elementwise keeps nothing in between.
        lora: for the tuning `lora`.
        nf4: whether frozen layers of the language model are in 4 bits.
        projector: whether LoRA also trains what connects towers and language model.
    """

    architecture: Architecture
    tuning: str
    sequence: int
    answers: int
    precision: torch.dtype = torch.bfloat16
    fused: bool = False
    lora: LoraSettings | None = None
    images: float = 1.0
    projector: bool = True
    nf4: bool = False


@dataclass(frozen=True)
class Parameters:
    """Numbers of elements: of every parameter, and of every one that is trained.

    `tied` is how many exist twice while the model is made: those of a head that is then tied to the word embeddings.
    `in_4_bits` are those of each frozen layer that is held so.
    """

    every: tuple[int, ...]
    trained: tuple[int, ...]
    tied: int = 0
    in_4_bits: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemoryTrace:
    """Of one micro batch, forward, recomputed and backward: bytes (moments, kinds), and floating-point operations.

    `accumulated` (moments,) is how many elements of trained parameters have their gradient by then, and `latest`
    (moments,) those of the one that has just got it.
    """

    sizes: np.ndarray
    flops: int
    accumulated: np.ndarray
    latest: np.ndarray


def build(workload: Workload) -> nn.Module:
    """The model on the meta device, with gradients asked of what is trained."""
    model = workload.architecture.build(workload.precision)
    model.requires_grad_(False)
    if workload.tuning == "lora":
        decoder = workload.architecture.language_model(model).layers
        with torch.device("meta"):
            wrapped = wrap_with_lora(model, workload.lora, decoder, projector=workload.projector)
        return wrapped.to(workload.precision)
    if workload.tuning == "full":
        workload.architecture.language_model(model).requires_grad_(True)
        model.get_output_embeddings().requires_grad_(True)
    for parameter in projector_parameters(model).values():
        parameter.requires_grad_(True)
    return model


@cache
def count_parameters(workload: Workload) -> Parameters:
    model = build(workload)
    parameters = list(model.parameters())
    head = model.get_output_embeddings().weight
    [whole] = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.get_output_embeddings()]
    layers = workload.architecture.language_model(whole).layers.modules() if workload.nf4 else ()
    frozen = [layer.weight for layer in layers if type(layer) is nn.Linear and not layer.weight.requires_grad]
    return Parameters(
        every=tuple(p.numel() for p in parameters),
        trained=tuple(p.numel() for p in parameters if p.requires_grad),
        tied=head.numel() if head is model.get_input_embeddings().weight else 0,
        in_4_bits=tuple(weight.numel() for weight in frozen if takes_nf4(weight.numel())),
    )


@cache
def trace_memory(workload: Workload, recomputation: int, micro_batch: int) -> MemoryTrace:
    """
    Args:
        recomputation: recompute every n-th layer; 0: none.
    """
    wrapped = build(workload).train()
    [model] = [m for m in wrapped.modules() if isinstance(m, PreTrainedModel) and m.get_output_embeddings()]
    model.set_attn_implementation(ATTENTION)
    if workload.architecture.attention != ATTENTION:
        model.set_attn_implementation({"text_config": workload.architecture.attention})
    if recomputation:
        # random state is a device's, of which there is none
        kwargs = {"use_reentrant": False, "preserve_rng_state": False}
        model.activation_checkpointing_enable(kwargs, every_n_layers=recomputation)
    if workload.fused:
        fuse(workload.architecture.language_model(model), model.get_output_embeddings())

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shapes = {parameter.shape for parameter in trained}
    words = (workload.architecture.vocab_size,)

    def kind_of(tensor: torch.Tensor) -> str:
        if tensor.shape[-1:] == words:
            return "logits"
        return "gradients" if tensor.shape in shapes else "activations"

    memory = LiveMemory(KINDS, kind_of)
    memory.know(model.parameters())
    memory.know(model.buffers())
    accumulated: list[tuple[int, int]] = []  # moment, elements

    def hand_over(parameter: nn.Parameter) -> None:
        """As DeepSpeed does: a gradient that is complete moves to a buffer that is counted with the optimizer."""
        memory.mark()
        accumulated.append((memory.count - 1, parameter.numel()))
        parameter.grad = None

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(hand_over)
    with memory, scans_as_one_operation():
        workload.architecture.compute(model, workload.sequence, workload.answers, micro_batch, workload.images)
    latest = np.zeros(memory.count, dtype=np.int64)
    for moment, elements in accumulated:
        latest[moment] += elements
    return MemoryTrace(memory.moments(), memory.flops, latest.cumsum(), latest)
