"""The report in a browser without network: no requests or errors, complete drawings, no horizontal scrolling."""

from pathlib import Path

import pytest

from accessibility import VIEWS, find_serious
from browser import Page
from dj2mgm.features.leaderboard.leaderboard import (
    SCORE_COLUMNS,
    Entry,
    Score,
    Unread,
    build_leaderboard,
    write_leaderboard,
)
from dj2mgm.features.studies.study_page import build_study_page
from dj2mgm.features.studies.study_records import ShownStudy
from dj2mgm.features.studies.study_table import compare_variants
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.report_page import write_report_page
from dj2mgm.reporting.variants_page import write_variants_page
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.storage.files import read_jsonl, write_jsonl
from report_results import write_results

DRAWN = """[...document.querySelectorAll("img, svg")].map(element => {
    const box = element.getBoundingClientRect();
    const shapes = element.tagName === "svg" ? element.querySelectorAll("path").length : element.naturalWidth;
    return {what: element.alt || element.ariaLabel || element.outerHTML.slice(0, 80),
            drawn: shapes > 0 && box.width > 0 && box.height > 0};
})"""
# text that overflows a card, and axis labels that touch each other
OVERFLOWING = """[...document.querySelectorAll(".card :not(.scroll *)")]
    .filter(element => element.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(element => element.outerHTML.slice(0, 120))"""
TOUCHING = """[...document.querySelectorAll(".axis")].flatMap(axis => {
    const boxes = [...axis.children].filter(label => label.textContent).map(label => label.getBoundingClientRect());
    return boxes.slice(1).filter((box, place) => box.left < boxes[place].right).map(() => axis.textContent);
})"""
COVERED = """[...document.querySelectorAll(".flow .said")]
    .filter(text => text.scrollHeight > text.parentElement.getBoundingClientRect().height + 1)
    .map(text => text.textContent)"""

OPENED = "document.querySelectorAll('details').forEach(details => (details.open = true))"
CHANGES = """[...document.querySelectorAll("#changes .scroll")].map(box => box.scrollWidth <= box.clientWidth)"""
HEIGHT = "document.documentElement.scrollHeight"
MAX_HEIGHT = 10_000  # px of a page on a phone, until details are opened
FIRST = """[...document.querySelectorAll("h1, .verdict-card:first-of-type, .verdict-card:first-of-type code")]
    .map(element => element.getBoundingClientRect().bottom)"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(tmp_path_factory.mktemp("report ä"))


def write_report(root: Path, base: float | None = None) -> Path:
    """Write a report with the score `base` of models before training; None if it was not measured."""
    config = write_results(root)
    for file in root.rglob("evaluate_vqa/scores.jsonl"):  # the verdict compares the probability of the right answer
        rows = list(read_jsonl(file))
        for row in rows:
            row["values"]["answer_probability"] = row["values"]["vqa_accuracy"]
        before = [row | {"model": "base", "values": {name: [base, 1] for name in row["values"]}} for row in rows]
        write_jsonl(file, rows + (before if base is not None else []))
    write_report_page(Assessment(load_experiments(config)), root / "report/report.html")
    return root / "report/report.html"


@pytest.mark.parametrize(("width", "dark"), [(360, False), (768, True), (1600, False)])
def test_the_page_is_drawn_completely_at_every_width(browser: Page, report, small_pages, width, dark):
    browser.open(report, width, dark=dark)
    browser.evaluate(OPENED)
    assert len(browser.evaluate(DRAWN)) > 30
    check_layout(browser, width)
    assert browser.evaluate(COVERED) == []
    if width == 768:
        check_silence(browser, report)
    for page in small_pages:
        browser.open(page, width, dark=dark)
        browser.evaluate(OPENED)
        check_layout(browser, width)
    if width < 700:
        assert {*browser.evaluate(CHANGES)} == {True}, "a table on a phone needs no scrolling"


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 900)])
def test_first_screen_of_a_short_page_has_the_next_step(browser: Page, report, width, height):
    browser.open(report, width, height)
    bottoms = browser.evaluate(FIRST)
    assert len(bottoms) == 4 and max(bottoms) <= height  # two commands
    short = browser.evaluate(HEIGHT)
    assert short <= MAX_HEIGHT
    browser.evaluate(OPENED)
    assert browser.evaluate(HEIGHT) > 2 * short  # the details are there


@pytest.mark.parametrize(("size", "dark"), VIEWS)
def test_report_has_no_serious_barriers(browser: Page, report, small_pages, size, dark):
    for page in (report, *small_pages):
        browser.open(page, *size, dark)
        browser.evaluate(OPENED)
        assert find_serious(browser) == []


@pytest.fixture(scope="module")
def leaderboard(report) -> Path:
    """Write the leaderboard of the report's experiments."""
    results = report.parents[1]
    page = results / "leaderboard/leaderboard.html"
    assert write_leaderboard(results, page) == (2, [])
    return page


def test_leaderboard_sorts_and_filters(browser: Page, leaderboard, report):
    for width, dark in ((390, True), (1280, False)):
        browser.open(leaderboard, width, dark=dark)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    check_silence(browser, leaderboard)
    names = "[...document.querySelectorAll('tbody th a')].map(link => link.textContent)"
    for expected in (["baseline", "dj_synth"], ["dj_synth", "baseline"]):
        browser.evaluate("document.querySelector('thead th').click()")
        assert browser.evaluate(names) == expected
    search = "document.querySelector('thead tr:nth-child(2) input')"
    browser.evaluate(f"{search}.value = 'synth'; {search}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert browser.evaluate(names) == ["dj_synth"]
    [link] = browser.evaluate("[...document.querySelectorAll('tbody th a')].map(one => one.href)")
    assert link == report.resolve().as_uri()


@pytest.mark.parametrize(("size", "dark"), VIEWS)
def test_a_wide_leaderboard_fits_and_is_accessible(browser: Page, tmp_path, size, dark):
    scores = dict.fromkeys(SCORE_COLUMNS, Score(-1.234, "-1.234", "-1.301 to -1.167"))
    names = ("length_balanced_half_learning_rate", "results", "my_summer_photos_2024", "Qwen2.5-VL-3B-Instruct")
    settings = {f"finetune.learning_rate_{number}": "0.0002" for number in range(3)}
    verdict = ("No clear difference", "a statement", scores, 7300.0, "2026-11-28 23:26", "../a.html", settings)
    page = tmp_path / "leaderboard.html"
    entries = [Entry(*names, [0, 1, 2, 3, 4], *verdict)]
    page.write_text(build_leaderboard(entries, [Unread("results/x", "No page lists it.")]), encoding="utf-8")
    browser.open(page, *size, dark)
    browser.evaluate(OPENED)
    assert find_serious(browser) == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    right = browser.evaluate("document.querySelector('#experiments').getBoundingClientRect().right")
    assert right <= size[0] or size[0] < 1200, "all columns are visible"


def check_layout(browser: Page, width: int) -> None:
    assert [item["what"] for item in browser.evaluate(DRAWN) if not item["drawn"]] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OVERFLOWING) == []
    assert browser.evaluate(TOUCHING) == []


def check_silence(browser: Page, page: Path) -> None:
    """Check that the page made no requests and reported no errors."""
    requests = [event["request"]["url"] for event in browser.reported("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [page.resolve().as_uri()]
    assert browser.reported("Runtime.consoleAPICalled") == []
    assert browser.reported("Runtime.exceptionThrown") == []
    assert [event["entry"]["text"] for event in browser.reported("Log.entryAdded")] == []


@pytest.fixture(scope="module")
def small_pages(tmp_path_factory) -> list[Path]:
    """Write the pages of a study and of models that forgot."""
    root = tmp_path_factory.mktemp("small pages ä")
    experiments = load_experiments(write_results(root / "study"))
    shown = {"experiment": "baseline", "description": "What it is for.", "page": {"title": "A study", "keeps": 0.9}}
    study = ShownStudy.model_validate(shown)
    assessment = Assessment(experiments, root / "study")
    page = build_study_page(assessment, compare_variants(assessment, study), study, root / "study")
    write_variants_page(page, root / "study.html")
    return [root / "study.html", write_report(root / "forgetting", base=1.0)]


def test_checks_of_this_file_find_faults(browser: Page, tmp_path):
    page = tmp_path / "broken.html"
    page.write_text(
        '<meta name="viewport" content="width=device-width">'
        '<div class="card" style="width: 3000px"><p>wide</p></div><img src="missing.png" alt="gone"><svg></svg>'
        '<div class="axis"><span>one</span><span style="margin-left: -9px">two</span></div>'
        '<script>console.error("oh"); undefined_function()</script>'
    )
    browser.open(page, 400)
    assert [item["drawn"] for item in browser.evaluate(DRAWN)] == [False, False]
    assert browser.evaluate("document.documentElement.scrollWidth") > 400
    assert browser.evaluate(OVERFLOWING) and browser.evaluate(TOUCHING)
    assert len(browser.reported("Network.requestWillBeSent")) == 2
    assert browser.reported("Runtime.consoleAPICalled") and browser.reported("Runtime.exceptionThrown")
    assert browser.reported("Log.entryAdded")
