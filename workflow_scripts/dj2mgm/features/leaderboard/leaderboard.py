"""The leaderboard: all finished experiments below a folder of results, on one page that sorts and filters them.

The config.yaml of each report and each study, such as `results/shapes/tiny/report/config.yaml`, lists its experiments
with their settings and the folders of their stages. Unreadable folders are listed with the reason, because runs may be
unfinished, or from another version.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from dj2mgm.cli.messages import format_duration
from dj2mgm.errors import InputError
from dj2mgm.evaluation.intervals import Estimate
from dj2mgm.records import (
    DECISION_FILE,
    VERDICT_FILE,
    PageSettings,
    ShownExperiment,
    list_settings,
    read_verdicts,
)
from dj2mgm.reporting.comparison import format_interval, format_score
from dj2mgm.reporting.experiment_results import ExperimentResults, load_experiment
from dj2mgm.reporting.rendering import build_library_script, build_page_style, build_template_environment, hash_source
from dj2mgm.reporting.sections.run_details import show_setting
from dj2mgm.reporting.verdicts.verdict_cards import find_cost
from dj2mgm.runs.stages import STAGES
from dj2mgm.score_groups import GAIN_GROUP, OWN_GROUP
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_json, write_text

SETTINGS_FILE = "config.yaml"  # tells the folder of a stage from a folder of images with the same name
PAGE_DEPTH = 4  # folders between the results and a page: results/<dataset>/<model>/<experiment>/report
SCORE_COLUMNS = {  # group and metric by the title of the column
    "probability of the right answer": (OWN_GROUP, "answer_probability"),
    "log-likelihood of captions": (OWN_GROUP, "caption_log_likelihood"),
    "VQA accuracy": (OWN_GROUP, "vqa_accuracy"),
    "CLIPScore": (OWN_GROUP, "clip_score"),
    "gain over a shuffled image": (GAIN_GROUP, "answer_log_likelihood"),
}
OWN_COLUMNS = ("dataset", "model", "seeds", "description")  # settings with a column of their own, or without effect
READ_ERRORS = (InputError, OSError, ValueError, LookupError, TypeError, AttributeError)  # errors of incomplete files


@dataclass(frozen=True)
class Score:
    """A score in a cell, with its value for sorting."""

    value: float
    text: str
    interval: str


@dataclass(frozen=True)
class Entry:
    """An experiment on the leaderboard."""

    name: str
    parent_folder: str  # name of the folder that contains the experiment's folder
    dataset: str
    model: str
    seeds: list[int]
    verdict: str
    statement: str
    scores: dict[str, Score]  # by the title of the column
    seconds: float | None
    finished: str  # day and time, in UTC
    report: str  # link to the report; empty if there is none
    settings: dict[str, str]  # settings that differ between the entries


@dataclass(frozen=True)
class Unread:
    """A folder whose results are not shown, and the reason."""

    folder: str
    reason: str


def write_leaderboard(results: Path, path: Path) -> tuple[int, list[Unread]]:
    """Write the page of all experiments below `results`; return their number, and the folders that are not shown."""
    entries, unread = find_entries(results, path)
    write_text(path, build_leaderboard(entries, unread))
    return len(entries), unread


@dataclass(frozen=True)
class Listing:
    """An experiment as a page lists it."""

    parent_folder: Path  # folder that contains the experiment's folder
    page: Path  # folder of the page
    modified: float  # time of the last change
    experiment: ShownExperiment


def find_entries(results: Path, path: Path) -> tuple[list[Entry], list[Unread]]:
    """Return the finished experiments below a folder, the newest first, and folders that are not shown.

    Args:
        results: the folder.
        path: the page of the leaderboard, from which links start.
    """
    listings, unread = read_listings(results)
    loaded = []
    for group in listings.values():
        reasons = []
        for listing in sorted(
            group, key=lambda listing: (len(listing.experiment.runs), listing.modified), reverse=True
        ):
            try:
                loaded.append((load_experiment(listing.experiment), listing, group))
                break
            except READ_ERRORS as error:
                name = f"{listing.page.relative_to(results)}: {listing.experiment.name}"
                reasons.append(Unread(name, _describe_error(error)))
        else:
            unread += reasons[:1]
    experiments = [listing.experiment for group in listings.values() for listing in group]
    unread += find_unlisted(results, [*experiments, *read_decided(results)])
    all_settings = list_differing_settings([experiment for experiment, *_ in loaded])
    entries = [_build_entry(*sources, path, settings) for sources, settings in zip(loaded, all_settings, strict=True)]
    return sorted(entries, key=lambda entry: entry.finished, reverse=True), unread


def read_listings(results: Path) -> tuple[dict[tuple[Path, str], list[Listing]], list[Unread]]:
    """Return the listings of each experiment by its parent folder and name, and the pages that cannot be read."""
    listings: dict[tuple[Path, str], list[Listing]] = {}
    unread = []
    for config in sorted(find_page_configs(results)):
        page = config.parent
        try:
            experiments, modified = load_settings(PageSettings, config).experiments, config.stat().st_mtime
        except READ_ERRORS as error:
            unread.append(Unread(str(page.relative_to(results)), _describe_error(error)))
            continue
        # a page of one experiment and its controls is inside its folder; one of several is next to their folders
        is_own_page = page.parent.name in {experiment.name for experiment in experiments}
        parent_folder = page.parent.parent if is_own_page else page.parent
        for experiment in experiments:
            listing = Listing(parent_folder, page, modified, experiment)
            listings.setdefault((parent_folder, experiment.name), []).append(listing)
    return listings, unread


def find_page_configs(results: Path) -> Iterator[Path]:
    """Yield the config.yaml of each page of experiments or of variants."""
    for depth in range(PAGE_DEPTH):
        for config in sorted(results.glob("*/" * depth + "*/config.yaml")):
            folder = config.parent
            if folder.is_relative_to(results / "datasets"):
                continue  # pages of datasets
            if folder.name == "report" or (folder / f"{folder.name}.html").is_file():
                yield config


def read_decided(results: Path) -> Iterator[ShownExperiment]:
    """Yield the experiments of each look of `snakemake decide`. Their seeds may not be on any page."""
    for depth in range(1, PAGE_DEPTH):
        for pattern in ("decide/seeds-*/config.yaml", "decide/*/seeds-*/config.yaml"):
            for config in results.glob("*/" * depth + pattern):
                with suppress(*READ_ERRORS):
                    yield from load_settings(PageSettings, config).experiments


def find_unlisted(results: Path, experiments: list[ShownExperiment]) -> Iterator[Unread]:
    """Yield folders with stages that no page lists: runs that have not finished, or whose page is missing."""
    folders = (folder for experiment in experiments for run in experiment.runs for folder in run.stages.values())
    listed_folders = {Path(folder).absolute().parent for folder in folders}
    stages: dict[Path, list[str]] = {}
    for depth in range(1, PAGE_DEPTH + 1):
        for stage in STAGES:
            for folder in results.glob("*/" * depth + stage):
                if (folder / SETTINGS_FILE).is_file() and folder.absolute().parent not in listed_folders:
                    stages.setdefault(folder.parent, []).append(stage)
    for folder, names in sorted(stages.items()):
        yield Unread(str(folder.relative_to(results)), f"No page lists this run yet; it has {', '.join(names)}.")


def list_differing_settings(experiments: list[ExperimentResults]) -> list[dict[str, str]]:
    """Return, for each experiment, its values of the settings that differ between the experiments."""
    flat = [
        {
            name: show_setting(value)
            for name, value in list_settings(experiment.config)
            if name.split(".")[0] not in OWN_COLUMNS
        }
        for experiment in experiments
    ]
    names = dict.fromkeys(name for settings in flat for name in settings)
    differing_names = [name for name in names if len({settings.get(name, "–") for settings in flat}) > 1]
    return [{name: settings.get(name, "–") for name in differing_names} for settings in flat]


def _build_entry(
    experiment: ExperimentResults, listing: Listing, listings: list[Listing], path: Path, settings: dict[str, str]
) -> Entry:
    """Return the experiment's scores, with the verdict of its decision or else of the newest page that has one."""
    page, record = _find_verdict(experiment.name, listing, listings)
    record = read_decision(experiment, listing.parent_folder) or record
    report = page / f"{page.name}.html"
    scores = {}
    for title, (group, metric) in SCORE_COLUMNS.items():
        if estimate := experiment.groups.get(group, {}).get(metric):
            scores[title] = _build_score(metric, estimate)
    finished = (experiment.runs[-1].stages["evaluate_clip"] / "metrics.json").stat().st_mtime
    return Entry(
        name=experiment.name,
        parent_folder=listing.parent_folder.name,
        dataset=experiment.dataset.name,
        model=experiment.config.model.name,
        seeds=experiment.seeds,
        verdict=str(record.get("verdict", "")),
        statement=str(record.get("statement", "")),
        scores=scores,
        seconds=find_cost(experiment),
        finished=datetime.fromtimestamp(finished, UTC).strftime("%Y-%m-%d %H:%M"),
        report=quote(os.path.relpath(report, path.parent)) if report.is_file() else "",
        settings=settings,
    )


def _find_verdict(name: str, default: Listing, listings: list[Listing]) -> tuple[Path, dict]:
    """Return the newest page with a verdict on the experiment, and its record; without a verdict, the default page."""
    for listing in sorted(listings, key=lambda listing: listing.modified, reverse=True):
        try:
            record = read_verdicts(listing.page / VERDICT_FILE).get(name, {})
            if record.get("verdict"):
                return listing.page, record
        except READ_ERRORS:
            continue  # a page of an earlier version, or an incomplete page
    return default.page, {}


def read_decision(experiment: ExperimentResults, parent_folder: Path) -> dict:
    """Return the verdict of `snakemake decide` on an experiment; {} if there is none, or if it trained again since."""
    file = parent_folder / experiment.name / "decide" / DECISION_FILE
    try:
        training_end = max((run.stages["evaluate_clip"] / "metrics.json").stat().st_mtime for run in experiment.runs)
        return read_json(file) if file.stat().st_mtime >= training_end else {}
    except READ_ERRORS:
        return {}


def _build_score(metric: str, estimate: Estimate) -> Score:
    return Score(estimate.mean, format_score(metric, estimate.mean), format_interval(metric, estimate))


def _describe_error(error: Exception) -> str:
    text = str(error) if isinstance(error, InputError) else f"it cannot be read ({type(error).__name__}: {error})"
    return text[:300]


def build_leaderboard(entries: list[Entry], unread: list[Unread]) -> str:
    """Return the page, with the grid of DataTables inside."""
    folder = Path(__file__).parent
    style = build_page_style(folder / "leaderboard.css")
    library, script = build_library_script(), (folder / "leaderboard.js").read_text(encoding="utf-8")
    scripts = " ".join(map(hash_source, (library, script)))
    policy = f"default-src 'none'; script-src {scripts}; style-src {hash_source(style)}; img-src data:; "
    return (
        build_template_environment(folder)
        .get_template("leaderboard.html.j2", globals={"format_duration": format_duration})
        .render(
            policy=policy + "base-uri 'none'; form-action 'none'",
            style=Markup(style),
            library=Markup(library),
            script=Markup(script),
            entries=entries,
            titles=[title for title in SCORE_COLUMNS if any(title in entry.scores for entry in entries)],
            unread=unread,
        )
    )
