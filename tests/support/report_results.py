"""Results of small experiments with data for all sections of the report.

`baseline` and `dj_synth` share a filter; `photos` has no ground truth.
"""

import io
import math
from functools import cache
from pathlib import Path

import numpy as np

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.shapes import describe_scene, draw_image, draw_row_scene
from dj2mgm.evaluation.caption_attributes import measure_attributes
from dj2mgm.evaluation.intervals import Measurements
from dj2mgm.evaluation.vqa import measure_rows
from dj2mgm.storage.files import write_json, write_jsonl, write_yaml
from evaluated_runs import build_entry, write_memory, write_scores
from recipe_summaries import summarize_operator, write_recipe_summary
from training_records import write_training_record

IMAGES, PAIRS = 15, 60
TOO_SHORT, TOO_SIMILAR = 6, 2  # rows dropped by the two filters
LOW = 20  # of the remaining rows: similarity below the threshold
UNUSABLE, UNLIKE, UNLIKELY = 1, 4, 3  # numbers of these rows: no caption, recaption not similar, recaption not likely
SIMILARITY, LIKELIHOOD = 0.135, -3.0
ODD = "a <b>bold</b> & odd caption"
BOTH = [(model, images) for model in ("pretrain", "finetune") for images in ("own", "shuffled")]
FILTER_RECIPE = {
    "process": [
        {"image_integrity_filter": None},
        {"text_length_filter": {"min_len": 38, "max_len": 528}},
        {"image_aspect_ratio_filter": {"min_ratio": 0.25}},
        {"image_text_deduplicator": None},
    ]
}
SYNTHESIS_RECIPE = {
    "process": [
        {"low_similarity_recaption_mapper": {"min_similarity": SIMILARITY}},
        {"batched_image_text_similarity_filter": {"min_score": SIMILARITY}},
        {"caption_log_likelihood_filter": {"min_log_likelihood": LIKELIHOOD}},
    ]
}


def write_results(root: Path, seeds: tuple[int, ...] = (0, 1)) -> Path:
    """Write baseline and dj_synth on the dataset `shapes`; return the path of the page's configuration."""
    dataset = _write_dataset(root / "datasets/shapes", has_truth=True)
    _write_filter(root / "baseline/filter")
    runs: dict[str, dict[int, dict]] = {"baseline": {}, "dj_synth": {}}
    for name, better in (("baseline", 0), ("dj_synth", 6)):
        for index, seed in enumerate(seeds):
            folder = root / name if index == 0 else root / name / f"seed-{seed}"
            runs[name][seed] = _write_run(folder, root / "baseline/filter", dataset, seed, better)
    synthesis = {"recipe": "dj_synth", "captioner": "mgm", "mgm": {"num_beams": 8}}
    config = {"recipe": "baseline", "seeds": list(seeds), "pretrain": {"learning_rate": 0.003}}
    entries = [
        build_entry("baseline", dataset, runs["baseline"], **config),
        build_entry("dj_synth", dataset, runs["dj_synth"], **config, synthesize=synthesis, finetune={"save_steps": 5}),
    ]
    for item, recipe in zip(entries, (None, SYNTHESIS_RECIPE), strict=True):
        item["recipes"] = {"filter": FILTER_RECIPE, "synthesize": recipe}
    write_yaml(root / "report/config.yaml", {"experiments": entries})
    return root / "report/config.yaml"


def write_photos(root: Path) -> Path:
    """Write one experiment with one seed on a dataset without objects, questions and ground truth."""
    dataset = _write_dataset(root / "datasets/photos", has_truth=False)
    _write_filter(root / "photos/filter")
    stages = _write_run(root / "photos", root / "photos/filter", dataset, 7, 0)
    item = build_entry("photos", dataset, {7: stages}) | {"recipes": {"filter": FILTER_RECIPE, "synthesize": None}}
    write_yaml(root / "photos-page/config.yaml", {"experiments": [item]})
    return root / "photos-page/config.yaml"


def pair_ids(count: int = PAIRS) -> list[str]:
    return [f"p{index:03d}" for index in range(count)]


@cache
def draw_scene(split: str, index: int):
    return draw_row_scene(seed=0, split=split, index=index)


@cache
def encode_image(split: str, index: int) -> bytes:
    """Return a scene's image as a file, which all results of a process share."""
    file = io.BytesIO()
    draw_image(draw_scene(split, index)).save(file, "PNG")
    return file.getvalue()


def _write_dataset(folder: Path, has_truth: bool) -> Path:
    rows = []
    for index in range(IMAGES):
        drawn_scene = draw_scene("evaluation", index)
        _write_image("evaluation", index, folder / f"images/e{index:02d}.png")
        row = {"id": f"e{index:02d}", "image": f"images/e{index:02d}.png", "captions": [describe_scene(drawn_scene)]}
        objects = [item.attributes for item in drawn_scene.objects] if has_truth else []
        rows.append(row | {"objects": objects, "questions": []})
    write_jsonl(folder / "evaluation.jsonl", rows)
    write_json(folder / "summary.json", {"pretrain": PAIRS, "finetune": 40, "evaluation": IMAGES})
    if has_truth:
        low_ids = set(_list_remaining_ids()[:LOW])
        truth = [
            {
                "id": name,
                "fault": "mismatched" if name in low_ids else "clean",
                "caption": describe_scene(draw_scene("pretrain", index)),
            }
            for index, name in enumerate(pair_ids())
        ]
        write_jsonl(folder / "ground_truth.jsonl", truth)
    for index, name in enumerate(pair_ids()):
        _write_image("pretrain", index, folder / f"images/{name}.png")
    return folder


def _write_image(split: str, index: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_image(split, index))


def _list_remaining_ids() -> list[str]:
    return pair_ids()[TOO_SHORT + TOO_SIMILAR :]


def _write_filter(folder: Path) -> None:
    ids = pair_ids()
    short_ids, similar_ids, kept_ids = ids[:TOO_SHORT], ids[TOO_SHORT : TOO_SHORT + TOO_SIMILAR], _list_remaining_ids()
    stats = {"image_integrity": "ok", "image_width": [128]}
    dropped = [
        {"id": name, "event": "dropped", "step": 2, "operator": "text_length_filter"}
        | {"stats": {"image_integrity": "ok", "text_len": 10 + index}}
        for index, name in enumerate(short_ids)
    ]
    dropped += [
        {"id": name, "event": "dropped", "step": 4, "operator": "image_text_deduplicator"}
        | {"stats": stats | {"text_len": 60, "aspect_ratios": [1.0]}}
        for name in similar_ids
    ]
    rows = [{"id": name, "text": build_dj_text("a red circle"), "images": [f"images/{name}.png"]} for name in kept_ids]
    row_stats = [
        {"id": name} | stats | {"text_len": 50 + 2 * index, "aspect_ratios": [0.5 + index / 40]}
        for index, name in enumerate(kept_ids)
    ]
    row_stats[0]["aspect_ratios"] = [math.nan]
    row_stats[1]["aspect_ratios"] = []
    counts = (0, TOO_SHORT, 0, TOO_SIMILAR)
    operators, rows_left = [], PAIRS
    for step, (operator, dropped_count) in enumerate(zip(FILTER_RECIPE["process"], counts, strict=True), start=1):
        operators.append(summarize_operator(step, next(iter(operator)), rows_left, dropped_count))
        rows_left -= dropped_count
    write_jsonl(folder / "filtered.jsonl", rows)
    write_jsonl(folder / "stats.jsonl", row_stats)
    write_jsonl(folder / "dropped.jsonl", dropped)
    write_recipe_summary(folder, PAIRS, rows_left, operators)


def _write_synthesis(folder: Path, image_root: Path) -> list[str]:
    """Write the synthesis and return the ids of the remaining rows.

    The first UNUSABLE rows with low similarity get no caption, the next UNLIKE no similar caption, and so on.
    """
    names, kept_rows, stats, dropped = _list_remaining_ids(), [], [], []
    rejecting_operators = {1: "batched_image_text_similarity_filter", 2: "caption_log_likelihood_filter"}
    for index, name in enumerate(names):
        row = {"id": name, "text": build_dj_text("a red circle"), "images": [f"images/{name}.png"]}
        if index >= LOW:
            kept_rows.append(row)
            stats.append({"id": name, "image_text_similarity": [0.2 + index / 1000], "caption_log_likelihood": []})
            continue
        record = {"original": "a red circle", "original_similarity": 0.01 * (index % 10)}
        new_caption = describe_scene(draw_scene("pretrain", int(name[1:]))) if index % 5 else ODD
        outcome = 0 if index < UNUSABLE else 1 if index < UNUSABLE + UNLIKE else 2
        if index < UNUSABLE:
            record |= {"caption": None, "similarity": None, "log_likelihood": None, "problem": "empty"}
            scores, outcome = (record["original_similarity"], None), 1
        else:
            scores = (0.05 if outcome == 1 else 0.25, -5.0 if index < UNUSABLE + UNLIKE + UNLIKELY else -1.0)
            record |= {"caption": new_caption, "similarity": scores[0], "log_likelihood": scores[1]}
        row_stats = {"image_text_similarity": [scores[0]], "caption_log_likelihood": [s for s in scores[1:] if s]}
        if index < UNUSABLE + UNLIKE + UNLIKELY:
            event = {"id": name, "event": "dropped", "step": outcome + 1, "operator": rejecting_operators[outcome]}
            dropped.append(event | {"stats": row_stats, "recaption": record})
        else:
            kept_rows.append(row | {"text": build_dj_text(new_caption), "recaption": record})
            stats.append({"id": name} | row_stats)
            dropped.append({"id": name, "event": "changed", "step": 1, "operator": "low_similarity_recaption_mapper"})
    report = {
        "below": LOW,
        "captioned": LOW,
        "cached": 0,
        "unusable": {"empty": UNUSABLE},
        "min_similarity": SIMILARITY,
    }
    rows_in = len(names)
    operators = [
        summarize_operator(1, "low_similarity_recaption_mapper", rows_in, 0, {"recaption": report}),
        summarize_operator(2, rejecting_operators[1], rows_in, UNUSABLE + UNLIKE),
        summarize_operator(3, rejecting_operators[2], rows_in - UNUSABLE - UNLIKE, UNLIKELY),
    ]
    write_jsonl(folder / "synthesized.jsonl", kept_rows)
    write_jsonl(folder / "stats.jsonl", stats)
    write_jsonl(folder / "dropped.jsonl", dropped)
    write_recipe_summary(folder, rows_in, len(kept_rows), operators)
    write_yaml(folder / "config.yaml", {"image_root": str(image_root)})
    return [row["id"] for row in kept_rows]


def _write_run(folder: Path, filter_folder: Path, dataset: Path, seed: int, better: int) -> dict[str, str]:
    """Write a run in which `better` more images get the true caption; the run has a synthesis if `better` is not 0."""
    stages = {name: folder / name for name in ("jsonl", "pretrain", "finetune", "generate")}
    stages |= {
        "filter": filter_folder,
        "evaluate_clip": folder / "evaluate_clip",
        "evaluate_vqa": folder / "evaluate_vqa",
    }
    ids, row_count = _list_remaining_ids(), len(_list_remaining_ids())
    if better:
        stages["synthesize"] = folder / "synthesize"
        ids = _write_synthesis(stages["synthesize"], dataset)
    ids = ids[1:]  # the training file lacks the first row
    repeated = row_count - 1 - len(ids)
    pretrain_counts = {
        "rows_in": len(ids) + 1,
        "rows_out": len(ids) + repeated,
        "dropped": {"missing": 1},
        "repeated": repeated,
    }
    instructions = {"rows_in": 40, "rows_out": 38, "dropped": {"missing": 2}, "repeated": 0}
    write_json(folder / "jsonl/summary.json", {"pretrain": pretrain_counts, "finetune": instructions})
    write_jsonl(folder / "jsonl/finetune.jsonl", [{"id": f"i{number:02d}"} for number in range(38)])
    rewritten_ids = set(_list_remaining_ids()[:LOW]) if better else set()
    texts = {name: [{"value": "new" if name in rewritten_ids else "old"}] for name in ids}
    rows = [*texts.items(), *((f"{name}#2", texts[name]) for name in ids[:repeated])]
    write_jsonl(folder / "jsonl/pretrain.jsonl", [{"id": name, "conversations": text} for name, text in rows])
    for stage, samples in (("pretrain", pretrain_counts["rows_out"]), ("finetune", 38)):
        steps = [{"step": step, "loss": 3 / step + 0.01 * seed, "learning_rate": 1e-3} for step in range(1, 30)]
        write_jsonl(folder / stage / "metrics.jsonl", steps)
        counts = {"samples": samples, "rows": samples, "steps": 29, "planned_steps": 29}
        record = counts | {"train_seconds": 75.0, "seed": seed, "versions": {"torch": "9.8.7"}}
        record |= {"scores": _write_scores(folder / stage, seed, (dataset / "ground_truth.jsonl").exists())}
        if better:
            record |= {"memory_plan": {"gpu_gib": 21.0, "host_gib": 9.0}}
            record |= {"memory": {"host_limit_gib": 62.6, "gpu_limit_gib": 23.63, "sampler_share": 0.004}}
        write_training_record(folder / stage, **record)
        write_memory(folder / stage / "memory.csv", [2.0, 8.0, 8.5, 8.25], [1.0, 20.0, 22.5, 22.0] if better else None)
    _write_evaluation(folder, dataset, seed, better)
    return {name: str(path) for name, path in stages.items()}


def _write_scores(folder: Path, seed: int, has_truth: bool) -> dict:
    """Write three checkpoints; evaluation and training disagree on the first question of the last checkpoint."""
    questions = has_truth and folder.name == "finetune"
    rows = [{"step": step, "loss": (4 + seed) / step, "questions": IMAGES, "seconds": 0.5} for step in (10, 20, 29)]
    rows = [row | ({"accuracy": row["step"] / 40 + seed / 10} if questions else {}) for row in rows]
    write_jsonl(folder / "scores.jsonl", rows)
    question = {"type": "count", "question": "How many?", "answer": "one"}
    right = [index > 0 and (index + seed) % IMAGES < 5 for index in range(IMAGES)]
    scored_rows = [
        {"id": f"e{index:02d}"} | (question | {"correct": hit} if questions else {}) for index, hit in enumerate(right)
    ]
    write_jsonl(folder / "scored.jsonl", scored_rows)
    return {"asked": "questions" if questions else "captions", "questions": IMAGES, "seconds": 1.5, "share": 0.02}


def _write_evaluation(folder: Path, dataset: Path, seed: int, better: int) -> None:
    has_truth = (dataset / "ground_truth.jsonl").exists()
    rows = [
        {
            "id": f"e{index:02d}",
            "image": f"images/e{index:02d}.png",
            "captions": [describe_scene(draw_scene("evaluation", index))],
        }
        | {"image_id": f"e{index:02d}"}
        | {"objects": [item.attributes for item in draw_scene("evaluation", index).objects] if has_truth else []}
        for index in range(IMAGES)
    ]
    captions, answers = [], []
    for model, images in BOTH:
        for row_index, row in enumerate(rows):
            right = images == "own" and (row_index + seed) % IMAGES < 5 + better
            keys = {"id": row["id"], "image_id": row["image_id"], "model": model, "images": images}
            captions.append(keys | {"image": row["image"], "caption": row["captions"][0] if right else ODD})
            if has_truth and model == "finetune":
                question = {"type": "count", "question": "How many?", "answer": "one"}
                answers.append(keys | question | {"prediction": "one" if right else "two"})
    write_jsonl(folder / "generate/captions.jsonl", captions)
    write_jsonl(folder / "generate/answers.jsonl", answers)
    group_metrics = {f"{model}/{images}": _measure_captions(captions, rows, model, images) for model, images in BOTH}
    group_metrics["reference"] = {"clip_score": Measurements.from_values([2.0] * IMAGES, [row["id"] for row in rows])}
    write_scores(folder / "evaluate_clip/scores.jsonl", {group: _sum_by_image(m) for group, m in group_metrics.items()})
    judge = {"name": "models/clip", "kind": "CLIP", "selects": ["models/clip"] if better else [], "sees": False}
    record = {"groups": {}, "judges": [judge], "prompt": "A photo depicts "}
    write_json(folder / "evaluate_clip/metrics.json", record | {"seconds": 4.0, "versions": {"numpy": "2.4.6"}})
    write_yaml(folder / "evaluate_clip/config.yaml", {"image_root": str(dataset)})
    answers_by_images = {i: [answer for answer in answers if answer["images"] == i] for i in ("own", "shuffled")}
    vqa = {
        f"finetune/{images}": _sum_by_image(measure_rows(group_answers))
        for images, group_answers in answers_by_images.items()
        if group_answers
    }
    write_scores(folder / "evaluate_vqa/scores.jsonl", vqa)
    write_json(folder / "evaluate_vqa/metrics.json", {"questions": len(answers) // 2, "groups": {}})


def _measure_captions(captions: list[dict], rows: list[dict], model: str, images: str) -> dict[str, Measurements]:
    group_captions = [row["caption"] for row in captions if (row["model"], row["images"]) == (model, images)]
    right = np.array([caption != ODD for caption in group_captions], dtype=float)
    clip = {"clip_score": Measurements.from_values(0.5 + right, [row["id"] for row in rows])}
    return clip | measure_attributes(group_captions, rows)


def _sum_by_image(metrics: dict[str, Measurements]) -> dict[str, dict[str, tuple[float, int]]]:
    return {
        name: {
            str(unit): (
                float(measurements.values[measurements.units == unit].sum()),
                int((measurements.units == unit).sum()),
            )
            for unit in np.unique(measurements.units)
        }
        for name, measurements in metrics.items()
    }
