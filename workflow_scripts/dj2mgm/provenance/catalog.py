"""Entities of an RO-Crate, each added once: files in the crate, files elsewhere, and other things."""

from pathlib import Path
from typing import Any

from rocrate.model import ContextEntity
from rocrate.rocrate import ROCrate

from dj2mgm.files import compute_sha256

LARGEST_INCLUDED = 1 << 20  # bytes; larger files are only described
WEIGHTS = (".safetensors", ".bin", ".pt")
TYPES = {
    ".csv": "text/csv",
    ".html": "text/html",
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".log": "text/plain",
    ".py": "text/x-python",
    ".tsv": "text/tab-separated-values",
    ".txt": "text/plain",
    ".yaml": "application/yaml",
    ".j2": "text/plain",
    ".rst": "text/plain",
    ".smk": "text/plain",
    ".sh": "text/plain",
    "": "text/plain",
}


class Catalog:
    """RO-Crate under construction."""

    def __init__(self) -> None:
        self.crate = ROCrate(version="1.1")
        self.known: dict[Path, Any] = {}  # files of inputs and results

    def file(self, path: Path) -> Any:
        """Add a file of the results."""
        if path not in self.known:
            name, is_small = path.as_posix(), path.stat().st_size <= LARGEST_INCLUDED and path.suffix not in WEIGHTS
            large = {"name": name, **describe_size(path)}
            self.known[path] = self.hold(path, name) if is_small else self.outside(path, large)
        return self.known[path]

    def hold(self, path: Path, name: str, properties: dict | None = None) -> Any:
        """Add a file with its content under this name."""
        own = {"name": name, **describe_size(path), **describe_type(path)} | (properties or {})
        return self.crate.add_file(path, name, properties=own)

    def outside(self, path: Path, properties: dict) -> Any:
        """Add a description of a file that stays in its place."""
        return self.crate.add_file(path.absolute().as_uri(), properties=properties | describe_type(path))

    def about(self, uri: str, kind: str, **values: object) -> Any:
        """Add an entity that is not a file, once per address; a list of one item becomes the item."""
        if found := self.crate.dereference(uri):
            return found
        entity = self.crate.add(ContextEntity(self.crate, uri, properties={"@type": kind}))
        for key, value in values.items():
            entity[key] = value[0] if isinstance(value, list) and len(value) == 1 else value
        return entity

    def mentioned(self, uri: str, kind: str, **values: object) -> Any:
        entity = self.about(uri, kind, **values)
        self.crate.root_dataset.append_to("mentions", entity)
        return entity


def describe_size(path: Path) -> dict[str, str]:
    return {"sha256": compute_sha256(path), "contentSize": str(path.stat().st_size)}


def describe_type(path: Path) -> dict[str, str]:
    return {"encodingFormat": TYPES.get(path.suffix, "application/octet-stream")}
