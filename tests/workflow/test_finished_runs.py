"""Targets that read finished runs and start nothing."""


def test_leaderboard_lists_the_finished_run(finished):
    printed = finished.run("leaderboard")
    assert "wrote results/leaderboard/leaderboard.html with 1 experiments" in printed
    page = (finished.folder / "results/leaderboard/leaderboard.html").read_text(encoding="utf-8")
    assert '<a href="../baseline/report/report.html">baseline</a>' in page
