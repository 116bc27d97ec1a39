"""Measure the deduplicators of images: near-duplicates that are found, false positives, and time.

    python benchmarks/near_duplicates.py found config/foundation/tiny/clip --photos path/to/folder
    python benchmarks/near_duplicates.py hash config/foundation/tiny/clip --photos path/to/folder
    python benchmarks/near_duplicates.py search --rows 10000 100000 1000000
    python benchmarks/near_duplicates.py search --rows 10000 40000 160000 --dimensions 512

`found` plants near-duplicates of rendered scenes and of photos: byte for byte, encoded again, scaled, and cropped to
80 % of both sides at a random place. It counts the rows that each deduplicator takes for a near-duplicate of another
image. Scenes with the same description do not count as different. `search` searches pairs among random hashes or, with
`--dimensions`, among vectors, a tenth of which are near another vector. Each number of rows runs in its own process,
with the imports of a stage. Memory is the peak of that process without mapped files (RssAnon). Each command prints rows
of Markdown.
"""

import argparse
import random
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

import numpy as np
from PIL import Image

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "workflow_scripts"))

import dj2mgm.juicer.operators  # noqa: E402, F401  (registers the operators)
from dj2mgm.data.images import load_image  # noqa: E402
from dj2mgm.data.shapes import (  # noqa: E402
    describe_scene,
    draw_image,
    draw_row_scene,
)
from dj2mgm.features.selection.operators.near_deduplicators import SIGNATURES_COLUMN  # noqa: E402
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops, patch_data_juicer  # noqa: E402

NEAR, EMBEDDING = "image_near_deduplicator", "image_embedding_deduplicator"
SIMILARITIES = (0.95, 0.98, 0.99, 0.995)
SIDE = 0.8  # side of a crop, relative to the image's
BLOCK = 1000


def make_encoder(kind: str, **options) -> Callable:
    def change(image: Image.Image, rng: random.Random) -> Image.Image:
        file = BytesIO()
        image.save(file, kind, **options)
        return Image.open(file).convert("RGB")

    return change


def make_scaler(factor: float) -> Callable:
    filters = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS, Image.Resampling.BOX)

    def change(image: Image.Image, rng: random.Random) -> Image.Image:
        return image.resize((round(image.width * factor), round(image.height * factor)), rng.choice(filters))

    return change


def crop(image: Image.Image, rng: random.Random) -> Image.Image:
    width, height = round(image.width * SIDE), round(image.height * SIDE)
    left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
    return image.crop((left, top, left + width, top + height))


CHANGES = {
    "none (byte for byte)": lambda image, rng: image,
    **{f"JPEG, quality {quality}": make_encoder("JPEG", quality=quality) for quality in (30, 50, 75, 95)},
    "PNG of the JPEG of quality 75": lambda image, rng: make_encoder("PNG")(
        make_encoder("JPEG", quality=75)(image, rng), rng
    ),
    **{f"WebP, quality {quality}": make_encoder("WEBP", quality=quality) for quality in (30, 80)},
    **{f"{factor} times the size": make_scaler(factor) for factor in (0.3, 0.5, 0.75, 1.5, 2)},
    "cropped": crop,
}


def compute_signatures(operator, images: list[Image.Image], folder: Path) -> list[bytes]:
    """Compute the operator's signatures of images from lossless files."""
    signatures = []
    for start in range(0, len(images), BLOCK):
        paths = [str(folder / f"{number}.png") for number in range(len(images[start : start + BLOCK]))]
        for path, image in zip(paths, images[start : start + BLOCK], strict=True):
            image.save(path, compress_level=1)
        signatures += [signature for signature, _ in operator.sign(paths, None)]
    return signatures


def measure_recall(operator, before: list[bytes], after: list[bytes]) -> float:
    """Return the share of images that are near to their changed copy."""
    originals, changed = (
        np.frombuffer(b"".join(signatures), dtype=np.uint8).reshape(len(signatures), -1)
        for signatures in (before, after)
    )
    return float(np.isfinite(operator.compute_distances(originals, changed)).mean())


def make_row(signature: bytes) -> dict:
    """Return the measured row of one image, in the operators' format."""
    return {SIGNATURES_COLUMN: f"1 {b64encode(signature).decode()}", Fields.stats: {"image_pixels": 1.0}}


def count_false_positives(operator, signatures: list[bytes], contents: list[str], folder: Path) -> tuple[int, int]:
    """Return numbers of rows dropped as near-duplicates of rows with other contents, and with the same contents."""
    copy_of = operator.decide(map(make_row, signatures), folder).copy_of
    has_other_contents = [contents[row] != contents[copy_of[row]] for row in np.flatnonzero(copy_of >= 0)]
    return sum(has_other_contents), len(has_other_contents) - sum(has_other_contents)


def report_found(arguments: argparse.Namespace) -> None:
    scenes = [draw_row_scene(0, "pretrain", number) for number in range(arguments.rows[0])]
    image_sets = {"scenes": ([draw_image(scene) for scene in scenes], [describe_scene(scene) for scene in scenes])}
    if arguments.photos:
        photos = [load_image(path) for path in sorted(arguments.photos.rglob("*.jpg"))]
        image_sets["photos"] = (photos, [str(number) for number in range(len(photos))])
    limits = [{"hf_clip": arguments.clip, "min_similarity": similarity} for similarity in SIMILARITIES]
    patch_data_juicer()
    operators = {NEAR: load_ops([{NEAR: {}}])[0]}
    operators |= {f"CLIP {v['min_similarity']}": load_ops([{EMBEDDING: v}])[0] for v in limits if arguments.clip}
    print(f"| images | change | {' | '.join(operators)} |\n|---|---|{'---|' * len(operators)}", flush=True)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, (images, contents) in image_sets.items():
            signatures = {kind: compute_signatures(operators[kind], images, folder) for kind in list(operators)[:2]}
            rng = random.Random(0)
            for change, function in CHANGES.items():
                changed = [function(image, rng) for image in images[: arguments.planted]]
                after = {kind: compute_signatures(operators[kind], changed, folder) for kind in signatures}
                shares = [
                    measure_recall(operator, signatures[kind][: len(changed)], after[kind])
                    for operator, kind in zip(operators.values(), _list_kinds(operators), strict=True)
                ]
                figures = " | ".join(f"{100 * share:.2f} %" for share in shares)
                print(f"| {len(changed)} {name} | {change} | {figures} |", flush=True)
            positives = [
                count_false_positives(operator, signatures[kind], contents, folder)
                for operator, kind in zip(operators.values(), _list_kinds(operators), strict=True)
            ]
            figures = " | ".join(f"{other} ({same})" for other, same in positives)
            print(f"| {len(images)} {name} | false positives (same contents) | {figures} |", flush=True)


def _list_kinds(operators: dict) -> list[str]:
    """Return the operator that signs for each operator; operators with a CLIP differ in their limit only."""
    first, *others = operators
    return [first, *others[:1] * len(others)]


def report_hashing(arguments: argparse.Namespace) -> None:
    print("| operator | images | ms each, with decoding |\n|---|---|---|")
    with TemporaryDirectory() as temporary:
        image_sets = {"scenes, PNG": [str(Path(temporary) / f"{number}.png") for number in range(arguments.planted)]}
        for number, path in enumerate(image_sets["scenes, PNG"]):
            draw_image(draw_row_scene(0, "pretrain", number)).save(path)
        if arguments.photos:
            image_sets["photos, JPEG"] = [str(path) for path in sorted(arguments.photos.rglob("*.jpg"))]
        for spec in [{NEAR: {}}, *([{EMBEDDING: {"hf_clip": arguments.clip}}] if arguments.clip else [])]:
            [operator] = load_ops([spec])
            for name, paths in image_sets.items():
                operator.sign(paths[:10], None)
                start_time = perf_counter()
                for start in range(0, len(paths), 128):
                    operator.sign(paths[start : start + 128], None)
                milliseconds = 1000 * (perf_counter() - start_time) / len(paths)
                print(f"| {operator._name} | {len(paths)} {name} | {milliseconds:.2f} |", flush=True)


def random_rows(rows: int, dimensions: int | None) -> Iterator[dict]:
    """Yield measured rows; a tenth is near the row just before it."""
    rng, last = np.random.default_rng(0), None
    centers = rng.standard_normal((1000, dimensions)) if dimensions else None
    for number in range(rows):
        repeats = number % 10 == 9
        if dimensions is None:
            signature = last.copy() if repeats else rng.integers(0, 256, 80, dtype=np.uint8)
            signature[0] ^= 1 if repeats else 0
        else:
            spread = rng.standard_normal(dimensions)
            vector = last + 0.1 * spread if repeats else centers[rng.integers(len(centers))] + spread
            signature = (vector / np.linalg.norm(vector)).astype(np.float16)
            last = vector
        last = signature if dimensions is None else last
        yield make_row(signature.tobytes())


def read_memory_mib() -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def search(rows: int, dimensions: int | None) -> None:
    """Search in this process and print one row of the table."""
    [operator] = load_ops([{EMBEDDING: {"hf_clip": ""}} if dimensions else {NEAR: {}}])
    peak = [read_memory_mib()]

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], read_memory_mib())
            sleep(0.02)

    start = perf_counter()
    for _ in random_rows(rows, dimensions):
        pass
    making_seconds = perf_counter() - start  # making the rows is not part of the search
    threading.Thread(target=watch, daemon=True).start()
    with TemporaryDirectory() as folder:
        start = perf_counter()
        copies = operator.decide(random_rows(rows, dimensions), Path(folder))
        seconds = perf_counter() - start - making_seconds
    dropped = int((copies.copy_of >= 0).sum())
    print(f"| {rows} | {seconds:.1f} | {1e6 * seconds / rows:.0f} | {peak[0]:.0f} | {dropped} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["found", "hash", "search"])
    parser.add_argument("clip", nargs="?", help="folder of a CLIP, for the deduplicator that uses one")
    parser.add_argument("--photos", type=Path, help="folder with JPEG files")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000])
    parser.add_argument("--planted", type=int, default=2000, help="images that get near-duplicates")
    parser.add_argument("--dimensions", type=int, help="dimensions of vectors; without it, hashes are searched")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "found":
        report_found(arguments)
    elif arguments.what == "hash":
        report_hashing(arguments)
    elif arguments.here:
        search(arguments.rows[0], arguments.dimensions)
    else:
        print("| rows | s | µs a row | MiB | copies found |\n|---|---|---|---|---|", flush=True)
        further_flags = ["--dimensions", str(arguments.dimensions)] if arguments.dimensions else []
        for rows in arguments.rows:
            command = [sys.executable, __file__, "search", "--here", "--rows", str(rows), *further_flags]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
