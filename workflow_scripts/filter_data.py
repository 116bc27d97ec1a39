"""Filter a Data-Juicer jsonl with a Data-Juicer recipe; every dropped row is named, with its operator and stats.

    python workflow_scripts/filter_data.py --config results/baseline/filter/config.yaml \
        --data results/datasets/shapes/pretrain.jsonl --output-dir results/baseline/filter

Writes filtered.jsonl, stats.jsonl, dropped.jsonl and summary.json.
"""

from command_line import command_line, path_arguments
from juicer.library import end_workers_with_this_process, forbid_installers
from juicer.settings import read_settings
from juicer.stage import configure_log, filter_dataset


@command_line
def main() -> None:
    arguments = path_arguments(__doc__, "--config", "--data", "--output-dir")
    configure_log()
    forbid_installers()
    end_workers_with_this_process()
    filter_dataset(read_settings(arguments.config), arguments.data, arguments.output_dir)


if __name__ == "__main__":
    main()
