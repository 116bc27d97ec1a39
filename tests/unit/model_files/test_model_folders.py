"""Untrusted model folders: links, special files and large numbers are refused, and unknown files are not copied."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from dj2mgm.errors import InputError
from dj2mgm.features.fetch.conversion import convert_to_safetensors
from dj2mgm.features.publish.publication import copy_records
from dj2mgm.features.publish.publish_settings import PublishSettings
from dj2mgm.model_files.missing_models import check_named_models
from dj2mgm.model_files.model_folders import MAX_CONFIG_BYTES, check_config, check_model_folder
from dj2mgm.models.generators import load_family
from dj2mgm.models.vlm.vlm_family import folder_errors
from dj2mgm.storage.files import check_tree, copy_plain
from tiny_families import save_tiny_family
from unpack_foundation import copy_part

SECRET = "hf_decoyDECOYdecoy"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    save_tiny_family("qwen3_vl", folder := tmp_path_factory.mktemp("saved") / "model")
    return folder


@pytest.fixture
def base(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "base"))


@pytest.fixture
def secret(tmp_path) -> Path:
    (tmp_path / "secret.json").write_text(json.dumps({"token": SECRET}))
    return tmp_path / "secret.json"


def holds_secret(folder: Path) -> bool:
    return any(SECRET.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def link(file: Path, to: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(to)


NAMES = ["vocab.txt", "tokenizer_config.json", "generation_config.json", "LICENSE", "config.json", "model.safetensors"]


def test_the_model_of_a_recipe_is_checked(base, secret):
    recipe = [
        {"low_similarity_recaption_mapper": {"captioner": {"image_captioning_mapper": {"hf_img2seq": str(base)}}}}
    ]
    check_named_models(recipe)
    link(base / "vocab.txt", secret)
    with pytest.raises(InputError, match="vocab.txt is a link out of its folder"):
        check_named_models(recipe)
    check_named_models(
        [{"text_length_filter": {"min_len": 1, "note": "a/b", "more": "", "text": "a/" * 5000, "long": "x" * 5000}}]
    )


@pytest.mark.parametrize("name", NAMES)
def test_links_out_of_a_model_folder_are_refused(base, secret, tmp_path, name):
    link(base / name, secret)
    for use in (
        lambda out: load_family(base).save_processor(out),
        lambda out: copy_part(base, out, torch.float32),
        lambda out: convert_to_safetensors(base, out),
    ):
        with pytest.raises(
            InputError, match=f"{name} is a link out of its folder, to .*; put a copy of the file there"
        ):
            use(tmp_path / "out")
        assert not (tmp_path / "out").exists() or not holds_secret(tmp_path / "out")


def test_linked_folders_and_broken_links_are_refused(base, secret):
    (base / "additional_chat_templates").symlink_to(secret.parent)
    with pytest.raises(InputError, match="additional_chat_templates is a link out of its folder"):
        check_model_folder(base)
    link(base / "additional_chat_templates", Path("nowhere"))
    with pytest.raises(InputError, match="additional_chat_templates cannot be read"):
        check_model_folder(base)


def test_pipes_hard_links_and_large_files_are_not_opened(base, secret):
    os.mkfifo(base / "merges.txt.new")
    (base / "merges.txt").unlink(missing_ok=True)
    os.rename(base / "merges.txt.new", base / "merges.txt")
    with pytest.raises(InputError, match="merges.txt is not a regular file but a pipe"):
        check_model_folder(base)
    (base / "merges.txt").unlink()
    (base / "merges.txt").hardlink_to(secret)
    with pytest.raises(InputError, match="merges.txt is a hard link"):
        check_model_folder(base)
    (base / "merges.txt").unlink()
    with open(base / "chat_template.jinja", "wb") as file:
        file.truncate(MAX_CONFIG_BYTES + 1)
    with pytest.raises(InputError, match=f"has {MAX_CONFIG_BYTES + 1} bytes, but may have at most {MAX_CONFIG_BYTES}"):
        check_model_folder(base)


def test_files_with_unknown_names_are_not_copied(base, tmp_path):
    for name in ("credentials.json", "notes.txt", "settings.model", "license.key/x"):
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(SECRET)
    (base / "LICENSE.txt").write_text("Apache-2.0")
    copy_part(base, tmp_path / "out", torch.float32)
    assert not holds_secret(tmp_path / "out")
    assert {"LICENSE.txt", "config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}


def test_links_of_hub_cache_stay_within_the_repository(base, secret, tmp_path):
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots/0123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(base.iterdir())):
        shutil.move(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    load_family(snapshot).save_processor(tmp_path / "out")
    assert (tmp_path / "out/tokenizer.json").is_file() and not (tmp_path / "out/tokenizer.json").is_symlink()
    link(snapshot / "vocab.txt", Path("../../../secret.json"))
    with pytest.raises(InputError, match="vocab.txt is a link out of its folder"):
        load_family(snapshot)
    (blobs / "chained").symlink_to(secret)
    link(snapshot / "vocab.txt", Path("../../blobs/chained"))
    with pytest.raises(InputError, match="vocab.txt is a link out of its folder"):
        load_family(snapshot)


def test_a_link_to_the_whole_folder_is_accepted(base, tmp_path):
    (tmp_path / "linked").symlink_to(base)
    check_model_folder(tmp_path / "linked")


def test_records_and_pushed_folders_contain_no_links(secret, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.json").symlink_to(secret)
    settings = PublishSettings.model_construct(experiment="x", seed=0, model="x", dataset="x")
    with pytest.raises(InputError, match="metrics.json is a link out of its folder"):
        copy_records({"metrics.json": str(folder / "metrics.json")}, tmp_path / "out", "model", settings)
    with pytest.raises(InputError, match="metrics.json is not a regular file but a link"):
        check_tree(folder)


def test_a_link_added_after_the_check_is_not_followed(base, secret, tmp_path, monkeypatch):
    monkeypatch.setattr("dj2mgm.storage.files.resolve_inside", lambda path, folder: path)
    link(base / "vocab.txt", secret)
    with pytest.raises(InputError, match="vocab.txt cannot be read"):
        copy_plain(base / "vocab.txt", base, tmp_path / "copy")


@pytest.mark.parametrize(
    ("file", "key_path", "value"),
    [
        ("config.json", "text_config.num_hidden_layers", 10**6),
        ("config.json", "vision_config.depth", 1e6),
        ("config.json", "text_config.num_attention_heads", 10**5),
        ("config.json", "text_config.hidden_size", 10**8),
        ("config.json", "text_config.vocab_size", 10**10),
        ("config.json", "text_config.max_position_embeddings", 10**12),
        ("config.json", "vision_config.patch_size", -(10**7)),
        ("config.json", "some_new.unknown_key", 10**9),
        ("processor_config.json", "image_processor.size.longest_edge", 10**12),
        ("preprocessor_config.json", "size.height", 10**6),
        ("preprocessor_config.json", "min_pixels", 10**10),
    ],
)
def test_impossible_numbers_are_refused_with_file_and_key(base, file, key_path, value):
    path = base / file
    values = json.loads(path.read_text()) if path.exists() else {}
    *parents, key = key_path.split(".")
    owner = values
    for name in parents:
        owner = owner.setdefault(name, {})
    owner[key] = value
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=f"{file}: {key_path} is {value}; at most"):
        load_family(base)


NESTED = ["[" * 3000 + "]" * 3000, '{"a": ' * 900 + "1" + "}" * 900, '{"a": 1' + "0" * 5000 + "}"]


@pytest.mark.parametrize("text", NESTED, ids=["lists", "objects", "digits"])
def test_nested_and_too_long_numbers_are_refused(base, text):
    (base / "config.json").write_text(text)
    with pytest.raises(InputError, match="config.json"):
        load_family(base)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"text_config": {"hidden_size": -2048}}, "text_config.hidden_size is -2048; at least 1 is expected"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; at least 1"),
        ({"vision_config": {"depths": [3, -3]}}, "vision_config.depths is -3; at least 1"),
    ],
)
def test_sizes_below_one_are_refused_by_key(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        check_config(tmp_path / "config.json")


def test_other_numbers_may_be_negative(tmp_path):
    config = {"vision_feature_layer": -2, "pad_token_id": -1, "num_local_experts": 0, "head_dim": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_config(tmp_path / "config.json")


def test_models_of_transformers_are_within_the_limits(tmp_path):
    kinds = [kind for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if kind in CONFIG_MAPPING]
    for kind in kinds[::4]:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[kind]().to_dict(), default=str))
        check_config(tmp_path / "config.json")
    assert len(kinds) > 40


def test_a_slow_tokenizer_pattern_is_refused_in_a_sentence(tmp_path):
    tokenizer = Tokenizer(BPE(unk_token="a", vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(InputError, match="cannot be used .*retry-limit.*; fix the folder, or download it again"):
        with folder_errors(tmp_path):
            tokenizer.encode("a" * 40 + "b")
    with pytest.raises(KeyboardInterrupt), folder_errors(tmp_path):
        raise KeyboardInterrupt
