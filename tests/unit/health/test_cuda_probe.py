"""The version of a CUDA toolkit, and the order in which toolkits are searched."""

import os

from dj2mgm.health.cuda_probe import Toolkit, find_toolkit, probe_cuda


def test_toolkit_version_is_read_from_nvcc(tmp_path):
    assert find_toolkit(str(tmp_path)) is None
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.5, V11.5.119'\n")
    nvcc.chmod(0o755)
    assert find_toolkit(str(tmp_path)) == Toolkit(str(tmp_path), "11.5")


def test_cuda_home_precedes_path_as_in_torch(tmp_path, monkeypatch):
    for version in ("11.5", "12.4"):
        nvcc = tmp_path / version / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\necho 'release {version}, V'\n")
        nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "11.5/bin"), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert probe_cuda().used.version == "11.5"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "12.4"))
    probe = probe_cuda()
    assert probe.used.version == "12.4" and "11.5" in [other.version for other in probe.others]
