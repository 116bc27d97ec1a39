r"""Count the words of the training captions.

    python workflow_scripts/count_words.py --data results/shapes/tiny/baseline/jsonl/pretrain.jsonl \
        --output-dir results/shapes/tiny/baseline/count_words

Writes words.json, {word: count}, the most frequent first.
"""

from collections import Counter

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.storage.files import read_jsonl, write_json


@command_line
def main() -> None:
    paths = parse_paths(__doc__, "--data", "--output-dir")
    counts: Counter[str] = Counter()
    for row in read_jsonl(paths.data):
        counts.update(row["conversations"][-1]["value"].split())
    write_json(paths.output_dir / "words.json", dict(counts.most_common()))


if __name__ == "__main__":
    main()
