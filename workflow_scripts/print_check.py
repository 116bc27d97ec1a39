"""Print the sentences of a dataset's check, and fail with its problem if there is one.

python workflow_scripts/print_check.py --text results/datasets/shapes/check/check.txt
"""

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.errors import InputError
from dj2mgm.features.check import ERROR


@command_line
def main() -> None:
    sentences, _, problem = parse_paths(__doc__, "--text").text.read_text(encoding="utf-8").partition(f"\n{ERROR}")
    print(sentences.rstrip("\n"))
    if problem:
        raise InputError(problem.rstrip("\n"))


if __name__ == "__main__":
    main()
