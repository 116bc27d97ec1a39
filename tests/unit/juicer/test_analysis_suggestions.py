"""Suggested limits follow from the data and have the operator's type; other limits do not change."""

import numpy as np
import pytest
import yaml

from dj2mgm.juicer.built_operators import check_installed
from dj2mgm.juicer.filter_statistics import FilterLimit, Statistic
from dj2mgm.juicer.suggestions import format_recipe, suggest
from dj2mgm.recipes.recipe_step import parse_steps

RNG = np.random.default_rng(0)
BULK = RNG.integers(1000, 2000, 1000).astype(float)
WITH_TAIL = np.concatenate([np.full(20, 90.0), BULK])


def statistic(
    values: np.ndarray, limits: list[FilterLimit], arguments: dict | None, operator: str = "image_size_filter"
):
    return Statistic("image_sizes", operator, values, True, arguments, {limit.side: limit for limit in limits})


def test_two_modes_get_a_limit_between_them():
    values = np.concatenate([RNG.normal(0.0, 0.05, 400), RNG.normal(0.3, 0.02, 600)])
    limits = [FilterLimit("min", "min_score", 0.1, 0.1), FilterLimit("max", "max_score", 1.0, 1.0)]
    suggestion = suggest(statistic(values, limits, None, "batched_image_text_similarity_filter"))
    assert 0.15 < suggestion.suggested["min"].value < 0.27 and suggestion.suggested["max"].value == 1.0
    assert "40% of the rows" in suggestion.suggested["min"].reason and "Two humps" in suggestion.remark
    process = [{"batched_image_text_similarity_filter": None}]
    recipe = yaml.safe_load(format_recipe("", process, [suggestion], {}))["process"]
    assert recipe == [{"batched_image_text_similarity_filter": {"min_score": suggestion.suggested["min"].value}}]


@pytest.mark.parametrize(
    ("argument", "written", "kind"), [(1, 1, int), (1.0, 1.0, float), ("1", "1", str)], ids=["int", "float", "str"]
)
def test_a_limit_has_the_operators_type(argument, written, kind):
    suggestion = suggest(
        statistic(WITH_TAIL, [FilterLimit("min", "min_size", float(argument), written)], {"min_size": written})
    )
    limit = suggestion.suggested["min"]
    assert 90 < limit.value <= 1000 and type(limit.written) is kind and float(limit.written) == limit.value
    assert limit.drops(WITH_TAIL).sum() == 20


def test_a_recipes_limit_inside_the_gap_stays():
    suggestion = suggest(statistic(WITH_TAIL, [FilterLimit("min", "min_size", 777.0, "777")], {"min_size": "777"}))
    assert suggestion.suggested["min"].written == "777" and "as in the recipe" in suggestion.suggested["min"].reason


@pytest.mark.parametrize("arguments", [{"min_size": "1500"}, {}, None], ids=["stated", "default", "not in the recipe"])
def test_without_a_tail_limits_stay_and_defaults_drop_nothing(arguments):
    suggestion = suggest(statistic(BULK, [FilterLimit("min", "min_size", 1500.0, "1500")], arguments))
    keeps_all = suggestion.suggested["min"].drops(BULK).sum() == 0
    assert keeps_all != bool(arguments) and (suggestion.suggested["min"].written == "1500") == bool(arguments)
    assert "no limit" in suggestion.remark


def test_a_row_without_a_value_is_kept():
    assert not FilterLimit("min", "min_size", 5.0, "5").drops(np.array([np.nan])).any()


def test_the_recipe_stays_valid_with_order_and_arguments():
    suggestion = suggest(
        statistic(
            WITH_TAIL, [FilterLimit("min", "min_size", 1.0, "1"), FilterLimit("max", "max_size", 2**40, "1TB")], {}
        )
    )
    process = [
        {"fix_unicode_mapper": None},
        {"image_size_filter": {"any_or_all": "all"}},
        {"words_num_filter": {"lang": "en", "min_num": 4}},
    ]
    text = format_recipe(
        "first line\nsecond: line", process, [suggestion], {"fix_unicode_mapper": "not measured: edits"}
    )
    recipe = yaml.safe_load(text)["process"]
    check_installed(parse_steps("recipe", recipe))
    assert [next(iter(step)) for step in recipe] == [next(iter(step)) for step in process]
    assert recipe[1]["image_size_filter"] == {"any_or_all": "all", "min_size": suggestion.suggested["min"].written}
    assert recipe[2] == process[2] and text.startswith("# first line\n# second: line\n") and text.endswith("4\n")
