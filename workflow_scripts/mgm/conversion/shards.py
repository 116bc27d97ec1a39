"""Reading and writing checkpoints shard by shard, so that host memory holds one shard and not the model."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from errors import InputError
from files import read_json, write_json

INDEX = "model.safetensors.index.json"
TRANSFORMERS = ("model.safetensors", "pytorch_model.bin")
OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")


class Shard:
    """One file of weights, `.safetensors` or pickled by PyTorch; a tensor is read when it is asked for.

    Args:
        path: the file; of a pickle only tensors and containers are loaded, and no code is run.

    Raises:
        InputError: the file cannot be read, or holds something else than tensors.
    """

    shapes: dict[str, torch.Size]
    tensor: Callable[[str], torch.Tensor]

    def __init__(self, path: Path):
        try:
            if path.suffix == ".safetensors":
                file = safe_open(path, framework="pt")
                self.shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                self.tensor = file.get_tensor
            else:
                tensors = torch.load(path, map_location="cpu", mmap=is_zipfile(path), weights_only=True)
                self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
                # a copy: in a pickle, two names may share one storage, which safetensors refuses
                self.tensor = lambda name: tensors[name].clone(memory_format=torch.contiguous_format)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} cannot be read as weights ({error}); download it again") from None
        except Exception:  # torch.load raises whatever a damaged file leads to, and advises to turn its check off
            raise InputError(
                f"{path} cannot be read as weights: it is damaged, or holds more than tensors, which is never loaded; "
                "download it again, or take the safetensors that its publisher has of it"
            ) from None


def shards_of(folder: Path, names: tuple[str, ...] = TRANSFORMERS) -> list[Shard]:
    """The shards of a checkpoint folder.

    Args:
        names: of the file that holds all weights; the first that is there, whole or in shards, is taken.

    Raises:
        InputError: no weights, or a file that the index names is missing.
    """
    for name in names:
        index = folder / f"{name}.index.json"
        if index.is_file():
            files = sorted(set(read_json(index, remedy="download the folder again")["weight_map"].values()))
            if missing := [file for file in files if not (folder / file).is_file()]:
                raise InputError(f"{index} names {missing[0]}, which is not there; download the folder again")
            return [Shard(folder / file) for file in files]
        if (folder / name).is_file():
            return [Shard(folder / name)]
    raise InputError(f"{folder} holds no weights, neither {' nor '.join(names)}; name the folder of a downloaded model")


def write_shards(folder: Path, shards: Iterable[dict[str, torch.Tensor]], count: int) -> None:
    """Write each of `count` shards as it comes, and the index that says where a tensor is."""
    weight_map, total, number = {}, 0, 0
    for tensors in shards:  # not enumerate, which holds the last shard while the next one is read
        number += 1
        name = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def renamed(shards: list[Shard], names: dict[str, str]) -> Iterator[dict[str, torch.Tensor]]:
    """The shards under new names; a tensor that `names` lacks is left out."""
    for shard in shards:
        yield {names[name]: shard.tensor(name) for name in shard.shapes if name in names}
