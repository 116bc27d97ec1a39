"""The leaderboard: finished experiments of several folders, their differences, and unreadable results."""

import os
import re
from pathlib import Path

import pytest

import write_leaderboard
from dj2mgm.features.leaderboard.leaderboard import find_entries
from dj2mgm.records import DECISION_FILE, VERDICT_FILE, read_verdicts, write_verdicts
from dj2mgm.storage.files import read_yaml, write_json, write_text, write_yaml
from evaluated_runs import build_entry, write_dataset, write_run
from report_pages import Elements
from run_main import run_main

IMAGES = [f"e{number}" for number in range(20)]
ODD = "<img src=x onerror=alert(1)>"


def scores(level: float) -> dict:
    values = {name: (level + 0.01 * (index % 3), 1) for index, name in enumerate(IMAGES)}
    return {f"finetune/{images}": {"answer_probability": values} for images in ("own", "shuffled")}


def write_page(root: Path, page: str, levels: dict[str, float], seeds: int = 1, **config) -> None:
    """Write a page in a folder, and its experiments next to it."""
    folder = (root / page).parent
    parent_folder = folder.parent if folder.name in levels else folder
    dataset, entries = write_dataset(root / "datasets/photos"), []
    for name, level in levels.items():
        folders = [parent_folder / name, *(parent_folder / name / f"seed-{seed}" for seed in range(1, seeds))]
        runs = {seed: write_run(folder, {}, scores(level)) for seed, folder in enumerate(folders)}
        entries.append(build_entry(name, dataset, runs, **config))
    write_yaml(root / page / "config.yaml", {"experiments": entries})
    write_text(root / page / "report.html", "a report")
    write_verdicts(
        root / page / VERDICT_FILE, {name: {"verdict": "Better", "statement": ODD} for name in [*levels][1:]}
    )


@pytest.fixture
def results(tmp_path) -> Path:
    """Write two folders of results: one with two pages of the same experiments, one with other settings."""
    root = tmp_path / "results ü"
    write_page(root, "baseline/report", {"baseline": 0.5})
    write_page(root, "report", {"baseline": 0.5, "new": 0.6}, seeds=2)
    write_page(root, "other/report", {"baseline": 0.4, "mine": 0.3}, finetune={"learning_rate": 0.5})
    return root


def test_each_experiment_is_listed_once_with_its_report(results):
    entries, unread = find_entries(results, results / "leaderboard/leaderboard.html")
    assert unread == []
    write_page(results, "half/report", {"baseline": 0.5, "half": 0.6, "half_random": 0.4})
    with_control, _ = find_entries(results, results / "leaderboard/leaderboard.html")
    added = sorted(shown.name for shown in with_control if shown not in entries)
    assert len(with_control) == len(entries) + 2 and {"half", "half_random"} <= {*added}, "the baseline is listed once"
    by_folder = {(shown.parent_folder, shown.name): shown for shown in entries}
    assert by_folder.keys() == {
        (results.name, "baseline"),
        (results.name, "new"),
        ("other", "baseline"),
        ("other", "mine"),
    }
    new = by_folder[results.name, "new"]
    assert (new.report, new.verdict, new.seeds) == ("../report/report.html", "Better", [0, 1])
    assert new.scores["probability of the right answer"].text == "60.9 %"  # 0.6 and the mean of 0, 0.01 and 0.02
    assert by_folder[results.name, "baseline"].seeds == [0, 1]  # from the page with more seeds
    assert new.settings == {"finetune.learning_rate": "0.0002"}
    assert by_folder["other", "mine"].settings == {"finetune.learning_rate": "0.5"}


def test_variants_are_shown_and_seeds_of_decisions_are_known(results):
    write_page(results, "ablation", {"baseline": 0.5, "no_filter": 0.4})
    (results / "ablation/report.html").rename(results / "ablation/ablation.html")
    (results / "new/decide/seeds-3").mkdir(parents=True)
    write_page(results, "report", {"baseline": 0.5, "new": 0.6}, seeds=3)
    (results / "report/config.yaml").rename(results / "new/decide/seeds-3/config.yaml")
    write_page(results, "report", {"baseline": 0.5, "new": 0.6}, seeds=2)
    entries, unread = find_entries(results, results / "leaderboard/leaderboard.html")
    assert [shown.report for shown in entries if shown.name == "no_filter"] == ["../ablation/ablation.html"]
    assert [shown.seeds for shown in entries if shown.name == "new"] == [[0, 1]] and unread == []


def test_a_decision_replaces_the_verdict_until_training_again(results):
    output = results / "leaderboard/leaderboard.html"
    write_json(results / "new/decide" / DECISION_FILE, {"verdict": "Undecided after 3 seeds", "statement": "After 3"})
    [new] = [shown for shown in find_entries(results, output)[0] if shown.name == "new"]
    assert (new.verdict, new.statement) == ("Undecided after 3 seeds", "After 3")
    os.utime(results / "new/decide" / DECISION_FILE, (0, 0))
    [new] = [shown for shown in find_entries(results, output)[0] if shown.name == "new"]
    assert new.verdict == "Better"


def test_incomplete_results_are_named_and_others_are_shown(results, capsys, tmp_path):
    write_text(results / "other/report/config.yaml", "{half")
    (results / "new/finetune/metrics.jsonl").unlink()
    write_text(results / "baseline/evaluate_vqa/scores.jsonl", '{"model"')
    write_run(results / "third", {}, scores(0.1))
    done = run_main(
        write_leaderboard, f"--results={results}", f"--output={results}/leaderboard/leaderboard.html", capture=capsys
    )
    assert done.status == 0 and "with no experiment; 6 folders not shown" in done.stdout
    empty = [f"--results={tmp_path}/none", f"--output={tmp_path}/none/leaderboard.html"]
    done = run_main(write_leaderboard, *empty, capture=capsys)
    assert done.status == 0 and "run one first, as in `snakemake baseline`" in done.stderr
    page = (results / "leaderboard/leaderboard.html").read_text(encoding="utf-8")
    text = Elements(page[page.index("<main>") : page.index("<script")]).text()
    for text_part in (
        "other/report: ",
        "report: new: ",
        "metrics.jsonl is missing",
        "scores.jsonl",
        "third: No page lists",
    ):
        assert text_part in text, text_part
    assert "No experiment has finished yet" in text


def test_values_are_escaped_and_nothing_is_fetched(results, capsys):
    config = read_yaml(results / "report/config.yaml")
    config["experiments"][1]["name"] = ODD
    config["experiments"][1]["config"]["model"]["name"] = ODD
    write_yaml(results / "report/config.yaml", config)
    verdicts = results / "report" / VERDICT_FILE
    write_verdicts(verdicts, {ODD: {"verdict": ODD}} | read_verdicts(verdicts))
    output = results / "leaderboard/leaderboard.html"
    run_main(write_leaderboard, f"--results={results}", f"--output={output}", capture=capsys)
    page = output.read_text(encoding="utf-8")
    body = page[page.index("<body>") : page.index("<script")]
    assert "<img" not in body and body.count("&lt;img") >= 4
    assert not re.search(r'(src|href)="(https?:)?//', body)
