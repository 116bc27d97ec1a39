"""Rows of the explorer: numbers in columns, texts on disk, one image each."""

import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from dj2mgm.features.explorer.steps import ExplorerStep

MAX_WORDS = 200  # a statistic with more different words is not offered as a filter


class TextFile:
    """JSON values by row, in a temporary file; eight bytes a row are in memory."""

    def __init__(self):
        self._file = TemporaryFile()
        self._ends = array("Q", [0])

    def add(self, value: object) -> None:
        line = json.dumps(value, ensure_ascii=False).encode()
        self._file.write(line)
        self._ends.append(self._ends[-1] + len(line))

    def finish(self) -> None:
        """Flush the file; call this before the first row is read."""
        self._file.flush()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> dict:
        """Read a row; safe for several threads."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        start, end = self._ends[row], self._ends[row + 1]
        return json.loads(os.pread(self._file.fileno(), end - start, start))

    def __iter__(self) -> Iterator[dict]:
        return (self[row] for row in range(len(self)))


@dataclass(frozen=True)
class Column:
    """One number per row, NaN if it has none; with `words`, the number is an index into them."""

    label: str
    values: np.ndarray  # (N,) float64
    words: list[str] | None = None


@dataclass
class RowTable:
    """Rows of one kind."""

    name: str  # in links
    title: str  # on the page
    image_root: Path
    texts: TextFile  # by row {"id", "lines": [[label, text], …], "image": path below image_root}
    columns: dict[str, Column]  # by key
    steps: list[ExplorerStep] = field(default_factory=list)  # operators that drop rows, in their order
    # (N,) float64, position in `steps`, from 1, of the step that dropped the row; 0 for kept rows. None if there are no
    # steps
    fate: np.ndarray | None = None
    recipes: dict[str, dict] = field(default_factory=dict)  # by stage, for the steps
    first_filter: dict[str, str] = field(default_factory=dict)  # filter when the page opens, {column: word}
    note: str = ""  # a sentence below the rows

    def __post_init__(self):
        self.image_root = self.image_root.absolute()

    def __len__(self) -> int:
        return len(self.texts)


def build_number_column(label: str, values: list | np.ndarray) -> Column | None:
    """Return a column of numbers; None if no row has one."""
    numbers = np.array(values, dtype=np.float64)
    return None if np.isnan(numbers).all() else Column(label, numbers)


def build_word_column(label: str, words: list[str | None]) -> Column | None:
    """Return a column of words; None if there are no words or too many different ones."""
    vocabulary = sorted({word for word in words if word is not None})
    if not vocabulary or len(vocabulary) > MAX_WORDS:
        return None
    indices = {word: index for index, word in enumerate(vocabulary)}
    codes = np.array([np.nan if word is None else indices[word] for word in words], dtype=np.float64)
    return Column(label, codes, vocabulary)
