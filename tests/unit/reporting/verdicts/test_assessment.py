"""The parts of an assessment are computed once for a page."""

from collections import Counter

import pytest

import compare_experiments
import compare_study
from dj2mgm.reporting import comparison
from dj2mgm.reporting.verdicts import assessment, headline_verdicts
from dj2mgm.storage.files import read_yaml, write_yaml
from report_results import write_results
from run_main import run_main

PARTS = (
    "find_headline",
    "compare_with_first",
    "find_unlearned",
    "judge_training_changes",
    "build_headline_verdicts",
    "write_verdict_cards",
)


@pytest.mark.parametrize("script", [compare_experiments, compare_study])
def test_each_part_is_computed_once_for_a_page(tmp_path, monkeypatch, capsys, script):
    counts: Counter[str] = Counter()

    def count(name: str):
        function = getattr(assessment, name)

        def counted(*args):
            counts[name] += 1
            return function(*args)

        return counted

    for name in PARTS:
        counted = count(name)
        monkeypatch.setattr(assessment, name, counted)
        for module in (comparison, headline_verdicts):  # where a part might be computed again
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted)
    config = write_results(tmp_path / "page")
    values = read_yaml(config)
    if script is compare_study:
        write_yaml(config, values | {"study": {"experiment": "baseline", "description": "", "page": {}}})
    done = run_main(script, f"--config={config}", f"--output-dir={config.parent}", capture=capsys)
    assert done.status == 0, done.stderr
    expected = dict.fromkeys(PARTS, 1) | {"judge_training_changes": len(values["experiments"])}
    assert counts == expected if script is compare_experiments else set(counts.items()) <= set(expected.items())
