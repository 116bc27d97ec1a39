"""Probes of CUDA toolkits, NVIDIA cards, connections, and probes that hang or crash in a process of their own."""

import os

from dj2mgm.health.probes import Toolkit, connect_to_itself, count_cards, find_toolkit, probe_cuda, run_probe


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


def test_cards_are_counted_without_a_driver(tmp_path):
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x8086", "0x030000"), ("c", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert count_cards(tmp_path) == 1


def test_connection_to_itself_is_tried():
    assert connect_to_itself() is None
    assert "Cannot assign requested address" in connect_to_itself("192.0.2.1")  # an address reserved for documentation


def test_hanging_and_crashing_probes_are_reported(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time; print('Using torch_extensions', flush=True); time.sleep(60)")
    (tmp_path / "crashes.py").write_text("import os, sys; print('abc', file=sys.stderr); os.abort()")
    monkeypatch.setattr("dj2mgm.health.probes.SCRIPTS", tmp_path)
    hung = run_probe("hangs", 1)
    assert hung.values is None and "Using torch_extensions" in hung.printed and "no answer within 1 s" in hung.printed
    crashed = run_probe("crashes", 30)
    assert crashed.values is None and "abc" in crashed.printed and "exit status -6" in crashed.printed


def test_a_probe_imports_nothing_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/probe.py").write_text("import random; print('{}')")
    (tmp_path / "random.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dj2mgm.health.probes.SCRIPTS", tmp_path / "modules")
    assert run_probe("probe", 30).values == {}
