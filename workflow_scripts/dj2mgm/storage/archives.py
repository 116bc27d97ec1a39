"""Commands that unpack archives, which the workflow does not read."""

import shlex
import zipfile
from pathlib import Path

ARCHIVE_SUFFIXES = (".zip", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2", ".tar.zst", ".7z", ".rar")


def advise_unpacking(file: Path) -> str:
    """Return the command that unpacks an archive, and the dataset that it makes."""
    folder = file.with_name(file.name.partition(".")[0])
    return f"Unpack it {_describe_unpacking(file, folder)}, and use {shlex.quote(f'dataset={folder}')}"


def advise_unpacking_images(image: Path) -> str | None:
    """Return the command that unpacks the archive next to rows whose image is missing; None if there is no archive."""
    folder = next((parent for parent in image.parents if parent.is_dir()), None)
    archives = (
        sorted(file for file in folder.iterdir() if file.name.lower().endswith(ARCHIVE_SUFFIXES)) if folder else []
    )
    if not archives:
        return None
    file, target = archives[0], folder
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if image.relative_to(folder).as_posix() not in archive.NameToInfo:
                target = folder / file.stem
    return f"unpack {file.name} {_describe_unpacking(file, target)}, and run the same command again"


def _describe_unpacking(file: Path, folder: Path) -> str:
    name, target = shlex.quote(str(file)), shlex.quote(str(folder))
    kind = file.suffix.lower()
    if kind == ".zip":
        return f"with `python -m zipfile --extract {name} {target}`"
    if kind in (".7z", ".rar"):
        return f"into {target}"
    option, program = ("--zstd ", " (it needs the program zstd)") if kind == ".zst" else ("", "")
    return f"with `mkdir --parents {target} && tar {option}--extract --file {name} --directory {target}`{program}"
