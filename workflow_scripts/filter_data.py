r"""Filter a Data-Juicer jsonl with a Data-Juicer recipe, and list every dropped row with its operator and stats.

    python workflow_scripts/filter_data.py --config results/shapes/tiny/baseline/filter/config.yaml \
        --data results/datasets/shapes/pretrain.jsonl --output-dir results/shapes/tiny/baseline/filter

Writes filtered.jsonl, stats.jsonl, dropped.jsonl and summary.json.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.juicer.patched_data_juicer import prepare_process
from dj2mgm.juicer.recipe_settings import read_filter_settings
from dj2mgm.juicer.run_recipe import FILTERED, configure_log, run_recipe


@command_line
def main() -> None:
    arguments = parse_paths(__doc__, "--config", "--data", "--output-dir")
    configure_log()
    prepare_process()
    run_recipe(read_filter_settings(arguments.config), arguments.data, arguments.output_dir, FILTERED)


if __name__ == "__main__":
    main()
