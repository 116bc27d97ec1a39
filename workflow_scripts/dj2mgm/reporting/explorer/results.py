"""The explorer's tables of a folder of results: a run, evaluated or not yet, or a dataset, analysed or not yet."""

import os
import re
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from dj2mgm.config.stages import STAGE_NOTE, STAGES
from dj2mgm.errors import InputError
from dj2mgm.files import SOURCES, read_yaml
from dj2mgm.reporting.explorer.model_outputs import read_answers, read_captions
from dj2mgm.reporting.explorer.pairs import StageFolder, read_analysis, read_pairs, read_rows
from dj2mgm.reporting.explorer.row_table import Table

EVALUATED = ("generate", "evaluate_clip")


@dataclass(frozen=True)
class Results:
    """The tables of one folder of results."""

    name: str
    tables: list[Table]


def read_results(folder: Path) -> Results:
    """Read the tables of a folder.

    Args:
        folder: results/<experiment>, one of its seeds, or results/datasets/<dataset>.

    Raises:
        InputError: it is not such a folder, or its stages are not finished.
    """
    whole = Path(os.path.abspath(folder))  # links are not followed, since results may be on another disk
    results = next((parent for parent in whole.parents if parent.name == "results"), None)
    if results is None or not whole.is_dir():
        raise InputError(
            f"{folder} is not a folder of results; name results/<experiment> or results/datasets/<dataset>"
        )
    folder = whole.relative_to(results.parent)
    with chdir(results.parent):  # paths in results are relative to it
        return _dataset(folder) if folder.parts[1] == "datasets" else _run(folder)


def _dataset(folder: Path) -> Results:
    _check_file(folder / "pretrain.jsonl", "make_dataset")
    analysis = folder / "analyze"
    if (analysis / "summary.json").is_file():
        return Results(folder.name, [read_analysis(folder / "pretrain.jsonl", StageFolder("analyze", analysis))])
    settings = read_yaml(folder / "config.yaml")
    if "generator" in settings:
        images = folder
    else:
        images = folder / SOURCES if "sources" in settings else Path(settings["pretrain"]["images"])
    return Results(folder.name, [read_rows(folder / "pretrain.jsonl", images)])


def _run(folder: Path) -> Results:
    stages = {name: _find_stage_folder(folder / name) for name in STAGES}
    if not any(stage.is_dir() for stage in stages.values()):
        if folder.name in STAGES:
            raise InputError(f"{folder} is one stage of a run; name its parent, {folder.parent}")
        raise InputError(
            f"{folder} contains no stage of a run; name results/<experiment> or results/datasets/<dataset>"
        )
    names = [name for name in ("filter", "synthesize") if name == "filter" or stages[name].is_dir()]
    for name in names:
        _check_file(stages[name] / STAGES[name].outputs[-1], STAGES[name].rule)
    dataset = Path(StageFolder("filter", stages["filter"]).summary["input"]["path"]).parent
    _check_file(dataset / "pretrain.jsonl", "make_dataset")
    tables = [read_pairs(dataset / "pretrain.jsonl", [StageFolder(name, stages[name]) for name in names])]
    if all((stages[name] / STAGES[name].outputs[-1]).is_file() for name in EVALUATED):
        made = (read(stages, dataset / "evaluation.jsonl") for read in (read_captions, read_answers))
        tables += [table for table in made if table]
    # reports link to the name of the experiment, without the folder that the setting `results` adds
    of_seed = len(folder.parts) > 2 and re.fullmatch(r"seed-\d+", folder.name)
    parts = folder.parts[-2:] if of_seed else folder.parts[-1:]
    return Results("-".join(parts), tables)


def _find_stage_folder(stage: Path) -> Path:
    """Return the folder that has the stage's files; a run may share a stage with another run."""
    note = stage / STAGE_NOTE
    return Path(read_yaml(note)["same_as"]) if note.is_file() else stage


def _check_file(file: Path, rule: str) -> None:
    if not file.is_file():
        raise InputError(f"{file} is missing, so there is nothing to explore yet; run the rule {rule} first")
