"""The folder with a stage's unfinished work, and the fingerprint by which a later run may continue there."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dj2mgm.code import find_modules
from dj2mgm.config.recipe_parsing import RecipeStep, find_recipe_files
from dj2mgm.errors import InputError
from dj2mgm.files import compute_sha256
from dj2mgm.juicer import changed_data_juicer, engine
from dj2mgm.juicer.operators.declarations import find_model_files
from dj2mgm.juicer.recipe_settings import RecipeSettings

WORKING = ".data_juicer-"


class EmptyResult(InputError):
    """The error for a recipe that has run to its end without a row to write."""


def fingerprint(steps: Sequence[RecipeStep], settings: RecipeSettings, data: Path) -> str:
    """Return a digest of everything that a stage's unfinished work depends on.

    These are data, recipe, models, and the code of the engine and the modules that it imports, including operators. The
    executor does not matter.
    """
    process = [step.as_dict() for step in steps]
    files = sorted({*find_model_files(process), *map(Path, find_recipe_files(process))})
    code = compute_sha256(*find_modules(Path(engine.__file__)))
    read = [compute_sha256(file) for file in files]
    parts = [process, str(settings.image_root), compute_sha256(data), read, code, changed_data_juicer.__version__]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def working_folder(output_dir: Path, fingerprint: str) -> Iterator[Path]:
    """Make a folder inside `output_dir`, and remove it at the end.

    A run that fails or is killed leaves it, and the next run with the same fingerprint continues there. Folders of
    other fingerprints are removed first.
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
        finished = True  # the user may correct the images now, so the next run must read them again
        raise
    finally:
        if finished:
            shutil.rmtree(working, ignore_errors=True)
