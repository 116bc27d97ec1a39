"""VQA accuracy compared with its definition, options in answers, and CircularEval."""

import itertools

import pytest

from dj2mgm.evaluation.groups import estimate_metrics
from dj2mgm.features.challenge.benchmarks.mmbench import measure as measure_mmbench
from dj2mgm.features.challenge.benchmarks.mmbench import parse_chosen_option
from dj2mgm.features.challenge.benchmarks.textvqa import CONTRACTIONS, compute_vqa_accuracy, normalize_like_evalai
from dj2mgm.features.challenge.benchmarks.textvqa import measure as measure_textvqa


def by_definition(prediction: str, answers: list[str]) -> float:
    """Return the mean of min(1, agreeing answers / 3) over all nine of the ten answers."""
    nines = list(itertools.combinations(answers, 9))
    return sum(min(1.0, nine.count(prediction) / 3) for nine in nines) / len(nines)


@pytest.mark.parametrize("agreeing", range(11))
def test_vqa_accuracy_is_the_mean_over_all_leave_one_out_subsets(agreeing):
    answers = ["red"] * agreeing + ["blue"] * (10 - agreeing)
    assert compute_vqa_accuracy("Red.", answers) == pytest.approx(by_definition("red", answers), abs=1e-12)


def test_both_sides_are_normalized():
    assert compute_vqa_accuracy("the 2 cats!", ["Two cats"] * 2 + ["two, cats?"] * 2 + ["dog"] * 6) == 1.0


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("The Two  cats.", "2 cats"),
        ("none", "0"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("5.", "5"),
        ("U.S.A.", "usa"),
        ("12:30", "12:30"),
        ("coca-cola", "coca cola"),
        ("coca- cola", "coca cola"),
        ("coca -cola", "coca cola"),
        ("coca-cola - zero", "cocacola 0"),
        ("budweiser's", "budweiser 's"),
        ("dont walk", "don't walk"),
        ("couldnt've", "couldn't've"),
        ("line\nbreak\ttab", "line break tab"),
        ("an", ""),
        ("", ""),
    ],
)
def test_answers_are_normalized_as_the_server_does(raw, expected):
    assert normalize_like_evalai(raw) == expected


def test_contractions_without_one_apostrophe_are_repaired():
    assert len(CONTRACTIONS) == len(set(CONTRACTIONS))
    for word in CONTRACTIONS:
        if "'s" not in word:  # normalization splits these: she's → she 's
            assert normalize_like_evalai(word) == word
            for index, letter in enumerate(word):
                if letter == "'":
                    assert normalize_like_evalai(word[:index] + word[index + 1 :]) == word


def test_textvqa_counts_questions_and_groups_them_by_image():
    rows = [
        {"image_id": image, "prediction": "red", "answers": ["red"] * agreeing + ["x"] * (10 - agreeing)}
        for image, agreeing in (("b", 10), ("a", 2), ("b", 0))
    ]
    measured = measure_textvqa(rows)["score"]
    assert measured.values.tolist() == [100, 60, 0] and measured.units.tolist() == ["b", "a", "b"]


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("B", "B"),
        (" B.\n", "B"),
        ("(B)", "B"),
        ("B: a cat", "B"),
        ("B. whatever", "B"),
        ("B\nThe cat is black.", "B"),
        ("B, a cat", "B"),
        ("A.C. is a current", None),
        ("a cat", "A"),
        ("Two Dogs", "B"),
        ("A cat and a dog", None),
        ("D", None),
        ("Both", None),
        ("b", None),
        ("", None),
    ],
)
def test_the_option_is_read_from_the_answer(prediction, letter):
    assert parse_chosen_option(prediction, {"A": "a cat", "B": "two dogs", "C": "none"}) == letter


def test_an_ambiguous_option_text_is_not_an_answer():
    assert parse_chosen_option("red", {"A": "red", "B": "Red"}) is None


def answered(index: int, prediction: str, answer: str | None, category: str = "style") -> dict:
    options = {"A": "red", "B": "blue"}
    truth = {"index": index, "options": options, "answer": answer, "category": category, "l2_category": "coarse"}
    return truth | {"image_id": str(index % 1_000_000), "prediction": prediction}


def test_circular_accuracy_needs_all_rotations_right():
    rows = [answered(1, "A", "A"), answered(2, "A", "A"), answered(3, "B", "B", "ocr")]
    rows += [answered(1_000_001, "A", "B"), answered(1_000_002, "B", "B"), answered(1_000_003, "A", "A", "ocr")]
    measured = measure_mmbench(rows)
    means = {name: values.values.mean() for name, values in measured.items()}
    assert means == {
        "score": pytest.approx(200 / 3),
        "l2_category/coarse": pytest.approx(200 / 3),
        "category/style": 50,
        "category/ocr": 100,
    }
    assert len(measured["score"].values) == 3


def test_mmbench_counts_questions_and_groups_them_by_image():
    rows = [answered(index, "A", answer) for index, answer in ((1, "A"), (2, "A"), (3, "B"), (1_000_001, "B"))]
    for row, image in zip(rows, ("b", "a", "b", "b"), strict=True):
        row["image_id"] = image
    measured = measure_mmbench(rows)
    for name in ("score", "category/style", "l2_category/coarse"):
        assert (measured[name].values.tolist(), measured[name].units.tolist()) == ([0, 100, 0], ["b", "a", "b"])
    assert estimate_metrics(measured)["score"].images == 2


def test_always_answering_a_scores_zero_with_rotations():
    rows = [answered(i + turn * 1_000_000, "A", "AB"[(i + turn) % 2]) for i in range(6) for turn in range(2)]
    assert measure_mmbench(rows)["score"].values.mean() == 0
    assert measure_mmbench(rows[::2])["score"].values.mean() == 50


def test_questions_without_answers_have_no_score():
    assert measure_mmbench([answered(1, "A", None)]) == {}
