"""Files of a model's weights, read and written one at a time, so that host memory never holds the whole model."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dj2mgm.errors import InputError
from dj2mgm.model_files.model_folders import WEIGHTS, WEIGHTS_INDEX, read_shard_names
from dj2mgm.storage.files import write_json

TRANSFORMERS_WEIGHTS = (WEIGHTS, "pytorch_model.bin")


class Shard:
    """File of weights, `.safetensors` or pickled by PyTorch, whose tensors are read one at a time.

    Only tensors and containers of a pickle are loaded, and no code is run.
    """

    shapes: dict[str, torch.Size]
    tensor: Callable[[str], torch.Tensor]

    def __init__(self, path: Path):
        try:
            if path.suffix == ".safetensors":
                file = safe_open(path, framework="pt")
                self.shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}
                self.tensor = file.get_tensor
            else:
                tensors = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
                self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
                # copied because two names of a pickle may share one storage, which safetensors rejects
                self.tensor = lambda name: tensors[name].clone(memory_format=torch.contiguous_format)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read as weights ({error}); download it again") from None
        except Exception:  # torch.load raises many types for damaged files, and advises to turn off its check
            raise InputError(
                f"{path} cannot be read as weights: it is damaged, or contains objects other than tensors, which are "
                "never loaded; download it again, or use its publisher's safetensors"
            ) from None


def open_shards(folder: Path, names: tuple[str, ...] = TRANSFORMERS_WEIGHTS) -> list[Shard]:
    """Return the shards of a checkpoint folder.

    `names` are possible names of the file with all weights. The first existing name is used, whole or in shards.
    """
    for name in names:
        index = folder / f"{name}.index.json"
        if index.is_file():
            files = read_shard_names(index)
            if missing := [file for file in files if not (folder / file).is_file()]:
                raise InputError(f"{index} names {missing[0]}, which is missing; download the folder again")
            return [Shard(folder / file) for file in files]
        if (folder / name).is_file():
            return [Shard(folder / name)]
    raise InputError(
        f"{folder} contains neither {' nor '.join(names)}; name the folder of a downloaded model with its weights"
    )


def write_shards(folder: Path, shards: Iterable[dict[str, torch.Tensor]], count: int) -> None:
    """Write `count` shards one after another, and the index of their tensors."""
    weight_map, total, number = {}, 0, 0
    for tensors in shards:  # enumerate would keep the last shard while the next one is read
        number += 1
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    write_json(
        folder / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def rename_shards(shards: list[Shard], names: dict[str, str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each shard under their new names; leave out tensors that `names` lacks."""
    for shard in shards:
        yield {names[name]: shard.tensor(name) for name in shard.shapes if name in names}
