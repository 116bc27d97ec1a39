"""Which data an experiment uses: a file in config/datasets, or a folder that someone brought."""

from pathlib import Path

from errors import InputError
from settings.layers import CONFIG, read_config
from settings.schema import check_merged

RESULTS = "results/datasets"


def resolve_dataset(value: str) -> dict:
    """`{name, settings, images: {pretrain, finetune, evaluation}}`; image paths are relative to the folders `images`.

    Raises:
        InputError: neither a known dataset nor a folder that holds one Data-Juicer jsonl.
    """
    path = CONFIG / "datasets" / f"{value}.yaml"
    if path.is_file():
        settings, name = read_config(path), value
        check_merged(str(path), settings, "shapes" if settings.get("generator") else "dataset")
    elif Path(value).is_dir():
        settings, name = _describe_folder(Path(value)), Path(value).resolve().name
    else:
        known = sorted(p.stem for p in (CONFIG / "datasets").glob("*.yaml"))
        raise InputError(f"dataset: {value!r} is neither a folder nor one of {', '.join(known)} (config/datasets/)")
    if settings.get("generator"):
        images = dict.fromkeys(("pretrain", "finetune", "evaluation"), f"{RESULTS}/{name}")
    else:
        images = {
            split: settings.get(split, settings["pretrain"])["images"]
            for split in ("pretrain", "finetune", "evaluation")
        }
    return {"name": name, "settings": settings, "images": images}


def _describe_folder(folder: Path) -> dict:
    """A folder as users bring it: one Data-Juicer .jsonl, perhaps a LLaVA .json and an evaluation.jsonl."""
    captions = sorted(p for p in folder.glob("*.jsonl") if p.name != "evaluation.jsonl")
    instructions = sorted(folder.glob("*.json"))
    if len(captions) != 1 or len(instructions) > 1:
        found = ", ".join(p.name for p in [*captions, *instructions]) or "none"
        raise InputError(
            f"dataset: {folder} must hold exactly one Data-Juicer .jsonl and at most one LLaVA .json, found {found}; "
            f"name the files in a config/datasets/<name>.yaml instead"
        )
    settings = {"pretrain": {"file": str(captions[0]), "images": str(folder)}}
    if instructions:
        settings["finetune"] = {"file": str(instructions[0]), "images": str(folder)}
    if (folder / "evaluation.jsonl").is_file():
        settings["evaluation"] = {"file": str(folder / "evaluation.jsonl"), "images": str(folder)}
    return settings
