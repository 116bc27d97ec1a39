r"""Generate the embedded dataset, or validate and complete a user's own dataset of one or several sources.

    python workflow_scripts/make_dataset.py --config results/datasets/shapes/config.yaml \
        --output-dir results/datasets/shapes

Writes pretrain.jsonl (Data-Juicer), finetune.json (LLaVA), evaluation.jsonl and summary.json.
"""

import shutil

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.cli.messages import note
from dj2mgm.data.merged_sources import write_merged_sources
from dj2mgm.data.shapes import assign_faults, count_faults, write_shapes
from dj2mgm.data.user_dataset import write_user_dataset
from dj2mgm.settings.dataset_files import (
    CHECK_FILES,
    FilesDataset,
    ReadableSources,
    ShapesDataset,
    load_dataset_settings,
)
from dj2mgm.storage.files import discard_files, write_json

ROWS = {"pretrain": "pairs", "finetune": "instructions"}  # by split


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--output-dir")
    discard_files(args.output_dir, CHECK_FILES)  # they show earlier data, also if these cannot be read
    match load_dataset_settings(args.config):
        case ShapesDataset() as settings:
            summary = write_shapes(settings, args.output_dir)
            summary["planted"] = count_faults(assign_faults(settings))
        case ReadableSources() as settings:
            working_folder = args.output_dir / ".sources"  # a fixed name, so that a killed run leaves nothing behind
            shutil.rmtree(working_folder, ignore_errors=True)
            working_folder.mkdir(parents=True)
            merged, source_records = write_merged_sources(settings, args.output_dir, working_folder)
            summary = write_user_dataset(merged, args.output_dir) | {"sources": source_records}
            shutil.rmtree(working_folder)
        case FilesDataset() as settings:
            summary = write_user_dataset(settings, args.output_dir)
    print(", ".join(f"{count:,} {split}" for split, count in summary.items() if isinstance(count, int)), flush=True)
    for split, count in summary.get("left_out", {}).items():
        copies = summary["left_out_copies"].get(split, 0)
        copies_note = f" ({copies:,} of them under another name)" if copies else ""
        note(
            f"{count:,} of {count + summary[split]:,} {ROWS[split]} are kept out of the training{copies_note}, because "
            "the model is scored on their images (evaluation.jsonl)"
        )
    write_json(args.output_dir / "summary.json", summary)


if __name__ == "__main__":
    main()
