"""The folder of compiled code, which all stages share and whose size is limited."""

import os
from pathlib import Path

import pytest

from dj2mgm import torch_environment
from dj2mgm.errors import InputError
from dj2mgm.torch_environment import COMPILED_CODE, limit_compiled_code, share_compiled_code


def test_stages_share_compiled_code_unless_user_sets_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    share_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    share_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / COMPILED_CODE)


def test_too_large_compiled_code_is_deleted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    limit_compiled_code()  # the folder does not exist yet
    (COMPILED_CODE / "fxgraph").mkdir(parents=True)
    (COMPILED_CODE / "fxgraph/code").write_bytes(bytes(100))
    limit_compiled_code()
    assert COMPILED_CODE.exists()
    monkeypatch.setattr(torch_environment, "COMPILED_CODE_BYTES", 99)
    limit_compiled_code()
    assert not COMPILED_CODE.exists()
    (tmp_path / "others").mkdir()
    (tmp_path / "others/file").write_bytes(bytes(100))
    COMPILED_CODE.symlink_to(tmp_path / "others")
    limit_compiled_code()
    assert (tmp_path / "others/file").exists(), "a linked folder is not emptied"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/dev/null")
    with pytest.raises(InputError, match="TORCHINDUCTOR_CACHE_DIR: /dev/null cannot be made"):
        share_compiled_code()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    COMPILED_CODE.parent.mkdir()
    COMPILED_CODE.touch()
    with pytest.raises(InputError, match="is not a folder; delete it"):
        share_compiled_code()


def test_only_variables_that_configure_training_are_removed(monkeypatch):
    removed = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "NVIDIA_TF32_OVERRIDE": "1", "DS_ACCELERATOR": "cpu"}
    harmless = {"ACCELERATE_LOG_LEVEL": "ERROR", "DS_SKIP_CUDA_CHECK": "1", "HF_HUB_OFFLINE": "1", "SMALL": "1"}
    for name, value in (removed | harmless).items():
        monkeypatch.setenv(name, value)
    torch_environment.set_torch_environment()
    assert not removed.keys() & os.environ.keys() and harmless.items() <= os.environ.items()


def test_each_environment_compiles_extensions_in_its_own_folder(tmp_path, monkeypatch):
    """A process that another environment has started takes the folder beside the one that it inherits."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folders = []
    for prefix in ("/environments/one", "/environments/two", "/environments/one"):
        monkeypatch.setattr("sys.prefix", prefix)
        torch_environment.set_torch_environment()
        folders.append(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    assert folders[0] == folders[2] != folders[1] and {folder.parent for folder in folders} == {tmp_path}
