"""Probes that hang or crash in a process of their own."""

from dj2mgm.health.probe_process import run_probe


def test_hanging_and_crashing_probes_are_reported(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time; print('Using torch_extensions', flush=True); time.sleep(60)")
    (tmp_path / "crashes.py").write_text("import os, sys; print('abc', file=sys.stderr); os.abort()")
    monkeypatch.setattr("dj2mgm.health.probe_process.SCRIPTS", tmp_path)
    hung = run_probe("hangs", 1)
    assert hung.values is None and "Using torch_extensions" in hung.printed and "no answer within 1 s" in hung.printed
    crashed = run_probe("crashes", 30)
    assert crashed.values is None and "abc" in crashed.printed and "exit status -6" in crashed.printed


def test_a_probe_imports_nothing_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/probe.py").write_text("import random; print('{}')")
    (tmp_path / "random.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dj2mgm.health.probe_process.SCRIPTS", tmp_path / "modules")
    assert run_probe("probe", 30).values == {}
