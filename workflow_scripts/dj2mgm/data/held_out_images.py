"""Which images are held out for evaluation, under whatever name: nothing that is said about them is trained on.

An image is held out if its path leads to the file of a held-out one, or if its file holds the same bytes. The same
picture in other bytes (another size, format or quality) is another image.
"""

from collections.abc import Iterable
from pathlib import Path

from dj2mgm.data.images import BadImage, locate_image
from dj2mgm.data.shards import compute_digest, file_size
from dj2mgm.errors import InputError


class HeldOutImages:
    """The images of evaluation rows; a few hundred bytes of memory for each.

    Args:
        rows: evaluation rows; their image paths are relative to `root`.

    Raises:
        InputError: an image that is not there.
    """

    def __init__(self, rows: Iterable[dict] = (), root: str | Path = ""):
        self._paths: set[Path] = set()
        self._sizes: set[int] = set()
        self._digests: set[str] = set()
        for row in rows:
            try:
                self._add(locate_image(root, row["image"]))
            except (BadImage, OSError) as error:
                raise InputError(f"evaluation row {row['id']}: {error}; fix the image or delete the row") from None

    def __len__(self) -> int:
        """How many images there are that differ from each other."""
        return len(self._digests)

    def match(self, path: Path) -> str | None:
        """How the image at a path that `locate_image` gave is held out: as that `file`, as a `copy` of one, or not.

        Only a file as large as a held-out one is read.
        """
        if path in self._paths:
            return "file"
        if file_size(path) in self._sizes and compute_digest(path) in self._digests:
            return "copy"
        return None

    def _add(self, path: Path) -> None:
        self._paths.add(path)
        self._sizes.add(file_size(path))
        self._digests.add(compute_digest(path))
