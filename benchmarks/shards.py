"""Compare images in WebDataset shards and in single files: speed of finding, reading and decoding, and memory.

    python benchmarks/shards.py                          # 20 000 images of 256 pixels in 100 shards
    python benchmarks/shards.py --rows 1000000 --side 16 # a dataset's rows and index; takes about an hour

`read` locates and decodes images like filters and the loader, in order and at random. Turns of both kinds alternate.
"""

import argparse
import io
import json
import random
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SCRIPTS = PROJECT / "workflow_scripts"
sys.path[:0] = [str(SCRIPTS)]

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

from dj2mgm.data.formats import build_dj_text  # noqa: E402
from dj2mgm.data.images import load_image, locate_image  # noqa: E402
from dj2mgm.storage.files import read_jsonl, write_jsonl, write_yaml  # noqa: E402

SHARDS = 100
TURNS = 50
# VmHWM, because ru_maxrss starts with the memory of this process when it forked
MAKE = "import make_dataset; make_dataset.main(); print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"


def draw_jpeg(number: int, side: int) -> bytes:
    """Return a smooth image, which has about as many bytes as a photo of its size."""
    grid = np.random.default_rng(number).integers(0, 256, (side // 8 or 1, side // 8 or 1, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(grid).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_inputs(folder: Path, rows: int, side: int) -> None:
    """Write `loose/` with a Data-Juicer file, and `tar/` with shards, of the same images and captions."""
    images = [draw_jpeg(number, side) for number in range(min(rows, 500))]
    (folder / "tar").mkdir()
    per_shard = -(-rows // SHARDS)

    def write_pairs():
        for number in range(rows):
            path = Path("images", f"{number // 1000:04d}", f"{number:07d}.jpg")
            if number % 1000 == 0:
                (folder / "loose" / path).parent.mkdir(parents=True)
            content = images[number % len(images)] + number.to_bytes(4, "big")  # no two have the same bytes
            (folder / "loose" / path).write_bytes(content)
            if number % per_shard == 0:
                write_pairs.tar = tarfile.open(folder / f"tar/{number // per_shard:05d}.tar", "w")
            for suffix, data in ((".jpg", content), (".txt", f"caption {number}".encode())):
                info = tarfile.TarInfo(f"{number:07d}{suffix}")
                info.size = len(data)
                write_pairs.tar.addfile(info, io.BytesIO(data))
            if number % per_shard == per_shard - 1 or number == rows - 1:
                write_pairs.tar.close()
            yield {"id": f"{number:07d}", "text": build_dj_text(f"caption {number}"), "images": [str(path)]}

    write_jsonl(folder / "loose/rows.jsonl", write_pairs())


def make_dataset(folder: Path, name: str, source: dict, report) -> list[tuple[Path, str]]:
    """Make the dataset of one source and return its images in the form that later stages read."""
    from dj2mgm.dataset_resolution.experiment_dataset import resolve_dataset

    write_yaml(folder / f"config/datasets/{name}.yaml", {"sources": {name: source}})
    output = folder / "results/datasets" / name
    write_yaml(output / "config.yaml", resolve_dataset(name).settings.file_content())
    start = time.monotonic()
    flags = ["--config", output / "config.yaml", "--output-dir", output]
    process = subprocess.run(
        [sys.executable, "-c", MAKE, *flags], cwd=SCRIPTS, check=True, capture_output=True, text=True
    )
    report(make=name, seconds=round(time.monotonic() - start, 1), peak_mib=int(process.stdout.split()[-1]) // 1024)
    return [(output / "sources.json", row["images"][0]) for row in read_jsonl(output / "pretrain.jsonl")]


def measure_reading(images: list[tuple[Path, str]]) -> float:
    """Return images per second of CPU time, which does not depend on other programs."""
    start = time.process_time()
    for root, relative in images:
        load_image(locate_image(root, relative))
    return len(images) / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=256, help="pixels")
    arguments = parser.parse_args()

    def report(**row) -> None:
        print(json.dumps({"rows": arguments.rows, "side": arguments.side} | row), flush=True)

    import os

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder, arguments.rows, arguments.side)
        os.chdir(folder)
        loose_images = make_dataset(
            folder, "loose", {"format": "data_juicer", "path": str(folder / "loose/rows.jsonl")}, report
        )
        shard_images = make_dataset(folder, "shards", {"format": "webdataset", "path": str(folder / "tar")}, report)
        sample = random.Random(0).sample(range(len(loose_images)), min(len(loose_images), 20_000))
        for order, numbers in (("in order", sorted(sample)), ("at random", sample)):
            rates: dict[str, list[float]] = {"loose": [], "shards": []}
            for turn in range(TURNS):
                turn_numbers = numbers[turn::TURNS]
                for kind, images in (("loose", loose_images), ("shards", shard_images)):
                    rates[kind].append(measure_reading([images[number] for number in turn_numbers]))
            medians = {kind: round(float(np.median(values)), 1) for kind, values in rates.items()}
            report(read=order, images_per_second=medians, share=round(medians["shards"] / medians["loose"], 3))
        report(own_peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        os.chdir(PROJECT)


if __name__ == "__main__":
    main()
