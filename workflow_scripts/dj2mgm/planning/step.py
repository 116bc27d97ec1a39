"""Memory of one micro batch over time, without weights and optimizer, traced with the real model on the meta device.

The model's own code runs forward and backward with its real shapes. Stand-ins replace kernels that need a GPU
(planning/live_memory.py).
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from dj2mgm.models.tuning import Tuning, list_frozen_layers, select_trained_parameters
from dj2mgm.models.vision_language import cast_images
from dj2mgm.planning.architecture import Architecture, MicroBatch
from dj2mgm.planning.live_memory import LiveMemory
from dj2mgm.planning.meta_kernels import ATTENTION, fuse_layers, register_attention, selective_scan_without_loop
from dj2mgm.planning.replay import replay_chunks, replay_layers
from dj2mgm.settings.training_stages import MAX_WORKERS, LoraSettings, can_use_nf4

MEMORY_KINDS = ("activations", "logits", "gradients")


@dataclass(frozen=True, eq=False)
class Workload:
    """Model, trained parameters and samples of a training stage."""

    architecture: Architecture
    tuning: Tuning
    sequence_length: int  # tokens of a sample, including the tokens of its image
    answer_tokens: int  # tokens of a sample that carry loss
    precision: torch.dtype = torch.bfloat16  # of the weights
    # whether layers and loss are compiled, so that elementwise operations keep no intermediate tensors
    fused: bool = False
    lora: LoraSettings | None = None  # settings of the tuning `lora`
    # images in `sequence_length` tokens; above 1 if several short samples fill this length
    images_per_sample: float = 1.0
    projector: bool = True  # whether LoRA also trains the projector between towers and language model
    nf4: bool = False  # whether frozen layers of the language model are in 4 bits
    loader_workers: int = MAX_WORKERS  # processes of a GPU that decode images

    def batch(self, samples: int) -> MicroBatch:
        return MicroBatch(samples, self.sequence_length, self.answer_tokens, self.images_per_sample)


@dataclass(frozen=True)
class Parameters:
    """Numbers of elements of every parameter, and of every trained parameter."""

    all_sizes: tuple[int, ...]
    trained_sizes: tuple[int, ...]
    tied: int = 0  # elements of a head that is tied to the word embeddings; they exist twice while the model is created
    in_4_bits: tuple[int, ...] = ()  # elements of each frozen layer that is held in 4 bits


@dataclass(frozen=True)
class MemoryTrace:
    """Memory and FLOPs of one micro batch: forward pass, recomputed activations and backward pass."""

    sizes: np.ndarray  # (moments, MEMORY_KINDS) live bytes by kind
    flops: int  # floating-point operations
    accumulated: np.ndarray  # (moments,) elements of trained parameters whose gradient is complete
    latest: np.ndarray  # (moments,) elements of the parameter whose gradient is completed at this moment


def build_meta_model(workload: Workload) -> nn.Module:
    """Return the model on the meta device; exactly the trained parameters require gradients."""
    model = workload.architecture.build(workload.precision)
    if not workload.architecture.image_tokens:  # a text model trains all its parameters
        return model
    decoder = workload.architecture.get_language_model(model).layers
    with torch.device("meta"):
        model = select_trained_parameters(model, decoder, workload.tuning, workload.lora, workload.projector)
    return model.to(workload.precision)


@lru_cache(maxsize=1)  # a search uses one workload many times, and building takes as long as tracing
def _build_traced_model(workload: Workload) -> PreTrainedModel:
    """Return the model inside PEFT's wrapper, in training mode, with stand-ins for kernels that need a GPU."""
    wrapped = build_meta_model(workload).train()
    [model] = [m for m in wrapped.modules() if isinstance(m, PreTrainedModel) and m.get_output_embeddings()]
    register_attention()
    model.set_attn_implementation(ATTENTION)
    if workload.architecture.attention != ATTENTION:
        model.set_attn_implementation({"text_config": workload.architecture.attention})
    replay_layers(model)
    if workload.fused:
        fuse_layers(workload.architecture.get_language_model(model), model.get_output_embeddings())
    return model


@lru_cache(maxsize=1)  # a search tries a micro batch with several checkpointing intervals
def _make_inputs(workload: Workload, micro_batch: int) -> dict[str, torch.Tensor]:
    return cast_images(workload.architecture.prepare_inputs(workload.batch(micro_batch), "meta"), workload.precision)


@cache
def count_parameters(workload: Workload) -> Parameters:
    model = _build_traced_model(workload)
    parameters = list(model.parameters())
    head = model.get_output_embeddings().weight
    decoder = workload.architecture.get_language_model(model).layers
    frozen_weights = [layer.weight for *_, layer in list_frozen_layers(decoder)] if workload.nf4 else []
    return Parameters(
        all_sizes=tuple(p.numel() for p in parameters),
        trained_sizes=tuple(p.numel() for p in parameters if p.requires_grad),
        tied=head.numel() if head is model.get_input_embeddings().weight else 0,
        in_4_bits=tuple(weight.numel() for weight in frozen_weights if can_use_nf4(weight.numel())),
    )


@cache
def trace_memory(workload: Workload, checkpointing_interval: int, micro_batch: int) -> MemoryTrace:
    """Run one micro batch on the meta device and record its memory.

    With `checkpointing_interval` n, the activations of every n-th layer are checkpointed; 0: none.
    """
    model = _build_traced_model(workload)
    if checkpointing_interval:
        # the random state belongs to a device, and the meta device has none
        kwargs = {"use_reentrant": False, "preserve_rng_state": False}
        model.activation_checkpointing_enable(kwargs, every_n_layers=checkpointing_interval)

    trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained_shapes = {parameter.shape for parameter in trained_parameters}
    vocabulary = (workload.architecture.vocab_size,)

    def classify(tensor: torch.Tensor) -> str:
        if tensor.shape[-1:] == vocabulary:
            return "logits"
        return "gradients" if tensor.shape in trained_shapes else "activations"

    memory = LiveMemory(MEMORY_KINDS, classify)
    memory.exclude(model.parameters())
    memory.exclude(model.buffers())

    def release_gradient(parameter: nn.Parameter) -> None:
        """Release a complete gradient. DeepSpeed moves it to a buffer that is counted with the optimizer."""
        memory.mark(parameter.numel())
        parameter.grad = None

    inputs = _make_inputs(workload, micro_batch)
    hooks = [parameter.register_post_accumulate_grad_hook(release_gradient) for parameter in trained_parameters]
    with memory, selective_scan_without_loop(), replay_chunks():
        memory.add(inputs.values())
        workload.architecture.compute(model, inputs, workload.batch(micro_batch))
    for hook in hooks:
        hook.remove()
    if checkpointing_interval:
        model.activation_checkpointing_disable()
        model.disable_input_require_grads()  # enabled with checkpointing
    latest = np.zeros(memory.count, dtype=np.int64)
    for moment, elements in memory.marks:
        latest[moment] += elements
    return MemoryTrace(memory.stack_moments(), memory.flops, latest.cumsum(), latest)
