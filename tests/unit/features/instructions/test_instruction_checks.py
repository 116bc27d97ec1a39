"""Checks of answers without a judge: blind answers, round trips, and equal numbers of yes and no."""

import random
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.shapes import draw_question, draw_scene
from dj2mgm.features.instructions.operators.instruction_checks import VERIFICATION_QUESTION
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops
from dj2mgm.juicer.run_recipe import SYNTHESIZED
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.recipes.argument_kinds import Rewrite, RewrittenQuestion
from dj2mgm.storage.files import read_jsonl, read_yaml
from instructions import ANSWERS, QUESTIONS, loss, select
from paths import PROJECT

COLOR = "What color is the {shape}? = {color} => Is there a {color} {shape}? = yes"
ABSENT = "Is there a {color} {shape}? = no => What color is the {shape}? != {color}"


def test_a_rewritten_question_has_the_same_topic():
    rule = Rewrite(COLOR)
    assert rule.apply("What color is the star?", "orange") == RewrittenQuestion("Is there an orange star?", "yes")
    assert rule.apply("what color is the star? ", " red") == RewrittenQuestion("Is there a red star?", "yes")
    assert rule.apply("What shape is the red object?", "star") is None
    absent = Rewrite(ABSENT)
    expected = RewrittenQuestion("What color is the star?", "orange", expected=False)
    assert absent.apply("Is there an orange star?", "no") == expected
    assert absent.apply("Is there an orange star?", "yes") is None
    twice = Rewrite("Is the {thing} a {thing}? = yes => What is it? = {thing}")
    assert twice.apply("Is the cat a cat?", "yes") and twice.apply("Is the cat a dog?", "yes") is None


def test_rewritten_questions_of_the_shipped_recipe_are_right():
    """Each rewritten question of the embedded dataset has the expected answer in the same scene."""
    process = read_yaml(PROJECT / "config/recipes/dj_synth_instructions.yaml")["process"]
    [arguments] = [step["round_trip_filter"] for step in process if "round_trip_filter" in step]
    rules, used = list(map(Rewrite, arguments["rewrites"])), set()
    for number in range(300):
        rng = random.Random(number)
        scene = draw_scene(rng)
        answers = {}  # for every question about the scene
        for item in scene.objects:
            answers |= {
                f"What color is the {item.shape}?": item.color,
                f"What shape is the {item.color} object?": item.shape,
            }
            article = "an" if item.color == "orange" else "a"
            answers[f"Is there {article} {item.name}?"] = "yes"
        for kind in ("color", "shape", "position", "yes_no"):
            question, answer = draw_question(scene, kind, rng)
            for index, rule in enumerate(rules):
                if other := rule.apply(question, answer):
                    used.add(index)
                    assert (answers.get(other.question) == other.answer) == other.expected
    assert used == set(range(len(rules)))


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("What is it?", "must be 'question = answer => question = answer'"),
        ("What? = {a} => {b}? = yes", "{b} is only on its right side"),
        ("{a} {b} {c} {d} {e}? = x => {a}? = yes", "more than 4 braces"),
    ],
)
def test_malformed_rewrites_are_refused(rule, says):
    with pytest.raises(ValueError, match=says.replace("{", r"\{")):
        load_ops([{"round_trip_filter": {"base_model": "", "stage": "", "rewrites": [rule]}}])


def test_rules_are_fast_on_hostile_text():
    rule = Rewrite("The {a} {b} {c} {d}? = yes => Is it {a}? = yes")
    assert rule.apply("The " + "a " * 50_000, "no") is None


def test_probabilities_equal_training_losses(project, tmp_path):
    rewrites = ["What is it? = {thing} => Is it {thing}? = yes", "Is it a cat? = no => What is it? != a cat"]
    process = [
        {"blind_answer_filter": {"max_likelihood": 1.0}},
        {"round_trip_filter": {"min_agreement": 0.0, "rewrites": rewrites}},
    ]
    select(project, tmp_path, process)
    stats = list(read_jsonl(tmp_path / "out/stats.jsonl"))
    model, family = MGMGenerator(project / "base", project / "pretrain", "cpu").model, MGMFamily(project / "base")
    Image.new("RGB", (224, 224), (128, 128, 128)).save(tmp_path / "gray.png")
    for number, (row, answer) in enumerate(zip(stats, ANSWERS, strict=True)):
        image, question = project / "data/images" / f"{number // 2}.png", QUESTIONS[number % 2]
        blind = np.exp(-loss(family, model, tmp_path / "gray.png", question, answer))
        assert row["blind_likelihood"] == pytest.approx([blind], rel=1e-3)
        if question == "What is it?":
            agreement = [np.exp(-loss(family, model, image, f"Is it {answer}?", "yes"))]
        else:
            agreement = [1 - np.exp(-loss(family, model, image, "What is it?", "a cat"))] if answer == "no" else []
        assert row["round_trip_agreement"] == pytest.approx(agreement, rel=1e-3)


def test_both_spellings_of_yes_count(project, tmp_path):
    """Compare with the losses of four answers: the probability of yes, given that the model answers yes or no."""
    select(project, tmp_path, [{"round_trip_filter": {"min_agreement": 0.0}}])
    model, family = MGMGenerator(project / "base", project / "pretrain", "cpu").model, MGMFamily(project / "base")
    image, question = (
        project / "data/images/0.png",
        VERIFICATION_QUESTION.format(question=QUESTIONS[0], answer=ANSWERS[0]),
    )
    weights = {word: np.exp(-loss(family, model, image, question, word)) for word in ("yes", "Yes", "no", "No")}
    expected = (weights["yes"] + weights["Yes"]) / sum(weights.values())
    assert next(read_jsonl(tmp_path / "out/stats.jsonl"))["round_trip_agreement"] == pytest.approx([expected], rel=1e-3)


MODEL = {"base_model": "", "stage": ""}


@pytest.mark.parametrize(
    ("name", "arguments", "stat", "value"),
    [
        ("blind_answer_filter", MODEL | {"max_likelihood": 0.5}, "blind_likelihood", 0.25),
        ("round_trip_filter", MODEL | {"min_agreement": 0.5}, "round_trip_agreement", 0.75),
        ("caption_agreement_filter", {"min_agreement": 0.5}, "caption_agreement", 1.0),
        ("caption_log_likelihood_filter", {"min_log_likelihood": -3.0}, "caption_log_likelihood", -1.0),
    ],
)
def test_checks_have_the_common_arguments_of_filters(name, arguments, stat, value):
    limit = next(value for key, value in arguments.items() if key.startswith(("min_", "max_")))
    samples = {Fields.stats: [{stat: np.array(values)} for values in ([value], [limit], [])]}

    def decide(**more) -> list[bool]:
        [operator] = load_ops([{name: arguments | {"batch_size": 8} | more}])
        assert operator.batch_size == 8
        return list(operator.process(samples))

    assert decide() == [True, True, True]
    assert decide(min_closed_interval=False, max_closed_interval=False) == [True, False, True]
    assert decide(reversed_range=True)[::2] == [False, True], "rows without the statistic are kept in any case"


def test_limits_drop_rows(project, tmp_path):
    select(project, tmp_path, [{"round_trip_filter": {"min_agreement": 0.0}}, {"blind_answer_filter": {}}])
    agreement = [row["round_trip_agreement"][0] for row in read_jsonl(tmp_path / "out/stats.jsonl")]
    limit = float(np.median(agreement))
    summary = select(project, tmp_path, [{"round_trip_filter": {"min_agreement": limit}}, {"blind_answer_filter": {}}])
    assert summary["rows_kept"] == 3 and len(list(read_jsonl(tmp_path / "out" / SYNTHESIZED))) == 3


@pytest.mark.parametrize("name", ["blind_answer_filter", "round_trip_filter"])
def test_rows_without_a_usable_question_are_kept(project, name):
    folders = {"base_model": str(project / "base"), "stage": str(project / "pretrain"), "template": "gemma"}
    [operator] = load_ops([{name: folders}])
    image = str(project / "data/images/0.png")
    questions = ["", "What is it <|end|>?", "What is it?", "What is it?"]
    texts = ["a cat", "a cat", "a cat </s>", "a cat"]
    samples = {"text": list(map(build_dj_text, texts)), "images": [[image]] * 4, "question": questions}
    measured = operator.compute_stats(samples | {Fields.stats: [{} for _ in texts]})
    assert [len(stats[operator.stat]) for stats in measured[Fields.stats]] == [0, 0, 0, 1]
    assert list(operator.process(measured))[:3] == [True] * 3


def test_new_only_skips_rows_of_the_dataset(project):
    folders = {"base_model": str(project / "base"), "stage": str(project / "pretrain"), "template": "gemma"}
    [operator] = load_ops([{"round_trip_filter": folders | {"new_only": True}}])
    images = [[str(project / "data/images/0.png")]] * 2
    samples = {"text": [build_dj_text("a cat")] * 2, "images": images, "question": ["What is it?"] * 2, "slot": [0, 1]}
    measured = operator.compute_stats(samples | {Fields.stats: [{}, {}]})
    assert [len(stats["round_trip_agreement"]) for stats in measured[Fields.stats]] == [0, 1]


AT = "Where is the {thing}? = {place} => caption = {thing} at the {place}"
NONE = "Is there a {thing}? = no => caption != {thing}"


@pytest.mark.parametrize(
    ("rules", "question", "answer", "agreement"),
    [
        (None, "What color is it?", "Red.", [1.0]),
        (None, "What color is it?", "blue", [0.0]),
        (None, "What color is it?", "re", [0.0]),
        (None, "Is it red?", "yes", []),
        (None, "How many?", "2", []),
        ([AT, NONE], "Where is the red boat?", "top left", [1.0]),
        ([AT, NONE], "Where is the boat?", "top right", [0.0]),
        ([AT, NONE], "Is there a star?", "no", [1.0]),
        ([AT, NONE], "Is there a boat?", "no", [0.0]),
        ([AT, NONE], "Is there a boat?", "yes", []),
    ],
)
def test_agreement_of_answers_with_a_caption(rules, question, answer, agreement):
    [operator] = load_ops([{"caption_agreement_filter": {"rules": rules}}])
    caption = "A red boat at the top left, and a sun."
    samples = {"text": [build_dj_text(answer)] * 2, "question": [question] * 2, "caption": [caption, ""]}
    measured = operator.compute_stats(samples | {Fields.stats: [{}, {}]})
    assert [stats["caption_agreement"].tolist() for stats in measured[Fields.stats]] == [agreement, []]
    assert list(operator.process(measured)) == [agreement != [0.0], True]


@pytest.mark.parametrize(
    ("answers", "arguments", "counts"),
    [
        (["yes", "Yes.", "no", "yes", "blue", "no"], {}, {"yes": 2, "no": 2, "blue": 1}),
        (["yes", "yes", "blue"], {}, {"yes": 2, "blue": 1}),
        (["ja", "Ja.", "nein", "no", "no"], {"positive": "Ja", "negative": "Nein"}, {"ja": 1, "nein": 1, "no": 2}),
    ],
)
def test_yes_and_no_are_balanced(answers, arguments, counts, tmp_path):
    [operator] = load_ops([{"yes_no_balance_filter": arguments}])
    rows = [{"id": str(number), "text": build_dj_text(answer)} for number, answer in enumerate(answers)]
    chosen = [answer for answer, keep in zip(answers, operator.decide(rows, tmp_path).mask, strict=True) if keep]
    assert {key: sum(answer.lower().strip(".") == key for answer in chosen) for key in counts} == counts


def test_a_gray_image_is_encoded_once(project, monkeypatch):
    """All rows of a batch share one gray image, because its encoding is expensive."""
    generator = MGMGenerator(project / "base", project / "pretrain", "cpu")
    encoded, encode = [], generator.model.model.get_image_features
    monkeypatch.setattr(
        generator.model.model, "get_image_features", lambda pixels: encoded.append(len(pixels)) or encode(pixels)
    )
    gray = BytesIO()
    Image.new("RGB", (8, 8)).save(gray, "PNG")
    assert (
        len(list(generator.compute_log_likelihoods([gray] * 5, QUESTIONS * 2 + ["Why?"], ["a cat"] * 5, "gemma"))) == 5
    )
    assert encoded == [1]
