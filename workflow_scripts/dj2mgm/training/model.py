"""A model before its first step: its layers, their attention kernels, and compiling them."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

import torch
from deepspeed.runtime.zero import register_external_parameter
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_flash_attn_2_available

from dj2mgm.config.training import FLASH_ATTENTION
from dj2mgm.errors import InputError
from dj2mgm.messages import note
from dj2mgm.mgm.modeling_mgm import get_position_selection
from dj2mgm.training.settings import TrainingSettings
from dj2mgm.vision_language import Parts
from dj2mgm.vlm.packed_images import is_packed


def gather_whole_layers(model: nn.Module, parts: Parts) -> None:
    """Let ZeRO-3 gather and release whole layers: its hooks around each of the hundreds of modules in them take longer
    than a GPU computes."""
    set_z3_leaf_modules(model, list({type(layer) for layer in (*parts.towers, *parts.decoder)}))
    # Not leaves: the gradients of a leaf count as complete once those of its inputs are, and its inputs may have none.
    for module in parts.called:
        for parameter in module.parameters():
            if is_zero_param(parameter):
                register_external_parameter(module, parameter)


# The attention kernels that the language model is trained with.


def attention_of(settings: TrainingSettings) -> tuple[str, str | None]:
    """transformers' name of the implementation, and what is to be said about the choice, if anything.

    `auto` is FlashAttention 2 where it can run: on a GPU, in bf16, with flash-attn installed. Elsewhere it is PyTorch's
    own attention, whose kernels are as fast on the newest GPUs (docs/performance.md).

    Raises:
        InputError: FlashAttention is asked for, and cannot run here.
    """
    if settings.attn_implementation == FLASH_ATTENTION and not is_flash_attn_2_available():
        missing = "a GPU" if find_spec("flash_attn") else "the package flash-attn, which is not installed"
        raise InputError(f"attn_implementation: {FLASH_ATTENTION} needs {missing}; set auto, or sdpa")
    if settings.attn_implementation != "auto":
        return settings.attn_implementation, None
    if not (torch.cuda.is_available() and settings.bf16):
        return "sdpa", None
    if is_flash_attn_2_available():
        return FLASH_ATTENTION, None
    return "sdpa", "flash-attn is not installed: attention runs by PyTorch's scaled_dot_product_attention"


def leave_out_cudnn_attention() -> None:
    """Let other kernels of PyTorch attend: cuDNN's are planned for seconds at each new shape, and keep the host longer.

    PyTorch prefers cuDNN's on data-centre GPUs only.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


# Compiles what a training step spends its time in, piece by piece, with torch.compile.
#
# Pieces, because layers of one shape share their compiled code, and because DeepSpeed's hooks around a layer stay
# outside of it: only what a layer's own `forward` computes is compiled, once for each shape it meets.


def compile_layers(parts: Parts) -> None:
    """Compile, in place, the layers of towers and decoder, what else of the towers is worth it, and the loss."""
    # ConvNeXt's blocks have four widths, and a batch may have one sample only
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    towers = [layer for layer in parts.towers if is_packed(layer) or not takes_boundaries(layer)]
    if len(towers) < len(parts.towers):
        note("the tower's layers are not compiled: their code depends on how large each image is")
    for layer in (*towers, *parts.between):
        layer.forward = _compiled(layer, dimensions=1)
    for layer in parts.decoder:
        layer.forward = _compiled(layer, dimensions=2)
    loss_and_gradient = torch.compile(parts.head.loss_and_gradient)
    # a copy of the targets: code that is compiled for a slice depends on where that begins
    parts.head.loss_and_gradient = lambda logits, targets: loss_and_gradient(
        *(_varying(tensor, logits.shape[:1]) for tensor in (logits, targets.clone()))
    )


def takes_boundaries(layer: nn.Module) -> bool:
    """Return whether a tower's layer takes the patches of all images as one sequence."""
    return "cu_seqlens" in inspect.signature(layer.forward).parameters


def _varying(value: object, sizes: Sequence[int]) -> object:
    """Say that dimensions of these sizes differ from batch to batch.

    Told so from the first on, PyTorch compiles once for any size; left to itself, it compiles for the first size, and
    again when it meets a second one.
    """
    if isinstance(value, tuple):
        return tuple(_varying(each, sizes) for each in value)
    if isinstance(value, torch.Tensor):
        for dimension, size in enumerate(value.shape):
            mark = torch._dynamo.maybe_mark_dynamic if size in sizes else torch._dynamo.mark_static
            mark(value, dimension)
    return value


def _compiled(layer: nn.Module, dimensions: int) -> Callable:
    """The layer's forward, compiled; recomputation is around it, and runs a forward pass of its own (reentrant).

    transformers wraps recomputation around a layer's forward (`GradientCheckpointingLayer`). Compiled with it, batches
    of several widths end in "Node add_431 was invalid, but is output" (PyTorch 2.11). The other kind of recomputation
    wants the same compiled code in both passes, but autograd's thread may be given another.

    Args:
        dimensions: of the layer's input that differ from batch to batch, the first ones.
    """
    forward, threads, packed = type(layer).forward, torch.get_num_threads(), is_packed(layer)
    compiled = torch.compile(getattr(forward, "__wrapped__", forward).__get__(layer))

    def marked(*args, **kwargs) -> torch.Tensor:
        # Compiled code holds for one number of threads. The thread that pins batches sets another one, which threads
        # that start later have too, such as autograd's.
        torch.set_num_threads(threads)
        for tensor in get_position_selection(layer):
            _varying(tensor, tensor.shape)
        sizes = [*args[0].shape[:dimensions], *kwargs["cu_seqlens"].shape] if packed else args[0].shape[:dimensions]
        return compiled(*_varying(args, sizes), **{name: _varying(value, sizes) for name, value in kwargs.items()})

    def recomputed_or_not(*args, **kwargs) -> torch.Tensor:
        if layer.training and getattr(layer, "gradient_checkpointing", False) and args[0].requires_grad:
            return checkpoint(partial(marked, **kwargs), *args, use_reentrant=True)
        return marked(*args, **kwargs)

    return recomputed_or_not
