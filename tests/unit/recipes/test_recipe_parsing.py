"""Checks of recipes by config/schemas/operators.yaml, at Snakemake's start and in the stage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dj2mgm.errors import InputError
from dj2mgm.juicer.engine import check_installed
from dj2mgm.juicer.operators.declarations import find_model_files
from dj2mgm.juicer.patched_data_juicer import OPERATORS
from dj2mgm.juicer.recipe_settings import read_filter_settings
from dj2mgm.recipes.catalogue import find_recipe_files
from dj2mgm.recipes.recipe_parsing import parse_recipe
from dj2mgm.runs.experiment_recipes import read_recipes
from dj2mgm.settings.configuration import Experiment
from dj2mgm.settings.models import AssembledModel
from fuzzing import fuzzed
from paths import PROJECT

NAMES = sorted(set(OPERATORS.modules))
SHIPPED = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (PROJECT / "config/recipes").glob("*.yaml")}


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Make a project's folder and return a function that checks a recipe there, given its text."""
    (tmp_path / "config/recipes").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def read(recipe: object, without: tuple[str, ...] = (), trusted: bool = False, clip: str = "") -> dict:
        text = recipe if isinstance(recipe, str | bytes) else yaml.dump(recipe)
        Path("config/recipes/mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_recipes(configuration("mine", without=without, trusted=trusted, clip=clip))["filter"]

    return read


def configuration(recipe: str, without: tuple[str, ...] = (), trusted: bool = False, clip: str = "") -> Experiment:
    """Return a configuration with a recipe and few folders of models."""
    return Experiment(
        recipe=recipe,
        synthesize={"blip2": {"model": "x/y"}},
        without=list(without),
        trusted_recipes=trusted,
        model=AssembledModel.model_construct(assembled="", clip=clip),
    )


def step(**arguments) -> dict:
    return {"process": [{"text_length_filter": arguments}]}


def recaptioning(captioner: object) -> dict:
    return {"process": [{"low_similarity_recaption_mapper": {"keep_fraction": 0.5, "captioner": captioner}}]}


BAD = {
    "no process": ({}, "mine.yaml: 'process' must be a list of at least one operator"),
    "no list": ({"process": {"text_length_filter": {}}}, "'process' must be a list"),
    "a nested list": ({"process": [[{"text_length_filter": {}}]]}, "step 1: expected 'operator: {argument: value}'"),
    "no mapping": (step() | {"process": [{"text_length_filter": [3]}]}, "step 1: expected 'operator"),
    "a number as a name": ({"process": [{5: {}}]}, "step 1: unknown operator '5'"),
    "a number as an argument": (
        "process: [text_length_filter: {5: 1}]",
        "step 1: text_length_filter has no argument '5'",
    ),
    "no number": (step(min_len=float("nan")), "text_length_filter.min_len': must be a finite number"),
    "itself": ("process:\n- text_length_filter: &a\n    min_len: *a", "line 2: .* an anchor holds an alias of itself"),
    "a bad date": (
        "process: [text_length_filter: {min_len: 2020-13-01}]",
        "'min_len' must be a whole number from 0, found '2020",
    ),
    "no characters": (b"process: [\xff]", "mine.yaml, line 1: not UTF-8 text; save"),
    "an unknown key": (
        step() | {"proces": 1},
        "no key 'proces', only executor, process, ray_address, rows; did you mean 'process'?",
    ),
    "Data-Juicer's other keys": (
        step() | {"export_path": "x"},
        "no key 'export_path', only executor, process, ray_address, rows; data, outputs and processes are set",
    ),
    "code as a tokenizer": (
        {"process": [{"remove_repeat_sentences_mapper": {"tokenizer": " lambda t: [t]"}}]},
        "'tokenizer' is not allowed in a recipe. Allowed are accelerator, batch_size, ignore_special_character, ",
    ),
    "a deep argument": (
        {"process": [{"llm_perplexity_filter": {"model_params": {"trust_remote_code": True}}}]},
        "'trust_remote_code' is not allowed",
    ),
    "a question with a control token": (
        {"process": [{"mgm_captioning_mapper": {"base_model": "a", "stage": "b", "question": "<image>"}}]},
        "'base_model' must be a folder on this machine, found 'a'",
    ),
    "rows to lose": (step(skip_op_error=True), "'skip_op_error' is not allowed, since rows .* would be lost"),
    "batches of nothing": (step(batch_size=0), "'batch_size' must be a whole number from 1 to 100000, found 0"),
    "an executor": (step() | {"executor": "dask"}, "mine.yaml: 'executor' must be default or ray, found 'dask'"),
    "an address": (step() | {"ray_address": "auto"}, "'ray_address' needs 'executor: ray'"),
    "an operator": (
        {"process": [{"image_integrity_filter": None}, {"text_lenght_filter": {}}]},
        "mine.yaml, step 2: unknown operator 'text_lenght_filter'; the nearest known one is 'text_length_filter'",
    ),
    "an argument": (
        step(min_length=3),
        "mine.yaml, step 1: text_length_filter has no argument 'min_length'; the nearest one is 'min_len'",
    ),
    "a type": (
        step(min_len="three"),
        "step 1: text_length_filter: 'min_len' must be a whole number from 0, found 'three'",
    ),
    "a truth for a number": (step(min_len=True), "'min_len' must be a whole number from 0, found True"),
    "a captioner": (
        recaptioning({"mgm_captionin_mapper": {}}),
        "step 1, captioner: unknown operator 'mgm_captionin_mapper'; the nearest known one is 'mgm_captioning_mapper'",
    ),
    "an endless name": ({"process": [{"x" * 10**5: {}}]}, "step 1: 'xxx.*xxx... is longer than any name"),
    "an endless text": ({"process": ["x" * 10**5]}, "expected 'operator: {argument: value}', found 'xxx.*xxx...$"),
    "a captioner that writes no captions": (
        recaptioning({"fix_unicode_mapper": {}}),
        "step 1, captioner: fix_unicode_mapper writes no captions. Use one of ",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_invalid_recipe_is_an_error_that_names_its_file(project, bad):
    recipe, message = BAD[bad]
    with pytest.raises(InputError, match=message) as error:
        project(recipe)
    assert "config/recipes/mine.yaml" in str(error.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_recipes_are_valid(project, name):
    assert project(SHIPPED[name]) == SHIPPED[name]


def test_omitted_operators_are_checked_and_one_must_remain(project):
    recipe = {"process": [{"text_length_filter": None}, {"words_num_filter": {"min_num": 2}}]}
    assert project(recipe, ("words_num_filter",))["process"] == [{"text_length_filter": None}]
    with pytest.raises(InputError, match="unknown operator 'text_lenght_filter'"):
        project({"process": [{"text_lenght_filter": None}, *recipe["process"]]}, ("words_num_filter",))
    with pytest.raises(
        InputError, match="without: it removes all operators of a recipe. Keep one of text_length_filter, wo"
    ):
        project(recipe, ("text_length_filter", "words_num_filter"))


def test_arguments_of_every_operator_and_every_filter_are_known(project):
    project({"process": [{"text_length_filter": {"batch_size": 5, "reversed_range": True, "accelerator": "cpu"}}]})
    with pytest.raises(InputError, match="'reversed_range'"):
        project({"process": [{"fix_unicode_mapper": {"reversed_range": True}}]})


def test_a_recipe_is_checked_without_importing_data_juicer():
    code = (
        "import sys; from dj2mgm.runs.experiment_recipes import read_recipes\n"
        "from dj2mgm.runs.layers import merge_experiment; read_recipes(merge_experiment('dj_synth', {}))\n"
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


@fuzzed(900)
@given(recipe=RECIPES)
def test_both_checks_agree_on_any_recipe(project, tmp_path, recipe):
    with pytest.MonkeyPatch.context() as patch:  # writing and parsing YAML would take most of the time
        patch.setattr("dj2mgm.runs.experiment_recipes.read_config", lambda path: recipe)
        try:
            accepted = project("")
        except InputError as error:
            assert "config/recipes/mine.yaml" in str(error)
            return
    values = {"image_root": str(tmp_path), "processes": 1, "recipe": accepted}
    (tmp_path / "config.yaml").write_text(json.dumps(values))  # like in the rules
    stage = read_filter_settings(tmp_path / "config.yaml")
    assert [step.as_dict() for step in stage.steps] == accepted["process"]
    try:
        check_installed(stage.steps)
    except InputError as error:
        assert "config.yaml: recipe, step" in str(error)


TEXT = b"process:\n- text_length_filter: {min_len: &a 38, max_len: *a}\n"
ODD = st.binary(max_size=4) | st.sampled_from((b"&a ", b"*a", b": ", b"!!int ", b"!!timestamp "))
EDIT = st.tuples(st.integers(0, len(TEXT)), ODD)


@fuzzed(900)
@given(st.lists(EDIT, max_size=4))
def test_any_string_as_a_recipe_is_accepted_or_refused(project, edits):
    text = TEXT
    for position, new in edits:
        text = text[:position] + new + text[position + len(new) :]
    try:
        project(text)
    except InputError as error:
        assert "config/recipes/mine.yaml" in str(error)


def test_files_in_folders_of_arguments_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip").mkdir()
    for name in ("model.safetensors", "notes.md"):
        (tmp_path / "clip" / name).write_text("{}")
    similarity = {"batched_image_text_similarity_filter": {"hf_clip": "clip"}}
    assert find_recipe_files([similarity]) == find_recipe_files({"process": [similarity]}) == ["clip/model.safetensors"]
    # a string is not a path, even if a file has this name
    text = [{"clean_links_mapper": {"repl": "clip"}}, {"text_length_filter": None}]
    assert find_recipe_files(text) == find_model_files(text) == []
    assert find_model_files([similarity]) == [Path("clip/model.safetensors")]
    assert find_recipe_files(None) == []
    # any argument of a trusted recipe can name a file
    assert find_recipe_files([{"stopwords_filter": {"stopwords_dir": "clip//notes.md"}}]) == ["clip/notes.md"]
    nested = {"low_similarity_recaption_mapper": {"captioner": {"image_captioning_mapper": {"hf_img2seq": "clip"}}}}
    assert find_recipe_files([nested]) == ["clip/model.safetensors"]


RECAPTION = "low_similarity_recaption_mapper"


@pytest.mark.parametrize(
    ("process", "says"),
    [
        (
            [{"likelihood_gain_filter": {}}, {"instruction_synthesis_mapper": {}}],
            "new rows have no text yet when likelihood_gain_filter",
        ),
        (
            [{"text_length_filter": {}}, {"instruction_synthesis_mapper": {}}],
            "new rows have no text yet when text_length_filter",
        ),
        (
            [{"instruction_synthesis_mapper": {}}, {"instruction_synthesis_mapper": {"kinds": ["count"]}}],
            "would write the same rows again",
        ),
        (
            [{"vlm_rating_filter": {}}, {RECAPTION: {"keep_fraction": 0.5}}, {"vlm_rating_filter": {}}],
            "each row is measured once, so the vlm_rating_filter after",
        ),
    ],
)
def test_captions_are_measured_after_they_are_written(process, says):
    with pytest.raises(InputError, match=says):
        parse_recipe("recipe", {"process": process})
    parse_recipe("recipe", {"process": [{"image_integrity_filter": {}}, *process[1:]]})
