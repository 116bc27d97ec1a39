r"""Check a dataset before a training: what was read, what is left out, and what a comparison can show.

    python workflow_scripts/check_dataset.py --config results/datasets/shapes/check/config.yaml \
        --dataset results/datasets/shapes --output-dir results/datasets/shapes/check

Writes check.html and check.txt. If the data cannot be used as they are, check.txt has only a line that begins with
`error:`, with which the rule `check` fails.
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.features.check.check_page import write_check_page, write_console_text
from dj2mgm.features.check.dataset_check import CheckSettings, check_dataset
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import write_text

PAGE, CONSOLE_TEXT = "check.html", "check.txt"


@command_line
def main() -> None:
    args = parse_paths(__doc__, "--config", "--dataset", "--output-dir")
    check = check_dataset(load_settings(CheckSettings, args.config), args.dataset)
    write_check_page(check, args.output_dir / PAGE)
    write_text(args.output_dir / CONSOLE_TEXT, write_console_text(check, args.output_dir / PAGE))


if __name__ == "__main__":
    main()
