"""Sizes of a dataset's images for a plan: models that keep an image's size need more tokens for a larger one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dj2mgm.data.formats import choose_spread_rows, list_images
from dj2mgm.data.images import BadImageError, locate_image, read_image_size
from dj2mgm.dataset_resolution.experiment_dataset import Dataset
from dj2mgm.planning.architecture import DEFAULT_IMAGE_SIZE, Architecture, VLMArchitecture
from dj2mgm.settings.dataset_files import load_dataset_settings
from dj2mgm.storage.files import read_json, read_jsonl
from dj2mgm.storage.json_rows import read_json_list

MAX_READ = 1000  # rows of a split whose images' sizes are read

Sizes = tuple[tuple[int, int], ...]  # width and height in pixels of a row's images


@dataclass(frozen=True)
class PlannedImages:
    """Architecture with the images of the longest and of a usual row, and a sentence about them."""

    largest: Architecture
    usual: Architecture
    sentence: str


def plan_images(architecture: Architecture, folder: Path | None) -> PlannedImages:
    """Return the images to plan for, from the dataset that the dataset stage has written to `folder`.

    Without a dataset, images have `DEFAULT_IMAGE_SIZE`.
    """
    if not isinstance(architecture, VLMArchitecture):
        tokens = architecture.image_tokens
        sentence = f"An image takes {tokens} tokens, whatever its size." if tokens else ""
        return PlannedImages(architecture, architecture, sentence)
    rows = sorted(_measure_rows(architecture, folder), key=lambda row: row[0]) if folder else []
    if not rows:
        sentence = (
            f"Assumed: images of {_describe(architecture, (DEFAULT_IMAGE_SIZE,))}. With `dataset=<your data>`, "
            "the plan reads the sizes of your images."
        )
        return PlannedImages(architecture, architecture, sentence)
    largest, usual = (
        replace(architecture, item=architecture.encoder.build_sample(*sizes))
        for sizes in (rows[-1][1], rows[len(rows) // 2][1])
    )
    sentence = (
        f"Images of {len(rows):,} rows of {folder.name}: the largest has {_describe(largest, rows[-1][1])}, "
        f"the median has {_describe(usual, rows[len(rows) // 2][1])}."
    )
    return PlannedImages(largest, usual, sentence)


def _describe(architecture: VLMArchitecture, sizes: Sizes) -> str:
    pixels = " and ".join(f"{width} × {height}" for width, height in sizes)
    return f"{pixels} pixels ({architecture.image_tokens:,} tokens)"


def _measure_rows(architecture: VLMArchitecture, folder: Path) -> Iterator[tuple[int, Sizes]]:
    """Yield the tokens and the sizes of each row's images, of rows spread over both splits; leave out bad images."""
    roots = Dataset(folder.name, load_dataset_settings(folder / "config.yaml")).images
    counts = read_json(folder / "summary.json")
    splits = {
        "pretrain": (row["images"] for row in read_jsonl(folder / "pretrain.jsonl")),
        "finetune": map(list_images, read_json_list(folder / "finetune.json")),
    }
    for split, rows in splits.items():
        chosen = choose_spread_rows(counts[split], MAX_READ)
        for images in (images for number, images in enumerate(rows) if number in chosen and images):
            try:
                paths = [str(locate_image(roots[split], image)) for image in images]
                tokens = architecture.encoder.count_image_tokens({"image": paths})
                yield tokens, tuple(map(read_image_size, paths))
            except (BadImageError, ValueError):  # some processors reject images with an extreme aspect ratio
                continue
