"""Code, configuration and machine that a run was made with, and digests of the user's own files."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pynvml

from dj2mgm.cli.messages import Progress, warn
from dj2mgm.data.formats import list_images
from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.dataset_resolution.experiment_dataset import list_dataset_files
from dj2mgm.errors import InputError
from dj2mgm.features.crate.crate_record import CrateInput, CrateMachine, CrateSettings
from dj2mgm.model_files.model_folders import MODEL_SUFFIXES, find_model
from dj2mgm.recipes.catalogue import find_recipe_files
from dj2mgm.runs.layers import MODEL_KEYS
from dj2mgm.runs.stages import InputKind
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.settings.config_files import CONFIG, SHIPPED
from dj2mgm.storage.files import check_plain, compute_sha256, read_jsonl
from dj2mgm.storage.image_files import compute_image_digest
from dj2mgm.storage.streaming import DiskMap, read_json_list

ROOT = SCRIPTS.parent


def describe_this_machine() -> CrateMachine:
    return CrateMachine.from_sections(
        system=platform.platform(),
        architecture=platform.machine(),
        processor=_read_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpus=_list_gpus(),
        python=platform.python_version(),
    )


def find_commit() -> str:
    """Return the commit of this clone, with `-dirty` if files differ from it; empty if it is not a Git clone."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return ""
    # Git's configuration of a folder can start programs
    command = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def _read_processor() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        match = None
    return match[1] if match else platform.processor()


def _list_gpus() -> list[str]:
    """Return the names of NVIDIA GPUs."""
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    return names


SNAKEFILE = "Snakefile"
# parts of the clone: its code, and its installation
CODE_FILES = (
    SNAKEFILE,
    "LICENSE",
    "pyproject.toml",
    "requirements.lock",
    "rules",
    "workflow_scripts",
    "envs",
    "profiles",
    "report",
    "config/schemas",
    "config/deepspeed",
)
FOUNDATION_FOLDER = "foundation"  # folder in config/ with weights, which count as inputs
CONFIG_SUFFIXES = (".yaml", ".json", ".jinja")
MADE_HERE = "results/"


def list_code_files() -> dict[str, Path]:
    """Return the clone's code files by their paths in the repository."""
    paths = [
        path for part in CODE_FILES for path in ([ROOT / part] if (ROOT / part).is_file() else (ROOT / part).rglob("*"))
    ]
    files = (path for path in paths if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix(): path for path in sorted(files)}


def list_config_files() -> dict[str, Path]:
    """Return the configuration files by name, `config/…`, from the current folder or else from the clone.

    A file that is a link out of its folder is refused, because a crate would publish its target.
    """
    files = {}
    for folder in (SHIPPED, CONFIG):
        for path in sorted(folder.rglob("*")):
            name = Path("config", path.relative_to(folder)).as_posix()
            if path.suffix in CONFIG_SUFFIXES and path.is_file() and _is_config(name):
                check_plain(path, folder, None)
                files[name] = path
    return files


def _is_config(name: str) -> bool:
    """Return whether a file of the repository is configuration not code or weights."""
    kinds = ("schemas", "deepspeed", FOUNDATION_FOLDER)
    return name.startswith("config/") and not name.startswith(tuple(f"config/{kind}/" for kind in kinds))


def describe_inputs(settings: CrateSettings) -> list[CrateInput]:
    """Describe the user's files and the trained parts of the workflow, each once."""
    entries = [
        ("dataset", file, "") for dataset in settings.datasets.values() for file in list_dataset_files(dataset.settings)
    ]
    for name, folder in settings.foundations.items():
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        entries += [
            ("model", f"config/{FOUNDATION_FOLDER}/{name}", path.relative_to(folder).as_posix()) for path in files
        ]
    for experiment in settings.experiments:
        entries += [("recipe", file, "") for _, recipe in experiment.recipes for file in find_recipe_files(recipe)]
        parts = _list_model_parts(experiment.config.model.model_dump())
        entries += [("model", *pair) for part in parts for pair in _list_model_files(part)]
    user_entries = (entry for entry in dict.fromkeys(entries) if not entry[1].startswith(MADE_HERE))
    return [_describe_input(*entry) for entry in user_entries]


def _describe_input(kind: InputKind, source: str, file: str) -> CrateInput:
    path = find_input(source, file)
    return CrateInput.from_sections(
        kind=kind,
        configured_path=source,
        file=file,
        found_at=str(path.absolute()),
        sha256=compute_sha256(path),
        bytes=path.stat().st_size,
    )


def find_input(source: str, file: str) -> Path:
    """Return the path of an input on this machine, which may not exist.

    Args:
        source: the configured path, or the folder or hub id that contains `file`.
        file: name of the file in `source`; empty if `source` is the file.
    """
    if source.startswith(f"config/{FOUNDATION_FOLDER}/") and not Path(source, file).exists():
        return ROOT / source / file
    return Path(find_model(source), file) if file else Path(source)


def _list_model_parts(model: dict) -> list[str]:
    """Return the folders and hub ids in a model's configuration."""
    parts = (model.get(key) for key in MODEL_KEYS)
    return [part for part in parts if isinstance(part, str) and not part.startswith(MADE_HERE)]


def _list_model_files(part: str) -> Iterator[tuple[str, str]]:
    folder = Path(find_model(part)).expanduser()
    if not folder.is_dir():
        warn(f"{part} is not on this machine; the crate has its name but no digest")
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in MODEL_SUFFIXES and path.is_file():
            yield part, path.name


def digest_images(folder: Path, roots: dict[str, str]) -> dict:
    """Return the number of images of a dataset that `make_dataset` wrote, and one digest of them.

    `roots` are image folders by split. `sha256` is of a line for each image, in the order of first use: its own digest,
    or the reason why it cannot be read. Paths do not matter.
    """
    digest, seen, progress = hashlib.sha256(), DiskMap(), Progress("images", _count_images(folder))
    count = 0
    for split, images in _iterate_images(folder):
        for image in images:
            progress.add()
            if (key := f"{split}\n{image}") not in seen:
                seen.fill([(key, 1)])
                digest.update(f"{_digest_image(roots[split], image)}\n".encode())
                count += 1
    return {"count": count, "sha256": digest.hexdigest()}


def _iterate_images(folder: Path) -> Iterator[tuple[str, Iterator[str]]]:
    yield "pretrain", (row["images"][0] for row in read_jsonl(folder / "pretrain.jsonl"))
    yield "finetune", (image for row in read_json_list(folder / "finetune.json") for image in list_images(row))
    yield "evaluation", (row["image"] for row in read_jsonl(folder / "evaluation.jsonl"))


def _count_images(folder: Path) -> int:
    """Return the number of images in all rows, for the progress."""
    return sum(1 for _, images in _iterate_images(folder) for _ in images)


def _digest_image(root: str, image: str) -> str:
    try:
        return compute_image_digest(locate_image(root, image))
    except BadImageError as error:
        return error.reason
    except OSError as error:
        raise InputError(f"{image} in {root} cannot be read ({error}); make the dataset again") from None
