"""Puts the page together from the parts and the template."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from files import replace_whole
from reporting.chain import finetune_chain, pretrain_chain
from reporting.comparison import metric_table
from reporting.experiment import STAGES, Experiment
from reporting.gallery import gallery
from reporting.panels import headline_panels
from reporting.plots import experiment_color, loss_curves
from reporting.record import times, training_table


def write_page(experiments: list[Experiment], path: str | Path) -> None:
    """Write `report.html`: one file, no script, nothing fetched, so that it opens anywhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # captions are whatever a model wrote
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["thousands"] = lambda number: f"{number:,}".replace(",", "\u202f")  # narrow no-break space
    page = environment.get_template("report.html.j2").render(
        names=[experiment.name for experiment in experiments],
        colors=[experiment_color(index) for index in range(len(experiments))],
        panels=headline_panels(experiments),
        losses={stage: loss_curves({e.name: e.steps[stage] for e in experiments}) for stage in STAGES},
        sections=[section(experiment) for experiment in experiments],
    )
    with replace_whole(path) as file:
        file.write(page)


def section(experiment: Experiment) -> dict:
    """What the template shows of one experiment."""
    columns, rows = metric_table(experiment)
    return {
        "name": experiment.name,
        "dataset": experiment.dataset,
        "counts": experiment.dataset_counts,
        "questions": experiment.vqa["questions"],
        "metric_columns": columns,
        "metric_rows": rows,
        "gallery": gallery(experiment),
        "pretrain_chain": pretrain_chain(experiment),
        "finetune_chain": finetune_chain(experiment),
        "training": training_table(experiment),
        "times": times(experiment),
        "clip": experiment.clip,
    }
