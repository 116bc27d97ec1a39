"""Settings of exports and publications, and the record of a run in the folder of a card, which its figures cite.

A figure in a card is a Markdown link with the place of its value as title, a JSON pointer (RFC 6901):
`[75.5 %](records/comparison.csv "/dj_synth/finetune~1own/vqa_accuracy/value")`.

Cards of models and datasets share some sections with such figures: sources, rows, recipes. A model that has learned
nothing according to the record is refused.
"""

import csv
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import yaml
from safetensors import SafetensorError

from dj2mgm.dataset_resolution.experiment_dataset import DATASETS_FOLDER
from dj2mgm.errors import InputError
from dj2mgm.features.publish.publish_settings import ExportSettings, PublishSettings, check_licenses, format_inline_code
from dj2mgm.recipes.catalogue import INSTRUCTIONS
from dj2mgm.records import VERDICT_FILE, RecipeContents, read_verdicts
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.command_messages import PlannedJob, ReadingTarget
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.runs.pages import locate_page_folder
from dj2mgm.runs.stages import Run
from dj2mgm.settings.string_formats import has_format
from dj2mgm.storage.files import copy_plain, read_json, read_yaml, write_json

RECORDS = "records"
MARKER = "experiment.json"  # marks a repository that was published from here
MAX_RECORD_BYTES = 1 << 30
UNIT_FACTORS = {"%": 100, "points": 100}  # factors by which a share is multiplied
READING_TARGETS = {
    "publish": ReadingTarget(r"results/published/(.+)/(?:model|dataset)(?:\.pushed\.json|/README\.md)"),
    "export": ReadingTarget(r"results/(.+)/export/[^/]+/README\.md", selects_rows=True),
}


class RunRecord:
    """Files in the `records/` folder of a card."""

    def __init__(self, folder: Path):
        self.folder = folder / RECORDS

    @cached_property
    def files(self) -> dict[str, dict]:
        """Contents by file name; a table is `{experiment: {group: {metric: row}}}`."""
        contents = {}
        for path in sorted(self.folder.rglob("*.*")):
            read = {".json": read_json, ".yaml": read_yaml, ".csv": _read_table}.get(path.suffix)
            if read:
                contents[str(path.relative_to(self.folder))] = read(path)
        return contents

    def get_value(self, file: str, pointer: str) -> object:
        """Return the value at a JSON pointer of a file in `records/`."""
        files = self.files  # raises its own error for a damaged file
        try:
            value: object = files[file]
            for part in pointer.split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError, InputError):
            raise InputError(f"{self.folder / file} has no {pointer}; publish again") from None
        return value

    def link_figure(self, file: str, *path: object, unit: str = "") -> str:
        """Return the value at a path as a link to it; `unit` is one of `UNIT_FACTORS` for a share."""
        json_pointer = make_pointer(*path)
        return f'[{format_value(self.get_value(file, json_pointer), unit)}]({RECORDS}/{file} "{json_pointer}")'

    @property
    def stages_of_pairs(self) -> list[str]:
        """Stages that ran a recipe on pairs, and not on instructions."""
        stages = ("filter", "synthesize")
        summaries = {stage: self.files.get(f"{stage}/summary.json") for stage in stages}
        return [stage for stage, summary in summaries.items() if summary and summary.get("rows") != INSTRUCTIONS]

    def iterate_operators(self, pairs_only: bool) -> Iterator[tuple[str, int, dict]]:
        """Yield stage, number and counts of each operator of filter and synthesis, in the order of processing."""
        for stage in self.stages_of_pairs if pairs_only else ("filter", "synthesize"):
            if summary := self.files.get(f"{stage}/summary.json"):
                yield from ((stage, number, step) for number, step in enumerate(summary["operators"]))


def copy_records(records: dict[str, str], folder: Path, kind: str, settings: PublishSettings) -> None:
    """Copy the run's files, by their names in the copy, below `folder`, with a marker of the published kind."""
    for name, path in records.items():
        target = folder / RECORDS / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_plain(Path(path), Path(path).parent, target, MAX_RECORD_BYTES)
    about = {key: getattr(settings, key) for key in ("experiment", "seed", "model", "dataset")}
    write_json(folder / RECORDS / MARKER, {"published_by": "dj2mgm", "kind": kind} | about)


def select_dataset_records(records: dict[str, str]) -> dict[str, str]:
    """Return the records that describe the processing of the pairs."""
    return {name: path for name, path in records.items() if name.split("/")[0] in ("dataset", "filter", "synthesize")}


@contextmanager
def reporting_full_disk(folder: Path) -> Iterator[None]:
    """Turn a full disk into one sentence about `folder`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise InputError(f"{folder} does not fit on the disk; free space, and run the same command again") from None
        raise


def make_pointer(*path: object) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def format_value(value: object, unit: str = "") -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if unit:
        return f"{UNIT_FACTORS[unit] * value:.1f} {unit}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _read_table(path: Path) -> dict:
    """Read comparison.csv, with numbers as numbers."""
    table: dict[str, dict[str, dict[str, dict]]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            experiment, group, metric = (row.pop(key) for key in ("experiment", "group", "metric"))
            values = {key: _parse_number(text) for key, text in row.items()}
            table.setdefault(experiment, {}).setdefault(group, {})[metric] = values
    return table


def _parse_number(text: str) -> int | float | None:
    if not text:
        return None
    return int(text) if text.isdecimal() else float(text)


def build_license_table(records: RunRecord, licenses: dict[str, str | None], dataset: str) -> list[str]:
    """Return the table of sources, with licenses by source or by split."""
    lines = [f"The dataset is {format_inline_code(dataset)}.", "", "| source | rows | license |", "|---|---|---|"]
    source_summaries = records.files["dataset/summary.json"].get("sources", {})
    for name, license in licenses.items():
        path = ("sources", name, "rows") if name in source_summaries else (name or "pretrain",)
        rows = records.link_figure("dataset/summary.json", *path)
        lines.append(f"| {format_inline_code(name or dataset)} | {rows} | {format_inline_code(license or '')} |")
    return lines


def build_row_count_table(records: RunRecord, trained_on: bool) -> list[str]:
    """Return the table of rows in, dropped, rewritten and kept by operator, and by training file if `trained_on`."""
    lines = ["| step | rows in | dropped | rewritten | kept |", "|---|---|---|---|---|"]
    for stage, number, step in records.iterate_operators(pairs_only=not trained_on):
        counts = [
            records.link_figure(f"{stage}/summary.json", "operators", number, key) if key in step else ""
            for key in ("rows_in", "dropped", "changed", "rows_out")
        ]
        lines.append(f"| {format_inline_code(step['operator'])} | {' | '.join(counts)} |")
    training_files = records.files.get("jsonl/summary.json", {}) if trained_on else {}
    for split in ("pretrain", "finetune"):
        if training_files.get(split, {}).get("rows_out"):
            rows_in, rows_out = (
                records.link_figure("jsonl/summary.json", split, key) for key in ("rows_in", "rows_out")
            )
            dropped = ", ".join(
                f"{records.link_figure('jsonl/summary.json', split, 'dropped', reason)} {reason.replace('_', ' ')}"
                for reason in training_files[split]["dropped"]
            )
            lines.append(
                f"| training file of {format_inline_code(split)} | {rows_in} | {dropped or 'none'} | | {rows_out} |"
            )
    return lines


def format_recipes(settings: PublishSettings) -> list[str]:
    lines = []
    for stage, recipe in settings.recipes:
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


def format_command(settings: PublishSettings) -> list[str]:
    return [
        "```bash",
        f"snakemake {settings.experiment} --config model={settings.model} dataset='{settings.dataset}'",
        "```",
    ]


def format_section(title: str, *parts: list[str]) -> list[str]:
    lines = [f"## {title}", ""]
    for part in parts:
        lines += [*part, ""]
    return lines


def refuse_unlearned(experiment: str, verdict: str | Path, allow_unlearned: bool) -> None:
    """Raise InputError if the model of an experiment has learned nothing, unless that is allowed.

    Args:
        experiment: the experiment whose model is published.
        verdict: the file of the verdicts of its page.
        allow_unlearned: `publish.allow_unlearned`.
    """
    faults = read_verdicts(verdict).get(experiment, {}).get("learning_faults", [])
    if faults and not allow_unlearned:
        reason, remedy = (faults[0][key] for key in ("reason", "remedy"))
        raise InputError(
            f"publish: the model of {experiment} has learned nothing measurable. {reason}. {remedy}, "
            f"then run `snakemake {experiment}` again, or add "
            "`--config publish='{allow_unlearned: true}'` to publish it as it is"
        )


def check_learned(runs: Runs, targets: Iterable[PlannedJob]) -> None:
    """Refuse models that have learned nothing according to their page; publishing makes and checks a missing page."""
    for folder in filter(None, map(READING_TARGETS["publish"].find_folder, targets)):
        experiment = runs.by_folder(folder).experiment
        verdict = Path("results", locate_page_folder(runs, experiment), VERDICT_FILE)
        if verdict.is_file():
            refuse_unlearned(experiment, verdict, runs.shared.publish.allow_unlearned)


def build_export_settings(run: Run) -> ExportSettings:
    """Return the settings of an export of a run's pairs."""
    return ExportSettings(
        experiment=run.experiment,
        dataset=run.dataset.name,
        licenses=run.dataset.settings.licenses,
        image_root=run.dataset.images["pretrain"],
        recipes=RecipeContents(**read_recipes(run.config)),
    )


def build_publish_settings(runs: Runs, run: Run) -> PublishSettings:
    """Return the settings of model, dataset and cards.

    Raises:
        InputError: a license is not stated, or there is no adapter that others could load.
    """
    model, weights = run.config.model, runs.shared.publish.weights
    check_licenses(run.dataset.name, run.dataset.settings)
    file = f"config/models/{model.name if has_format('name', model.name) else '<name>'}.yaml"
    if not model.license:
        raise InputError(
            f"publish: {model.name} has no license, and nothing is published without one; state license in {file}, "
            "as its base models and data allow, which repeats no training"
        )
    bases = model.hub_ids
    if weights == "adapter" and not run.config.finetune.lora:
        raise InputError(f"publish.weights: {run.experiment} trains no adapter (lora: null); choose merged")
    # the language model of an MGM
    adapter_base = bases[0] if bases and not (model.is_mgm and model.whole_model) else None
    if weights == "adapter" and not adapter_base:
        raise InputError(
            f"publish.weights: an adapter needs a base model that other libraries load from the hub, and {file} names "
            "none; state hub_ids there, or choose merged"
        )
    evaluate = run.config.evaluate
    return PublishSettings(
        experiment=run.experiment,
        seed=run.seed,
        dataset=run.dataset.name,
        licenses=run.dataset.settings.licenses,
        model=model.name,
        license=model.license,
        base_models=bases,
        adapter_base=adapter_base,
        mgm=model.is_mgm,
        trained_by_workflow=model.trained_by_workflow,
        weights=weights,
        allow_unlearned=runs.shared.publish.allow_unlearned,
        question=evaluate.caption_question,
        max_new_tokens=evaluate.max_new_tokens,
        recipes=RecipeContents(**read_recipes(run.config)),
        records=list_records(runs, run),
    )


def list_records(runs: Runs, run: Run) -> dict[str, str]:
    """Return the files whose figures the cards state, by their names next to the cards."""
    page = f"results/{locate_page_folder(runs, run.experiment)}"
    records = {
        "dataset/summary.json": f"{DATASETS_FOLDER}/{run.dataset.name}/summary.json",
        "comparison.csv": f"{page}/comparison.csv",
        VERDICT_FILE: f"{page}/{VERDICT_FILE}",
    }
    for stage in ("filter", "synthesize", "jsonl", *run.training_stages):
        names = ("metrics.json", "config.yaml") if stage in run.training_stages else ("summary.json",)
        if stage in run.settings:
            records |= {f"{stage}/{name}": f"{runs.find_stage_folder(run, stage)}/{name}" for name in names}
    return records
