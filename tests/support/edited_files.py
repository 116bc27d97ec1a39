"""Files that a test changes for some time."""

import shutil
from contextlib import contextmanager


@contextmanager
def edit_file(path, old, new):
    """Replace one string in the file, and restore contents and time stamp afterwards."""
    backup = path.with_name(path.name + ".backup")
    shutil.copy2(path, backup)
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    try:
        yield
    finally:
        shutil.move(backup, path)
