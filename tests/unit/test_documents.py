"""Files generated from the typed settings, and the types."""

import json

import pytest
import yaml
from jsonschema import Draft202012Validator

from configuration_files import FILES
from dj2mgm.settings.base import SEARCH, read_extra
from dj2mgm.settings.configuration import Configuration
from dj2mgm.settings.training_stages import FinetuneSection, LoraSettings, PretrainSection
from dj2mgm.settings.validation import validate_settings
from paths import PROJECT
from write_configuration import build_documents

DOCUMENTS = build_documents()


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_generated_file_is_up_to_date(path):
    """If this fails, run `python workflow_scripts/tools/write_configuration.py`."""
    assert (PROJECT / path).read_text(encoding="utf-8") == DOCUMENTS[path]


def test_every_schema_in_the_repository_is_generated():
    schemas = {path.relative_to(PROJECT) for path in PROJECT.glob("config/schemas/*.schema.json")}
    assert schemas == {path for path in DOCUMENTS if path.name.endswith(".schema.json")}


def test_config_yaml_states_the_defaults_of_the_types():
    values = yaml.safe_load((PROJECT / "config/config.yaml").read_text(encoding="utf-8"))
    defaults = Configuration().model_dump()
    assert values == defaults
    assert validate_settings(Configuration, values, "config.yaml").model_dump() == defaults


def test_every_key_of_the_configuration_has_a_description():
    def undescribed(model, prefix=""):
        for name, field in model.model_fields.items():
            kinds = [kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))]
            for kind in kinds:
                if hasattr(kind, "model_fields"):
                    yield from undescribed(kind, f"{prefix}{name}.")
            if not field.description:
                yield prefix + name

    groups = {"benchmarks.mmbench", "benchmarks.textvqa", "challenge.scores"}
    scores = {"challenge.scores.mmbench", "challenge.scores.textvqa"}
    assert set(undescribed(Configuration)) == groups | scores


def test_schema_accepts_the_files_of_the_repository():
    for folder, name in (("models", "model"), ("datasets", "dataset"), ("experiments", "config")):
        [schema] = [json.loads(text) for path, text in DOCUMENTS.items() if path.name == f"{name}.schema.json"]
        Draft202012Validator.check_schema(schema)
        for path in (PROJECT / "config" / folder).glob("*.yaml"):
            Draft202012Validator(schema).validate(yaml.safe_load(path.read_text(encoding="utf-8")) or {})


def test_editor_schema_and_types_refuse_the_same_values():
    schema = json.loads(next(text for path, text in DOCUMENTS.items() if path.name == "config.schema.json"))
    wrong = [{"gpus": 0}, {"sedes": [1]}, {"finetune": {"epochs": 0}}, {"finetune": {"lora": {"rnk": 1}}}]
    for values in [*wrong, {"seeds": []}, {"jsonl": {"leaks": "no"}}, {"pretrain": {"micro_batch_size": "all"}}]:
        assert list(Draft202012Validator(schema).iter_errors(values)), values
        with pytest.raises(Exception, match="values: "):
            validate_settings(Configuration, values, "values")


@pytest.mark.parametrize("section", [PretrainSection, FinetuneSection, LoraSettings])
def test_search_intervals_are_within_limits(section):
    for name, field in section.model_fields.items():
        if search := read_extra(field, SEARCH):
            assert search.low < search.high and (search.low > 0 or not search.log)
            for value in (search.low, search.high):
                validate_settings(section, {name: round(value) if field.annotation is int else value}, "search")


def test_types_of_files_refuse_unknown_keys():
    for model in FILES:
        with pytest.raises(Exception, match="file: nonsense: unknown key"):
            validate_settings(model, {"nonsense": 1}, "file")
