"""Results of a run for the explorer, with any number of rows, and dropped rows computed in plain Python."""

import random
from pathlib import Path

from PIL import Image

from dj2mgm.data.formats import build_dj_text
from dj2mgm.storage.files import read_json, write_json, write_jsonl, write_yaml
from recipe_summaries import summarize_operator, write_recipe_summary

MARKUP = '<img src=x onerror="document.title=1"><script>document.title=1</script><b>bold</b>'
PICTURES = 40
HELD_OUT = 20
TIE = 1e-6
FILTER = [
    {"image_integrity_filter": None},
    {"text_length_filter": {"min_len": 38, "max_len": 90}},
    {"alphanumeric_filter": {"min_ratio": 0.4, "min_closed_interval": False}},  # max_ratio has no limit
    {"image_shape_filter": {"min_width": 32, "max_width": 640, "min_height": 32}},
    {"image_aspect_ratio_filter": {"min_ratio": 0.5}},  # Data-Juicer's own max_ratio, 3.0, applies
    {"image_size_filter": {"min_size": "1KiB", "max_size": "20MiB"}},
    {"image_near_deduplicator": {"max_bits": 8}},
    {"image_text_deduplicator": None},
]
SYNTHESIZE = [
    {"low_similarity_recaption_mapper": {"keep_fraction": 0.5}},
    {"batched_image_text_similarity_filter": {"keep_fraction": 0.5}},
    {"caption_log_likelihood_filter": {"min_log_likelihood": -3.0}},
]


def write_run(results: Path, rows: int, seed: int = 0, several: bool = True) -> Path:
    """Write results/run and its dataset; return the folder of the run.

    Args:
        several: whether there are a synthesis and answers about held-out images.
    """
    rng = random.Random(seed)
    dataset = _write_dataset(results / "datasets/drawn", rows, rng)
    kept_rows = _write_filter(results / "run/filter", dataset, rows, rng)
    if several:
        _write_synthesis(results / "run/synthesize", kept_rows, rng)
        _write_answers(results / "run", dataset)
    return results / "run"


def format_row_id(row: int) -> str:
    return f"r{row:07d}"


def _write_dataset(folder: Path, rows: int, rng: random.Random) -> Path:
    (folder / "images").mkdir(parents=True)
    for number in range(PICTURES):
        color = tuple(rng.randrange(256) for _ in range(3))
        Image.new("RGB", (160, 120), color).save(folder / f"images/{number}.jpg")
    words = ["red", "blue", "boat", "on", "a", "lake", "near", "trees", "and", "houses", "in", "winter"]

    def generate_pairs():
        for row in range(rows):
            caption = MARKUP if row == 1 else " ".join(rng.choices(words, k=rng.randint(3, 20)))
            image = "images/gone.jpg" if row == 2 else f"images/{row % PICTURES}.jpg"
            yield {"id": format_row_id(row), "text": build_dj_text(caption), "images": [image]}

    write_jsonl(folder / "pretrain.jsonl", generate_pairs())
    parts = {"captions": ["a boat"], "objects": [], "questions": []}
    evaluation = ({"id": f"e{n}", "image": f"images/{n}.jpg"} | parts for n in range(HELD_OUT))
    write_jsonl(folder / "evaluation.jsonl", evaluation)
    return folder


def _measure(rng: random.Random) -> dict:
    """Return values, many of which are exactly at a limit."""
    return {
        "text_len": rng.choice([37, 38, 39, 60, 75, 90, 91]) if rng.random() < 0.3 else rng.randint(39, 89),
        "alnum_ratio": rng.choice([0.4, 0.41]) if rng.random() < 0.05 else rng.uniform(0.41, 0.9),
        "image_width": [rng.choice([31, 32, 640, 641])] if rng.random() < 0.1 else [rng.randint(32, 640)],
        "image_height": [rng.choice([31, 32])] if rng.random() < 0.05 else [rng.randint(32, 9000)],
        "aspect_ratios": [] if rng.random() < 0.02 else [rng.choice([0.5, 3.0, 3.001]) if rng.random() < 0.1 else 1.0],
        "image_sizes": [rng.choice([1023, 1024, 20 * 2**20])] if rng.random() < 0.05 else [rng.randint(1024, 10**6)],
    }


def _is_dropped(step: int, stats: dict) -> bool:
    """Return whether one of filters 2 to 6 drops a row."""
    if step == 2:
        return not 38 <= stats["text_len"] <= 90
    if step == 3:
        return not stats["alnum_ratio"] > 0.4
    if step == 4:
        return not (32 <= stats["image_width"][0] <= 640 and 32 <= stats["image_height"][0])
    if step == 5:
        return any(not 0.5 <= ratio <= 3.0 for ratio in stats["aspect_ratios"])
    return not 1024 <= stats["image_sizes"][0] <= 20 * 2**20


KEYS = {
    2: ["text_len"],
    3: ["alnum_ratio"],
    4: ["image_width", "image_height"],
    5: ["aspect_ratios"],
    6: ["image_sizes"],
}


def _write_filter(folder: Path, dataset: Path, rows: int, rng: random.Random) -> list[int]:
    stats, dropped, kept_rows = [], {step: [] for step in range(1, len(FILTER) + 1)}, []
    for row in range(rows):
        row_stats = {"image_integrity": "missing" if row == 2 else "ok"}
        event = {"id": format_row_id(row), "event": "dropped"}
        if row == 2:
            dropped[1].append(event | {"stats": row_stats})
            continue
        measurements = _measure(rng)
        if row == 1:
            measurements |= {"text_len": 60, "alnum_ratio": 0.5, "image_width": [99], "image_height": [99]}
            measurements |= {"aspect_ratios": [1.0], "image_sizes": [2000]}
        for step, keys in KEYS.items():
            row_stats |= {key: measurements[key] for key in keys}
            if _is_dropped(step, row_stats):
                dropped[step].append(event | {"stats": row_stats})
                break
        else:
            if len(kept_rows) > 2 and row != 1 and rng.random() < 0.05:
                copy = {"copy_of": format_row_id(rng.choice(kept_rows[1:3])), "distance": float(rng.randint(0, 8))}
                dropped[7].append(event | {"stats": row_stats} | copy)
            elif len(kept_rows) > 2 and row != 1 and rng.random() < 0.02:
                dropped[8].append(event | {"stats": row_stats})
            else:
                kept_rows.append(row)
                stats.append({"id": format_row_id(row)} | row_stats)
    _write_stage(folder, "filtered.jsonl", FILTER, rows, stats, dropped, dataset)
    return kept_rows


def _write_synthesis(folder: Path, rows: list[int], rng: random.Random) -> None:
    """Write the synthesis with a new caption for half of the rows and the original captions' median as the limit."""
    similarities = {row: rng.choice([0.1, 0.2]) if rng.random() < 0.1 else rng.uniform(0, 0.3) for row in rows}
    limit = sorted(similarities.values())[len(rows) - round(0.5 * len(rows))] - TIE
    dropped, kept_rows, changes = {1: [], 2: [], 3: []}, [], []
    for row in rows:
        stats = {"original_image_text_similarity": [similarities[row]], "image_text_similarity": [similarities[row]]}
        stats["caption_log_likelihood"] = []
        record = {}
        if similarities[row] < limit:
            stats["image_text_similarity"] = [rng.uniform(0.05, 0.3)]
            stats["caption_log_likelihood"] = [-3.0 if rng.random() < 0.1 else rng.uniform(-6, -1)]
            record = {"recaption": {"original": "old", "caption": f"new caption {row}", "problem": None}}
            change = {"id": format_row_id(row), "event": "changed", "text_before": "", "step": 1}
            changes.append(
                change
                | {"text_after": build_dj_text(f"new caption {row}")}
                | {"operator": _read_operator(SYNTHESIZE[0])}
            )
        event = {"id": format_row_id(row), "event": "dropped", "stats": stats} | record
        if stats["image_text_similarity"][0] < limit:
            dropped[2].append(event)
        elif any(value < -3.0 for value in stats["caption_log_likelihood"]):
            dropped[3].append(event)
        else:
            kept_rows.append({"id": format_row_id(row)} | stats)
    _write_stage(folder, "synthesized.jsonl", SYNTHESIZE, len(rows), kept_rows, dropped, None, changes)
    summary = read_json(folder / "summary.json")
    summary["operators"][0]["recaption"] = {"below": len(changes)}
    write_json(folder / "summary.json", summary)


def _read_operator(step: dict) -> str:
    return next(iter(step))


def _write_stage(
    folder: Path,
    rows_file: str,
    process: list[dict],
    rows: int,
    stats: list[dict],
    dropped: dict[int, list[dict]],
    dataset: Path | None,
    changes: list[dict] = (),
) -> None:
    operators, rows_left = [], rows
    for step, spec in enumerate(process, start=1):
        dropped_count = len(dropped[step])
        operators.append(summarize_operator(step, _read_operator(spec), rows_left, dropped_count))
        rows_left -= dropped_count
    write_jsonl(folder / "stats.jsonl", stats)
    write_jsonl(folder / rows_file, ({"id": row["id"]} for row in stats))
    events = (
        (event | {"step": n, "operator": _read_operator(process[n - 1])})
        for n, step_events in dropped.items()
        for event in step_events
    )
    write_jsonl(folder / "dropped.jsonl", [*changes, *events])
    data = [f"{_make_relative(dataset)}/pretrain.jsonl"] if dataset else []
    write_recipe_summary(folder, rows, rows_left, operators, *data)
    write_yaml(folder / "config.yaml", {"image_root": "results/datasets/drawn", "recipe": {"process": process}})


def _make_relative(folder: Path) -> str:
    """Return the path as Snakemake prints it, relative to the folder that contains results/."""
    return str(folder.relative_to(folder.parents[2]))


def _write_answers(run: Path, dataset: Path) -> None:
    captions, answers, scores = [], [], []
    for number in range(HELD_OUT):
        row = {"id": f"e{number}", "image_id": f"e{number}", "model": "finetune", "images": "own"}
        captions.append(row | {"image": f"images/{number}.jpg", "caption": MARKUP if number == 0 else "a boat"})
        question = {"question": "What is it?", "answer": "boat", "type": "what"}
        answers.append(row | question | {"prediction": "car" if number % 4 == 0 else "A boat."})
        scores.append({"model": "finetune", "images": "own", "id": f"e{number}", "values": {"clip_score": [number, 1]}})
    write_jsonl(run / "generate/captions.jsonl", captions)
    write_jsonl(run / "generate/answers.jsonl", answers)
    write_jsonl(run / "evaluate_clip/scores.jsonl", scores)
    write_json(run / "evaluate_clip/metrics.json", {})
    write_yaml(run / "evaluate_clip/config.yaml", {"image_root": _make_relative(dataset)})
