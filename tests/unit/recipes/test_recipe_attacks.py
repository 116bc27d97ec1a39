"""Hostile recipes run no code, delete or write no files, and connect to no host."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from dj2mgm.errors import InputError
from dj2mgm.juicer.recipe_settings import RecipeSettings, read_filter_settings
from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
from dj2mgm.recipes.catalogue import read_refused_operators
from dj2mgm.recipes.recipe_parsing import parse_recipe, parse_steps
from dj2mgm.runs.all_runs import Runs
from dj2mgm.storage.files import write_yaml
from paths import PROJECT
from recipe_fuzzing import generate_cases, is_accepted, make_process, prepare, run_cases

CODE = "lambda s: [__import__('os').system('touch ran')]"
MINHASH, REPEATS = "document_minhash_deduplicator", "remove_repeat_sentences_mapper"
WRAPPED = (CODE, f" \n(({CODE}))", f"(f := {CODE})", f"# x\n{CODE}", [CODE], {"a": CODE})
ATTACKS = {
    **{f"code {number}": {REPEATS: {"tokenizer": code}} for number, code in enumerate(WRAPPED)},
    "a file of code": {"python_file_mapper": {"file_path": "DECOYS/model.pt"}},
    "a condition that is evaluated": {"general_field_filter": {"filter_condition": "__import__('os')"}},
    "a deleted file": {MINHASH: {"tokenization": "sentencepiece", "tokenizer_model": "DECOYS/model.pt"}},
    "a deleted file by a language": {"perplexity_filter": {"lang": "../DECOYS/en"}},
    "a folder of words": {"stopwords_filter": {"stopwords_dir": "DECOYS/new"}},
    "another folder of words": {"flagged_words_filter": {"flagged_words_dir": "DECOYS/new"}},
    "a folder of faces": {"video_active_speaker_detect_mapper": {"face_track_bbox_path": "DECOYS/new"}},
    "statistics elsewhere": {"text_length_filter": {"stats_export_path": "DECOYS/stats.jsonl"}},
    "a downloaded tokenizer": {"alphanumeric_filter": {"tokenization": True}},
    "a downloaded model of words": {"words_num_filter": {"tokenization": True, "lang": "../../x"}},
    "a language that is a path": {"word_repetition_filter": {"lang": "../../x"}},
    "a hub id": {"image_text_similarity_filter": {"hf_clip": "evil/model"}},
    "a default on the hub": {"image_nsfw_filter": {}},
    "a model elsewhere": {"image_text_similarity_filter": {"hf_clip": "DECOYS"}},
    "a model behind a link": {"image_text_similarity_filter": {"hf_clip": "results/linked"}},
    "a model of another format": {"image_segment_mapper": {"model_path": "DECOYS/model.pt"}},
    "another column": {"image_shape_filter": {"min_width": 1, "image_key": "elsewhere"}},
    "another column of text": {"fix_unicode_mapper": {"text_key": "meta"}},
    "a database": {"ray_document_deduplicator": {"redis_address": "redis://evil.example:6379"}},
    "another worker": {"ray_image_deduplicator": {"worker_cls": "x.y"}},
    "a server of models": {"openai_captioning_mapper": {"base_url": "http://evil.example/v1"}},
    "a captioner's server": {
        "low_similarity_recaption_mapper": {
            "keep_fraction": 0.5,
            "captioner": {"openai_captioning_mapper": {"base_url": "http://evil.example/v1"}},
        }
    },
    "a pattern without end": {"replace_content_mapper": {"pattern": "(a+)+$", "repl": ""}},
    "a chat template of its own": {"likelihood_gain_filter": {"template": {"template": "{% for x in y %}"}}},
    "images outside": {"image_integrity_filter": {"image_root": "/"}},
    "a folder to work in": {"text_length_filter": {"work_dir": "DECOYS/new"}},
    "an environment": {"text_length_filter": {"runtime_env": {"pip": ["evil"]}}},
}


@pytest.fixture
def decoys(tmp_path, monkeypatch) -> Path:
    """Write files that an attack would delete, read or change, next to the current folder, which is a project."""
    folder = tmp_path / "decoys"
    (tmp_path / "project/results").mkdir(parents=True)
    folder.mkdir()
    for name in ("model.pt", "en.sp.model", "model.safetensors", "config.json"):
        (folder / name).write_text("a decoy")
    monkeypatch.chdir(tmp_path / "project")
    Path("results/linked").symlink_to(folder)
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail(f"connects to {arguments[1:]}"))
    return folder


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_before_anything_runs(decoys, attack):
    step = yaml.safe_load(yaml.safe_dump(ATTACKS[attack]).replace("DECOYS", str(decoys)))
    before = {path: path.read_text() for path in decoys.iterdir()}
    with pytest.raises(InputError, match="step 1"):
        parse_recipe("recipe", {"process": [step]}, folders=("results",))
    settings = {"image_root": str(decoys), "processes": 1, "recipe": {"process": [step]}}
    write_yaml("config.yaml", settings)  # like the settings of a stage
    if attack != "a model elsewhere" and attack != "a model behind a link":  # Snakemake has checked the folder before
        with pytest.raises(InputError, match="step 1"):
            read_filter_settings("config.yaml")
    assert {path: path.read_text() for path in decoys.iterdir()} == before
    assert not Path("ran").exists()


def test_every_forbidden_operator_is_refused_with_a_reason():
    for name, reason in read_refused_operators().items():
        with pytest.raises(InputError, match=f"step 1: {name} (is not allowed in a recipe, because it )?{reason}"):
            parse_recipe("recipe", {"process": [{name: None}]})


@pytest.mark.parametrize("address", ["evil.example:6379", "ray://127.0.0.1:1", ""])
def test_a_recipe_names_no_ray_cluster_on_another_machine(project, address):
    recipe = {"executor": "ray", "ray_address": address, "process": [{"text_length_filter": None}]}
    with pytest.raises(InputError, match="mine.yaml: 'ray_address' must be auto, or a port of this machine"):
        project(recipe)
    for own in ("auto", "127.0.0.1:6379", "localhost:10001"):
        project(recipe | {"ray_address": own})


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write a configuration folder in which the baseline has a hostile recipe."""
    monkeypatch.chdir(tmp_path)

    def read(recipe: dict, experiment: dict | None = None, **command_line) -> Runs:
        write_yaml("config/recipes/mine.yaml", recipe)
        write_yaml("config/experiments/baseline.yaml", {"recipe": "mine", **(experiment or {})})
        runs = Runs(command_line)
        runs.first_seed("baseline")
        return runs

    for folder in ("recipes", "experiments"):
        (tmp_path / "config" / folder).mkdir(parents=True)
    return read


NEEDS_PACKAGES = ("chinese_convert", "clean_html", "document_simhash", "fix_unicode")  # which are not installed
DANGEROUS = {"process": [{"python_lambda_mapper": {"lambda_str": "lambda s: s"}}]}


def test_only_the_users_configuration_trusts_recipes(project):
    with pytest.raises(
        InputError,
        match="python_lambda_mapper is not .*, because it runs code.*set trusted_recipes: true in config/config",
    ):
        project(DANGEROUS)
    runs = project(DANGEROUS, trusted_recipes=True)
    assert runs.shared.trusted_recipes and runs.first_seed("baseline").settings["filter"].trusted_recipes is True
    with pytest.raises(InputError, match="baseline.yaml: 'trusted_recipes' applies to all experiments; set it in"):
        project(DANGEROUS, {"trusted_recipes": True})
    for trusted in (False, True):  # in the settings, this would rerun the stage
        safe = project({"process": [{"text_length_filter": None}]}, trusted_recipes=trusted)
        assert safe.shared.trusted_recipes is trusted
        assert "trusted_recipes" not in safe.first_seed("baseline").settings["filter"].file_content()


def test_a_model_file_cannot_trust_recipes(project):
    tiny = yaml.safe_load((PROJECT / "config/models/tiny.yaml").read_text(encoding="utf-8"))
    write_yaml("config/models/other.yaml", tiny | {"settings": {"trusted_recipes": True}})
    with pytest.raises(InputError, match="trusted_recipes"):
        project(DANGEROUS, model="other")


@pytest.mark.parametrize("refused", ["trust_remote_code", "skip_op_error"])
def test_some_arguments_are_refused_even_in_trusted_recipes(project, refused):
    with pytest.raises(InputError, match=f"'{refused}' is not allowed, since"):
        project({"process": [{"image_nsfw_filter": {refused: True}}]}, trusted_recipes=True)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Path]:
    """Make a folder that an unprivileged user can reach, unlike pytest's folder."""
    with TemporaryDirectory() as folder:
        prepare(Path(folder), models=False)
        yield Path(folder)


def test_hostile_values_are_refused_or_change_nothing_outside(sandbox, monkeypatch):
    """Try operators without a model and some values of each kind; tests/support/recipe_fuzzing.py tries all."""
    decoys, expected_files = sandbox / "decoys", {}
    monkeypatch.chdir(sandbox / "work")
    tried = 0
    for operator, argument, value in generate_cases(decoys, full=False):
        process = make_process(operator, argument, value)
        tried += 1
        if not operator.startswith(NEEDS_PACKAGES) and is_accepted(process):  # without a folder for models
            assert "decoys" not in str(value) and "lambda" not in str(value)
            expected_files.setdefault((operator, type(value)), (process, False))
    assert tried > 5000 and len(expected_files) > 40
    code = f"(lambda s: [s, __import__('os').system('touch {decoys}/ran')][:1])"
    attacks = [  # without the check, to show that the sandbox notices attacks
        [{REPEATS: {"tokenizer": code}}],
        [{MINHASH: {"tokenization": "sentencepiece", "tokenizer_model": str(decoys / "model.pt")}}],
        [{"stopwords_filter": {"stopwords_dir": f"{decoys}/new"}}],
    ]
    findings = run_cases(sandbox, [*expected_files.values(), *((attack, True) for attack in attacks)])
    *harmless, ran, deleted, made = findings
    assert [
        finding
        for finding in harmless
        if finding["events"] or finding["changed"] or finding["outcome"].startswith("failed")
    ] == []
    assert {finding["outcome"].split(":")[0] for finding in harmless} == {"ran", "refused"}
    assert any("os.system" in event for event in ran["events"]) and f"{decoys}/ran" in ran["changed"]
    assert f"{decoys}/model.pt" in deleted["changed"]
    assert f"{decoys}/new" in made["changed"]


@pytest.mark.slow
def test_all_hostile_values_change_nothing_outside():
    """Try everything, which takes minutes; operators of `NEEDS_PACKAGES` need their packages in PYTHONPATH."""
    done = subprocess.run([sys.executable, PROJECT / "tests/support/recipe_fuzzing.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


VALUES = {
    "a huge number": ({"text_length_filter": {"max_len": 10**400}}, "'max_len' must be a whole number from 0"),
    "two limits": (
        {"length_balance_filter": {"keep_fraction": 0.5, "keep_rows": 10}},
        "keep_fraction and keep_rows exclude each other",
    ),
    "neither": ({"cluster_balance_filter": {"clusters": 4}}, "neither keep_fraction nor keep_rows is given"),
    "two ends of one side": (
        {"batched_image_text_similarity_filter": {"lower_quantile": 0.5, "min_score": 0.2}},
        "lower_quantile and min_score exclude each other",
    ),
    "crossed quantiles": (
        {"batched_image_text_similarity_filter": {"lower_quantile": 0.9, "upper_quantile": 0.4}},
        "lower_quantile 0.9 must be below upper_quantile 0.4",
    ),
    "crossed limits": (
        {"image_shape_filter": {"min_width": 300, "max_width": 200}},
        "min_width 300 is above max_width 200, so that no row could be kept",
    ),
    "crossed with a default": ({"text_length_filter": {"max_len": 5}}, r"min_len \(by default 10\) is above max_len 5"),
    "crossed sizes": (
        {"image_size_filter": {"min_size": "2MiB", "max_size": "20"}},
        "min_size 2MiB is above max_size 20",
    ),
    "a selector of nothing": (
        {"topk_specified_field_selector": {"field_key": "__dj__stats__.text_len"}},
        "without top_ratio or topk",
    ),
    "lists of different lengths": (
        {"replace_content_mapper": {"pattern": ["a", "b"], "repl": ["x"]}},
        "pattern and repl are lists of different lengths",
    ),
    "an empty filter": ({"image_size_filter": None}, "the operator has no effect without min_size or max_size"),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_are_checked_before_anything_runs(case):
    step, message = VALUES[case]
    with pytest.raises(InputError, match=f"mine.yaml, step 1: {next(iter(step))}.*{message}"):
        parse_recipe("mine.yaml", {"process": [step]})


@pytest.mark.parametrize("case", ["two limits", "neither", "two ends of one side", "crossed quantiles"])
def test_values_of_own_operators_are_checked_in_trusted_recipes(case):
    step, message = VALUES[case]
    with pytest.raises(InputError, match=message):
        parse_recipe("mine.yaml", {"process": [step]}, trusted=True)
    hub = {"batched_image_text_similarity_filter": {"hf_clip": "openai/clip", "min_score": 0.2}}
    anything = {"text_length_filter": {"min_len": -3, "text_key": "caption"}}
    parse_recipe("mine.yaml", {"process": [hub, anything]}, trusted=True)


def test_a_model_can_be_in_results_or_a_named_folder(project, tmp_path):
    for folder in ("results/models/clip", "elsewhere/clip", "private/clip"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").touch()
    (tmp_path / "results/words").mkdir()

    def name_clip(folder: str) -> Runs:
        recipe = {"process": [{"image_text_similarity_filter": {"hf_clip": folder}}]}
        return project(recipe, evaluate={"judge_clip": str(tmp_path / "elsewhere/clip")})

    name_clip("results/models/clip")
    name_clip(str(tmp_path / "elsewhere/clip"))
    for folder, problem in {
        str(tmp_path / "private/clip"): "must be a folder in results/ or one that the model's file names",
        "results/../private/clip": "must be a folder in results/ or one that the model's file names",
        "results/words": "must be a folder with safetensors weights",
        "results/nosuch": "must be a folder on this machine",
        "~/nosuch": "must be a folder on this machine",
        "x" * 5000: "must be a folder on this machine",
    }.items():
        with pytest.raises(InputError, match=f"'hf_clip' {problem}"):
            name_clip(folder)


def test_the_home_folder_can_be_abbreviated(project, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "results/clip").mkdir(parents=True)
    (tmp_path / "results/clip/model.safetensors").touch()
    runs = project({"process": [{"image_text_similarity_filter": {"hf_clip": "~/results/clip"}}]})
    [step] = runs.first_seed("baseline").settings["filter"].recipe["process"]
    assert step["image_text_similarity_filter"]["hf_clip"] == str(tmp_path / "results/clip")


def test_a_recipe_of_the_filter_stage_uses_no_captioner(project):
    with pytest.raises(InputError, match="recipe: low_similarity_recaption_mapper needs a captioner, which the filter"):
        project({"process": [{"low_similarity_recaption_mapper": {"keep_fraction": 0.5}}]})


def test_a_default_on_the_hub_is_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: pytest.fail(f"connects to {arguments[1:]}"))
    prepare(tmp_path, models=False)
    steps = parse_steps("recipe", [{"batched_image_text_similarity_filter": {"min_score": -1.0}}])
    settings = RecipeSettings(tmp_path / "work/data", 1, steps)
    with pytest.raises(InputError, match="'hf_clip' is missing, and its default, openai/clip.*Name the folder"):
        run_recipe(settings, tmp_path / "work/data/pairs.jsonl", tmp_path / "work/out", FILTERED)
