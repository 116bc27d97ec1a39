"""The page of looks of `snakemake decide`."""

from functools import partial

import pytest

from dj2mgm.features.decide.look_verdict import (
    build_decision_page,
    describe_conclusion,
    describe_decision,
    take_look,
    was_reported,
)
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.settings.targets import DecisionBudget
from dj2mgm.storage.files import read_yaml, write_json, write_yaml
from headline_pages import write_levels
from training_records import write_training_record


@pytest.fixture
def page(tmp_path):
    return partial(write_levels, tmp_path)


def test_the_verdict_on_unlearned_models_is_withheld(page, tmp_path):
    page({"baseline": 0.5, "new": 0.6}, seeds=2)
    write_training_record(tmp_path / "new/0/finetune", steps=6)
    budget = DecisionBudget()
    look = take_look(load_experiments(tmp_path / "config.yaml"), [], budget)
    assert look.kind == "withheld"
    assert describe_decision(look, budget).endswith("or lower finetune.global_batch_size.")
    assert "because new learned nothing. The stage finetune changed weights in 6 optimizer steps" in look.statement


def test_a_page_of_looks_begins_with_the_cost(page):
    budget = DecisionBudget(seeds=3)
    look = take_look(page({"baseline": 0.5, "new": 0.53}, seeds=3, spread=0.05), [], budget)
    [card] = build_decision_page([look], budget).cards
    assert (card.label, card.command) == ("Undecided", look.command) and look.command
    beginning = "After 3 of at most 3 seeds, it is undecided whether new is better than baseline: "
    assert card.verdict.statement.startswith(beginning)
    assert card.next_step == look.next_step and ",." not in look.next_step
    assert card.cost == "1 h 48 min for the seeds of both sides."


def test_the_command_continues_the_decision_on_its_dataset(page, tmp_path):
    page({"baseline": 0.5, "new": 0.53}, seeds=3, spread=0.05)
    config = read_yaml(tmp_path / "config.yaml")
    for experiment in config["experiments"]:
        experiment["config"] |= {"dataset": "../my photos", "model": {"name": "mgm-2b"}}
    write_yaml(tmp_path / "config.yaml", config)
    command = take_look(load_experiments(tmp_path / "config.yaml"), [], DecisionBudget(seeds=3)).command
    start = "snakemake decide --config 'dataset=../my photos' model=mgm-2b experiment=new 'decide={seeds: "
    assert command.startswith(start)
    new_first = load_experiments(tmp_path / "config.yaml")[::-1]
    command = take_look(new_first, [], DecisionBudget(seeds=3)).command
    assert "experiment=baseline 'decide={against: [new], seeds: " in command


def test_a_first_look_without_exclusions_is_described(page):
    budget = DecisionBudget(seeds=10)
    look = take_look(page({"baseline": 0.5, "new": 0.53}, seeds=2, spread=0.1), [], budget)
    assert look.kind == "undecided" and look.half > 1 and look.interval == ""
    assert "points; no possible difference is excluded yet)." in describe_decision(look, budget)
    decision = build_decision_page([look], budget)
    [card] = decision.cards
    assert card.confidence == "Not sure." and "no possible difference is excluded yet" in card.verdict.certainty
    assert decision.rows[0].scores[0].lines == ["no possible difference is excluded yet", "undecided"]


def test_better_than_all_needs_each_verdict(page):
    experiments = page({"baseline": 0.5, "new": 0.6, "near": 0.605}, seeds=4, spread=0.005)
    baseline, new, near = experiments
    looks = [take_look([opponent, new], [], DecisionBudget(seeds=4)) for opponent in (baseline, near)]
    assert describe_conclusion(looks[:1] * 2) == "Conclusion: new is better than baseline and baseline."
    assert looks[1].against == "near" and looks[1].kind != "better"
    sentence = describe_conclusion(looks)
    assert sentence.startswith("Conclusion: new is better than baseline, but not shown to be better than near (")


def test_an_earlier_report_is_a_look(page, tmp_path):
    experiments, budget = page({"baseline": 0.5, "new": 0.53}, seeds=2, spread=0.05), DecisionBudget(seeds=10)
    folder = tmp_path / "results/new"
    assert not was_reported(experiments, folder)
    config = read_yaml(tmp_path / "config.yaml")
    for report in (folder / "report", folder.parent / "report"):
        write_yaml(report / "config.yaml", config)
        assert not was_reported(experiments, folder), "the report is not finished"
        write_json(report / "verdict.json", {})
        assert was_reported(experiments, folder)
        (report / "verdict.json").unlink()
    for entry in config["experiments"]:
        del entry["runs"][1:]
    write_yaml(folder / "report/config.yaml", config)
    write_json(folder / "report/verdict.json", {})
    assert not was_reported(experiments, folder), "one seed is no verdict on the data"
    new, after_report = (take_look(experiments, [], budget, reported=reported) for reported in (False, True))
    assert after_report.level < new.level and after_report.spent > 0.045 > new.spent
    next_look = take_look(experiments, [after_report.model_copy(update={"seeds": [0]})], budget)
    assert next_look.reported and next_look.spent == pytest.approx(after_report.spent)
