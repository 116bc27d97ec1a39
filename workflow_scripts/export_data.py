r"""Export the pairs that an experiment trains on, with their images, scores and a dataset card.

    python workflow_scripts/export_data.py --config results/shapes/tiny/dj_synth/export/config.yaml --format parquet \
        --pairs results/shapes/tiny/dj_synth/synthesize/synthesized.jsonl \
        --dataset results/datasets/shapes/summary.json \
        --stages results/shapes/tiny/baseline/filter results/shapes/tiny/dj_synth/synthesize \
        --output-dir results/shapes/tiny/dj_synth/export/parquet

The folder is complete or missing.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from dj2mgm.cli.command_line import command_line, make_parser
from dj2mgm.data.formats import extract_caption
from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.errors import InputError, pluralize, quote_value
from dj2mgm.features.publish.exports import TEXT_FIELDS, WRITERS, Sample, build_export_card
from dj2mgm.features.publish.publish_settings import ExportSettings
from dj2mgm.records import read_recipe_summary
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_json, read_jsonl, replace_folder, write_text
from dj2mgm.storage.streaming import DiskMap


@command_line
def main() -> None:
    parser = make_parser(__doc__)
    for flag in ("--config", "--pairs", "--dataset", "--output-dir"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--format", choices=WRITERS, required=True)
    parser.add_argument(
        "--stages", type=Path, nargs="+", required=True, help="folders of the filters, in order of processing"
    )
    args = parser.parse_args()
    settings = load_settings(ExportSettings, args.config)
    names, scores = read_row_statistics([stage / "stats.jsonl" for stage in args.stages])
    summaries = {stage.name: read_recipe_summary(stage / "summary.json") for stage in args.stages}
    rewritten_counts: Counter = Counter()
    rows = count_rewritten(read_samples(args.pairs, settings.image_root, names, scores), rewritten_counts)
    with replace_folder(args.output_dir) as folder:
        count = WRITERS[args.format](rows, folder)
        rewritten = rewritten_counts[True]
        card = build_export_card(settings, args.format, count, rewritten, names, read_json(args.dataset), summaries)
        write_text(folder / "README.md", card)
    print(f"{pluralize(count, 'pair')} in {args.output_dir}", flush=True)


def read_samples(pairs: Path, root: str, names: list[str], scores: DiskMap) -> Iterator[Sample]:
    """Yield the rows of an export with their images; `names` are the exported statistics."""
    for row in read_jsonl(pairs):
        try:
            image = locate_image(root, row["images"][0])
        except BadImageError as error:
            raise InputError(f"{pairs}: row {quote_value(row['id'])}: {error}; run the filters again") from None
        values = json.loads(scores.get(row["id"]) or "{}")
        yield Sample(
            id=row["id"],
            image=image,
            caption=extract_caption(row["text"]),
            question=row.get("question", ""),
            original_caption=find_original_caption(row),
            source=row["source"] if isinstance(row.get("source"), str) else "",
            scores={name: values.get(name) for name in names},
        )


def count_rewritten(rows: Iterable[Sample], rewritten_counts: Counter) -> Iterator[Sample]:
    for sample in rows:
        rewritten_counts[bool(sample.original_caption)] += 1
        yield sample


def find_original_caption(row: dict) -> str:
    """Return the caption before synthesis; empty if synthesis kept it."""
    record = row.get("recaption")
    return record["original"] if isinstance(record, dict) and isinstance(record.get("original"), str) else ""


def read_row_statistics(files: list[Path]) -> tuple[list[str], DiskMap]:
    """Return the names of all numeric statistics, and each row's values as JSON by its id; later files win."""
    names: dict[str, None] = {}
    scores = DiskMap()
    for file in files:
        for row in read_jsonl(file):
            values = (_read_number(item) for item in row.items() if item[0] != "id")
            numbers = {name: value for name, value in values if value is not None}
            names |= dict.fromkeys(numbers)
            earlier_numbers = json.loads(scores.get(row["id"]) or "{}")
            scores.replace([(row["id"], json.dumps(earlier_numbers | numbers))])
    return list(names), scores


def _read_number(item: tuple[str, object]) -> tuple[str, float | None]:
    """Return a statistic's name and value; a list with one value per image counts if it has a single value."""
    name, value = item
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return f"{name}_statistic" if name in (*TEXT_FIELDS, "image") else name, float(value) if is_number else None


if __name__ == "__main__":
    main()
