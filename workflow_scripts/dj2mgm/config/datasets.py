"""Which data an experiment uses: a file in config/datasets, or a folder that someone brought."""

import os
from pathlib import Path

from dj2mgm.config.reading import config_file, names_in, read_config
from dj2mgm.config.schema import check_format, check_merged, is_of, schema_of
from dj2mgm.errors import InputError

RESULTS = "results/datasets"


def resolve_dataset(value: str) -> dict:
    """`{name, settings, images: {pretrain, finetune, evaluation}}`; image paths are relative to the folders `images`.

    Raises:
        InputError: neither a known dataset nor a folder that holds one Data-Juicer jsonl.
    """
    known = names_in("datasets")
    if value in known and is_of("name", value):
        settings, name = _read_dataset(config_file("datasets", f"{value}.yaml")), value
    elif os.path.isdir(value):
        settings, name = _describe_folder(Path(value)), _name_of(Path(value))
    else:
        raise InputError(f"dataset: {value!r} is neither a folder nor one of {', '.join(known)} (config/datasets/)")
    if settings.get("generator"):
        images = dict.fromkeys(("pretrain", "finetune", "evaluation"), f"{RESULTS}/{name}")
    else:
        images = {
            split: settings.get(split, settings["pretrain"])["images"]
            for split in ("pretrain", "finetune", "evaluation")
        }
    return {"name": name, "settings": settings, "images": images}


def _read_dataset(path: Path) -> dict:
    kind = "shapes" if "generator" in read_config(path) else "dataset"
    settings = read_config(path, schema_of(kind))
    check_merged(str(path), settings, kind)
    return settings


def _name_of(folder: Path) -> str:
    """What the folder is called, also where it is stated as `.`; spaces and umlauts are welcome."""
    name = folder.resolve().name
    check_format(f"dataset: the folder {name!r}", "folder", name)
    return name


def _describe_folder(folder: Path) -> dict:
    """A folder as users bring it: one Data-Juicer .jsonl, perhaps a LLaVA .json and an evaluation.jsonl."""
    captions = sorted(p for p in folder.glob("*.jsonl") if p.name != "evaluation.jsonl")
    instructions = sorted(folder.glob("*.json"))
    if len(captions) != 1 or len(instructions) > 1:
        names = ", ".join(p.name for p in [*captions, *instructions]) or "none"
        raise InputError(
            f"dataset: {folder} must hold exactly one Data-Juicer .jsonl and at most one LLaVA .json, found {names}; "
            f"name the files in a config/datasets/<name>.yaml instead"
        )
    settings = {"pretrain": {"file": str(captions[0]), "images": str(folder)}}
    if instructions:
        settings["finetune"] = {"file": str(instructions[0]), "images": str(folder)}
    if (folder / "evaluation.jsonl").is_file():
        settings["evaluation"] = {"file": str(folder / "evaluation.jsonl"), "images": str(folder)}
    check_merged(f"dataset {folder}", settings, "dataset")
    return settings
