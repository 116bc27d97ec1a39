"""Images that are held out for evaluation and must not be trained on under any name.

An image is held out if its path leads to the file of a held-out image, or if its file has the same bytes. The same
image in other bytes (another size, format or quality) is a different image.
"""

from collections.abc import Iterable
from pathlib import Path

from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.errors import InputError
from dj2mgm.storage.shards import compute_image_digest, read_file_size


class HeldOutImages:
    """Images of evaluation rows, whose paths are relative to `root`; each takes a few hundred bytes of memory."""

    def __init__(self, rows: Iterable[dict] = (), root: str | Path = ""):
        self._paths: set[Path] = set()
        self._sizes: set[int] = set()
        self._digests: set[str] = set()
        for row in rows:
            try:
                self._add(locate_image(root, row["image"]))
            except (BadImageError, OSError) as error:
                raise InputError(f"evaluation row {row['id']}: {error}; fix the image or delete the row") from None

    def __len__(self) -> int:
        """Return the number of different images."""
        return len(self._digests)

    def match(self, path: Path) -> str | None:
        """Return `file` for the file of a held-out image, `copy` for a file with the same bytes, and None otherwise.

        Only files with the size of a held-out image are read. The path comes from `locate_image`.
        """
        if path in self._paths:
            return "file"
        if read_file_size(path) in self._sizes and compute_image_digest(path) in self._digests:
            return "copy"
        return None

    def _add(self, path: Path) -> None:
        self._paths.add(path)
        self._sizes.add(read_file_size(path))
        self._digests.add(compute_image_digest(path))
