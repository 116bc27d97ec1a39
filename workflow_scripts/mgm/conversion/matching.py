"""Accounting for every tensor of a checkpoint: each gets a new name, none is missing, none is left over."""

import re
from collections.abc import Collection
from pathlib import Path

import torch

from errors import InputError
from mgm.conversion.names import Pairs, rename
from mgm.conversion.shards import Shard


def match_names(where: Path, shards: list[Shard], pairs: Pairs, left_out: re.Pattern) -> dict[str, str]:
    """The new name of every tensor but those that `left_out` matches.

    Raises:
        InputError: a tensor that no pair renames, or two that get one name.
    """
    names: dict[str, str] = {}
    for name in (name for shard in shards for name in shard.shapes):
        if left_out.fullmatch(name):
            continue
        new = rename(name, pairs)
        if new is None:
            raise InputError(f"{where}: tensor {name} has no place in this conversion; is it another kind of model?")
        if name in names or new in names.values():
            raise InputError(f"{where}: tensor {name} is there twice; download the folder again")
        names[name] = new
    return names


def check_names(where: Path, found: Collection[str], expected: Collection[str]) -> None:
    """
    Raises:
        InputError: names the first tensor that is missing or too many, by its name in this project.
    """
    if missing := sorted(set(expected) - set(found)):
        raise InputError(f"{where}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if surplus := sorted(set(found) - set(expected)):
        raise InputError(f"{where}: {len(surplus)} tensors have no place in the model, the first is {surplus[0]}")


def check_shapes(where: Path, found: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    """
    Raises:
        InputError: as `check_names`, or names a tensor of another shape.
    """
    check_names(where, found, expected)
    for name, shape in expected.items():
        if found[name] != shape:
            raise InputError(
                f"{where}: tensor {name} has shape {tuple(found[name])}, the model has {tuple(shape)}; name the "
                "configuration of the same model"
            )
