"""Card of published image–caption pairs, from the record of their run and the card of the export."""

from huggingface_hub import DatasetCard, DatasetCardData

from dj2mgm.features.publish.export_card import format_inline_code
from dj2mgm.features.publish.publish_settings import PublishSettings, build_license_keys
from dj2mgm.features.publish.run_record import (
    RECORDS,
    RunRecord,
    build_license_table,
    build_row_count_table,
    format_command,
    format_recipes,
    format_section,
)

LOADING_SECTION = """```python
from datasets import load_dataset

rows = load_dataset(".", split="train")  # this folder, or the name of this repository
```"""


def build_dataset_card(settings: PublishSettings, records: RunRecord, exported: DatasetCard) -> DatasetCard:
    """Return the card of a published dataset (publication.py), from the card of the export of the same pairs."""
    data = DatasetCardData(
        **build_license_keys(*(license for name, license in settings.licenses.items() if _has_pairs(name, records))),
        task_categories=["image-to-text"],
        size_categories=exported.data.size_categories,
        tags=["dj2mgm"],
        configs=exported.data.configs,
    )
    last_stage = records.stages_of_pairs[-1]
    count = records.link_figure(f"{last_stage}/summary.json", "rows_kept")
    rewriting_note = [
        "- If `original_caption` is not empty, a model wrote the caption; it may mention things that are not in the "
        "image.",
    ]
    lines = [
        f"# {format_inline_code(settings.dataset)}, {format_inline_code(settings.experiment)}",
        "",
        f"{count} image–caption pairs, processed by dj2mgm. Every number is a link to its place in `{RECORDS}/`.",
        "",
        *format_section("Use", [LOADING_SECTION]),
        *format_section("Sources", build_license_table(records, settings.licenses, settings.dataset)),
        *format_section("Processing", build_row_count_table(records, trained_on=False)),
        *format_section("Columns", [_find_section(exported.text, "Columns")]),
        *format_section("How to reproduce", format_command(settings), format_recipes(settings)),
        *format_section(
            "Limits",
            ["- Images and captions of a source remain under its license.", *rewriting_note],
        ),
    ]
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines))


def _has_pairs(name: str, records: RunRecord) -> bool:
    """Return whether a source or split contributes to the published pairs; instructions are not published."""
    source_summaries = records.files["dataset/summary.json"].get("sources", {})
    return (source_summaries[name]["split"] if name in source_summaries else name) != "finetune"


def _find_section(text: str, title: str) -> str:
    return next(
        (part.partition("\n")[2].strip() for part in text.split("\n## ")[1:] if part.startswith(f"{title}\n")), ""
    )
