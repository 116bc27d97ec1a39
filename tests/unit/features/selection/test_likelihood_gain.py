"""Likelihood gain of captions under a trained model, and the kept rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from captioned_pairs import (
    CAPTIONS,
    build_captioner_model,
    build_captioner_settings,
    read_rows,
    synthesize,
)
from dj2mgm.data.chat_template import ChatTemplate
from dj2mgm.data.formats import build_conversation, build_dj_text, build_text_conversation, extract_caption
from dj2mgm.errors import InputError
from dj2mgm.features.selection.operators.model_score_filters import compute_likelihood_gain
from dj2mgm.juicer.operators import trained_model_operators
from dj2mgm.juicer.patched_data_juicer import Fields, load_ops
from dj2mgm.juicer.run_recipe import SYNTHESIZED
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.models.questions import GivenAnswer
from dj2mgm.models.vision_language import IGNORE_INDEX
from dj2mgm.runs.layers import merge_experiment
from dj2mgm.runs.stage_settings import build_filter_settings, build_synthesize_settings
from dj2mgm.storage.files import read_jsonl
from instructions import ANSWERS, COUNT, QUESTIONS, save_instructions, select
from paths import PROJECT
from synthesis import read_synthesize_settings
from tiny_captioners import save_project

NAME, STAT = "likelihood_gain_filter", "likelihood_gain"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """Write twenty pairs in `data/`, a CLIP in `clip/`, and a model in `base/` and `pretrain/`, all random."""
    return save_project(tmp_path_factory.mktemp("project"), CAPTIONS)


@pytest.fixture
def known_likelihoods(monkeypatch):
    """Return a function that replaces the model by known log-likelihoods per token of captions given images."""
    calls: list[int] = []

    class Known:
        def list_control_tokens(self, template):
            return ["<image_soft_token>"]

        def compute_answer_log_likelihoods(self, images, answers, template):
            calls.append(len(images))
            return [[by_pair.get((Path(images[image]).stem, answer), -2.0)] * 3 for image, _, answer in answers]

    by_pair: dict[tuple[str, str], float] = {}
    monkeypatch.setattr(trained_model_operators, "get_model", lambda *arguments: Known())

    def register(likelihoods: dict[tuple[str, str], float]) -> list[int]:
        by_pair.update(likelihoods)
        return calls

    return register


def gains(images: list[list[str]], captions: list[str], **arguments) -> list[list[float]]:
    [operator] = load_ops([{NAME: {"base_model": "", "stage": ""} | arguments}])
    samples = {"text": list(map(build_dj_text, captions)), "images": images, Fields.stats: [{} for _ in images]}
    return [stats[STAT].tolist() for stats in operator.compute_stats(samples)[Fields.stats]]


def test_the_gain_is_the_mutual_information_per_token():
    """Compute by hand: two tokens, with probabilities given the own image and two others."""
    own, others = np.array([0.5, 0.8]), np.array([[0.1, 0.8], [0.3, 0.8]])
    whole = (np.log(0.5 / 0.3) + np.log(0.8 / 0.8)) / 2
    assert compute_likelihood_gain(np.log([own, *others]), 1.0) == pytest.approx(whole)
    assert compute_likelihood_gain(np.log([own, *others]), 0.0) == pytest.approx(np.log(own).mean())
    halfway = (np.log(0.5) - 0.5 * np.log(0.3) + np.log(0.8) - 0.5 * np.log(0.8)) / 2
    assert compute_likelihood_gain(np.log([own, *others]), 0.5) == pytest.approx(halfway)


def test_likelihoods_of_answers_equal_training_losses(project):
    images = [str(project / "data/images" / f"{number}.png") for number in range(3)]
    pairs = [
        GivenAnswer(0, "What is it?", "a cat"),
        GivenAnswer(2, "What is shown in this picture?", "picture 3 of a sea"),
        GivenAnswer(1, "", "a cat"),
        GivenAnswer(0, "What is it?", "dog"),
    ]
    generator, family = MGMGenerator(project / "base", project / "pretrain", "cpu"), MGMFamily(project / "base")
    values = generator.compute_answer_log_likelihoods(images, pairs, "gemma")
    encoder, model = family.make_encoder("gemma", 512), generator.model
    for (image, question, answer), token_values in zip(pairs, values, strict=True):
        item = encoder.encode_row(build_conversation("1", images[image], question, answer))
        batch = family.prepare_inputs(encoder.batch([item], len(item["input_ids"])), torch.device("cpu"))
        assert -sum(token_values) / len(token_values) == pytest.approx(model(**batch).loss.item(), rel=1e-4)
    assert generator.compute_answer_log_likelihoods([], [], "plain") == []
    with pytest.raises(InputError, match="template plain leaves out the question 'What is"):
        generator.compute_answer_log_likelihoods(images, pairs, "plain")
    assert list(generator.compute_log_likelihoods([images[0]], ["What is it?"], ["a <|end|> cat"], "gemma")) == [[]]
    about, questions, answers = zip(*pairs, strict=True)
    in_order = generator.compute_log_likelihoods([images[image] for image in about], questions, answers, "gemma")
    for actual, expected in zip(in_order, values, strict=True):
        assert actual == pytest.approx(expected, rel=1e-4)


def test_likelihoods_without_an_image_equal_those_of_the_text(project):
    generator = MGMGenerator(project / "base", project / "pretrain", "cpu")
    chat = ChatTemplate.load("gemma", generator.processor.tokenizer)
    pairs = [("What is it?", "a cat"), ("What color is the big dog?", "brown")]
    likelihoods = generator.compute_log_likelihoods([None, None], *zip(*pairs, strict=True), "gemma")
    for pair, values in zip(pairs, likelihoods, strict=True):
        item = generator.processor.encode(chat.render_segments(build_text_conversation(*pair)["conversations"]))
        ids = torch.tensor([item["input_ids"]])
        with torch.inference_mode():
            logits = generator.model(input_ids=ids).logits[0].log_softmax(dim=-1)
        labels = enumerate(item["labels"])
        expected = [logits[position - 1, token].item() for position, token in labels if token != IGNORE_INDEX]
        assert values == pytest.approx(expected, rel=1e-4)


def test_gain_is_high_for_captions_of_their_own_image(known_likelihoods):
    calls = known_likelihoods({("a", "a cat"): -0.5, ("b", "a dog"): -2.0})
    results = gains([["a.png"], ["b.png"], ["c.png"]], ["a cat", "a dog", "a cat"], other_images=2)
    prior = np.log((np.exp(-0.5) + 2 * np.exp(-2)) / 3)
    assert [value for [value] in results] == pytest.approx([-0.5 - prior, 0.0, -2.0 - prior])
    assert calls == [3]


def test_a_caption_with_a_control_token_has_no_gain_and_is_kept(known_likelihoods):
    known_likelihoods({("a", "a cat"): -0.5})
    images, captions = [["a.png"], ["b.png"], ["c.png"]], ["a cat", "a <image_soft_token> dog", "an <|end|> owl"]
    assert [len(gain) for gain in gains(images, captions, other_images=2)] == [1, 0, 0]


def test_rows_without_a_comparable_gain_are_kept(known_likelihoods):
    """Gains are not computed with fewer images, which would change their scale."""
    known_likelihoods({})
    assert gains([["a.png"], ["a.png"], [], ["b.png", "c.png"]], ["x"] * 4) == [[]] * 4
    assert gains([["a.png"], ["b.png"], ["c.png"]], ["x"] * 3, other_images=3) == [[]] * 3
    [operator] = load_ops([{NAME: {"base_model": "", "stage": ""}}])
    stats = [{STAT: []}, {STAT: [0.1]}, {STAT: [-0.1]}]
    assert list(operator.process({Fields.stats: stats})) == [True, True, False]
    assert gains([], []) == []


@pytest.mark.parametrize(("batch_size", "other_images", "parts"), [(8, 4, {6, 7}), (8, 7, {8, 9}), (40, 4, {33})])
def test_every_row_is_compared_with_equally_many_images(known_likelihoods, batch_size, other_images, parts):
    calls = known_likelihoods({(str(number), "x"): 0.0 for number in range(33)})
    images = [[f"{number}.png"] for number in range(33) for _ in range(2)]
    results = gains(images, ["x", "y"] * 33, batch_size=batch_size, other_images=other_images)
    assert [len(gain) for gain in results] == [1] * 66 and sum(calls) == 33 and set(calls) == parts


def test_other_images_are_evenly_spread_over_the_batch(known_likelihoods):
    """Each of eight images has a partner four places later that its caption fits equally well."""
    known_likelihoods(
        {(str(number), caption): 0.0 for number in range(8) for caption in (str(number), str((number + 4) % 8))}
    )
    results = gains([[f"{number}.png"] for number in range(8)], [str(number) for number in range(8)], other_images=1)
    assert results == [[0.0]] * 8


def test_the_stage_uses_its_model_and_keeps_the_share(project, tmp_path):
    settings = build_captioner_settings(project, tmp_path, [{NAME: {"keep_fraction": 0.5, "prior_weight": 0.5}}])
    summary = synthesize(project, tmp_path, settings)
    assert (summary["rows_in"], summary["rows_kept"], summary["rows_dropped"]) == (20, 10, 10)
    kept_gains = [row[STAT][0] for row in read_jsonl(tmp_path / "out/stats.jsonl")]
    dropped = [row["stats"][STAT][0] for row in read_jsonl(tmp_path / "out/dropped.jsonl")]
    assert min(kept_gains) > max(dropped)
    assert list(read_rows(tmp_path / "out/synthesized.jsonl").values())[0].keys() == {"id", "text", "images"}
    arguments = read_synthesize_settings(tmp_path / "config.yaml", tmp_path, build_captioner_model(project)).arguments[
        NAME
    ]
    assert arguments["stage"] == str(project / "pretrain") and arguments["template"]["name"] == "plain"


@pytest.mark.parametrize(
    ("name", "row_count"),
    [
        ("clip_window", 10),
        ("cluster_balance", 10),
        ("length_balance", 10),
        ("ngram_balance", 10),
        ("likelihood_gain", 10),
        ("selection", 10),
    ],
)
def test_recipes_run_with_the_stages_arguments(project, tmp_path, name, row_count):
    recipe = yaml.safe_load((PROJECT / f"config/recipes/{name}.yaml").read_text(encoding="utf-8"))
    assert (
        synthesize(project, tmp_path, build_captioner_settings(project, tmp_path, recipe["process"]))["rows_kept"]
        == row_count
    )


def test_a_missing_trained_model_is_an_immediate_error():
    images, recipes = {"pretrain": "."}, merge_experiment("baseline", {"recipe": "likelihood_gain"})
    with pytest.raises(
        InputError, match="likelihood_gain_filter needs a trained model, which the filter stage does not have"
    ):
        build_filter_settings(recipes, images)
    synthesize = {"recipe": "likelihood_gain", "captioner": "blip2"}
    recipes = merge_experiment("baseline", {"synthesize": synthesize})
    with pytest.raises(InputError, match="synthesize.captioner: blip2 gives no likelihoods, which"):
        build_synthesize_settings(recipes, images)


def test_gains_are_computed_for_answers_given_questions(tmp_path):
    project = save_instructions(tmp_path / "project")
    process = [{"likelihood_gain_filter": {"keep_fraction": 0.5, "other_images": 2}}]
    summary = select(project, tmp_path, process)
    assert (summary["rows_in"], summary["rows_kept"], summary["rows"]) == (COUNT, 3, "instructions")
    stats = {row["id"]: row for row in read_jsonl(tmp_path / "out/stats.jsonl")}
    stats |= {row["id"]: row["stats"] for row in read_jsonl(tmp_path / "out/dropped.jsonl")}
    generator = MGMGenerator(project / "base", project / "pretrain", "cpu")
    images = [str(project / "data/images" / f"{number}.png") for number in range(3)]
    gains = []
    for number, answer in enumerate(ANSWERS):
        own = number // 2
        answers = [GivenAnswer((own + step) % 3, QUESTIONS[number % 2], answer) for step in range(3)]
        gains.append(compute_likelihood_gain(generator.compute_answer_log_likelihoods(images, answers, "gemma"), 1.0))
        assert stats[f"i{number}"]["likelihood_gain"] == pytest.approx([gains[-1]], abs=1e-5)
    kept_rows = list(read_jsonl(tmp_path / "out" / SYNTHESIZED))
    best = sorted(sorted(range(COUNT), key=lambda number: -gains[number])[:3])
    assert [row["id"] for row in kept_rows] == [f"i{number}" for number in best]
    for row, number in zip(kept_rows, best, strict=True):
        assert (row["question"], extract_caption(row["text"])) == (QUESTIONS[number % 2], ANSWERS[number])
        assert row["images"] == [f"images/{number // 2}.png"]
