"""The verdict on the first screen of a page."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dj2mgm.evaluation.run_scores import MetricValues
from dj2mgm.reporting.comparison import compare_with_first, find_headline, format_difference, format_interval
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.reporting.report_page import write_report_page
from dj2mgm.reporting.variants_page import VariantsPage, write_variants_page
from dj2mgm.reporting.verdicts.assessment import Assessment
from dj2mgm.reporting.verdicts.headline_verdicts import HeadlineVerdict
from dj2mgm.reporting.verdicts.learning_faults import LearningFault, describe_faults, estimate_image_gain
from dj2mgm.reporting.verdicts.verdict_cards import merge_withheld
from dj2mgm.reporting.verdicts.verdict_sentences import build_keep_command
from dj2mgm.settings.targets import ReportSection
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_json, write_jsonl, write_yaml
from evaluated_runs import write_run
from headline_pages import make_scores, write_levels
from report_pages import read_page_text, write_report
from report_results import write_results
from training_records import write_training_record

LONGER = "'pretrain={min_steps: 120}' 'finetune={min_steps: 60}'"  # settings of a training with more steps


def verdict(experiments) -> HeadlineVerdict:
    [single_verdict] = Assessment(experiments).verdicts
    return single_verdict


@pytest.fixture
def page(tmp_path):
    return partial(write_levels, tmp_path)


def test_better_data_are_named_with_their_difference(page):
    result = verdict(page({"baseline": 0.5, "new": 0.6}, seeds=3))
    assert result.kind == "better" and result.statement.startswith("new is better than baseline: probability of the ")
    assert " % instead of " in result.statement and "(+" in result.statement and "95 % interval" in result.statement
    pattern = (
        r"Equally good data would differ by this much or more in (\d\.\d+) % of repetitions with 100 images and 3 "
        r"seeds\."
    )
    assert 0 < float(re.fullmatch(pattern, result.certainty)[1]) < 5
    assert (result.next_step, result.command) == ("", "")
    experiments = page({"baseline": 0.5, "new": 0.6}, seeds=3)
    [card] = Assessment(experiments).cards
    assert (card.label, card.tone, card.confidence) == ("Better", "good", "95 % confidence.")
    # six stages and three seeds, three minutes each; the filter's time is 9999 s
    assert card.cost == "9 h 13 min for the stages that this experiment added, their times added up."
    assert card.command == "snakemake publish --config experiment=new"
    assert verdict(page({"baseline": 0.6, "new": 0.5}, seeds=3)).kind == "worse"


def test_the_verdict_on_one_seed_is_about_two_models(page):
    commands = {0.6: "new --config 'seeds=[0,1,2]'", 0.5001: "decide --config experiment=new"}
    for level, command in commands.items():
        result = verdict(page({"baseline": 0.5, "new": level}, seeds=1, spread=0.1))
        assert "or these two models" in result.statement
        chance = "Equally good models would differ by this much or more in less than 0.1 % of samples of 100 images."
        assert level != 0.6 or result.certainty.startswith(chance)
        assert "One seed does not show how much the scores would change with another seed." in result.certainty
        # six stages of two experiments, three minutes each, for two seeds
        assert (
            "With 2 more seeds of both experiments (about 1 h 12 min) the verdict is about the data, not only about "
            "these two models." in result.next_step
        )
        assert result.command == f"snakemake {command}"


def test_the_verdict_on_one_common_seed_is_about_two_models(page, tmp_path):
    page({"baseline": 0.5, "new": 0.6}, seeds=3)
    config = read_yaml(tmp_path / "config.yaml")
    for experiment, runs in zip(config["experiments"], (slice(0, 2), slice(1, 3)), strict=True):
        experiment["runs"] = experiment["runs"][runs]
    write_yaml(tmp_path / "config.yaml", config)
    [card] = Assessment(load_experiments(tmp_path / "config.yaml")).cards
    assert card.verdict.statement.startswith("For these two models, new is better")
    assert (card.label, card.confidence) == (
        "Better, one seed",
        "95 % confidence about these two trained models, not about the data.",
    )


def test_an_undecided_verdict_states_power_and_cost(page):
    result = verdict(page({"baseline": 0.5, "new": 0.53}, seeds=3, spread=0.05))
    assert result.kind == "undecided"
    assert result.statement.startswith("It is undecided whether new is better than baseline: ")
    assert result.certainty.startswith("The interval contains zero, so either side may be better. ")
    assert "With 100 images and 3 seeds, four of five comparisons would find a true difference of " in result.certainty
    assert result.next_step.startswith("If the true difference equals the measured one, ")
    assert " more seeds of both experiments (about 4 h 48 min) would decide with 80 % probability." in result.next_step
    advice = " This command adds seeds one by one until the verdict is decided, up to 25 per experiment in all:"
    assert result.next_step.endswith(advice), "the page was a look"
    assert result.command == "snakemake decide --config experiment=new 'decide={seeds: 25}'"
    result = verdict(page({"baseline": 0.5, "new": 0.52}, seeds=3, spread=0.05))
    assert "more held-out images together would decide" in result.next_step


def reduce_to_images(experiments, changes: list[float]) -> None:
    """Keep as many images as there are changes, on which all experiments but the first score this much more."""
    for number, experiment in enumerate(experiments):
        for run in experiment.runs:
            for metrics in run.scores.groups.values():
                for metric, values in metrics.items():
                    sums = 0.5 + np.array(changes) * bool(number)
                    metrics[metric] = MetricValues(
                        values.ids[: len(sums)], sums, values.counts[: len(sums)], values.file
                    )


@pytest.mark.parametrize(
    ("changes", "certainty", "step"),
    [
        ([0.2], "At least two images are needed.", "Hold out more images."),
        ([0.2] * 3, "The interval excludes zero, but the p-value is 0.25.", "3 more held-out images would decide"),
        ([0.2, 0.1, 0.3], "or more than the largest possible one (80 % interval).", ""),
    ],
    ids=["one image", "equal differences", "few images"],
)
def test_an_undecided_verdict_on_few_images(page, changes, certainty, step):
    experiments = page({"baseline": 0.5, "new": 0.6}, seeds=2)
    reduce_to_images(experiments, changes)
    result = verdict(experiments)
    assert certainty in result.certainty and step in result.next_step


def test_a_difference_within_the_margin_is_equivalent(page):
    result = verdict(page({"baseline": 0.5, "new": 0.501}, seeds=5, spread=0.01, margin=0.05))
    assert result.kind == "equivalent"
    assert result.statement.startswith("new and baseline are equivalent within the margin of 5.0 points: probability")


def test_several_experiments_are_corrected_and_share_noise(page):
    verdicts = Assessment(page({"baseline": 0.5, "one": 0.6, "two": 0.4, "three": 0.5003}, seeds=3)).verdicts
    assert [decided.kind for decided in verdicts[:2]] == ["better", "worse"]
    assert all("corrected for 3 comparisons" in decided.certainty for decided in verdicts[:2])
    noise = "The noise between seeds is estimated from all experiments of the page with "
    assert all(noise in shown.certainty for shown in verdicts)


def test_scores_and_their_difference_are_from_the_same_seeds(page, tmp_path):
    page({"baseline": 0.5, "new": 0.6, "one seed": 0.62}, seeds=3)
    config = read_yaml(tmp_path / "config.yaml")
    del config["experiments"][2]["runs"][1:]
    write_yaml(tmp_path / "config.yaml", config)
    experiments = load_experiments(tmp_path / "config.yaml")
    shown = {verdict.experiment: verdict.statement for verdict in Assessment(experiments).verdicts}
    for experiment in experiments[1:]:
        own, base = (
            100
            * np.mean(
                [run.groups["finetune/own"]["answer_probability"].mean for run in side.scores[: len(experiment.runs)]]
            )
            for side in (experiment, experiments[0])
        )
        levels = f"{own:.1f} % instead of {base:.1f} % ({own - base:+.1f} points"
        assert levels in shown[experiment.name]
    assert experiments[0].groups["finetune/own"]["answer_probability"].seeds == 3


def test_an_experiment_is_compared_with_its_random_control(page, tmp_path):
    page({"baseline": 0.5, "new": 0.6, "new-random": 0.52}, seeds=3)
    config = read_yaml(tmp_path / "config.yaml")
    config["experiments"][2]["control"] = {"kind": "random", "experiment": "new", "compared": ["new", "new-random"]}
    write_yaml(tmp_path / "config.yaml", config)
    experiments = load_experiments(tmp_path / "config.yaml")
    better, control = Assessment(experiments).verdicts
    assert better.statement.startswith("new is better than baseline: ")
    assert control.experiment == "new-random"
    assert control.statement.startswith("new is better than new-random: ")
    for shown in (better, control):
        assert "corrected for 2 comparisons" in shown.certainty
        assert "The noise between seeds is estimated from all experiments of the page with " in shown.certainty
    card = Assessment(experiments).cards[1]
    assert card.label == "new: better" and "than as many random ones" in card.next_step
    # the intervals equal those of the page's tables
    for shown, reference in ((better, 0), (control, 2)):
        ordered = [experiments[reference], *(other for index, other in enumerate(experiments) if index != reference)]
        difference = compare_with_first(ordered)["new"]["finetune/own"]["answer_probability"]
        assert format_interval("answer_probability", difference, format_difference) in shown.statement
    assert Assessment(experiments).build_records()["new-random"]["statement"] == control.statement


def test_the_command_that_keeps_a_variant_names_the_page(page):
    [_, variant] = page({"base": 0.5, "base-lora-r8": 0.6}, seeds=2)
    command = build_keep_command(variant, Path("results/shapes/mgm-2b/sweep"))  # the variants may have another model
    assert command.endswith("keep_variant.py results/shapes/mgm-2b/sweep/config.yaml base-lora-r8 sweep_best")


def test_a_page_of_variants_begins_with_verdicts(page, tmp_path):
    experiments = page({"base": 0.5, "base-lora-r8": 0.6, "base-lora-r32": 0.51}, seeds=3, spread=0.05)
    better, open_one = cards = Assessment(experiments, Path("results/shapes/mgm-2b/lora_sweep")).cards
    assert (better.label, better.next_step) == ("Better", "Use base-lora-r8 instead of base.")
    assert open_one.label == "Undecided" and open_one.confidence == "Not sure."
    assert not open_one.command or open_one.command.startswith("snakemake lora_sweep --config 'seeds=[")
    shown = VariantsPage("LoRA rank sweep", ["A note."], "Experiment", [], [], cards=cards)
    write_variants_page(shown, tmp_path / "lora_sweep.html")
    html = (tmp_path / "lora_sweep.html").read_text(encoding="utf-8")
    positions = [
        html.index(text) for text in ("base-lora-r8 is better than base: ", "How sure", "Cost", "Next", "A note.")
    ]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("halved", "begun", "advice"),
    [
        (0.6, "At half of the learning rates, the verdict is the same: new-half-learning-rate is better than", "holds"),
        (
            0.4,
            "At half of the learning rates, the verdict changes (no longer “better”): new-half-learning-rate is worse",
            "depends",
        ),
    ],
)
def test_a_verdict_is_repeated_at_half_of_the_learning_rates(page, tmp_path, halved, begun, advice):
    names = ["baseline-half-learning-rate", "new-half-learning-rate"]
    page({"baseline": 0.5, "new": 0.6, names[0]: 0.48, names[1]: halved}, seeds=3)
    config = read_yaml(tmp_path / "config.yaml")
    for index, (parent, compared) in enumerate([("baseline", None), ("new", names[::-1])], start=2):
        control = {"kind": "half_learning_rate", "experiment": parent, "compared": compared}
        config["experiments"][index]["control"] = control
    write_yaml(tmp_path / "config.yaml", config)
    experiments = load_experiments(tmp_path / "config.yaml")
    better, control = Assessment(experiments).verdicts
    assert better.statement.startswith("new is better than baseline: ")
    assert control.experiment == names[1]
    assert control.statement.startswith(begun)
    card = Assessment(experiments).cards[1]
    assert card.next_step.startswith("The verdict") and advice in card.next_step
    assert "verdict" not in Assessment(experiments).build_records()[names[0]]


def test_an_interval_without_zero_may_be_undecided(page):
    levels = {"baseline": 0.5, "one": 0.536} | {f"other{number}": 0.5 + number / 10000 for number in range(1, 5)}
    [result, *_] = Assessment(page(levels, seeds=3, spread=0.03)).verdicts
    assert result.kind == "undecided"
    assert "The interval excludes zero, but the corrected p-value is 0.052." in result.certainty


def test_the_configuration_sets_the_headline_metric(page):
    gain = find_headline(page({"baseline": 0.5, "new": 0.6}, seeds=1, headline="likelihood_gain", margin=0.2))
    assert (gain.group, gain.metric, gain.margin) == ("finetune/difference", "answer_log_likelihood", 0.2)
    result = verdict(page({"baseline": 0.5, "new": 0.6}, seeds=2, headline="answer_log_likelihood"))
    assert "log-likelihood of the right answer (nats) −0.396 instead" in result.statement


@pytest.mark.parametrize(
    ("headline", "ranks_short_runs"),
    [
        ("answer_probability", ("finetune/difference", "answer_log_likelihood")),
        ("vqa_accuracy", ("finetune/difference", "answer_log_likelihood")),
        ("ref_clip_score", ("finetune/own", "ref_clip_score")),
    ],
)
def test_the_likelihood_gain_ranks_short_trainings(headline, ranks_short_runs):
    settings = ReportSection(headline=headline)
    assert settings.locate_headline(share_of_rows=0.25)[1:] == ranks_short_runs
    assert settings.locate_headline()[1:] == ("finetune/own", headline)
    assert settings.locate_headline(False, 0.25) == settings.locate_headline(False), "captions have no shuffled answers"


def test_baseline_alone_states_what_it_learned(page):
    result = verdict(page({"baseline": 0.5}, seeds=2))
    assert result.statement.startswith("The fine-tuned model uses its images: probability of the right answer 50.")
    assert " instead of 25." in result.statement and "2 seeds" in result.certainty


def test_a_model_that_ignores_images_has_a_banner(monkeypatch, tmp_path, capsys):
    config = write_results(tmp_path)
    for file in tmp_path.glob("dj_synth/**/evaluate_vqa/scores.jsonl"):
        rows = list(read_jsonl(file))
        for row in rows:
            row["values"] |= {"answer_probability": [0.25, 1]}
        write_jsonl(file, rows)
    for file in tmp_path.glob("baseline/**/evaluate_vqa/scores.jsonl"):
        rows = [row | {"values": row["values"] | {"answer_probability": row["values"]["vqa_accuracy"]}} for row in
                read_jsonl(file)]  # fmt: skip
        write_jsonl(file, rows)
    text = read_page_text(write_report(monkeypatch, config))
    first = text[: text.index("Headline metrics")]
    assert first.count("dj_synth has learned nothing measurable, so there is no verdict on it.") == 1
    assert "(probability of the right answer 25.0 % and 25.0 %)" in first
    assert first.lower().count("learned") == first.lower().count("withheld") == 1
    assert "warning: dj_synth has learned nothing" in capsys.readouterr().err


def test_reasons_name_their_experiments_unless_all_share_them():
    def fault(reason):
        return LearningFault(reason, "Train longer")

    same, stage = fault("The loss rose"), fault("The stage took 6 steps")
    unlearned = {"one": [fault("No gain (5 % and 6 %)"), same], "two": [fault("No gain (7 % and 8 %)"), same, stage]}
    assert describe_faults(unlearned) == [
        "No gain (one: 5 % and 6 %; two: 7 % and 8 %).",
        "The loss rose.",
        "two: The stage took 6 steps.",
    ]
    assert describe_faults({"one": [fault("No gain (5 %)"), fault("No gain (6 %)")]}) == ["No gain (5 %; 6 %)."]


def test_experiments_that_learned_nothing_share_a_card(page, tmp_path):
    names = ("one", "two")
    page({"baseline": 0.5, "new": 0.6} | dict.fromkeys(names, 0.55), seeds=1)
    for name in names:
        write_training_record(tmp_path / name / "0/finetune", steps=6)
    experiments = load_experiments(tmp_path / "config.yaml")
    for target, command in (("", "one two"), ("sweep", "sweep")):
        cards = Assessment(experiments, Path("results", target) if target else None).cards
        first, merged = merge_withheld(cards, experiments[0], target)
        assert first == cards[0] and merged.verdict.experiment == "one and two"
        assert merged.verdict.statement == "The verdicts are withheld, because one and two learned nothing."
        assert merged.command == f"snakemake {command} --config {LONGER}"
        assert merged.next_step == cards[1].next_step == cards[2].next_step
        assert merged.cost.endswith(" for the stages that these experiments added, their times added up.")
    assert set(Assessment(experiments).build_records()) == {"baseline", "new", *names}


def test_seed_noise_does_not_hide_that_models_learned(page):
    experiments = page({"baseline": 0.5}, seeds=2)
    gains = [run.groups["finetune/difference"]["answer_probability"] for run in experiments[0].scores]
    gains[1].sums[:] = 0.05 + gains[1].sums / 100  # this seed gains a fifth of the other's
    assert experiments[0].groups["finetune/difference"]["answer_probability"].low < 0
    own = stats.ttest_1samp(np.mean([gain.sums for gain in gains], axis=0), 0).confidence_interval()
    assert estimate_image_gain(experiments[0], "answer_probability").ends == pytest.approx(own)
    assert Assessment(experiments).unlearned == {}


def test_few_steps_and_a_loss_that_rises_are_named(page, tmp_path):
    page({"baseline": 0.5, "new": 0.6}, seeds=1)
    write_training_record(tmp_path / "new/0/finetune", steps=6)
    losses = [{"step": step, "loss": 1.0 + step / 100} for step in range(1, 41)]
    write_jsonl(tmp_path / "new/0/pretrain/metrics.jsonl", losses)
    experiments = load_experiments(tmp_path / "config.yaml")
    [rising, few] = Assessment(experiments).unlearned["new"]
    assert str(few) == (
        "The stage finetune changed weights in 6 optimizer steps only; at least 20 are needed. Raise "
        "finetune.min_steps or finetune.epochs, or lower finetune.global_batch_size."
    )
    assert str(rising).startswith(
        "The loss of the stage pretrain rose (1.070 over the first third of the logged steps, 1.340 over the last third"
    )
    assert verdict(experiments).statement.startswith("The verdict is withheld, because new learned nothing")


def test_data_without_questions_are_judged_by_captions(page, tmp_path):
    experiments = page({"baseline": 0.5, "new": 0.6}, seeds=1)
    for file in tmp_path.glob("*/0/evaluate_vqa/metrics.json"):
        write_json(file, read_json(file) | {"questions": 0})
    experiments = load_experiments(tmp_path / "config.yaml")
    assert find_headline(experiments).metric == "caption_log_likelihood"


def test_the_first_screen_precedes_everything_else(monkeypatch, tmp_path):
    config = write_results(tmp_path)
    [older] = Assessment(load_experiments(config)).verdicts
    reason = "the probability of the right answer of dj_synth and baseline was not measured."
    assert older.statement.startswith(f"There is no verdict: {reason}")
    for file in tmp_path.glob("*/**/evaluate_vqa/scores.jsonl"):
        rows = list(read_jsonl(file))
        for row in rows:
            row["values"] |= {"answer_probability": row["values"]["vqa_accuracy"]}
        write_jsonl(file, rows)
    assert read_yaml(config)["experiments"][1]["name"] == "dj_synth"
    text = read_page_text(write_report(monkeypatch, config))
    first = text[: text.index("Headline metrics")]
    assert (
        "dj_synth is better than baseline: probability of the right answer" in first
        and "Equally good data would " in first
    )


def test_shared_stages_cost_nothing_and_commands_continue_runs(page, tmp_path):
    page({"baseline": 0.5, "new": 0.5001}, seeds=1, spread=0.1)
    config = read_yaml(tmp_path / "config.yaml")
    for experiment in config["experiments"]:
        experiment["config"] |= {"dataset": "../my photos", "model": {"name": "mgm-2b"}}
    config["experiments"][1]["runs"][0]["stages"]["filter"] = config["experiments"][0]["runs"][0]["stages"]["filter"]
    write_yaml(tmp_path / "config.yaml", config)
    [card] = Assessment(load_experiments(tmp_path / "config.yaml")).cards
    assert card.cost == "18 min 00 s for the stages that this experiment added, their times added up."
    assert (card.label, card.confidence) == ("Undecided, one seed", "Not sure.")
    assert card.command == ("snakemake decide --config 'dataset=../my photos' model=mgm-2b experiment=new")


@pytest.mark.parametrize(
    ("settings", "step", "command"),
    [
        ({}, "Raise finetune.min_steps or finetune.epochs", f"snakemake baseline --config {LONGER}"),
        (
            {"dataset": "photos", "model": {"name": "tiny", "foundation": "shipped"}},
            "The model tiny is made for rendered scenes; on photos, train another one.",
            "snakemake fetch --config model=qwen3-vl-2b && "
            "snakemake baseline --config dataset=photos model=qwen3-vl-2b",
        ),
        (
            {"finetune": {"max_steps": 6}},
            "Raise finetune.max_steps. This command trains with more steps:",
            "snakemake baseline --config 'pretrain={min_steps: 120}' 'finetune={max_steps: 60}'",
        ),
    ],
    ids=["few steps", "photos", "limited steps"],
)
def test_advice_for_unlearned_models_follows_from_their_settings(page, tmp_path, settings, step, command):
    page({"baseline": 0.5}, seeds=1)
    write_training_record(tmp_path / "baseline/0/finetune", steps=6)
    config = read_yaml(tmp_path / "config.yaml")
    config["experiments"][0]["config"] |= settings
    write_yaml(tmp_path / "config.yaml", config)
    record = Assessment(load_experiments(tmp_path / "config.yaml")).build_records()["baseline"]
    assert record["verdict"] == "Nothing learned" and len(record["learning_faults"]) == 1
    assert record["next_step"].startswith(step) and record["command"] == command


@pytest.mark.parametrize(
    ("base", "label", "statement"),
    [
        (0.7, "Forgot", "The fine-tuned model is worse than before training: probability of the right answer"),
        (0.3, "Learned", "The fine-tuned model uses its images, and is better than before training: probability"),
    ],
)
def test_training_is_compared_with_the_model_before_it(page, tmp_path, base, label, statement):
    page({"baseline": 0.5}, seeds=1)
    before = {f"base/{images}": values for images, values in
              zip(("own", "shuffled"), make_scores(base, 1, 0.02).values(), strict=True)}  # fmt: skip
    stages = write_run(tmp_path / "baseline/0", {}, make_scores(0.5, 0, 0.02) | before)
    assert stages
    [card] = Assessment(load_experiments(tmp_path / "config.yaml")).cards
    assert card.label == label and card.verdict.statement.startswith(statement)
    assert ("learning_rate: 0.0001" in card.command) == (label == "Forgot")


def test_a_single_experiment_is_judged_by_the_corrected_change(page):
    """Both scores fall by 2.1 standard errors, whose p-value is 0.04, and 0.08 after Holm's correction."""
    experiments = page({"baseline": 0.5}, seeds=1)
    noise = stats.zscore(np.random.default_rng(0).normal(size=100), ddof=1)
    groups = experiments[0].runs[0].scores.groups
    for images in ("own", "shuffled"):
        groups[f"base/{images}"] = {
            metric: MetricValues(
                values.ids, values.sums + 0.01 * (noise + 0.21 * np.sqrt(2)), values.counts, values.file
            )
            for metric, values in groups[f"finetune/{images}"].items()
        }
    assert Assessment(experiments).forgotten == {}
    result = verdict(experiments)
    assert result.kind == "better" and "is not shown to differ from before training" in result.statement


def test_publishing_is_not_advised_for_a_model_that_forgot(page, tmp_path):
    page({"baseline": 0.5, "new": 0.6}, seeds=3)
    assert " publish " in Assessment(load_experiments(tmp_path / "config.yaml")).cards[0].command
    for seed in range(3):
        before = {f"base/{images}": values for images, values in
                  zip(("own", "shuffled"), make_scores(0.7, seed, 0.02).values(), strict=True)}  # fmt: skip
        write_run(tmp_path / f"new/{seed}", {}, make_scores(0.6, seed, 0.02) | before)
    [card] = Assessment(load_experiments(tmp_path / "config.yaml")).cards
    assert card.label == "Better"
    assert card.next_step == (
        "The verdict needs no more runs, but training made scores of new worse. Before you publish: train less, or "
        "mix general instructions into the data. This command trains with half the learning rate:"
    )
    assert card.command == "snakemake new --config 'finetune={learning_rate: 0.0001}'"


def test_statements_stay_within_the_range_of_a_share(page):
    result = verdict(page({"baseline": 0.5, "new": 0.6}, seeds=2, spread=0.8))
    assert result.kind == "undecided"
    assert "more than one of five comparisons would miss the largest possible difference" in result.certainty
    points = [float(number.replace("−", "-")) for number in re.findall(r"[+−]\d+\.\d", result.statement)]
    assert len(points) == 3 and max(map(abs, points)) <= 100


def test_a_command_of_two_verdicts_is_shown_once(tmp_path):
    assessment = Assessment(load_experiments(write_results(tmp_path / "results")))
    card = replace(assessment.cards[0], next_step="Run:", command="snakemake more", withheld=None)
    assessment.__dict__["cards"] = [card, replace(card, verdict=replace(card.verdict, experiment="baseline"))]
    write_report_page(assessment, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert html.count("<code>snakemake more</code>") == html.count("(The same command as above.)") == 1
