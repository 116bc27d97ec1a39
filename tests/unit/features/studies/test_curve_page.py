"""Learning curves of a study's page, for shares of all rows and of one source."""

import pytest

from dj2mgm.features.studies.learning_curves import LearningCurve, build_curve_table
from dj2mgm.reporting.comparison import find_headline
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.rendering import format_integer
from dj2mgm.storage.files import write_json, write_yaml
from evaluated_runs import build_entry, write_dataset, write_run

FRACTIONS = (1.0, 0.125, 0.25, 0.5)


@pytest.fixture
def write_page(tmp_path):
    """Return a function that writes runs on shares of two sources with 800 rows each, and reads their results.

    Source b has an effect and source a has none.
    """

    def write(find_score):
        return _write_shares(tmp_path, find_score)

    return write


def _write_shares(tmp_path, find_score):
    dataset, entries = write_dataset(tmp_path / "datasets/shapes"), []
    shares = [*FRACTIONS, *({name: share} for name in "ab" for share in FRACTIONS[1:])]
    for number, share in enumerate(shares):
        parts = {name: share.get(name, 1.0) if isinstance(share, dict) else share for name in "ab"}
        score = find_score(parts["b"])
        vqa = {"finetune/own": {"answer_probability": {f"e{n}": (score, 1) for n in range(4)}}}
        run = write_run(tmp_path / f"v{number}", {}, vqa)
        sources = {
            name: {"usable": 800, "used": int(800 * part), "rows_out": int(800 * part), "words": 0}
            for name, part in parts.items()
        }
        total = sum(source["rows_out"] for source in sources.values())
        counts = {"rows_in": 1600, "rows_out": total, "dropped": {}, "sources": sources}
        summary = {"pretrain": counts, "finetune": {"rows_in": 0, "rows_out": 0, "dropped": {}}}
        write_json(tmp_path / f"v{number}/jsonl/summary.json", summary)
        entries.append(build_entry(f"v{number}", dataset, {0: run}, jsonl={"fraction": share}))
    write_yaml(tmp_path / "config.yaml", {"experiments": entries})
    return load_experiments(tmp_path / "config.yaml")


def test_all_rows_and_each_source_have_a_curve(write_page):
    variants = write_page(lambda share: 0.9 - 0.1 * share**-0.5)
    [table] = build_curve_table(variants, find_headline(variants))
    rows = {row[0]: row[1:] for row in table.rows}
    assert [rows[name][:2] for name in ("all", "a", "b")] == [
        *([format_integer(count), "80.0 %"] for count in (1600, 800, 800)),
    ]
    assert rows["a"][3].startswith("800 more: 0.0 points (")
    law = LearningCurve([800 * part for part in FRACTIONS], [0.9 - 0.1 * part**-0.5 for part in FRACTIONS])
    expected = 100 * law.predict_gain(1600).median
    assert rows["b"][3].startswith(f"800 more: +{expected:.1f} points (") and expected == pytest.approx(2.9, abs=0.1)
    assert rows["all"][3].startswith(f"{format_integer(1000)} more: +")
    assert all(float(rows[name][2].split(" to ")[1].split()[0]) <= 100 for name in rows), "no score is above 100 %"
    assert build_curve_table(variants[:2], find_headline(variants)) == []


def test_scores_that_do_not_follow_a_power_law_give_no_advice(write_page):
    variants = write_page(lambda share: 0.9 - (share - 0.5) ** 2)
    [table] = build_curve_table(variants, find_headline(variants))
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["b"][2:] == ["no extrapolation: the scores are not shown to follow a power law", "–"]
    assert rows["a"][3].startswith("800 more: 0.0 points ("), "equal scores follow a law"
