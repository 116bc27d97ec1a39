r"""Write the pairs of a run as a dataset for Hugging Face datasets, with a card from the record.

    python workflow_scripts/publish_dataset.py --config results/published/shapes/tiny/dj_synth/config.yaml \
        --exported results/shapes/tiny/dj_synth/export/parquet \
        --output-dir results/published/shapes/tiny/dj_synth/dataset

The folder is complete or missing. Its files are hard links to the export's files if the file system allows it.
"""

import os
import shutil

from huggingface_hub import DatasetCard

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.features.publish.cards import build_dataset_card
from dj2mgm.features.publish.publication import (
    RunRecord,
    copy_records,
    refuse_unlearned,
    reporting_full_disk,
    select_dataset_records,
)
from dj2mgm.features.publish.publish_settings import PublishSettings
from dj2mgm.records import VERDICT_FILE
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import check_tree, replace_folder


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--exported", "--output-dir")
    settings = load_settings(PublishSettings, args.config)
    refuse_unlearned(settings.experiment, settings.records[VERDICT_FILE], settings.allow_unlearned)
    records = select_dataset_records(settings.records)
    with reporting_full_disk(args.output_dir), replace_folder(args.output_dir) as folder:
        copy_records(records, folder, "dataset", settings)
        check_tree(args.exported / "data")
        shutil.copytree(args.exported / "data", folder / "data", copy_function=link_or_copy)
        exported = DatasetCard.load(args.exported / "README.md", ignore_metadata_errors=True)
        build_dataset_card(settings, RunRecord(folder), exported).save(folder / "README.md")
    print(f"wrote {args.output_dir}", flush=True)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


if __name__ == "__main__":
    main()
