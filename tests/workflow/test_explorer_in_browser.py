"""The explorer in a browser, served and as a file: counts, keys, dark mode, and no requests to other machines."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from accessibility import SIZES, VIEWS, find_serious
from browser import Page
from dj2mgm.data.score_limits import compute_score_limits
from dj2mgm.features.explorer.explorer_page import Explorer, Server, write_offline_page
from dj2mgm.features.explorer.results import Results, read_results
from dj2mgm.recipes.recipe_parsing import parse_recipe
from dj2mgm.reporting.rendering import locate_explorer_page
from dj2mgm.storage.files import read_json, read_yaml
from explorer_results import format_row_id, write_run

ROWS = 2000
READY = """new Promise(done => { const look = () => document.querySelector("#rows tbody td:nth-child(2)")?.textContent
    ? done(true) : setTimeout(look, 5); look(); })"""
ROW_TOP = 'document.querySelector("#rows tbody tr").getBoundingClientRect().top'
COUNTS = 'document.getElementById("counts").textContent.replace(/,(?=\\d)/g, "")'


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("explorer ä") / "results", ROWS)


@pytest.fixture(scope="module")
def results(run) -> Results:
    return read_results(run)


@pytest.fixture(scope="module")
def addresses(results, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "explore.html"
    write_offline_page(results, file)
    server = Server(Explorer([results], {}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"served": server.build_address("explorer/run.html"), "file": file.as_uri()}
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["served", "file"])
def page(request, browser, addresses) -> Page:
    visit(browser, addresses[request.param])
    browser.address = addresses[request.param]
    return browser


def visit(browser: Page, address: str) -> None:
    browser.open("about:blank", 1400)  # a change of only the fragment loads nothing
    browser.open(address, 1400)
    assert browser.evaluate(READY)


def wait(page: Page, condition: str) -> None:
    look = f"{{ ({condition}) ? done(true) : performance.now() > end ? done(false) : setTimeout(look, 10); }}"
    script = f"new Promise(done => {{ const end = performance.now() + 20000, look = () => {look}; look(); }})"
    assert page.evaluate(script), condition


def test_counts_agree_with_summaries_and_page_is_offline(page, run):
    summaries = [read_json(run / stage / "summary.json") for stage in ("filter", "synthesize")]
    counts = page.evaluate("[...explorer.cascade(explorer.now().table, explorer.now().limits.values).counts]")
    operators = [operator for summary in summaries for operator in summary["operators"]]
    assert counts == [summaries[-1]["rows_kept"], *(operator["dropped"] for operator in operators)]
    assert page.evaluate(COUNTS).startswith(
        f"{counts[0]} of {ROWS} rows kept, {ROWS - counts[0]} dropped; {ROWS} shown."
    )
    folder_address = page.address.rpartition("/")[0].removesuffix("/explorer")
    requests = [event["request"]["url"] for event in page.reported("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith((folder_address, "data:", run.parent.as_uri()))] == []
    check_silence(page)


def check_silence(page: Page) -> None:
    assert page.reported("Runtime.consoleAPICalled") == page.reported("Runtime.exceptionThrown") == []
    assert [event["entry"]["text"] for event in page.reported("Log.entryAdded")] == []


@pytest.mark.parametrize("size", SIZES)
def test_counts_do_not_cover_operators(browser, addresses, size):
    """The counts of moved limits have two numbers."""
    browser.open("about:blank", *size)
    browser.open(addresses["file"], *size)
    assert browser.evaluate(READY)
    overlaps = browser.evaluate(
        """(() => { document.getElementById("tools").open = true;
        const texts = document.querySelectorAll(".count > :first-child");
        for (const text of texts) text.textContent = "12 345 dropped (run: 1 234)";
        return [...document.querySelectorAll("#limits fieldset")].map(step => {
            const [name, count] = [".count", "legend"].map(part => step.querySelector(part).getBoundingClientRect());
            return name.width > 0 && name.left < count.right && count.left < name.right && name.top < count.bottom
                && count.top < name.bottom; }); })()"""
    )
    assert overlaps and not any(overlaps)
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_markup_in_a_caption_is_shown_as_text(page):
    page.evaluate('location.hash = "find=onerror"')
    wait(page, f'document.querySelector("#rows tbody td:nth-child(2) small")?.textContent === "{format_row_id(1)}"')
    cell = page.evaluate('document.querySelector("#rows tbody td:nth-child(3)").textContent')
    assert cell.startswith('<img src=x onerror="document.title=1"><script>')
    assert page.evaluate('document.querySelectorAll("#rows tbody td:nth-child(3) :not(div, p, small)").length') == 0
    assert page.evaluate("document.title") == "run: explorer of drawn"
    check_silence(page)


def test_moved_limits_drop_the_same_rows_as_numpy(page, results):
    """The page and NumPy agree on every row for random limits, including limits by share."""
    pairs, rng = results.tables[0], np.random.default_rng(0)
    for _ in range(12):
        limit_values = [
            [float(rng.choice(limit.stops)) if rng.random() < 0.4 else limit.value for limit in step.limits]
            for step in pairs.steps
        ]
        counts = page.evaluate(
            f"""(() => {{ const {{ table, limits }} = explorer.now(), values = {to_json(limit_values)};
            const of = (step, s) => step.limits.map((limit, l) => [limit, values[s][l]]);
            const chosen = new Map(table.steps.flatMap(of));
            return [...explorer.cascade(table, chosen).outcome]; }})()"""
        )
        assert counts == compute_outcome(pairs, limit_values)


def to_json(limit_values: list) -> str:
    return str(limit_values).replace("None", "null")


def compute_outcome(pairs, limit_values: list[list[float | None]]) -> list[int]:
    """Return the index of the step that drops each row, computed in plain Python."""
    outcome = [0] * ROWS
    values = {key: column.values.tolist() for key, column in pairs.columns.items()}
    for step_number, (step, limits) in enumerate(zip(pairs.steps, limit_values, strict=True), start=1):
        if step.rewritten is not None:
            continue
        bounds = []
        for limit, value in zip(step.limits, limits, strict=True):
            if limit.scores and value is not None:
                rows = [row for row in range(ROWS) if not outcome[row]]
                scores = [
                    values[limit.scores][row] for row in rows if values[limit.scores][row] == values[limit.scores][row]
                ]
                value = compute_score_limits(scores, **{limit.argument: value})[limit.side]
            bounds.append(value)
        for row in range(ROWS):
            if outcome[row]:
                continue
            row_values = [values[limit.column][row] for limit in step.limits]
            if not row_values or any(value != value for value in row_values):
                is_dropped = pairs.fate[row] == step_number
            else:
                is_dropped = any(
                    bound is not None and not is_inside(value, bound, limit)
                    for value, bound, limit in zip(row_values, bounds, step.limits, strict=True)
                )
            outcome[row] = step_number if is_dropped else 0
    return outcome


def is_inside(value: float, bound: float, limit) -> bool:
    if value == bound:
        return limit.closed
    return value > bound if limit.side == "min" else value < bound


def press(page: Page, key: str, code: int) -> None:
    text = {"text": "\r"} if key == "Enter" else {}  # so that a keypress event follows, like on a keyboard
    page.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
    page.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)


def read_focus(page: Page) -> str:
    return page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent")


def has_focus(row: int) -> str:
    """Return the condition that this row has the focus."""
    focus = f'document.querySelector("td.focus small")?.textContent === "{format_row_id(row)}"'
    return f'!document.querySelector("dialog[open]") && explorer.grid().keys.enabled() && {focus}'


def test_the_keyboard_can_reach_and_open_rows(page):
    tabs = 0
    while not page.evaluate('!!document.querySelector("td.focus")'):
        press(page, "Tab", 9)
        tabs += 1
        assert tabs <= 5
    assert page.evaluate('getComputedStyle(document.querySelector("td.focus")).outlineStyle') == "solid"
    for _ in range(3):
        press(page, "ArrowDown", 40)
    wait(page, has_focus(3))
    press(page, "Enter", 13)
    wait(page, f'document.querySelector("dialog[open] h2 + p")?.textContent === "id {format_row_id(3)}"')
    assert read_focus(page) == "Close"
    press(page, "Escape", 27)
    wait(page, has_focus(3))
    press(page, "ArrowDown", 40)
    wait(page, has_focus(4))
    press(page, "Enter", 13)
    wait(page, f'document.querySelector("dialog[open] h2 + p")?.textContent === "id {format_row_id(4)}"')
    press(page, "Enter", 13)  # the focus is on the button Close
    wait(page, has_focus(4))
    check_silence(page)


def test_the_keyboard_can_move_a_slider(page):
    for _ in range(60):
        press(page, "Tab", 9)
        if read_focus(page) == "text_length_filter min_len":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    before = page.evaluate(COUNTS)
    for _ in range(5):
        press(page, "ArrowRight", 39)
    wait(page, f"{COUNTS} !== {before!r}")
    assert page.evaluate('document.querySelector(".limit.moved span").textContent') == "min_len"
    assert "text_length_filter" in page.evaluate('document.querySelector("#limits pre").textContent')
    check_silence(page)


def test_rows_are_found_while_the_user_types(page):
    page.evaluate('document.querySelector("#search input").focus()')
    for length, key in enumerate(format_row_id(7), start=1):
        page.send("Input.insertText", text=key)
        if length == 3:
            wait(page, f'!{COUNTS}.endsWith(" {ROWS} shown.")' if key not in format_row_id(0) else "true")
    wait(page, f'{COUNTS}.endsWith(" 1 shown.")')
    assert page.evaluate('document.activeElement.value === document.querySelector("#search input").value')
    wait(page, f'document.querySelector("#rows tbody td:nth-child(2) small")?.textContent === "{format_row_id(7)}"')


def test_chosen_limits_are_saved_as_a_recipe(page, run, tmp_path):
    """The file is a valid recipe; only the moved limits differ from the recipe of the run."""
    page.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.evaluate("""(() => { const { limits } = explorer.now();
        const values = { min_len: 40, min_ratio: 1e-7, min_size: 2048, max_width: null, max_bits: null };
        for (const limit of limits.values.keys())
            if (limit.argument in values) limits._set(limit, values[limit.argument]);
        document.querySelector("#limits > button:nth-last-of-type(2)").click(); })()""")
    wait(page, 'document.querySelector("#limits [role=status]").textContent.includes("config/recipes/run_filter.yaml")')
    file = tmp_path / "run_filter.yaml"
    deadline = time.monotonic() + 20
    while not file.is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    expected = read_yaml(run / "filter/config.yaml")["recipe"]
    for operator, changes in {
        "text_length_filter": {"min_len": 40},
        "alphanumeric_filter": {"min_ratio": 1e-7},
        "image_shape_filter": {"max_width": 2**40},
        "image_aspect_ratio_filter": {"min_ratio": 1e-7},
        "image_size_filter": {"min_size": "2048"},
    }.items():
        next(step for step in expected["process"] if operator in step)[operator].update(changes)
    expected["process"] = [step for step in expected["process"] if "image_near_deduplicator" not in step]
    assert read_yaml(file) == expected
    parse_recipe(file, read_yaml(file))


@pytest.mark.parametrize(("size", "dark"), VIEWS)
def test_explorer_has_no_serious_barriers(browser, addresses, size, dark):
    browser.open("about:blank", *size, dark)
    browser.open(addresses["file"], *size, dark)
    assert browser.evaluate(READY)
    assert browser.evaluate("document.documentElement.scrollWidth") <= size[0]
    caption = browser.evaluate('document.querySelector("#rows .text").getBoundingClientRect().toJSON()')
    assert caption["width"] > 150 and caption["bottom"] <= size[1]
    if size[0] > 900:  # rows and filters scroll, not the page
        assert browser.evaluate("document.documentElement.scrollHeight") <= size[1]
    browser.evaluate('document.querySelectorAll("details").forEach(details => (details.open = true))')
    assert find_serious(browser) == []
    browser.evaluate('document.querySelector("#rows tbody tr").click()')
    wait(browser, '!!document.querySelector("dialog[open]")')
    assert find_serious(browser) == []


def test_filters_and_limits_can_be_reached_on_a_phone(browser, addresses):
    browser.open("about:blank", *SIZES[1])
    browser.open(addresses["file"], *SIZES[1])
    assert browser.evaluate(READY)
    summary = browser.evaluate('document.querySelector("#tools > summary").getBoundingClientRect().toJSON()')
    assert 0 < summary["height"] and summary["bottom"] < browser.evaluate(f"{ROW_TOP}") < SIZES[1][1]
    browser.evaluate('document.querySelector("#tools > summary").click()')
    for control in ("#filters select", "#limits input[type=range]", "#limits > button"):
        browser.evaluate(f"document.querySelector('{control}').scrollIntoView({{block: 'center'}})")
        box = browser.evaluate(f"document.querySelector('{control}').getBoundingClientRect().toJSON()")
        assert 0 <= box["top"] < box["bottom"] <= SIZES[1][1] and box["right"] <= SIZES[1][0], control
    browser.evaluate("scrollTo(0, 0)")
    assert browser.evaluate(ROW_TOP) < SIZES[1][1], "rows are visible while a slider moves"


def test_all_images_are_shown_next_to_the_dataset(browser, addresses):
    """The first screen has thumbnails in the page; other images are read from their files."""
    visit(browser, addresses["file"])
    sources = "[...document.querySelectorAll('#rows img')].map(image => image.src.slice(0, 5))"
    assert set(browser.evaluate(sources)[:8]) == {"data:"}
    browser.evaluate("document.querySelector('.dt-scroll-body').scrollTop = 60000")
    wait(browser, "[...document.querySelectorAll('#rows img')].some(image => image.src.startsWith('file:'))")
    shown = "[...document.querySelectorAll('#rows img')].every(image => image.complete && image.naturalWidth > 0)"
    wait(browser, f"{shown} && !document.querySelector('#rows .no-image')")
    check_silence(browser)


def test_links_of_the_report_open_their_rows(page, run):
    dropped = read_json(run / "filter/summary.json")["operators"][1]["dropped"]
    visit(page, f"{page.address}#drop=filter-2")
    assert page.evaluate(COUNTS).endswith(f"{dropped} shown.")
    assert page.evaluate('document.querySelector("#filters select").value') == "filter-2"
    visit(page, f"{page.address}#table=answers")
    assert page.evaluate(COUNTS) == "5 of 20 rows shown."
    assert page.evaluate('document.querySelector("#rows tbody td:nth-child(3)").textContent').endswith("finetune car")
    visit(page, f"{page.address}#with=cluster&order=cluster")
    check_silence(page)


def test_a_name_that_needs_quoting_in_urls_is_opened(browser, results):
    server = Server(Explorer([Results("my #1 照片?", results.tables, "")], {}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    visit(browser, server.build_address(locate_explorer_page("my #1 照片?")))
    wait(browser, 'document.querySelector("#rows img")?.naturalWidth > 0')
    server.shutdown()
    server.server_close()


def test_all_rows_can_be_reached_by_scrolling(page):
    """The page contains only the rows in view and estimates the height of the others until the end is near."""
    cells = '[...document.querySelectorAll("#rows tbody td:nth-child(2) small")]'
    last = f'{cells}.at(-1)?.textContent === "{format_row_id(ROWS - 1)}"'
    bottom = 'document.querySelector(".dt-scroll-body").scrollTop = 1e9'
    wait(page, f"({bottom}, {last})")
    assert page.evaluate('document.querySelectorAll("#rows tbody tr").length') < 100
