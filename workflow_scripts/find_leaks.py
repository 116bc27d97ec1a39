r"""Find evaluation images, also re-encoded or scaled, and benchmarks' questions in the training data.

    python workflow_scripts/find_leaks.py --config results/datasets/photos/leaks/config.yaml \
        --dataset results/datasets/photos --output-dir results/datasets/photos/leaks

The images of pairs and instructions are compared with the images of the held-out split, of the configured benchmarks
and of folders. The texts of instructions are compared with the benchmarks' questions
(features/challenge/challenge_questions.py). Writes leaks.jsonl, with a row for each copied image and each instruction
with a benchmark's question, and summary.json.
"""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.data.formats import list_images
from dj2mgm.evaluation.leak_search import (
    collect_folder_images,
    collect_held_out_images,
    count_leaks,
    find_leaks,
    read_references,
)
from dj2mgm.script_modules import import_feature_modules
from dj2mgm.settings.evaluation import LeakSettings
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_jsonl, write_json, write_jsonl
from dj2mgm.storage.streaming import read_json_list


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--config", "--dataset", "--output-dir")
    settings = load_settings(LeakSettings, paths.config)
    processes = settings.cpu_threads or len(os.sched_getaffinity(0))
    images = collect_held_out_images(list(read_jsonl(paths.dataset / "evaluation.jsonl")), settings.evaluation_images)
    searches = [module.QuestionSearch(settings.benchmarks) for module in import_feature_modules("questions")]
    for search in searches:
        images |= search.images
    for folder in settings.folders:
        images |= collect_folder_images(Path(folder))
    references = read_references(images, processes)
    splits = {"pretrain": paths.dataset / "pretrain.jsonl", "finetune": paths.dataset / "finetune.json"}
    image_leaks = (
        {"split": split} | leak
        for split, file in splits.items()
        for leak in find_leaks(
            chain.from_iterable(read_image_lists(split, file)),
            getattr(settings, f"{split}_images"),
            references,
            processes,
        )
    )
    text_leaks = (search.find_leaks(read_json_list(splits["finetune"])) for search in searches)
    write_jsonl(paths.output_dir / "leaks.jsonl", chain(image_leaks, *text_leaks))
    rows = ((split, images) for split, file in splits.items() for images in read_image_lists(split, file))
    leaks = read_jsonl(paths.output_dir / "leaks.jsonl")
    counts = count_leaks(references, (leak for leak in leaks if "image" in leak), rows)
    for source, count in counts.items():
        print(f"{source}: {count['leaked']} of {count['references']} images are in the training data", flush=True)
    for search in searches:
        leaks = read_jsonl(paths.output_dir / "leaks.jsonl")
        for source, count in search.count_leaks(leak for leak in leaks if "row" in leak).items():
            print(
                f"{source}: {count['leaked_texts']} of {count['texts']} questions are in the training data", flush=True
            )
            counts[source] |= count
    write_json(paths.output_dir / "summary.json", counts)


def read_image_lists(split: str, file: Path) -> Iterator[list[str]]:
    """Yield the images of each row."""
    return (
        (row["images"] for row in read_jsonl(file)) if split == "pretrain" else map(list_images, read_json_list(file))
    )


if __name__ == "__main__":
    main()
