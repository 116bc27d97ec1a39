"""The folder of compiled code, which all stages share and whose size is limited."""

import os

from dj2mgm import torch_environment
from dj2mgm.torch_environment import COMPILED_CODE, limit_compiled_code, share_compiled_code


def test_stages_share_compiled_code_unless_user_sets_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    share_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
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
