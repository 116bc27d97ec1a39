"""Tests of the looks of `snakemake decide`."""

from test_headline import page  # a fixture

from dj2mgm.config.settings.shared import DecideSection
from dj2mgm.files import write_json
from dj2mgm.reporting.decision import describe_decision, take_look
from dj2mgm.reporting.experiment import load_experiments

__all__ = ["page"]


def test_the_verdict_on_unlearned_models_is_withheld(page, tmp_path):
    page({"baseline": 0.5, "new": 0.6}, seeds=2)
    write_json(tmp_path / "new/0/finetune/metrics.json", {"seed": 0, "steps": 6})
    budget = DecideSection()
    look = take_look(load_experiments(tmp_path / "config.yaml"), [], budget)
    assert look.kind == "withheld"
    assert describe_decision(look, budget).endswith("or lower finetune.global_batch_size.")
    assert "because new learned nothing. The stage finetune took 6 optimizer steps" in look.statement
