"""A damaged result (emptied, truncated, overwritten) is an error of one sentence that names the file."""

import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import compare_experiments
from dj2mgm.errors import InputError
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.models.mgm.mgm_generator import load_trained
from dj2mgm.models.trained_weights import find_projector_parameters
from dj2mgm.models.tuning import wrap_with_lora
from dj2mgm.reporting.experiment_results import load_experiments
from dj2mgm.settings.training_stages import LoraSettings
from dj2mgm.storage.files import read_json, read_jsonl, read_yaml, write_json
from dj2mgm.storage.streaming import LineIndex
from fuzzing import fuzzed
from report_results import write_results
from tiny_models import tiny_mgm

DAMAGE = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[:10],
    "other bytes": lambda content: b"\xff\x00\x9f" + content[3:],
    "another type": lambda content: b"7\n",
}
READERS = {"json": read_json, "jsonl": lambda path: list(read_jsonl(path)), "yaml": read_yaml}


def damage_message(path) -> str:
    return f"^{re.escape(str(path))}.* is damaged .*again"


@fuzzed(1000)
@given(st.binary(max_size=12) | st.text("{}[]:,\"' 0eNaN\n-!&*\t", max_size=12).map(str.encode))
def test_any_file_contents_are_read_or_the_file_is_named(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    for read in READERS.values():
        try:
            rows = read(path)
            assert isinstance(rows, dict) or all(isinstance(row, dict) for row in rows)
        except InputError as error:
            assert str(error).startswith(str(path)) and "\n" not in str(error)


def test_a_too_deeply_nested_file_or_a_missing_key_is_named(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    for read in (read_json, READERS["jsonl"]):
        with pytest.raises(InputError, match=damage_message(path)):
            read(path)
    write_json(path, [])
    with pytest.raises(InputError, match="expected an object, found .*: fix the file$"):
        read_json(path, remedy="fix the file")
    write_json(path, {"groups": {}})
    with pytest.raises(InputError, match=r"deep.json is damaged .it lacks 'reference'.: delete it and run"):
        read_json(path)["groups"]["reference"]


def test_an_error_of_a_reader_is_not_attributed_to_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n')
    with pytest.raises(ValueError, match="my own"):
        for _ in read_jsonl(path):
            raise ValueError("my own")


def test_a_truncated_line_of_training_data_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n{"id": ')
    assert LineIndex(path)[0] == {"id": 1}
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}, line 2, is damaged"):
        LineIndex(path)[1]


def test_the_report_names_a_damaged_result(tmp_path, monkeypatch, capsys):
    config = write_results(tmp_path / "results")
    arguments = ["--config", str(config), "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["compare_experiments.py", *arguments])
    names = ("summary.json", "metrics.json", "metrics.jsonl", "captions.jsonl")
    for name, damage in [*zip(names, DAMAGE.values(), strict=True), ("metrics.jsonl", DAMAGE["empty"])]:
        file = sorted((tmp_path / "results").rglob(name))[0]
        content = file.read_bytes()
        file.write_bytes(damage(content))
        with pytest.raises(SystemExit):
            compare_experiments.main()
        assert f"error: {file}" in capsys.readouterr().err
        assert not (tmp_path / "report.html").exists()
        file.write_bytes(content)


def test_emptied_scores_do_not_count_as_missing(tmp_path):
    config = write_results(tmp_path / "results")
    scores = sorted((tmp_path / "results").rglob("evaluate_clip/scores.jsonl"))[0]
    metrics = read_json(scores.with_name("metrics.json"))
    write_json(scores.with_name("metrics.json"), metrics | {"groups": {"reference": {}}})
    scores.write_bytes(b"")
    with pytest.raises(InputError, match=damage_message(scores)):
        load_experiments(config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Save a base model and a fine-tuned stage with an adapter."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_mgm()
    model.save_pretrained(folder / "base")
    projector = {name: tensor.detach().clone() for name, tensor in find_projector_parameters(model).items()}
    (folder / "finetune").mkdir()
    save_file(projector, folder / "finetune/projector.safetensors")
    wrap_with_lora(
        model, LoraSettings(r=2, alpha=4, dropout=0.0, targets=["q_proj"]), MGMFamily.find_parts(model).decoder
    ).save_pretrained(folder / "finetune/adapter")
    return folder


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("base/config.json", "another type"),
        ("base/model.safetensors", "cut off"),
        ("finetune/projector.safetensors", "empty"),
        ("finetune/adapter/adapter_config.json", "other bytes"),
        ("finetune/adapter/adapter_model.safetensors", "other bytes"),
    ],
)
def test_damaged_weights_and_their_settings_are_named(trained, name, damage):
    assert load_trained(trained / "base", trained / "finetune", torch.float32)
    file = trained / name
    content = file.read_bytes()
    file.write_bytes(DAMAGE[damage](content))
    try:
        with pytest.raises(InputError, match=f"^{re.escape(str(file.parent))}.* is damaged"):
            load_trained(trained / "base", trained / "finetune", torch.float32)
    finally:
        file.write_bytes(content)
