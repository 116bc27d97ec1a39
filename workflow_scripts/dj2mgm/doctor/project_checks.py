"""Checks of the user's configuration, data and models, before any stage runs."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from dj2mgm.config.reading import names_folder
from dj2mgm.config.runs import Runs
from dj2mgm.data.formats import list_images, read_evaluation, read_llava, read_pairs
from dj2mgm.data.images import BadImage, locate_image
from dj2mgm.doctor.probes import Finding
from dj2mgm.errors import InputError

NAMED = 3  # bad paths named in a message; the others are only counted
READERS = {
    "pretrain": lambda file: (row["images"][0] for row in read_pairs(file)),
    "finetune": lambda file: chain.from_iterable(map(list_images, read_llava(file, number_ids=True))),
    "evaluation": lambda file: (row["image"] for row in read_evaluation(file)),
}


def read_runs(command_line: dict) -> tuple[Runs | None, Finding]:
    """Return the configuration (None if it is invalid) and a finding about it."""
    name = "configuration"
    try:
        runs = Runs(command_line)
    except InputError as error:
        return None, Finding(name, "fail", str(error), "correct that file or key")
    names, errors = runs.experiments.names, runs.experiments.errors
    if errors:
        return runs, Finding(name, "warn", "; ".join(map(str, errors.values())), "correct these files")
    return runs, Finding(name, "pass", f"{len(names)} experiments: {', '.join(names)}")


def stages_in_fp8(runs: Runs | None) -> set[str]:
    every = runs or ()
    return {stage for run in every for stage in run.trains if run.settings[stage]["precision"] == "fp8"}


def loader_workers(runs: Runs | None) -> int:
    """Return the largest number of data loader processes of any stage."""
    if runs is None:
        return 0
    return max(run.settings[stage]["loader_workers"] for run in runs for stage in run.trains)


def check_data(runs: Runs) -> Iterator[Finding]:
    """Yield a finding for each dataset, after reading every row and locating every image."""
    datasets = {run.dataset["name"]: run.dataset["settings"] for run in runs}
    for dataset, settings in datasets.items():
        name = f"dataset {dataset}"
        if settings.get("generator"):
            yield Finding(name, "skip", "the workflow generates it")
        elif sources := settings.get("sources"):
            yield Finding(name, "pass", f"{len(sources)} sources; make_dataset reads and checks them")
        else:
            yield check_dataset(name, {split: settings[split] for split in READERS if split in settings})


def check_dataset(name: str, splits: dict[str, dict]) -> Finding:
    """Read every row of a dataset and locate every image.

    Args:
        splits: `{file, images}` of `pretrain` and, if present, of `finetune` and `evaluation`.
    """
    counts, bad = [], {}
    for split, files in splits.items():
        images, bad[split] = 0, []
        try:
            for image in READERS[split](files["file"]):
                images += 1
                bad[split] += _bad_image(files["images"], image)
        except (InputError, OSError) as error:
            return Finding(name, "fail", str(error), "correct the file")
        counts.append(f"{images} images in {split}")
    if every := list(chain.from_iterable(bad.values())):
        reason = f"{len(every)} of {', '.join(counts)} cannot be used: {'; '.join(every[:NAMED])}"
        if len(every) > len(bad["pretrain"]):
            return Finding(name, "fail", reason, "correct the paths, or delete the rows")
        return Finding(name, "warn", reason, "correct the paths; the filter stage drops such rows and counts them")
    return Finding(name, "pass", f"{', '.join(counts)}; all exist")


def check_models(runs: Runs) -> Iterator[Finding]:
    """Yield a finding for each model: its folders exist, or the workflow fetches or trains them."""
    for model in {run.config.model.name: run.config.model for run in runs}.values():
        name = f"model {model.name}"
        if model.made_here:
            yield Finding(name, "skip", "the workflow trains it")
            continue
        parts = {part for part in (*model.parts.values(), model.given, model.clip_score) if part}
        missing = sorted(
            part for part in parts if (names_folder(part) or part == model.given) and not Path(part).is_dir()
        )
        if missing:
            reason = f"missing folders: {', '.join(missing)}"
            yield Finding(
                name, "fail", reason, f"see docs/models.md, or change the folders in config/models/{model.name}.yaml"
            )
        else:
            fetched = sorted(part for part in parts if not Path(part).is_dir())
            yield Finding(name, "pass", f"to be fetched: {', '.join(fetched)}" if fetched else "all its folders exist")


def _bad_image(root: str, image: str) -> list[str]:
    try:
        locate_image(root, image)
    except BadImage as error:
        return [str(error)]
    return []
