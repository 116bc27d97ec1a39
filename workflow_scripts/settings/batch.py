"""The arithmetic of batch sizes: global = micro × accumulation × GPUs, exactly."""

import math
from collections.abc import Iterable, Mapping

from errors import InputError

FACTORS = ("micro_batch_size", "gradient_accumulation_steps", "gpus")


def solve_batch(where: str, settings: Mapping) -> dict[str, int]:
    """`global_batch_size` and its three factors, the one that is left open (None) filled in; in samples a step.

    Raises:
        InputError: more than one is open, or the sizes do not multiply; with the nearest ones that do.
    """
    sizes = {key: settings[key] for key in ("global_batch_size", *FACTORS)}
    open_keys = [key for key, size in sizes.items() if size is None]
    if len(open_keys) > 1:
        raise InputError(f"{where}: {' and '.join(open_keys)} are null; state all of them but one")
    if open_keys == ["global_batch_size"]:
        return sizes | {"global_batch_size": _product(sizes, FACTORS)}
    [key] = open_keys or ["gradient_accumulation_steps"]
    others = [factor for factor in FACTORS if factor != key]
    unit, wanted = _product(sizes, others), sizes["global_batch_size"]
    solved = sizes | {key: wanted // unit}
    if wanted % unit == 0 and (open_keys or solved == sizes):
        return solved
    if wanted % unit == 0:
        remedy = f"set {key}: {solved[key]}"
    else:
        nearest = sorted({max(1, wanted // unit) * unit, (wanted // unit + 1) * unit})
        factors = " × ".join(f"{factor} {sizes[factor]}" for factor in others)
        remedy = f"with {factors}, choose a global_batch_size of {' or '.join(map(str, nearest))}"
    stated = " × ".join(f"{factor} {'?' if sizes[factor] is None else sizes[factor]}" for factor in FACTORS)
    product = "" if open_keys else f" = {_product(sizes, FACTORS)}"
    raise InputError(f"{where}: global_batch_size {wanted} is not {stated}{product}; {remedy}")


def _product(sizes: Mapping[str, int], keys: Iterable[str]) -> int:
    return math.prod(sizes[key] for key in keys)
