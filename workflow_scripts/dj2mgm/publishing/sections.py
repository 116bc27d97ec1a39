"""Sections that the cards of models and datasets share: sources, processing, reproduction.

Numbers are figures of the run's record (run_record.py).
"""

import yaml

from dj2mgm.data.export_card import code
from dj2mgm.publishing.run_record import RunRecord


def sources(records: RunRecord, licenses: dict[str, str | None], dataset: str) -> list[str]:
    """Return the table of sources.

    Args:
        records: the record of the run.
        licenses: licenses by source or by split.
        dataset: name of the dataset.
    """
    lines = [f"The dataset is {code(dataset)}.", "", "| source | rows | license |", "|---|---|---|"]
    read = records.files["dataset/summary.json"].get("sources", {})
    for name, license in licenses.items():
        place = ("sources", name, "rows") if name in read else (name or "pretrain",)
        rows = records.figure("dataset/summary.json", *place)
        lines.append(f"| {code(name or dataset)} | {rows} | {code(license or '')} |")
    return lines


def row_counts(records: RunRecord, trained_on: bool) -> list[str]:
    """Return the table of rows in, dropped, rewritten and kept for each operator.

    Args:
        records: the record of the run.
        trained_on: whether to add the training files.
    """
    lines = ["| step | rows in | dropped | rewritten | kept |", "|---|---|---|---|---|"]
    for stage, number, step in records.operators():
        counts = [
            records.figure(f"{stage}/summary.json", "operators", number, key) if key in step else ""
            for key in ("rows_in", "dropped", "changed", "rows_out")
        ]
        lines.append(f"| {code(step['operator'])} | {' | '.join(counts)} |")
    written = records.files.get("jsonl/summary.json", {}) if trained_on else {}
    for split in ("pretrain", "finetune"):
        if written.get(split, {}).get("rows_out"):
            rows_in, rows_out = (records.figure("jsonl/summary.json", split, key) for key in ("rows_in", "rows_out"))
            dropped = ", ".join(
                f"{records.figure('jsonl/summary.json', split, 'dropped', reason)} {reason.replace('_', ' ')}"
                for reason in written[split]["dropped"]
            )
            lines.append(f"| training file of {code(split)} | {rows_in} | {dropped or 'none'} | | {rows_out} |")
    return lines


def recipes(settings: dict) -> list[str]:
    lines = []
    for stage, recipe in settings["recipes"].items():
        if recipe:
            lines += [
                f"The recipe of `{stage}`:",
                "",
                "```yaml",
                yaml.safe_dump(recipe, sort_keys=False).strip(),
                "```",
            ]
            lines.append("")
    return lines


def command(settings: dict) -> list[str]:
    return [
        "```bash",
        f"snakemake --cores 1 {settings['experiment']} --config model={settings['model']} "
        f"dataset='{settings['dataset']}'",
        "```",
    ]


def section(title: str, *parts: list[str]) -> list[str]:
    lines = [f"## {title}", ""]
    for part in parts:
        lines += [*part, ""]
    return lines
