"""The explorer's limits agree with Data-Juicer's operators for values at the limits."""

import inspect
import random
from pathlib import Path

import numpy as np
from PIL import Image

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.score_limits import UNLIMITED_FROM
from dj2mgm.features.explorer.results import read_results
from dj2mgm.juicer.patched_data_juicer import OPERATORS
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
from dj2mgm.recipes.catalogue import read_defaults, read_statistic_operators
from dj2mgm.recipes.recipe_parsing import parse_steps
from dj2mgm.storage.files import write_jsonl, write_yaml

ROWS = 120
PROCESS = [
    {"image_integrity_filter": None},
    {"text_length_filter": {"min_len": 3, "max_len": 42}},
    {"words_num_filter": {"min_num": 2, "max_num": 7, "max_closed_interval": False}},
    {"special_characters_filter": {"max_ratio": 0.6}},
    {"alphanumeric_filter": None},
    {"image_shape_filter": {"min_width": 20, "max_width": 60, "min_height": 20}},
    {"image_aspect_ratio_filter": {"min_ratio": 0.5}},
    {"image_size_filter": {"min_size": "100"}},
    {"character_repetition_filter": {"rep_len": 3, "max_ratio": 0.4, "reversed_range": True, "min_ratio": 0.39}},
    {"image_near_deduplicator": {"max_bits": 12}},
    {"image_text_deduplicator": None},
]
WITHOUT = {"image_integrity_filter", "character_repetition_filter", "image_text_deduplicator"}


def write_data(folder: Path) -> Path:
    rng = random.Random(0)
    (folder / "images").mkdir(parents=True)
    rows = []
    for row in range(ROWS):
        width, height = rng.choice([19, 20, 30, 40, 60, 61]), rng.choice([19, 20, 30, 40, 60])
        noise = np.random.default_rng(row // 2).integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((width, height)).save(folder / f"images/{row}.png")
        caption = " ".join(rng.choices(["a", "boat", "red", "12", "!!", "water"], k=rng.randint(1, 9)))
        rows.append({"id": f"r{row}", "text": build_dj_text(caption), "images": [f"images/{row}.png"]})
    write_jsonl(folder / "pretrain.jsonl", rows)
    return folder / "pretrain.jsonl"


def test_movable_limits_agree_with_the_operators(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_data(Path("results/datasets/boats"))
    output = Path("results/boats/filter")
    summary = run_recipe(
        RecipeSettings(data.parent, 1, parse_steps("recipe", PROCESS)), data, output, FILTERED
    ).as_dict()
    write_yaml(output / "config.yaml", {"image_root": "results/datasets/boats", "recipe": {"process": PROCESS}})
    [pairs] = read_results(Path("results/boats")).tables
    assert [step.dropped for step in pairs.steps] == [operator["dropped"] for operator in summary["operators"]]
    assert {step.operator for step in pairs.steps if not step.limits} == WITHOUT
    assert sum(step.dropped > 0 for step in pairs.steps if step.limits) >= 5, "the data try too few limits"
    assert pairs.steps[-2].dropped > 0


def test_defaults_from_the_source_code_equal_the_classes():
    for operator, arguments in read_statistic_operators().values():
        for name in {operator, f"batched_{operator}"} & set(OPERATORS.modules):
            parameters = inspect.signature(OPERATORS.modules[name].__init__).parameters
            defaults = read_defaults(name)
            assert {argument: parameters[argument].default for argument in defaults} == defaults, name
            for argument in {*arguments.values()} & set(parameters) - set(defaults):
                assert parameters[argument].default >= UNLIMITED_FROM, (name, argument)
