"""The arithmetic of batch sizes: global = micro × accumulation × GPUs, exactly."""

from collections.abc import Mapping

from errors import InputError


def check_batch(where: str, settings: Mapping) -> None:
    """Check `global_batch_size` against its factors, all in samples a step.

    Raises:
        InputError: with the accumulation that would make it hold, or the nearest global batches that can.
    """
    wanted, micro = settings["global_batch_size"], settings["micro_batch_size"]
    accumulation, gpus = settings["gradient_accumulation_steps"], settings["gpus"]
    product = micro * accumulation * gpus
    if product == wanted:
        return
    unit = micro * gpus
    if wanted % unit == 0:
        remedy = f"set gradient_accumulation_steps: {wanted // unit}"
    else:
        nearest = sorted({max(1, wanted // unit) * unit, (wanted // unit + 1) * unit})
        remedy = f"with {micro} × {gpus} a step, choose a global_batch_size of {' or '.join(map(str, nearest))}"
    raise InputError(
        f"{where}: global_batch_size {wanted} is not micro_batch_size {micro} × gradient_accumulation_steps "
        f"{accumulation} × gpus {gpus} = {product}; {remedy}"
    )
