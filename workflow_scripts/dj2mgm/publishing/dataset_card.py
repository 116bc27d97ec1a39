"""The card of published pairs, from the record of their run and the export's own card."""

from huggingface_hub import DatasetCard, DatasetCardData

from dj2mgm.config.licenses import card_license
from dj2mgm.publishing.records import FOLDER, Records
from dj2mgm.publishing.sections import code, command, flow, recipes, section, sources

USE = """```python
from datasets import load_dataset

rows = load_dataset(".", split="train")  # this folder, or the name of this repository
```"""


def dataset_card(settings: dict, records: Records, exported: DatasetCard) -> DatasetCard:
    """
    Args:
        settings: config/publishing.py.
        exported: of the same pairs (data/card.py).
    """
    data = DatasetCardData(
        **card_license(*(license for name, license in settings["licenses"].items() if _has_pairs(name, records))),
        task_categories=["image-to-text"],
        size_categories=exported.data.size_categories,
        tags=["dj2mgm"],
        configs=exported.data.configs,
    )
    last = next(stage for stage in ("synthesize", "filter") if f"{stage}/summary.json" in records.files)
    count = records.figure(f"{last}/summary.json", "rows_kept")
    rewritten = [
        "- Where `original_caption` is not empty, a model has written the caption; it may state what is not there.",
    ]
    lines = [
        f"# {code(settings['dataset'])}, {code(settings['experiment'])}",
        "",
        f"{count} image–caption pairs, as dj2mgm left them. Every number is a link to its place in `{FOLDER}/`.",
        "",
        *section("Use", [USE]),
        *section("Where the pairs come from", sources(records, settings["licenses"], settings["dataset"])),
        *section("What became of them", flow(records, trained_on=False)),
        *section("Columns", [_section(exported.text, "Columns")]),
        *section("How to reproduce", command(settings), recipes(settings)),
        *section(
            "Limits",
            ["- Images and captions are others' work where a source is; its license holds.", *rewritten],
        ),
    ]
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines))


def _has_pairs(name: str, records: Records) -> bool:
    """Whether a source, or a split, is of the pairs; instructions are not published."""
    read = records.files["dataset/summary.json"].get("sources", {})
    return (read[name]["split"] if name in read else name) != "finetune"


def _section(text: str, title: str) -> str:
    """The text below a title."""
    return next(
        (part.partition("\n")[2].strip() for part in text.split("\n## ")[1:] if part.startswith(f"{title}\n")), ""
    )
