"""Print the sentences of a dataset's check, or fail with its problem.

python workflow_scripts/print_check.py --text results/datasets/shapes/check/check.txt
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.errors import InputError
from dj2mgm.features.check import ERROR


@command_line
def main() -> None:
    text = parse_paths(__doc__, "--text").text.read_text(encoding="utf-8").rstrip("\n")
    if text.startswith(ERROR):
        raise InputError(text.removeprefix(ERROR))
    print(text)


if __name__ == "__main__":
    main()
