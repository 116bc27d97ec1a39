"""CLIPScore compared with a simple computation, with a small random CLIP."""

import shutil
import sys

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel, SiglipModel, SiglipProcessor

import evaluate_clip
from dj2mgm.evaluation import caption_metrics
from dj2mgm.evaluation.caption_metrics import (
    Embedder,
    compute_clip_score,
    compute_ref_clip_score,
    compute_reference_similarity,
)
from dj2mgm.storage.files import read_json, read_jsonl, write_jsonl
from tiny_clip import TOKEN_LIMIT, save_tiny_clip, save_tiny_siglip

PROMPT = "a photo "
CAPTIONS = {"1": "a red circle at the top left", "2": "a blue star at the top right", "3": "two cats"}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """Save a random CLIP whose tokens are single letters."""
    return save_tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def siglip_folder(tmp_path_factory):
    return save_tiny_siglip(tmp_path_factory.mktemp("siglip"))


@pytest.fixture
def dataset(tmp_path):
    """Return three evaluation rows with images of different sizes; the third has two references and no objects."""
    rng = np.random.default_rng(0)
    rows = []
    for identifier, caption in CAPTIONS.items():
        size = 40 + 10 * int(identifier)
        pixels = rng.integers(0, 255, (size, size + 7, 3), dtype=np.uint8)
        (tmp_path / "images").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{identifier}.png")
        row = {"id": identifier, "image": f"images/{identifier}.png", "captions": [caption]}
        rows.append(row | {"objects": [], "questions": []})
    rows[0]["objects"] = [{"color": "red", "shape": "circle", "position": "top left"}]
    rows[1]["objects"] = [{"color": "blue", "shape": "star", "position": "top right"}]
    rows[2]["captions"].append("a dog and a cat")
    write_jsonl(tmp_path / "evaluation.jsonl", rows)
    return tmp_path


def caption_rows(own: list[str], shuffled: list[str], model: str = "finetune") -> list[dict]:
    return [
        {"id": str(number), "image_id": str(number), "image": f"images/{number}.png"}
        | {"model": model, "images": images, "caption": caption}
        for images, captions in (("own", own), ("shuffled", shuffled))
        for number, caption in enumerate(captions, start=1)
    ]


def evaluate(dataset, clip, rows, monkeypatch, at_once: int = 2, **changes) -> dict:
    monkeypatch.setattr(caption_metrics, "INPUTS_AT_ONCE", at_once)
    write_jsonl(dataset / "captions.jsonl", rows)
    config = {"clip": str(clip), "second_judge": None, "selecting": [], "prompt": PROMPT, "image_root": str(dataset)}
    config |= {"cpu_threads": 1} | changes
    (dataset / "config.yaml").write_text(yaml.safe_dump(config))
    flags = {"config": "config.yaml", "captions": "captions.jsonl", "evaluation": "evaluation.jsonl"}
    flags |= {"model": "model", "output-dir": "."}
    arguments = [part for flag, name in flags.items() for part in (f"--{flag}", str(dataset / name))]
    monkeypatch.setattr(sys, "argv", ["evaluate_clip.py", *arguments])
    evaluate_clip.main()
    return read_json(dataset / "metrics.json")


def by_hand(clip_folder, image_path, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute image features (D,) and text features (n, D) one at a time from towers and projections."""
    model, tokenizer = CLIPModel.from_pretrained(clip_folder).eval(), AutoTokenizer.from_pretrained(clip_folder)
    processor = CLIPImageProcessorPil.from_pretrained(clip_folder)
    with torch.no_grad():
        pixels = processor(Image.open(image_path), return_tensors="pt").pixel_values
        image = model.visual_projection(model.vision_model(pixels).pooler_output)[0]
        texts = []
        for caption in captions:
            ids = tokenizer(PROMPT + caption).input_ids
            ids = torch.tensor([ids[: TOKEN_LIMIT - 1] + [tokenizer.eos_token_id] if len(ids) > TOKEN_LIMIT else ids])
            texts.append(model.text_projection(model.text_model(ids).pooler_output)[0])
    return image, torch.stack(texts)


def test_scores_equal_a_computation_by_hand(clip_folder, dataset, monkeypatch):
    own = ["red", "a star", "a long caption that does not fit into the text tower at all"]
    metrics = evaluate(dataset, clip_folder, caption_rows(own, own[::-1]), monkeypatch)
    references = [["a red circle at the top left"], ["a blue star at the top right"], ["two cats", "a dog and a cat"]]
    cosine = torch.nn.functional.cosine_similarity
    for group, captions in (("finetune/own", own), ("finetune/shuffled", own[::-1])):
        scores, ref_scores = [], []
        for number, (caption, refs) in enumerate(zip(captions, references, strict=True), start=1):
            image, texts = by_hand(clip_folder, dataset / f"images/{number}.png", [caption, *refs])
            score = 2.5 * max(cosine(image, texts[0], dim=0).item(), 0)
            similarity = max(cosine(texts[:1], texts[1:]).max().item(), 0)
            scores.append(score)
            ref_scores.append(2 / (1 / score + 1 / similarity) if score and similarity else 0)
        estimates = metrics["groups"][group]
        assert estimates["clip_score"]["mean"] == pytest.approx(np.mean(scores), abs=1e-5)
        assert estimates["ref_clip_score"]["mean"] == pytest.approx(np.mean(ref_scores), abs=1e-5)
    assert any(score > 0 for score in scores)
    # "a red circle at the top left" has more letters than the text tower has positions
    counts = {name: value["truncated"] for name, value in metrics["counts"].items()}
    assert counts == {"finetune/own": 1, "finetune/shuffled": 1, "reference": 2}


def transformers_cosines(siglip_folder, image_path, captions: list[str]) -> np.ndarray:
    """Compute cosines of one image and each text from transformers' logits (scale · cos + bias)."""
    model, processor = SiglipModel.from_pretrained(siglip_folder).eval(), SiglipProcessor.from_pretrained(siglip_folder)
    with torch.no_grad(), Image.open(image_path) as image:
        limits = {"padding": "max_length", "truncation": True, "max_length": TOKEN_LIMIT}
        texts = processor.tokenizer([PROMPT + caption for caption in captions], return_tensors="pt", **limits)
        pixels = processor.image_processor(image, return_tensors="pt").pixel_values
        logits = model(input_ids=texts["input_ids"], pixel_values=pixels).logits_per_image[0]
        return ((logits - model.logit_bias) / model.logit_scale.exp()).numpy()


def test_siglip_scores_equal_those_of_transformers(siglip_folder, dataset, monkeypatch):
    own = [
        "a red circle",
        "a star",
        "two cats at the top left and a dog at the bottom right and a blue square and a dog",
    ]
    siglip, images = Embedder(str(siglip_folder)), [dataset / f"images/{number}.png" for number in CAPTIONS]
    cosines = np.stack([transformers_cosines(siglip_folder, image, own) for image in images])
    products = siglip.embed_images(images) @ siglip.embed_texts([PROMPT + caption for caption in own]).T
    assert products == pytest.approx(cosines, abs=1e-5)
    assert cosines.max() > 0.01 and np.ptp(cosines, axis=1).min() > 0.001
    metrics = evaluate(dataset, siglip_folder, caption_rows(own, own[::-1]), monkeypatch)
    for group, diagonal in (("finetune/own", cosines), ("finetune/shuffled", cosines[:, ::-1])):
        score = metrics["groups"][group]["clip_score"]["mean"]
        assert score == pytest.approx(2.5 * np.maximum(np.diagonal(diagonal), 0).mean(), abs=1e-5)
    assert metrics["counts"]["finetune/own"] == {"captions": 3, "empty": 0, "truncated": 1}
    assert metrics["judges"] == [{"name": str(siglip_folder), "kind": "SigLIP", "selects": [], "sees": False}]


def test_scores_of_two_judges_equal_those_of_each_alone(clip_folder, siglip_folder, dataset, monkeypatch):
    rows = caption_rows(list(CAPTIONS.values()), ["b", "c", "dd"])
    first, second = (evaluate(dataset, folder, rows, monkeypatch) for folder in (clip_folder, siglip_folder))
    both = evaluate(dataset, clip_folder, rows, monkeypatch, second_judge=str(siglip_folder))
    assert [judge["kind"] for judge in both["judges"]] == ["CLIP", "SigLIP"]
    for group, estimates in both["groups"].items():
        for metric in ("clip_score", "ref_clip_score"):
            assert estimates[metric] == first["groups"][group][metric]
            assert estimates[f"second_{metric}"] == second["groups"][group][metric]
        added = {f"second_{metric}" for metric in ("clip_score", "ref_clip_score")}
        assert estimates.keys() == first["groups"][group].keys() | added
        if group in both["counts"]:
            assert both["counts"][group]["second_truncated"] == second["counts"][group]["truncated"]


def test_judges_that_select_or_see_are_recognized_by_weights(clip_folder, dataset, monkeypatch, tmp_path):
    rows = caption_rows(list(CAPTIONS.values()), ["b", "c", "dd"])
    copy = shutil.copytree(clip_folder, tmp_path / "copy")
    other = save_tiny_clip(tmp_path / "other", seed=5)
    tower = CLIPModel.from_pretrained(clip_folder).vision_model.to(torch.bfloat16)
    (dataset / "model").mkdir()
    save_file(
        {f"model.vision_tower.{name}": value for name, value in tower.state_dict().items()},
        dataset / "model/model.safetensors",
    )
    selecting = [str(other), str(copy), "some/hub-id"]
    [judge] = evaluate(dataset, clip_folder, rows, monkeypatch, selecting=selecting)["judges"]
    assert judge["selects"] == [str(copy)] and judge["sees"]
    [judge] = evaluate(dataset, other, rows, monkeypatch, selecting=[str(copy)])["judges"]
    assert judge["selects"] == [] and not judge["sees"]


def test_scores_of_images_add_up_to_the_metrics(clip_folder, dataset, monkeypatch):
    metrics = evaluate(dataset, clip_folder, caption_rows(["red", "a star", "cats"], ["a", "b", "c"]), monkeypatch)
    rows = list(read_jsonl(dataset / "scores.jsonl"))
    kinds = [("finetune", "own"), ("finetune", "shuffled"), ("reference", "own")]
    assert [(row["model"], row["images"], row["id"]) for row in rows] == [(*kind, i) for kind in kinds for i in "123"]
    assert "attribute_accuracy" not in rows[2]["values"]  # the third image's objects are unknown
    for (model, images), group in zip(kinds, ("finetune/own", "finetune/shuffled", "reference"), strict=True):
        chosen = [row["values"] for row in rows if (row["model"], row["images"]) == (model, images)]
        for metric, estimate in metrics["groups"][group].items():
            total, count = map(sum, zip(*(values[metric] for values in chosen if metric in values), strict=True))
            assert estimate["mean"] == pytest.approx(total / count) and estimate["n"] == count


def test_intervals_count_captions_of_an_image_as_one_image(clip_folder, dataset, monkeypatch):
    """Rows 1 and 2 have the same image, so their values are summed and left out together."""
    rows = caption_rows(["red", "a star", "cats"], ["a", "b", "c"])
    separate = evaluate(dataset, clip_folder, rows, monkeypatch)
    scores = list(read_jsonl(dataset / "scores.jsonl"))
    joint = evaluate(
        dataset, clip_folder, [row | ({"image_id": "1"} if row["id"] == "2" else {}) for row in rows], monkeypatch
    )
    for group, estimates in joint["groups"].items():
        for metric, estimate in estimates.items():
            separate_estimate = separate["groups"][group][metric]
            assert estimate["images"] == separate_estimate["images"] - 1
            assert (estimate["n"], estimate["mean"]) == (
                separate_estimate["n"],
                pytest.approx(separate_estimate["mean"]),
            )
    sums = [row["values"]["clip_score"] for row in read_jsonl(dataset / "scores.jsonl")][:2]
    first, second, third = [row["values"]["clip_score"][0] for row in scores[:3]]
    assert sums == [[pytest.approx(first + second), 2], [third, 1]]


def test_scores_do_not_depend_on_the_batch_size(clip_folder, dataset, monkeypatch):
    rows = caption_rows(list(CAPTIONS.values()), ["b", "c", "dd"])
    single, many = (evaluate(dataset, clip_folder, rows, monkeypatch, at_once=size) for size in (1, 64))
    for group, estimates in single["groups"].items():
        for name, estimate in estimates.items():
            assert estimate == pytest.approx(many["groups"][group][name], abs=1e-5)


def test_reference_control_is_the_ceiling(clip_folder, dataset, monkeypatch):
    rows = caption_rows(list(CAPTIONS.values()), ["a", "b", "c"])
    groups = evaluate(dataset, clip_folder, rows, monkeypatch)["groups"]
    assert groups["reference"] == groups["finetune/own"]
    assert groups["reference"]["attribute_accuracy"]["mean"] == groups["reference"]["exact_match"]["mean"] == 1
    assert groups["reference"]["attribute_accuracy"]["n"] == 6  # only two rows have objects
    difference = groups["finetune/difference"]["clip_score"]["mean"]
    means = [groups[f"finetune/{images}"]["clip_score"]["mean"] for images in ("own", "shuffled")]
    assert difference == pytest.approx(means[0] - means[1])


def test_empty_captions_have_score_zero_and_are_counted(clip_folder, dataset, monkeypatch):
    metrics = evaluate(dataset, clip_folder, caption_rows(["", " ", ""], list(CAPTIONS.values())), monkeypatch)
    assert metrics["counts"]["finetune/own"] == {"captions": 3, "empty": 3, "truncated": 0}
    assert all(estimate["mean"] == 0 for estimate in metrics["groups"]["finetune/own"].values())


def test_metrics_are_deterministic(clip_folder, dataset, monkeypatch):
    rows = caption_rows(list(CAPTIONS.values()), ["b", "c", "dd"])
    first, second = (evaluate(dataset, clip_folder, rows, monkeypatch) for _ in range(2))
    assert first | {"seconds": 0} == second | {"seconds": 0}


def failure(capsys, *arguments, **changes) -> str:
    with pytest.raises(SystemExit) as stop:
        evaluate(*arguments, **changes)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_invalid_input_is_refused_in_a_sentence(clip_folder, dataset, monkeypatch, capsys, tmp_path):
    good = caption_rows(["a", "b", "c"], ["a", "b", "c"])
    empty = tmp_path / "no clip"
    empty.mkdir()
    message = failure(capsys, dataset, empty, good, monkeypatch)
    assert "no clip" in message and "key clip" in message
    blip = tmp_path / "blip"
    blip.mkdir()
    (blip / "config.json").write_text('{"model_type": "blip"}')
    for key, changes in (("clip", {}), ("second_judge", {"second_judge": str(blip)})):
        message = failure(capsys, dataset, clip_folder if changes else blip, good, monkeypatch, **changes)
        assert f"{key}: {blip} is a model of type 'blip', and only a CLIP or a SigLIP can judge" in message
    (dataset / "images" / "2.png").write_bytes(b"no image")
    message = failure(capsys, dataset, clip_folder, good, monkeypatch)
    assert "2.png" in message and "restore the image" in message
    assert not (dataset / "metrics.json").exists() and not (dataset / "scores.jsonl").exists()


def test_pickled_weights_are_refused(clip_folder, dataset, monkeypatch, capsys, tmp_path):
    pickled = tmp_path / "pickled"
    shutil.copytree(clip_folder, pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(CLIPModel.from_pretrained(clip_folder).state_dict(), pickled / "pytorch_model.bin")
    rows = caption_rows(["a", "b", "c"], ["a", "b", "c"])
    assert "safetensors" in failure(capsys, dataset, pickled, rows, monkeypatch)


def test_formulas_on_vectors_with_known_angles():
    images = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    captions = np.array([[0.6, 0.8], [-1.0, 0.0], [1.0, 0.0]])  # cosine 0.6, -1, 1
    score = compute_clip_score(images, captions)
    assert score == pytest.approx([1.5, 0, 2.5])
    references = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    similarity = compute_reference_similarity(captions, references, np.array([0, 0, 1, 2]))
    assert similarity == pytest.approx([0.8, 0, 0])
    assert compute_ref_clip_score(score, similarity) == pytest.approx([2 * 1.5 * 0.8 / 2.3, 0, 0])


def test_texts_keep_their_order_and_repeat(clip_folder, monkeypatch):
    monkeypatch.setattr(caption_metrics, "INPUTS_AT_ONCE", 2)
    clip = Embedder(str(clip_folder))
    texts = ["b", "a", "b", "cc", "a"]
    features = clip.embed_texts(texts)
    alone = np.concatenate([clip.embed_texts([text]) for text in texts])
    assert features == pytest.approx(alone, abs=1e-5)
    assert np.linalg.norm(features, axis=1) == pytest.approx(np.ones(5), abs=1e-5)
    assert features.dtype == np.float32
