"""Sizes of a training: samples of a step and its micro batches, and steps for a number of rows."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dj2mgm.errors import InputError, pluralize

FACTORS = ("micro_batch_size", "gradient_accumulation_steps", "gpus")  # their product is global_batch_size
AUTO = "auto"  # the memory plan decides
HARMLESS_PASSES = 4  # over the same rows, which teach a language model nearly as much as new rows (arXiv:2305.16264)


def solve_batch(location: str, settings: Mapping, alternative: str = "") -> dict[str, int | str]:
    """Return `global_batch_size`, in samples per step, and its three factors, with the null one computed.

    If the micro batch is "auto" and the accumulation is "auto" or null, both are "auto": the memory plan chooses them.

    Args:
        location: beginning of the message.
        settings: values with the four keys.
        alternative: another remedy for sizes whose product is wrong, as in "set a: 1".

    Raises:
        InputError: more than one is null, or the product is wrong; the message names sizes that are possible.
    """
    sizes = {key: settings[key] for key in ("global_batch_size", *FACTORS)}
    planned_sizes = {"micro_batch_size": AUTO, "gradient_accumulation_steps": AUTO}
    if sizes["micro_batch_size"] == AUTO and sizes["gradient_accumulation_steps"] in (AUTO, None):
        if sizes["global_batch_size"] is None:
            raise InputError(f"{location}: global_batch_size is null while micro_batch_size is auto; set one of them")
        return (
            solve_batch(location, sizes | {"micro_batch_size": 1, "gradient_accumulation_steps": None}) | planned_sizes
        )
    sizes = {key: None if size == AUTO else size for key, size in sizes.items()}
    open_keys = [key for key, size in sizes.items() if size is None]
    if len(open_keys) > 1:
        raise InputError(f"{location}: {' and '.join(open_keys)} are null; set all but one")
    if open_keys == ["global_batch_size"]:
        return sizes | {"global_batch_size": _multiply(sizes, FACTORS)}
    [key] = open_keys or ["gradient_accumulation_steps"]
    other_factors = [factor for factor in FACTORS if factor != key]
    unit, batch_size = _multiply(sizes, other_factors), sizes["global_batch_size"]
    solved_sizes = sizes | {key: batch_size // unit}
    if batch_size % unit == 0 and (open_keys or solved_sizes == sizes):
        return solved_sizes
    if batch_size % unit == 0:
        remedy = f"set {key}: {solved_sizes[key]}"
    elif not open_keys:
        remedy = f"set global_batch_size: {_multiply(sizes, FACTORS)}" + (f", or {alternative}" if alternative else "")
    else:
        nearest = sorted({max(1, batch_size // unit) * unit, (batch_size // unit + 1) * unit})
        factors = " × ".join(f"{factor} {sizes[factor]}" for factor in other_factors)
        remedy = f"with {factors}, choose a global_batch_size of {' or '.join(map(str, nearest))}"
    factor_values = " × ".join(f"{factor} {'?' if sizes[factor] is None else sizes[factor]}" for factor in FACTORS)
    product = "" if open_keys else f" = {_multiply(sizes, FACTORS)}"
    raise InputError(f"{location}: global_batch_size {batch_size} is not {factor_values}{product}; {remedy}")


def count_micro_batches(global_batch: int, micro_batch: int, gpus: int) -> int:
    """Return the micro batches of one GPU in a step; the last one may have fewer samples, as in 128 = 48 + 48 + 32."""
    return math.ceil(global_batch / (micro_batch * gpus))


def solve_training_batch(location: str, settings: Mapping) -> dict[str, int | str]:
    """Return sizes as `solve_batch` does, and accept those of a training plan (`count_micro_batches`)."""
    sizes = {key: settings[key] for key in ("global_batch_size", *FACTORS)}
    batch_size, micro, accumulation, gpus = sizes.values()
    alternative = ""
    if isinstance(micro, int) and batch_size and batch_size % gpus == 0 and micro <= batch_size // gpus:
        needed_batches = count_micro_batches(batch_size, micro, gpus)
        if accumulation in (AUTO, needed_batches):
            return sizes | {"gradient_accumulation_steps": needed_batches}
        alternative = f"set gradient_accumulation_steps: {AUTO}"
    return solve_batch(location, settings, alternative)


def count_steps(settings: Any, rows: int) -> int:
    """Return the optimizer steps that `max_steps` or `epochs` of a training stage give for a number of rows."""
    batch = settings.global_batch_size or solve_batch("config.yaml", vars(settings))["global_batch_size"]
    return settings.max_steps or math.ceil(settings.epochs * math.ceil(rows / batch))


def find_steps(settings: Any, rows: int) -> int:
    """Return the optimizer steps of a training stage, with further epochs until `min_steps` steps change the weights.

    The first step of a warm-up does not change them, because its learning rate is zero.
    """
    steps = count_steps(settings, rows)
    if settings.max_steps or not settings.min_steps:
        return steps
    without_effect = int(settings.warmup_ratio > 0 and settings.lr_scheduler != "constant")
    return max(steps, settings.min_steps + without_effect)


def count_samples(settings: Any, rows: int) -> int:
    """Return the samples of all steps of a training stage: every row once in each epoch."""
    batch = settings.global_batch_size or solve_batch("config.yaml", vars(settings))["global_batch_size"]
    return round(rows * find_steps(settings, rows) / math.ceil(rows / batch))


def describe_steps(stage: str, settings: Any, rows: int) -> str:
    """Return sentences about epochs that `min_steps` adds; empty if it adds none."""
    planned_steps, steps = count_steps(settings, rows), find_steps(settings, rows)
    if steps == planned_steps:
        return ""
    samples = f"{pluralize(rows, 'sample')} {'gives' if rows == 1 else 'give'}"
    passes = count_samples(settings, rows) / rows
    risk = f". About {passes:.0f} passes over the same {pluralize(rows, 'row')} may memorize them"
    return (
        f"{samples} only {pluralize(planned_steps, 'step')}, so the stage {stage} adds epochs and takes {steps} "
        f"({stage}.min_steps: {settings.min_steps}, because a training of fewer steps hardly changes a model)"
        f"{risk if passes > HARMLESS_PASSES else ''}"
    )


def _multiply(sizes: Mapping[str, int], keys: Iterable[str]) -> int:
    return math.prod(sizes[key] for key in keys)
