"""Targets that only read finished runs, and links between their pages."""

import re

from browser import Page


def test_leaderboard_lists_the_finished_run(finished):
    printed = finished.run("leaderboard")
    assert re.search(r"wrote results/leaderboard/leaderboard.html with [1-9]\d* experiments\n", printed)
    page = (finished.folder / "results/leaderboard/leaderboard.html").read_text(encoding="utf-8")
    assert '<a href="../small/small/baseline/report/report.html">baseline</a>' in page


def test_report_links_to_the_explorer_without_a_server(finished, browser: Page):
    browser.open(finished.folder / "results/small/small/baseline/report/report.html", 1280)
    links = browser.evaluate("[...document.querySelectorAll('a')].map(link => link.href)")
    explorer_links = [link for link in links if "/explorer/baseline.html#" in link]
    assert explorer_links
    browser.open(explorer_links[0], 1280)
    wait = (
        "new Promise(done => setInterval(() => document.querySelector('#rows tbody td:nth-child(2)') && done(1), 20))"
    )
    assert browser.evaluate(wait) == 1
    assert "baseline: explorer of small, model small" in browser.evaluate("document.title")
