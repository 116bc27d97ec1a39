"""Filter a Data-Juicer jsonl with a Data-Juicer recipe; every dropped row is named, with its operator and stats.

    python workflow_scripts/filter_data.py --config results/baseline/filter/config.yaml \
        --data results/datasets/shapes/pretrain.jsonl --output-dir results/baseline/filter

Writes filtered.jsonl, stats.jsonl, dropped.jsonl and summary.json.
"""

import argparse
from pathlib import Path

from errors import command_line
from juicer.library import end_workers_with_this_process, forbid_installers
from juicer.settings import read_settings
from juicer.stage import configure_log, filter_dataset


@command_line
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="resolved settings: image_root, processes, recipe")
    parser.add_argument("--data", type=Path, required=True, help="rows with id, text and images")
    parser.add_argument("--output-dir", type=Path, required=True)
    arguments = parser.parse_args()
    configure_log()
    forbid_installers()
    end_workers_with_this_process()
    filter_dataset(read_settings(arguments.config), arguments.data, arguments.output_dir)


if __name__ == "__main__":
    main()
