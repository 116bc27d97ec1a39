"""Precedence of layers, rejected settings and their messages."""

import json
import shutil

import pytest
import yaml

from configuration_files import FILES
from dj2mgm.dataset_resolution.experiment_dataset import check_files, resolve_dataset
from dj2mgm.errors import InputError
from dj2mgm.runs.all_runs import Runs
from dj2mgm.runs.layers import drop_defaults, list_experiment_names, merge_experiment, read_default_layer
from dj2mgm.runs.stages import STAGES
from dj2mgm.script_modules import find_modules
from dj2mgm.settings.base import build_schema
from dj2mgm.settings.configuration import Configuration
from dj2mgm.settings.dataset_files import FilesDataset
from dj2mgm.settings.models import MgmModel, read_chat_template
from dj2mgm.settings.training_stages import list_deepspeed_names, read_deepspeed
from dj2mgm.settings.validation import validate_settings
from paths import PROJECT


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Copy config/ into a new current folder."""
    shutil.copytree(PROJECT / "config", tmp_path / "config")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_experiment(project, text):
    (project / "config/experiments/mine.yaml").write_text(text, encoding="utf-8")


EXPERIMENTS, MODELS = (
    sorted(path.stem for path in (PROJECT / f"config/{kind}").glob("*.yaml")) for kind in ("experiments", "models")
)


@pytest.mark.parametrize(
    ("experiment", "command_line"),
    [*((name, {}) for name in EXPERIMENTS), *(("dj_synth", {"model": name}) for name in MODELS)],
)
def test_every_experiment_and_model_of_the_repository_resolves(project, experiment, command_line):
    config = merge_experiment(experiment, command_line)
    images = resolve_dataset(config.dataset).images
    for stage in STAGES.values():
        if settings := stage.settings(config, images):
            json.dumps(settings.file_content())
    if not config.model.whole_model:
        json.dumps(config.model.build_assembly_settings().file_content())


def test_mgm_2b_trains_with_the_challenges_hyperparameters(project):
    """Compare with the kit's train_mgm_2b_stage_1_10k_baseline.sh, except the learning rate of stage 2, a LoRA's."""
    config = merge_experiment("baseline", {"model": "mgm-2b", "dataset": "better_synth"})
    fixed = {
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.03,
        "weight_decay": 0.0,
        "epochs": 1,
        "max_length": 2048,
    }
    assert fixed.items() <= dict(config.pretrain).items() and fixed.items() <= dict(config.finetune).items()
    assert (config.pretrain.global_batch_size, config.finetune.global_batch_size) == (256, 128)
    assert (config.pretrain.learning_rate, config.jsonl.max_samples) == (1.0e-3, 200_000)


def test_captions_are_requested_like_in_stage_1(project):
    def settings(model: str, **evaluate) -> dict:
        config = merge_experiment("dj_synth", {"model": model, "evaluate": evaluate})
        images = resolve_dataset(config.dataset).images
        return {name: stage.settings(config, images).file_content() for name, stage in STAGES.items()}

    for model, template, question in (("tiny", "plain", ""), ("mgm-2b", "gemma", "What is this?")):
        stages = settings(model, caption_question="What is this?")
        first, second = read_chat_template(template), read_chat_template("gemma")
        assert (stages["pretrain"]["template"], stages["jsonl"]["question"]) == (first, question)
        assert stages["generate"]["captions"]["pretrain"] == {"template": first, "question": question}
        assert stages["generate"]["captions"]["finetune"] == {"template": second, "question": "What is this?"}
        assert {"template": first, "question": question}.items() <= stages["synthesize"]["captioner"].items()


def test_a_model_has_parts_or_is_a_complete_folder(project):
    path = project / "config/models/mine.yaml"
    whole = (project / "config/models/mgm-2b-released.yaml").read_text(encoding="utf-8")
    path.write_text(whole + "language_model: model_zoo/gemma-2b-it\n", encoding="utf-8")
    with pytest.raises(InputError, match="mine.yaml: language_model: unknown key; known are assembled"):
        merge_experiment("baseline", {"model": "mine"})
    path.write_text(whole.replace("assembled:", "asembled:"), encoding="utf-8")
    with pytest.raises(InputError, match="mine.yaml: asembled: unknown key"):
        merge_experiment("baseline", {"model": "mine"})


def test_later_layers_override_earlier_ones(project):
    assert merge_experiment("baseline", {}).pretrain.learning_rate == 3.0e-3  # the tiny model's value, not the default
    write_experiment(project, "pretrain: {learning_rate: 0.25, epochs: 2}")
    merged = merge_experiment("mine", {"pretrain": {"epochs": 3}})
    assert "mine" in list_experiment_names()
    assert (merged.pretrain.learning_rate, merged.pretrain.epochs) == (0.25, 3)
    assert merged.pretrain.lr_scheduler == "cosine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("finetune: {lora: {rnk: 8}}", "config/experiments/mine.yaml: finetune.lora.rnk: unknown key"),
        ("pretrain: {learning_rat: 0.1}", "did you mean 'learning_rate'?"),
        ("finetune: {epochs:2}", "finetune.epochs:2: unknown key; put a blank after the colon: 'epochs: 2'"),
        ("sedes: [1]", "sedes: unknown key; did you mean 'seeds'?"),
        ("report: {experiments: [mine]}", "'report' applies to all experiments; set it in config/config.yaml"),
        ("finetune: {learning_rate: .inf}", "'finetune.learning_rate': expected a number above 0, found .inf"),
        ("finetune: {precision: half}", "finetune.precision: expected auto, bf16, fp8, nf4 or fp32, found 'half'"),
        ("finetune: {micro_batch_size: '8'}", "an integer from 1 to 65536 or auto or null, found '8'"),
        ("finetune: {epochs: two}", "finetune.epochs: expected a number above 0 and up to 100000, found 'two'"),
        ("gpus: 1.0", "gpus: expected an integer from 1 to 1024, found 1.0"),
        ("gpus: true", "gpus: expected an integer from 1 to 1024, found true"),
        ("seeds: [0, 0]", "seeds: an item is repeated; keep one, found [0, 0]"),
        ("seeds: [1, true]", "seeds.1: expected an integer from 0 to 4294967295, found true"),
        ("model: ../experiments/baseline", "model: there is no folder ../experiments/baseline; correct the path"),
        ("dataset: 'a{b}'", "dataset: must be a path without braces"),
        ("evaluate: {question_prompt: Answer}", "evaluate.question_prompt: must hold {question} once, and no other"),
        (
            "evaluate: {question_prompt: '{question}<unused0>'}",
            "must hold {question} once, and no other braces or control",
        ),
        ("evaluate: {caption_question: '<image> What?'}", "evaluate.caption_question: must hold no control token"),
        ("evaluate: {question_prompt: '{question!r}'}", "must hold {question} once"),
        (
            "pretrain: {activation_checkpointing: often}",
            "true or false or an integer from 1 to 1024 or auto, found 'often'",
        ),
        ("finetune: 2", "finetune: expected keys and values, found 2; put them in braces, as in {global_batch_size:"),
        ("description: null", "description: expected a string, found null"),
        ("finetune: {lora: {r: 1000000000}}", "finetune.lora.r: expected an integer from 1 to 65536, found 1000000000"),
        ("sources: {a: 1.0e+308}", "sources.a: expected a number from 0 to 1000000000, found 1e+308"),
        ("seeds: '0,1'", "at most 1000, found '0,1'; put the items in brackets, as in [0,1]"),
        ("dataset: ''", "dataset: the value is empty; give one, or leave the key out"),
    ],
)
def test_an_invalid_setting_is_refused_with_key_and_remedy(project, text, message):
    write_experiment(project, text)
    with pytest.raises(InputError) as error:
        merge_experiment("mine", {})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_renamed_key_is_refused_with_its_new_name(project):
    with pytest.raises(InputError, match="publish.anyway: unknown key; did you mean 'allow_unlearned'"):
        Runs({"publish": {"anyway": True}})
    with pytest.raises(InputError, match="report.anyway: unknown key; known are experiments"):
        Runs({"report": {"anyway": True}})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/dev/null", "dataset: '/dev/null' is a device, a pipe or a socket; name a folder"),
        ("/", "dataset: '/' holds all files of the machine; name the folder of the data"),
        ("nowhere", "'nowhere' is neither a folder, nor a file, nor a name in config/datasets; known are"),
        ("/no/such/folder", "correct the path"),
        ("mine", "pretrain.imags: unknown key; did you mean 'images'"),
        (".", "the folder 'a{b}' must have no braces, quotes"),
    ],
)
def test_a_value_that_is_not_a_dataset_is_refused(project, monkeypatch, value, message):
    (project / "config/datasets/mine.yaml").write_text("pretrain: {file: a.jsonl, imags: b}", encoding="utf-8")
    if value == ".":
        (project / "a{b}").mkdir()
        (project / "a{b}/pairs.jsonl").touch()
        monkeypatch.chdir(project / "a{b}")
    with pytest.raises(InputError, match=message):
        resolve_dataset(value)


def test_moving_the_project_rewrites_training_files(project, tmp_path, monkeypatch):
    config = merge_experiment("baseline", {})
    images = resolve_dataset("shapes").images
    here = STAGES["jsonl"].settings(config, images)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert STAGES["jsonl"].settings(config, images) != here


def test_modules_of_a_script_are_found_transitively():
    def names(script):
        return {path.name for path in find_modules(PROJECT / "workflow_scripts" / script)}

    assert {"finetune.py", "stage.py", "modeling_mgm.py", "chat_template.py", "errors.py"} <= names("finetune.py")
    assert not names("finetune.py") & {"pretrain.py", "recipe.py", "scenes.py", "vqa.py"}
    assert not names("filter_data.py") & {"trainer.py", "vqa.py"}


def test_every_operator_is_a_module_of_recipe_scripts():
    """Operators import each other relatively, as Data-Juicer requires. Features add some."""
    scripts = PROJECT / "workflow_scripts"
    for script in ("filter_data.py", "synthesize_captions.py", "analyze_data.py", "dj2mgm/juicer/engine.py"):
        operators = {
            *scripts.glob("dj2mgm/juicer/operators/*.py"),
            *scripts.glob("dj2mgm/features/*/operators/[!_]*.py"),
        }
        assert operators < set(find_modules(scripts / script)), script


def integers_without_limits(schema: object, key: str = "") -> list[str]:
    """Return keys of integers without a maximum, except in a crate's record, which is only compared."""
    if isinstance(schema, list):
        return [name for item in schema for name in integers_without_limits(item, key)]
    if not isinstance(schema, dict):
        return []
    kinds = schema.get("type", ())
    here = "integer" in ([kinds] if isinstance(kinds, str) else kinds) and "maximum" not in schema
    within = [
        n for name, item in schema.items() for n in integers_without_limits(item, key if name == "items" else name)
    ]
    return [key] * here + within


@pytest.mark.parametrize("model", [Configuration, *FILES], ids=lambda model: model.__name__)
def test_every_integer_of_a_configuration_has_a_maximum(model):
    assert not set(integers_without_limits(build_schema(model))) - {"seeds"}


def test_a_model_without_a_part_is_refused():
    model = yaml.safe_load((PROJECT / "config/models/tiny.yaml").read_text(encoding="utf-8"))
    del model["language_model"]
    with pytest.raises(InputError, match="language_model: the key is missing"):
        validate_settings(MgmModel, model, "m.yaml")


def test_command_line_values_inside_braces_are_read_as_yaml(project):
    # Snakemake passes {finetune: {epochs: '2', lora: {targets: ['q_proj']}}}
    command_line = {
        "finetune": {"epochs": "2", "lora": {"targets": ["q_proj"], "dropout": "0.5"}},
        "cpu_threads": "null",
    }
    merged = merge_experiment("baseline", command_line)
    assert (merged.finetune.epochs, merged.finetune.lora.dropout) == (2, 0.5)
    assert merged.finetune.lora.targets == ["q_proj"] and merged.cpu_threads is None


def test_strings_on_the_command_line_stay_unchanged(project):
    texts = {"clip_prompt": "A photo shows ", "question_prompt": "In a word. {question} #1", "caption_question": ""}
    assert dict(merge_experiment("baseline", {"evaluate": texts}).evaluate).items() >= texts.items()


@pytest.mark.parametrize("key", ["report", "dataset", "seeds"])
def test_a_models_settings_have_only_its_keys(project, key):
    path = project / "config/models/mine.yaml"
    text = (project / "config/models/mgm-2b.yaml").read_text(encoding="utf-8")
    path.write_text(text + "settings: {gpus: 2, pretrain: {epochs: 2}}\n", encoding="utf-8")
    assert merge_experiment("baseline", {"model": "mine"}).gpus == 2
    path.write_text(text + f"settings: {{{key}: x}}\n", encoding="utf-8")
    with pytest.raises(
        InputError, match=f"mine.yaml, settings: '{key}' is not a setting of a model; set it in config/config.yaml"
    ):
        merge_experiment("baseline", {"model": "mine"})


@pytest.mark.parametrize("model", ["tiny", "mgm-2b", "mgm-qwen2.5-1.5b"])
def test_an_unknown_lora_target_is_refused_with_the_known_ones(project, model):
    images = dict.fromkeys(("pretrain", "finetune", "evaluation"), ".")
    for targets, refused in ((["q_proj", "down_proj"], None), (["q_proj", "q_porj"], "q_porj"), ([".*"], r"\.\*")):
        config = merge_experiment("baseline", {"model": model, "finetune": {"lora": {"targets": targets}}})
        if refused is None:
            STAGES["finetune"].settings(config, images)
        else:
            with pytest.raises(InputError, match=f"has no projection '{refused}'; known are q_proj, k_proj"):
                STAGES["finetune"].settings(config, images)


def test_targets_of_a_missing_model_are_checked_by_the_stage(project):
    text = (project / "config/models/mgm-2b.yaml").read_text(encoding="utf-8")
    path = project / "config/models/mine.yaml"
    path.write_text(text.replace("model_zoo/gemma-2b-it ", "somebody/else "), encoding="utf-8")
    lora = {"targets": ["odd_proj"]}
    config = merge_experiment("baseline", {"model": "mine", "finetune": {"lora": lora}})
    images = dict.fromkeys(("pretrain", "finetune", "evaluation"), ".")
    assert STAGES["finetune"].settings(config, images).lora.targets == ["odd_proj"]


def test_a_deepspeed_file_is_read_strictly(project):
    (project / "config/deepspeed/mine.json").write_text('{"a": 1, "a": NaN}', encoding="utf-8")
    with pytest.raises(InputError, match="config/deepspeed/mine.json: the key 'a' is stated twice"):
        read_deepspeed("mine", "finetune.deepspeed")
    (project / "config/deepspeed/.#mine.json").write_text("{", encoding="utf-8")
    assert ".#mine" not in list_deepspeed_names()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage: expected 0, 1, 2 or 3, found 7"),
        ({"zero_optimization": {}}, "zero_optimization.stage: expected 0, 1, 2 or 3, found null"),
        ({"bf16": {"enabled": True}}, 'bf16.enabled: found true; set "auto"'),
        ({"bf16": {}}, 'bf16.enabled: found null; set "auto"'),
        ({"fp16": {"enabled": True}}, "fp16.enabled: found true; remove fp16"),
        ({"train_batch_size": 0}, 'train_batch_size: expected "auto" or an integer from 1, found 0'),
        ({"train_batch_size": 32}, 'train_batch_size is 32, but finetune.global_batch_size is 16; set .*: "auto"'),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "global_batch_size 16 is not micro_batch_size 4 × gradient_accumulation_steps 2 × gpus 1 = 8",
        ),
    ],
)
def test_a_deepspeed_file_is_checked_before_the_stage(project, changed, message):
    content = read_deepspeed("zero2", "finetune.deepspeed") | changed
    (project / "config/deepspeed/mine.json").write_text(json.dumps(content), encoding="utf-8")
    automatic = dict.fromkeys(("micro_batch_size", "gradient_accumulation_steps"), "auto")
    config = merge_experiment("baseline", {"finetune": {"deepspeed": "mine", "global_batch_size": 16} | automatic})
    images = dict.fromkeys(("pretrain", "finetune", "evaluation"), ".")
    with pytest.raises(InputError, match=f"config/deepspeed/mine.json: {message}"):
        STAGES["finetune"].settings(config, images)


def test_a_deepspeed_name_with_suffix_is_refused(project):
    with pytest.raises(InputError, match=r"found zero2.json; set finetune.deepspeed: zero2, without .json"):
        read_deepspeed("zero2.json", "finetune.deepspeed")
    with pytest.raises(InputError, match="there is no .*zero9.json; did you mean 'zero3'. Known are .*zero3_"):
        read_deepspeed("zero9", "finetune.deepspeed")


def test_a_deepspeed_file_may_fix_the_sizes_of_the_settings(project):
    fixed = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    content = read_deepspeed("zero2", "finetune.deepspeed") | fixed
    (project / "config/deepspeed/mine.json").write_text(json.dumps(content), encoding="utf-8")
    sizes = {"global_batch_size": 16, "micro_batch_size": "auto", "gradient_accumulation_steps": 4}
    config = merge_experiment("baseline", {"finetune": {"deepspeed": "mine"} | sizes})
    images = dict.fromkeys(("pretrain", "finetune", "evaluation"), ".")
    assert STAGES["finetune"].settings(config, images).deepspeed == content


def test_the_folder_of_a_model_is_checked_before_anything_runs(project, tmp_path):
    folder = tmp_path / "clip"
    folder.mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (folder / "config.json").write_text('{"model_type": "clip", "vision_config": {"num_hidden_layers": 1000000}}')
    model = yaml.safe_load((project / "config/models/tiny.yaml").read_text()) | {"clip": str(folder)}
    (project / "config/models/tiny.yaml").write_text(yaml.safe_dump(model))
    with pytest.raises(InputError, match="config.json: vision_config.num_hidden_layers is 1000000; at most"):
        merge_experiment("baseline", {})
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(InputError, match="config.json is a link out of its folder"):
        merge_experiment("baseline", {})


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"file": "no.jsonl", "images": "."}, "dataset: pretrain.file: there is no file no.jsonl"),
        ({"file": "rows.jsonl", "images": "no"}, "dataset: pretrain.images: there is no folder no"),
        ({"file": "rows.jsonl", "images": ".", "questions": "no.json"}, "pretrain.questions: there is no file no.json"),
    ],
)
def test_missing_files_of_a_dataset_are_named(project, split, message):
    (project / "rows.jsonl").touch()
    with pytest.raises(InputError, match=message):
        check_files(FilesDataset.model_validate({"pretrain": split}))
    check_files(FilesDataset(pretrain={"file": "rows.jsonl", "images": "."}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"format": "table", "path": "no"},
            "sources.a: no names no file that ends with .csv or .tsv or .jsonl or .json",
        ),
        ({"format": "table", "path": "rows.csv", "images": "no"}, "sources.a: images: there is no folder no"),
    ],
)
def test_missing_folders_of_sources_are_named(project, source, message):
    (project / "rows.csv").touch()
    (project / "config/datasets/own.yaml").write_text(yaml.safe_dump({"sources": {"a": source}}))
    with pytest.raises(InputError, match=message):
        resolve_dataset("own")


def test_only_differences_of_a_modules_config_count(project):
    defaults = read_default_layer().values
    whole = {key: defaults[key] for key in ("seeds", "finetune", "synthesize", "recipe")}
    changed = whole | {"finetune": whole["finetune"] | {"epochs": 3}}
    assert drop_defaults(changed, {}) == {"finetune": {"epochs": 3}}
    explicit_values = {"synthesize": {"recipe": None}}
    assert drop_defaults(changed, explicit_values) == {"finetune": {"epochs": 3}, "synthesize": {"recipe": None}}
