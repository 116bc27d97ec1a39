"""Writes the pairs of a run as a dataset for Hugging Face's datasets, with a card whose numbers are the record's.

    python workflow_scripts/publish_dataset.py --config results/published/dj_synth/config.yaml \\
        --exported results/dj_synth/export/parquet --output-dir results/published/dj_synth/dataset

The folder is complete or not there at all. Its files are links to those of the export, where the file system has links.
"""

import os
import shutil

from huggingface_hub import DatasetCard

from dj2mgm.command_line import command_line, path_arguments
from dj2mgm.files import read_yaml, replace_folder
from dj2mgm.plain_files import check_tree
from dj2mgm.publishing.check import check_card
from dj2mgm.publishing.dataset_card import dataset_card
from dj2mgm.publishing.records import Records, copy_records, of_dataset, room_on_disk


@command_line
def main() -> None:
    args = path_arguments(__doc__, "--config", "--exported", "--output-dir")
    settings = read_yaml(args.config)
    records = of_dataset(settings["records"])
    with room_on_disk(args.output_dir), replace_folder(args.output_dir) as folder:
        copy_records(records, folder, "dataset", settings)
        check_tree(args.exported / "data")
        shutil.copytree(args.exported / "data", folder / "data", copy_function=link_or_copy)
        exported = DatasetCard.load(args.exported / "README.md", ignore_metadata_errors=True)
        dataset_card(settings, Records(folder), exported).save(folder / "README.md")
        count = check_card(folder, records)
    print(f"{args.output_dir}: {count} figures of its card are those of the record", flush=True)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


if __name__ == "__main__":
    main()
