"""Measure the speed of the explorer in a headless Chromium: reading a run, first paint, every slider, scrolling.

    python benchmarks/explorer.py --rows 10000 100000

Each number of rows is measured in both forms, served and as one file. `filtered` shows the kept rows, longest texts
first, so that every move draws other rows. Times are in milliseconds. `paint` is the browser's own `first-paint`, from
the start of the navigation; `ready` is the time until the first rows are drawn. Every slider is moved through its
stops. A move lasts from its event to the first frame with new counts and rows; median, 95th percentile and maximum are
printed, and median and maximum of the CPU time of the page's thread. A jump scrolls to another position and lasts until
rows are drawn; the longest of 20 is printed. The output is rows of Markdown.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "workflow_scripts"), str(PROJECT / "tests/support")]

from browser import Page, find_browser, open_browser  # noqa: E402
from explorer_results import write_run  # noqa: E402

TITLES = "rows form read,s moves paint,ms ready move 95% longest CPU longest jump".split()
FILTERED = "#outcome=kept&order=-filter/text_len"
MOVES = 8  # of each slider
READY = """new Promise(done => { const look = () => document.querySelector("#rows tbody td:nth-child(2)")?.textContent
    ? done(performance.now()) : setTimeout(look, 5); look(); })"""
PAINT = 'performance.getEntriesByName("first-paint")[0].startTime'
FRAME = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
MOVE = f"""(async (number, part) => {{
    const slider = document.querySelectorAll("input[type=range]")[number];
    const drawn = new Promise(done => explorer.grid().one("draw", done));
    slider.value = Math.round(Number(slider.max) * part);
    const start = performance.now();
    slider.dispatchEvent(new Event("input"));
    await drawn;
    await {FRAME};
    return performance.now() - start;
}})"""
SCROLL = f"""(async () => {{
    const body = document.querySelector(".dt-scroll-body"), times = [];
    const blank = () => {{
        const box = body.getBoundingClientRect();
        const cell = document.elementFromPoint(box.left + 200, box.top + box.height / 2);
        return !cell.closest("tbody tr")?.cells[1]?.textContent;
    }};
    for (let part = 1; part <= 20; part++) {{
        const start = performance.now();
        body.scrollTop = body.scrollHeight * ((part * 7) % 20) / 20;
        do await {FRAME}; while (blank() && performance.now() - start < 5000);
        times.push(performance.now() - start);
    }}
    return Math.max(...times);
}})()"""


@contextmanager
def serve_run(run: Path) -> Iterator[tuple[str, float]]:
    command = [sys.executable, str(PROJECT / "workflow_scripts/explore.py"), str(run)]
    start = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().split()[-1], perf_counter() - start
    finally:
        process.terminate()
        process.wait()


def write_page(run: Path, page: Path) -> tuple[str, float]:
    start = perf_counter()
    command = [sys.executable, str(PROJECT / "workflow_scripts/explore.py"), str(run), "--output", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return page.as_uri(), perf_counter() - start


def measure(page: Page, address: str) -> list[str]:
    page.open("about:blank", 1400)
    page.open(address, 1400)
    ready, paint = page.evaluate(READY), page.evaluate(PAINT)
    page.send("Performance.enable", timeDomain="threadTicks")
    sliders = page.evaluate('document.querySelectorAll("input[type=range]").length')
    moves = [(number, move / (MOVES - 1)) for number in range(sliders) for move in range(MOVES)]
    times, cpu_times = [], [read_thread_ms(page)]
    for number, part in moves:
        times.append(page.evaluate(f"{MOVE}({number}, {part})"))
        cpu_times.append(read_thread_ms(page))
    figures = [paint, ready, *np.quantile(times, [0.5, 0.95, 1]), *np.quantile(np.diff(cpu_times), [0.5, 1])]
    return [str(len(moves)), *(f"{time:.0f}" for time in (*figures, page.evaluate(SCROLL)))]


def read_thread_ms(page: Page) -> float:
    """Return the CPU time of the page's thread, which does not depend on other work on the machine."""
    metrics = page.send("Performance.getMetrics")["metrics"]
    return 1000 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    rows = parser.parse_args().rows
    print("|", " | ".join(TITLES), "|")
    print("|" + "---|" * len(TITLES))
    for count in rows:
        with TemporaryDirectory() as folder:
            run = write_run(Path(folder) / "results", count)
            with open_browser(find_browser(), Path(folder) / "profile") as page:
                with serve_run(run) as (address, seconds):
                    print("|", " | ".join([f"{count}", "served", f"{seconds:.1f}", *measure(page, address)]), "|")
                    figures = measure(page, address + FILTERED)
                    print("|", " | ".join([f"{count}", "filtered", f"{seconds:.1f}", *figures]), "|", flush=True)
                address, seconds = write_page(run, Path(folder) / "page.html")
                size = (Path(folder) / "page.html").stat().st_size / 2**20
                form = f"one file, {size:.1f} MiB"
                print("|", " | ".join([f"{count}", form, f"{seconds:.1f}", *measure(page, address)]), "|", flush=True)


if __name__ == "__main__":
    main()
