"""The folder in which a stage's work is kept while it runs, and whether a later run may go on there."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dj2mgm.code import modules_of
from dj2mgm.config.recipe_check import files_named
from dj2mgm.errors import InputError
from dj2mgm.files import sha256_of
from dj2mgm.juicer import data_juicer, engine
from dj2mgm.juicer.operators.declarations import model_files
from dj2mgm.juicer.settings import StageSettings

WORKING = ".data_juicer-"


class EmptyResult(InputError):
    """The recipe has run to its end, and there is nothing to write."""


def fingerprint(process: list[dict], settings: StageSettings, data: Path) -> str:
    """What a stage's work so far depends on: data, recipe, models, and the code of the engine and of the modules that
    it uses, operators among them. The executor changes nothing."""
    files = sorted({*model_files(process), *map(Path, files_named(process))})  # a model's folder is named, too
    code = sha256_of(*modules_of(Path(engine.__file__)))
    read = [sha256_of(file) for file in files]
    parts = [process, str(settings.image_root), sha256_of(data), read, code, data_juicer.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def working_folder(output_dir: Path, fingerprint: str) -> Iterator[Path]:
    """A folder inside `output_dir`, removed at the end. A run that fails or is killed leaves it for another run with
    the same fingerprint, which goes on there; folders of other fingerprints are removed first.
    """
    output_dir = output_dir.resolve()
    working = output_dir / f"{WORKING}{fingerprint[:16]}"
    for folder in output_dir.glob(f"{WORKING}*"):
        if folder != working:
            shutil.rmtree(folder)
    working.mkdir(parents=True, exist_ok=True)
    finished = False
    try:
        yield working
        finished = True
    except EmptyResult:
        finished = True  # the images may be what the user fixes now, so the next run must read them again
        raise
    finally:
        if finished:
            shutil.rmtree(working, ignore_errors=True)
