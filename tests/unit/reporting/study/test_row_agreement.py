"""The rows that the best recipes of a study agree on."""

import pytest

from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.study.row_agreement import RowAgreement, build_agreement_table, list_rows
from dj2mgm.storage.files import write_jsonl, write_yaml
from evaluated_runs import build_entry, write_dataset, write_run

KEPT = [["a", "b", "c", "d"], ["a", "b", "c"], ["a", "c"], ["a", "b"]]  # rows of each variant; later ones are better


@pytest.fixture
def load(tmp_path):
    """Return a function that writes variants of rising quality with the rows that they keep, and loads them."""

    def write(row_ids: list[list[str]]):
        dataset, entries = write_dataset(tmp_path / "datasets/shapes"), []
        for index, ids in enumerate(row_ids):
            images = {f"e{n}": (0.1 * index + 0.01 * n, 1) for n in range(8)}
            scores = {"finetune/own": {"answer_probability": images}}
            run = write_run(tmp_path / f"v{index}", {}, scores, filtered=len(ids))
            write_jsonl(tmp_path / f"v{index}/filter/filtered.jsonl", [{"id": identifier} for identifier in ids])
            dropped = [{"id": identifier, "event": "dropped"} for identifier in "abcd" if identifier not in ids]
            write_jsonl(tmp_path / f"v{index}/filter/dropped.jsonl", dropped)
            entries.append(build_entry(f"v{index}", dataset, {0: run}))
        write_yaml(tmp_path / "config.yaml", {"experiments": entries})
        return RowAgreement(load_experiments(tmp_path / "config.yaml"))

    return write


def test_rows_are_counted_by_the_best_recipes_that_keep_them(load):
    agreement = load(KEPT)
    assert agreement.best == ["v3", "v2"], "the best quarter, but at least two"
    assert agreement.counts == {"a": 2, "b": 1, "c": 1} and agreement.kept_counts == [2, 2]
    [table] = build_agreement_table(agreement)
    assert table.rows == [["all of them", "1", "25 %"], ["some of them", "2", "50 %"], ["none of them", "1", "25 %"]]
    assert "all of them would agree on about 1." in table.note
    assert list_rows(agreement) == [{"id": "a", "recipes": 2}, {"id": "b", "recipes": 1}, {"id": "c", "recipes": 1}]


@pytest.mark.parametrize("row_ids", [KEPT[:3], [*KEPT[:2], ["a"], ["a"]]], ids=["few variants", "equal rows"])
def test_no_table_without_best_recipes_that_differ(load, row_ids):
    agreement = load(row_ids)
    assert build_agreement_table(agreement) == [] == list_rows(agreement)
