"""Preparation of a model for training: whole layers under ZeRO-3, attention kernels, compiled layers."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product

import torch
from deepspeed.runtime.zero import register_external_parameter
from deepspeed.runtime.zero.utils import is_zero_param
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.utils import is_flash_attn_2_available

from dj2mgm.cli.messages import note
from dj2mgm.errors import InputError
from dj2mgm.models.mgm.modeling_mgm import get_position_selection
from dj2mgm.models.vision_language import ModelParts
from dj2mgm.models.vlm.packed_images import is_packed
from dj2mgm.settings.training_stages import FLASH_ATTENTION
from dj2mgm.training.settings import TrainingSettings


def gather_whole_layers(model: nn.Module, parts: ModelParts) -> None:
    """Let ZeRO-3 gather and release whole layers.

    Its hooks around each of the hundreds of modules in the layers would take longer than the GPU computes.
    """
    set_z3_leaf_modules(model, list({type(layer) for layer in (*parts.towers, *parts.decoder)}))
    # These modules cannot be leaves. The gradients of a leaf count as complete when the gradients of its inputs are
    # complete, and the inputs of these modules may have no gradients.
    for module in parts.externally_read:
        for parameter in module.parameters():
            if is_zero_param(parameter):
                register_external_parameter(module, parameter)


def choose_attention(settings: TrainingSettings) -> tuple[str, str | None]:
    """Return transformers' name of the language model's attention implementation, and a note about it, or None.

    `auto` is FlashAttention 2 if it can run: on a GPU, in bf16, with flash-attn installed. Otherwise it is PyTorch's
    own attention, whose kernels are as fast on the newest GPUs.
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
    return "sdpa", "flash-attn is not installed; PyTorch's scaled_dot_product_attention is used"


def disable_cudnn_attention() -> None:
    """Disable cuDNN's attention, which takes seconds of planning at each new shape, and more time of the host.

    PyTorch prefers it on data-center GPUs only.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def plan_convolutions(
    convolutions: Sequence[tuple[nn.Conv2d, int]],
    numbers_of_images: Iterable[int],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Run depthwise convolutions, given with the side of their inputs, once for each number of images.

    cuDNN compiles them for 150 ms at each new number of images. Otherwise it would do so within the first steps, where
    every other process waits.
    """
    for images, (convolution, side) in product(numbers_of_images, convolutions):
        channels, options = convolution.in_channels, {"device": device, "dtype": dtype}
        features = torch.empty(images, channels, side, side, memory_format=torch.channels_last, **options)
        weight = torch.empty(channels, 1, *convolution.kernel_size, **options)
        bias = torch.empty(channels, **options)
        functional.conv2d(features, weight, bias, padding=convolution.padding, groups=channels)


# torch.compile compiles layer by layer. Layers of one shape share their compiled code, and DeepSpeed's hooks around a
# layer stay outside: only the layer's own `forward` is compiled, once for each shape.


def compile_layers(parts: ModelParts) -> None:
    """Compile, in place, the layers of towers and decoder, `compiled_tower_modules`, and the loss."""
    # the default limit is too low: ConvNeXt's blocks have four widths, and a batch may have a single sample
    torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
    towers = [layer for layer in parts.towers if is_packed(layer) or not has_boundary_argument(layer)]
    if len(towers) < len(parts.towers):
        note("the tower's layers are not compiled: their code depends on the size of each image")
    for layer in (*towers, *parts.compiled_tower_modules):
        layer.forward = _compile_forward(layer, dimensions=1)
    for layer in parts.decoder:
        layer.forward = _compile_forward(layer, dimensions=2)
    loss_and_gradient = torch.compile(parts.head.loss_and_gradient)
    # the targets are copied, because code compiled for a slice depends on its offset
    parts.head.loss_and_gradient = lambda logits, targets: loss_and_gradient(
        *(_mark_dynamic(tensor, logits.shape[:1]) for tensor in (logits, targets.clone()))
    )


def has_boundary_argument(layer: nn.Module) -> bool:
    """Return whether a tower's layer takes the patches of all images as one sequence."""
    return "cu_seqlens" in inspect.signature(layer.forward).parameters


def _mark_dynamic(value: object, sizes: Sequence[int]) -> object:
    """Mark dimensions of these sizes as dynamic, all others as static.

    PyTorch then compiles once for any size. Otherwise it would compile for the first size, and again for a second one.
    """
    if isinstance(value, tuple):
        return tuple(_mark_dynamic(item, sizes) for item in value)
    if isinstance(value, torch.Tensor):
        for dimension, size in enumerate(value.shape):
            mark = torch._dynamo.maybe_mark_dynamic if size in sizes else torch._dynamo.mark_static
            mark(value, dimension)
    return value


def _compile_forward(layer: nn.Module, dimensions: int) -> Callable:
    """Return the layer's compiled forward, inside reentrant activation checkpointing.

    transformers wraps checkpointing around a layer's forward (`GradientCheckpointingLayer`). If both are compiled,
    batches of several widths fail with "Node add_431 was invalid, but is output" (PyTorch 2.11). Non-reentrant
    checkpointing needs the same compiled code in both passes, but autograd's thread may select other code. The first
    `dimensions` dimensions of the layer's input differ from batch to batch.

    Reentrant checkpointing sees only positional arguments. A layer that also takes tensors with gradients by keyword,
    or an object in which layers share keys and values, is checkpointed without compilation.
    """
    forward, threads, packed = type(layer).forward, torch.get_num_threads(), is_packed(layer)
    uncompiled = getattr(forward, "__wrapped__", forward).__get__(layer)
    compiled = torch.compile(uncompiled)

    def run_compiled(*args, **kwargs) -> torch.Tensor:
        # Compiled code is valid for one number of threads. The thread that pins batches sets another number, which
        # later threads, such as autograd's, inherit.
        torch.set_num_threads(threads)
        for tensor in get_position_selection(layer):
            _mark_dynamic(tensor, tensor.shape)
        sizes = [*args[0].shape[:dimensions], *kwargs["cu_seqlens"].shape] if packed else args[0].shape[:dimensions]
        keywords = {name: _mark_dynamic(value, sizes) for name, value in kwargs.items()}
        return compiled(*_mark_dynamic(args, sizes), **keywords)

    def run_layer(*args, **kwargs) -> torch.Tensor:
        if not (layer.training and getattr(layer, "gradient_checkpointing", False) and args[0].requires_grad):
            return run_compiled(*args, **kwargs)
        if any(map(_may_carry_gradients, kwargs.values())):
            return checkpoint(partial(uncompiled, **kwargs), *args, use_reentrant=False)
        return checkpoint(partial(run_compiled, **kwargs), *args, use_reentrant=True)

    return run_layer


def _may_carry_gradients(value: object) -> bool:
    """Return whether gradients may flow through an argument: a tensor, or an object in which layers keep tensors."""
    if isinstance(value, tuple | list):
        return any(map(_may_carry_gradients, value))
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return not (value is None or isinstance(value, bool | int | float | str))
