"""Recipes are checked before any row is read, and build Data-Juicer's operators."""

import subprocess
from pathlib import Path

import pytest
from data_juicer.utils.lazy_loader import LazyLoader

from dj2mgm.errors import InputError
from dj2mgm.juicer.engine import build_operators, check_installed
from dj2mgm.juicer.patched_data_juicer import OPERATORS, Filter
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.recipes.recipe_parsing import parse_steps


def check(process: object) -> list:
    steps = parse_steps("recipe", process)
    check_installed(steps)
    return steps


def build(process: list, folder: Path) -> list:
    return build_operators(check(process), folder)


def test_a_value_that_an_operator_refuses_is_reported(tmp_path):
    with pytest.raises(InputError, match="image_shape_filter cannot be built: ValueError: .*sometimes"):
        build([{"image_shape_filter": {"any_or_all": "sometimes"}}], tmp_path)


def test_repeated_operators_keep_their_own_arguments(tmp_path):
    """Data-Juicer's `init_configs` would pass the first operator's `min_len` to the second."""
    first, second = build([{"text_length_filter": {"min_len": 30}}, {"text_length_filter": {"max_len": 90}}], tmp_path)
    assert (first.min_len, second.min_len, second.max_len) == (30, 10, 90)


def test_operators_start_no_processes_and_never_skip_errors(tmp_path):
    process = [{"image_integrity_filter": None}, {"words_num_filter": {"min_num": 2}}]
    integrity, words = build(process, tmp_path)
    assert [op.skip_op_error for op in (integrity, words)] == [False, False]
    assert [op.runtime_np() for op in (integrity, words)] == [None, None]
    # the caller's value does not change
    assert process == [{"image_integrity_filter": None}, {"words_num_filter": {"min_num": 2}}]


def test_arguments_of_the_stage_do_not_replace_the_recipes():
    process = [{"image_integrity_filter": None}, {"image_integrity_filter": {"image_root": "/own"}}, {"other": None}]
    arguments = {"image_integrity_filter": {"image_root": "/run", "more": 1}}
    settings = RecipeSettings(Path(), 1, parse_steps("recipe", process), arguments)
    assert [{step.name: step.arguments} for step in settings.complete(settings.steps)] == [
        {"image_integrity_filter": {"image_root": "/run", "more": 1}},
        {"image_integrity_filter": {"image_root": "/own", "more": 1}},
        {"other": {}},
    ]
    assert process[0] == {"image_integrity_filter": None}  # the caller's value does not change


def test_a_missing_package_fails_and_is_not_installed(tmp_path, monkeypatch):
    class NeedsMissingPackage(Filter):
        _name = "needy_filter"

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            LazyLoader.check_packages(["surely_missing_package"])

    monkeypatch.setitem(OPERATORS.modules, "needy_filter", NeedsMissingPackage)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail(f"started {args}"))
    with pytest.raises(
        InputError, match="needy_filter needs the package surely_missing_package.*install it in envs/data_juicer.yaml"
    ):
        build([{"needy_filter": None}], tmp_path)
    with pytest.raises(InputError, match="surely_missing_package"):
        _ = LazyLoader("surely_missing_package").anything
