"""Recipes are judged when Snakemake starts, by Data-Juicer's source files, as the stage judges them."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest
import yaml
from data_juicer.core.preflight import _get_valid_params, _type_compatible
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import PROJECT

from dj2mgm.config import recipe_check
from dj2mgm.config.recipe_check import files_named
from dj2mgm.config.recipes import read_recipes
from dj2mgm.errors import InputError
from dj2mgm.juicer.data_juicer import OPERATORS
from dj2mgm.juicer.recipe import check_process
from dj2mgm.juicer.settings import read_filter_settings

ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}
NAMES = sorted(set(OPERATORS.modules))
SHIPPED = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (PROJECT / "config/recipes").glob("*.yaml")}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project's folder, in which `read` judges a recipe by its text."""
    (tmp_path / "config/recipes").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "dj2mgm.config.recipe_check.entry_points", lambda group: []
    )  # looking for plugins takes a while

    def read(recipe: object, without: tuple[str, ...] = ()) -> dict:
        text = recipe if isinstance(recipe, str | bytes) else yaml.dump(recipe)
        Path("config/recipes/mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        config = {"recipe": "mine", "synthesize": {"recipe": None}, "without": list(without)}
        return read_recipes(config)["filter"]

    return read


@cache
def parameters_of(name: str) -> dict:
    path = recipe_check._all_registered()[name]
    found = {}
    for parameters in recipe_check._parameters(path, recipe_check._registered(path)[name]):
        found = ({"?": None} if parameters is None else parameters) | found
    return found


def test_operators_and_arguments_are_those_of_data_juicers_registry():
    assert set(recipe_check._all_registered()) == set(NAMES)
    different = {name for name in NAMES if set(parameters_of(name)) != set(_get_valid_params(OPERATORS.modules[name]))}
    assert not different


VALUES = (None, True, False, 0, 3, -2, 1.5, 2.0, "x", "", [], [None], {})


def takes(type_: object, value: object) -> bool:
    """Data-Juicer takes anything where one of several types is asked for; here one of them has to take it."""
    return any(_type_compatible(value, kind) for kind in get_args(type_) or (type_,) if kind is not NoneType)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_types_are_judged_as_data_juicer_judges_them(value):
    for name in NAMES:
        for argument, type_ in _get_valid_params(OPERATORS.modules[name]).items():
            annotation = parameters_of(name)[argument]
            fits = recipe_check._fits(value, annotation)
            if not recipe_check._kinds(annotation) <= recipe_check.TYPES.keys():
                assert fits, (name, argument)
            elif not isinstance(type_, str):  # where a module has put off its annotations, Data-Juicer judges nothing
                assert fits == takes(type_, value), (name, argument)


def step(**arguments) -> dict:
    return {"process": [{"text_length_filter": arguments}]}


BAD = {
    "no process": ({}, "mine.yaml: 'process' must be a list of at least one operator"),
    "no list": ({"process": {"text_length_filter": {}}}, "'process' must be a list"),
    "an empty list": ({"process": []}, "'process' must be a list"),
    "a nested list": ({"process": [[{"text_length_filter": {}}]]}, "step 1: expected 'operator: {argument: value}'"),
    "nothing": ({"process": [None]}, "step 1: expected 'operator: {argument: value}', found None"),
    "two operators": ({"process": [{"a": 1, "b": 2}]}, "step 1: expected 'operator"),
    "no mapping": (step() | {"process": [{"text_length_filter": [3]}]}, "step 1: expected 'operator"),
    "a number as a name": ({"process": [{5: {}}]}, "step 1: unknown operator '5'"),
    "nothing as a name": ({"process": [{None: {}}]}, "step 1: unknown operator 'null'"),
    "a number as an argument": (
        "process: [text_length_filter: {5: 1}]",
        "step 1: text_length_filter has no argument '5'",
    ),
    "no number": (step(min_len=float("nan")), "text_length_filter.min_len': must be a finite number"),
    "no limit": (step(max_len=float("inf")), "text_length_filter.max_len': must be a finite number"),
    "a date": ("process: [text_length_filter: {min_len: 2020-01-01}]", "'min_len' must be of type int, found '2020"),
    "itself": ("process:\n- text_length_filter: &a\n    min_len: *a", "line 2: .* an anchor holds an alias of itself"),
    "a bad date": (
        "process: [text_length_filter: {min_len: 2020-13-01}]",
        "'min_len' must be of type int, found '2020",
    ),
    "no characters": (b"process: [\xff]", "mine.yaml, line 1: not UTF-8 text; save"),
    "an unknown key": (step() | {"proces": 1}, "ray_address, and no 'proces'; did you mean 'process'?"),
    "Data-Juicer's other keys": (
        step() | {"export_path": "x"},
        "no 'export_path'; data, outputs and processes are set",
    ),
    "any code": ({"process": [{"python_lambda_mapper": {"lambda_str": "lambda s: s"}}]}, "'lambda_str' is Python code"),
    "code as a tokenizer": (
        {"process": [{"remove_repeat_sentences_mapper": {"tokenizer": " lambda t: [t]"}}]},
        "'tokenizer' is Python code",
    ),
    "a file of code": (
        {"process": [{"python_file_mapper": {"file_path": "a.py"}}]},
        "runs code or programs of its own",
    ),
    "code that comes with a model": ({"process": [{"llm_analysis_filter": None}]}, "runs code that comes with a model"),
    "operators in an argument": (
        {"process": [{"general_fused_op": {"fused_op_list": [{"text_length_filter": None}]}}]},
        "runs operators that nothing has checked",
    ),
    "packages": (step(runtime_env={"pip": ["x"]}), "'runtime_env' is not allowed"),
    "a deep argument": (
        {"process": [{"llm_perplexity_filter": {"model_params": {"trust_remote_code": True}}}]},
        "'trust_remote_code' is not allowed",
    ),
    "a folder of captions": (
        {"process": [{"low_similarity_recaption_mapper": {"captions_folder": "/tmp", "writer": "../x"}}]},
        "'captions_folder' is not allowed",
    ),
    "a question with a control token": (
        {"process": [{"mgm_captioning_mapper": {"base_model": "a", "stage": "b", "question": "<image>"}}]},
        "'question' holds the control token <image>",
    ),
    "a store of files": (
        {"process": [{"s3_upload_file_mapper": {"upload_field": "images", "s3_bucket": "b"}}]},
        "s3_upload_file_mapper sends files to servers, or fetches them, which a recipe may not",
    ),
    "a server": (
        {"process": [{"llm_quality_score_filter": {"api_endpoint": "http://somewhere/v1"}}]},
        "'api_endpoint' names a server, which would be sent data; leave it out, and set OPENAI_BASE_URL",
    ),
    "a server, further down": (
        {"process": [{"llm_quality_score_filter": {"model_params": {"base": "HTTPS://somewhere"}}}]},
        "'base' names a server",
    ),
    "images of its own": (
        {"process": [{"image_blur_mapper": {"p": 1.0}}]},
        r"image_blur_mapper writes files \(save_dir",
    ),
    "a model's code": ({"process": [{"image_text_similarity_filter": {"trust_remote_code": True}}]}, "is not allowed"),
    "files of its own": ({"process": [{"image_blur_mapper": {"save_dir": "/tmp"}}]}, "'save_dir' is not allowed"),
    "rows to lose": (step(skip_op_error=True), "'skip_op_error' is not allowed, since rows .* would be lost"),
    "batches of nothing": (step(batch_size=0), "'batch_size' must be 1 or more, found 0"),
    "batches of less": (step(batch_size=-5), "'batch_size' must be 1 or more, found -5"),
    "an executor": (step() | {"executor": "dask"}, "mine.yaml: 'executor' must be default or ray, found 'dask'"),
    "an unhashable executor": (step() | {"executor": ["ray"]}, "mine.yaml: 'executor' must be default or ray"),
    "an address": (step() | {"ray_address": "auto"}, "'ray_address' must be a text beside 'executor: ray'"),
    "an operator": (
        {"process": [{"image_integrity_filter": None}, {"text_lenght_filter": {}}]},
        "mine.yaml, step 2: unknown operator 'text_lenght_filter'; the nearest known one is 'text_length_filter'",
    ),
    "an argument": (
        step(min_length=3),
        "mine.yaml, step 1: text_length_filter has no argument 'min_length'; the nearest that it has is 'min_len'",
    ),
    "a type": (step(min_len="three"), "step 1: text_length_filter: 'min_len' must be of type int, found 'three'"),
    "a truth for a number": (step(min_len=True), "'min_len' must be of type int, found True"),
    "a grouper": ({"process": [{"naive_grouper": None}]}, "step 1: naive_grouper merges or groups rows"),
    "a captioner": (
        {"process": [{"low_similarity_recaption_mapper": {"captioner": {"mgm_captionin_mapper": {}}}}]},
        "step 1, captioner: unknown operator 'mgm_captionin_mapper'; the nearest known one is 'mgm_captioning_mapper'",
    ),
    "a captioner's argument": (
        {"process": [{"low_similarity_recaption_mapper": {"captioner": {"mgm_captioning_mapper": {"beams": 3}}}}]},
        "step 1, captioner: mgm_captioning_mapper has no argument 'beams'; the nearest that it has is 'num_beams'",
    ),
    "a captioner's shape": (
        {"process": [{"low_similarity_recaption_mapper": {"captioner": {"mgm_captioning_mapper": [3]}}}]},
        "step 1, captioner: expected 'operator: {argument: value}'",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_recipe_is_an_error_that_names_its_file_before_anything_runs(project, bad):
    recipe, message = BAD[bad]
    with pytest.raises(InputError, match=message) as error:
        project(recipe)
    assert "config/recipes/mine.yaml" in str(error.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_recipes_pass(project, name):
    assert project(SHIPPED[name]) == SHIPPED[name]


def test_what_is_left_out_is_checked_and_something_must_stay(project):
    recipe = {"process": [{"text_length_filter": None}, {"words_num_filter": {"min_num": 2}}]}
    assert project(recipe, ("words_num_filter",))["process"] == [{"text_length_filter": None}]
    with pytest.raises(InputError, match="unknown operator 'text_lenght_filter'"):
        project({"process": [{"text_lenght_filter": None}, *recipe["process"]]}, ("words_num_filter",))
    with pytest.raises(InputError, match="without: it leaves a recipe no operator; keep one of text_length_filter, wo"):
        project(recipe, ("text_length_filter", "words_num_filter"))


def test_arguments_of_every_base_are_known(project):
    project({"process": [{"text_length_filter": {"batch_size": 5, "reversed_range": True}}]})
    project({"process": [{"llm_quality_score_filter": {"api_or_hf_model": "x", "text_key": "text"}}]})


def test_without_data_juicer_names_are_left_to_the_stage(project, monkeypatch):
    monkeypatch.setattr("dj2mgm.config.recipe_check._stems", dict)
    project({"process": [{"text_lenght_filter": None}]})
    with pytest.raises(InputError, match="expected 'operator"):
        project({"process": ["text_lenght_filter"]})


def test_operators_of_other_packages_are_left_to_the_stage(project, monkeypatch):
    monkeypatch.setattr("dj2mgm.config.recipe_check.entry_points", lambda group: [group])
    project({"process": [{"somebodys_filter": None}]})


PATHS = {"PYTHONPATH": "workflow_scripts"}


def test_a_recipe_is_judged_without_importing_data_juicer():
    code = (
        "import sys; from dj2mgm.config.recipes import read_recipes\n"
        "read_recipes({'recipe': 'baseline', 'synthesize': {'recipe': 'dj_synth'}, 'without': []})\n"
        "assert not {'data_juicer', 'torch', 'PIL', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env={"PYTHONPATH": "workflow_scripts"},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr


WORDS = st.sampled_from(
    ["min_len", "max_len", "any_or_all", "lang", "captioner", "hf_clip", "batch_size", "", "x", "\ud800"]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-9, 99)
    | st.just(10**400)
    | st.floats()
    | WORDS
    | st.dates()
    | st.binary(max_size=2)
)
ARGUMENTS = st.dictionaries(WORDS | SCALARS, SCALARS | st.lists(SCALARS, max_size=2), max_size=3)
OPERATOR = st.sampled_from(
    ["text_length_filter", "image_shape_filter", "words_num_filter", "low_similarity_recaption_mapper"]
)
STEP = st.dictionaries(OPERATOR | st.sampled_from(NAMES) | WORDS | SCALARS, ARGUMENTS | SCALARS, max_size=2)
NESTED = st.fixed_dictionaries(
    {"low_similarity_recaption_mapper": st.fixed_dictionaries({"captioner": STEP | SCALARS})}
)
PROCESS = st.lists(st.dictionaries(OPERATOR, ARGUMENTS | st.none(), min_size=1, max_size=1) | STEP | NESTED, max_size=3)
KEYS = st.sampled_from(["process", "executor", "ray_address", "proces"]) | SCALARS
NEAR = st.fixed_dictionaries({"process": PROCESS | SCALARS}, optional={"executor": SCALARS | st.just("ray")})
RECIPES = NEAR | st.dictionaries(KEYS, PROCESS | SCALARS, max_size=3)


@settings(max_examples=2000, **ANY)
@given(recipe=RECIPES)
def test_whatever_a_recipe_holds_it_is_accepted_by_the_stage_too_or_refused_in_a_sentence(project, tmp_path, recipe):
    with pytest.MonkeyPatch.context() as patch:  # dumping and parsing YAML would take most of the time
        patch.setattr("dj2mgm.config.recipes.read_config", lambda path: recipe)
        try:
            accepted = project("")
        except InputError as error:
            assert "config/recipes/mine.yaml" in str(error)
            return
    values = {"image_root": str(tmp_path), "processes": 1, "recipe": accepted}
    (tmp_path / "config.yaml").write_text(json.dumps(values))  # as the rules hand it over
    stage = read_filter_settings(tmp_path / "config.yaml")
    assert stage.process == accepted["process"]
    try:
        check_process(stage.process)
    except InputError as error:
        assert str(error).startswith("recipe, step")


TEXT = b"process:\n- text_length_filter: {min_len: &a 38, max_len: *a}\n"
ODD = st.binary(max_size=4) | st.sampled_from((b"&a ", b"*a", b": ", b"!!int ", b"!!timestamp "))
EDIT = st.tuples(st.integers(0, len(TEXT)), ODD)


@settings(max_examples=2000, **ANY)
@given(st.lists(EDIT, max_size=4))
def test_whatever_text_a_recipe_is_it_is_accepted_or_refused_in_a_sentence(project, edits):
    text = TEXT
    for place, new in edits:
        text = text[:place] + new + text[place + len(new) :]
    try:
        project(text)
    except InputError as error:
        assert "config/recipes/mine.yaml" in str(error)


def test_files_and_folders_that_arguments_name_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists").mkdir()
    for name in ("stopwords.json", "notes.md"):
        (tmp_path / "lists" / name).write_text("{}")
    recipe = [{"stopwords_filter": {"stopwords_dir": "lists"}}, {"clean_links_mapper": {"repl": "lists//notes.md"}}]
    assert files_named(recipe) == ["lists/stopwords.json", "lists/notes.md"]
    assert files_named(["", "elsewhere", 7, None]) == []
