"""The explorer's tables of a folder of results: a run, evaluated or not yet, or a dataset, analysed or not yet."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dj2mgm.dataset_resolution.experiment_dataset import Dataset
from dj2mgm.errors import InputError
from dj2mgm.evaluation.vqa import is_correct
from dj2mgm.features.explorer.pairs import (
    StageFolder,
    read_analysis,
    read_held_out,
    read_instructions,
    read_plain_table,
    read_stage_table,
)
from dj2mgm.features.explorer.row_table import RowTable, TextFile, build_number_column, build_word_column
from dj2mgm.records import read_image_root
from dj2mgm.reporting.comparison import lower_title
from dj2mgm.runs.experiment_recipes import is_for_instructions
from dj2mgm.runs.stages import STAGE_NOTE, STAGES
from dj2mgm.score_groups import OWN, REFERENCE_CAPTIONS
from dj2mgm.settings.dataset_files import load_dataset_settings
from dj2mgm.storage.files import read_jsonl, read_yaml

RIGHT, WRONG = "right", "wrong"
Values = dict[tuple[str, str], dict[str, float]]


def read_captions(stages: dict[str, Path], evaluation: Path) -> RowTable | None:
    """Return a row per caption of a held-out image, with the image's scores; None if there are no captions."""
    references = {row["id"]: row["captions"][0] for row in read_jsonl(evaluation)}

    def build_lines(row: dict) -> list[list[str]]:
        return [
            [REFERENCE_CAPTIONS, references.get(row["id"], "")],
            [row["model"], row["caption"].strip() or "(empty)"],
        ]

    rows = _read_own_rows(stages["generate"] / "captions.jsonl")
    words = {"model": lambda row: row["model"]}
    return _build_table("captions", "Captions", stages, rows, build_lines, words, _read_scores(stages["evaluate_clip"]))


def read_answers(stages: dict[str, Path], evaluation: Path) -> RowTable | None:
    """Return a row per answer about a held-out image, showing wrong answers first; None if there are no answers."""
    images = {row["id"]: row["image"] for row in read_jsonl(evaluation)}

    def build_lines(row: dict) -> list[list[str]]:
        prediction = row["prediction"].strip() or "(empty)"
        return [["question", row["question"]], ["right answer", row["answer"]], [row["model"], prediction]]

    rows = ({"image": images.get(row["id"], "")} | row for row in _read_own_rows(stages["generate"] / "answers.jsonl"))
    words = {
        "verdict": lambda row: RIGHT if is_correct(row) else WRONG,
        "type": lambda row: row["type"],
        "model": lambda row: row["model"],
    }
    table = _build_table("answers", "Answers", stages, rows, build_lines, words, {})
    if table and WRONG in table.columns["verdict"].words:
        table.first_filter = {"verdict": WRONG}
    return table


def _read_own_rows(file: Path) -> Iterator[dict]:
    return (row for row in read_jsonl(file) if row["images"] == OWN)


def _read_scores(folder: Path) -> Values:
    """Read {(model, image's id): {metric: mean}} of the right images."""
    return {
        (row["model"], row["id"]): {name: total / count for name, (total, count) in row["values"].items() if count}
        for row in read_jsonl(folder / "scores.jsonl")
        if row.get("images") == OWN
    }


def _build_table(
    name: str,
    title: str,
    stages: dict[str, Path],
    rows: Iterable[dict],
    build_lines: Callable[[dict], list[list[str]]],
    words: dict[str, Callable[[dict], str]],
    scores: Values,
) -> RowTable | None:
    """Return a table of rows with their words and the scores of their images; None without a row."""
    texts = TextFile()
    words_by_key: dict[str, list[str | None]] = {key: [] for key in words}
    scores_by_row: list[dict[str, float]] = []
    for row in rows:
        texts.add({"id": row["id"], "lines": build_lines(row), "image": row["image"]})
        scores_by_row.append(scores.get((row["model"], row["image_id"]), {}))
        for key, read_word in words.items():
            words_by_key[key].append(read_word(row))
    texts.finish()
    if not len(texts):
        return None
    columns = {key: build_word_column(key, values) for key, values in words_by_key.items()}
    metrics = dict.fromkeys(metric for row_scores in scores_by_row for metric in row_scores)
    for metric in metrics:
        values = np.array([row_scores.get(metric, np.nan) for row_scores in scores_by_row])
        columns[metric] = build_number_column(lower_title(metric), values)
    root = read_image_root(stages["evaluate_clip"])
    return RowTable(name, title, root, texts, {key: column for key, column in columns.items() if column})


EVALUATED = ("generate", "evaluate_clip")
FOLDER_ADVICE = "name results/<dataset>/<model>/<experiment> or results/datasets/<dataset>"


@dataclass(frozen=True)
class Results:
    """The tables of one folder of results; `origin` has the names of a run's dataset and model."""

    name: str
    tables: list[RowTable]
    origin: str = ""


def read_results(folder: Path) -> Results:
    """Read the tables of a run, results/<dataset>/<model>/<experiment>, or of results/datasets/<dataset>."""
    absolute_folder = Path(os.path.abspath(folder))  # links are not followed, since results may be on another disk
    results = next((parent for parent in absolute_folder.parents if parent.name == "results"), None)
    if results is None or not absolute_folder.is_dir():
        raise InputError(f"{folder} is not a folder of results; {FOLDER_ADVICE}")
    folder = absolute_folder.relative_to(results.parent)
    with chdir(results.parent):  # paths in results are relative to it
        return _read_dataset(folder) if folder.parts[1] == "datasets" else _read_run_folder(folder)


def _read_dataset(folder: Path) -> Results:
    _check_file(folder / "pretrain.jsonl", "make_dataset")
    images = Dataset(folder.name, load_dataset_settings(folder / "config.yaml")).images
    data, analysis = folder / "pretrain.jsonl", folder / "analyze"
    if (analysis / "summary.json").is_file():
        pairs = read_analysis(data, StageFolder("analyze", analysis))
    else:
        pairs = read_plain_table(data, Path(images["pretrain"]))
    return Results(folder.name, [pairs, read_held_out(folder / "evaluation.jsonl", Path(images["evaluation"]))])


def _read_run_folder(folder: Path) -> Results:
    stages = {name: _find_stage_folder(folder / name) for name in STAGES}
    if not any(stage.is_dir() for stage in stages.values()):
        if folder.name in STAGES:
            raise InputError(f"{folder} is one stage of a run; name its parent, {folder.parent}")
        raise InputError(f"{folder} contains no stage of a run; {FOLDER_ADVICE}")
    # reports link to the name of the experiment, without the folders of dataset and model
    is_seed_folder = len(folder.parts) > 2 and re.fullmatch(r"seed-\d+", folder.name)
    parts = folder.parts[-2:] if is_seed_folder else folder.parts[-1:]
    run_stages = {name: stage for name, stage in stages.items() if name == "filter" or stage.is_dir()}
    return read_run("-".join(parts), run_stages)


def read_run(name: str, stages: dict[str, Path]) -> Results:
    """Read the tables of a run.

    Args:
        name: name of the page.
        stages: folders of the run's stages.
    """
    selection_stages = [stage for stage in ("filter", "synthesize") if stage == "filter" or stage in stages]
    for stage in selection_stages:
        _check_file(stages[stage] / STAGES[stage].outputs[-1], STAGES[stage].rule)
    dataset = Path(StageFolder("filter", stages["filter"]).summary.input["path"]).parent
    _check_file(dataset / "pretrain.jsonl", "make_dataset")
    folders = [StageFolder(stage, stages[stage]) for stage in selection_stages]
    instructions = [folder for folder in folders if is_for_instructions(folder.recipe)]
    tables = [
        read_stage_table(dataset / "pretrain.jsonl", [folder for folder in folders if folder not in instructions])
    ]
    tables += map(read_instructions, instructions)
    if all(stage in stages and (stages[stage] / STAGES[stage].outputs[-1]).is_file() for stage in EVALUATED):
        evaluation_tables = (read(stages, dataset / "evaluation.jsonl") for read in (read_captions, read_answers))
        tables += [table for table in evaluation_tables if table]
    trained = stages.get("finetune", Path()).parts
    model = f", model {trained[2]}" if trained[:1] == ("results",) and len(trained) > 4 else ""
    return Results(name, tables, f"{dataset.name}{model}")


def _find_stage_folder(stage: Path) -> Path:
    """Return the folder that has the stage's files; a run may share a stage with another run."""
    note = stage / STAGE_NOTE
    return Path(read_yaml(note)["same_as"]) if note.is_file() else stage


def _check_file(file: Path, rule: str) -> None:
    if not file.is_file():
        raise InputError(f"{file} is missing, so there is nothing to explore yet; run the rule {rule} first")
