"""The report in a real browser, offline: nothing fetched, no console error, everything drawn, no sideways scrolling."""

from pathlib import Path

import pytest
from browser import Page, find_browser, open_browser
from report_results import write_results

from reporting.experiment import load_experiments
from reporting.page import write_page

DRAWN = """[...document.querySelectorAll("img, svg")].map(element => {
    const box = element.getBoundingClientRect();
    const shapes = element.tagName === "svg" ? element.querySelectorAll("path").length : element.naturalWidth;
    return {what: element.alt || element.ariaLabel || element.outerHTML.slice(0, 80),
            drawn: shapes > 0 && box.width > 0 && box.height > 0};
})"""
# text that sticks out of a card, and axis labels that touch each other
OVERFLOWING = """[...document.querySelectorAll(".card :not(.scroll *)")]
    .filter(element => element.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(element => element.outerHTML.slice(0, 120))"""
TOUCHING = """[...document.querySelectorAll(".axis")].flatMap(axis => {
    const boxes = [...axis.children].map(label => label.getBoundingClientRect());
    return boxes.slice(1).filter((box, place) => box.left < boxes[place].right).map(() => axis.textContent);
})"""
COVERED = """[...document.querySelectorAll(".flow .said")]
    .filter(text => text.scrollHeight > text.parentElement.getBoundingClientRect().height + 1)
    .map(text => text.textContent)"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("report ä")
    write_page(load_experiments(write_results(root)), root / "report.html")
    return root / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find_browser()
    if executable is None:
        pytest.skip("no Chromium or Chrome is installed: the report is not opened in a browser")
    with open_browser(executable, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 400, 768, 1400, 1600])
def test_the_page_is_drawn_whole_at_every_width(browser: Page, report, width, dark):
    browser.open(report, width, dark=dark)
    drawn = browser.evaluate(DRAWN)
    assert len(drawn) > 30
    assert [item["what"] for item in drawn if not item["drawn"]] == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(OVERFLOWING) == []
    assert browser.evaluate(TOUCHING) == []
    assert browser.evaluate(COVERED) == []


def test_nothing_is_fetched_and_nothing_complains(browser: Page, report):
    browser.open(report, 1000)
    requests = [event["request"]["url"] for event in browser.reported("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [report.resolve().as_uri()]
    assert browser.reported("Runtime.consoleAPICalled") == []
    assert browser.reported("Runtime.exceptionThrown") == []
    assert [event["entry"]["text"] for event in browser.reported("Log.entryAdded")] == []


def test_the_checks_of_this_file_find_what_they_look_for(browser: Page, tmp_path):
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
