"""Trackers with local stores receive values and continue after a resume; a failure ends only one tracker."""

import importlib.util
import json
import os
import sqlite3
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from dj2mgm.errors import InputError
from dj2mgm.training.trackers import (
    PROJECT_NAME,
    GuardedCallback,
    Trackers,
    check_trackers,
    mask_secrets,
    read_row_counts,
)

LABELS = {"experiment": "dj_synth", "seed": 3, "stage": "finetune", "dataset": "shapes", "recipe": "baseline"}
PREFIXES = ("WANDB_", "MLFLOW_", "TRACKIO_")


def needs(name: str):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # the folder of stored keys
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def stage(tmp_path: Path) -> Path:
    folder = tmp_path / "results/dj_synth/seed-3/finetune/checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def logged(tmp_path: Path, name: str, losses: dict[int, float], resumed: bool = False) -> Trackers:
    """Run a training that logs these losses by step, with a score at each."""
    trackers = Trackers([name], LABELS | {"finetune_rows_out": 38}, stage(tmp_path), resumed)
    args = TrainingArguments(str(tmp_path / "out"), report_to=[], use_cpu=True)
    args.project, args.run_name = PROJECT_NAME, trackers.run_name
    control, state = TrainerControl(), TrainerState(is_world_process_zero=True)
    [callback] = trackers.make_callbacks()
    callback.on_train_begin(args, state, control)
    for step, loss in losses.items():
        state.global_step = step
        callback.on_log(args, state, control, logs={"loss": loss})
        callback.on_log(args, state, control, logs={"eval_accuracy": 0.5})
    callback.on_train_end(args, state, control)
    assert callback.callback is not None
    return trackers


@needs("wandb")
def test_wandb_without_a_key_writes_a_run_on_this_machine(tmp_path, capsys):
    import wandb

    first = logged(tmp_path, "wandb", {1: 2.5})
    assert (wandb.run.id, wandb.run.name, wandb.run.group) == (first.state["id"], first.run_name, "dj_synth")
    assert wandb.run.config["recipe"] == "baseline" and wandb.run.config["finetune_rows_out"] == 38
    assert set(wandb.run.tags) == {"finetune", "shapes", "baseline"}
    wandb.finish()
    resumed = logged(tmp_path, "wandb", {2: 2.0}, resumed=True)
    assert resumed.state["id"] == first.state["id"]
    wandb.finish()
    folders = sorted((tmp_path / "results/wandb").glob("offline-run-*"))
    assert all(folder.name.endswith(first.state["id"]) for folder in folders) and folders
    assert list(folders[0].glob("*.wandb")) and "wandb sync" in capsys.readouterr().err


@needs("mlflow")
def test_mlflow_continues_the_run_of_a_resumed_stage(tmp_path):
    first = logged(tmp_path, "mlflow", {1: 2.5})
    again = logged(tmp_path, "mlflow", {2: 2.0}, resumed=True)
    fresh = logged(tmp_path, "mlflow", {1: 9.0})
    assert first.state["mlflow"] == again.state["mlflow"] != fresh.state["mlflow"]
    import mlflow

    mlflow.flush_async_logging()
    with sqlite3.connect(tmp_path / "results/mlflow.db") as store:
        metrics = store.execute("SELECT run_uuid, key, step, value FROM metrics").fetchall()
        tags = dict(store.execute("SELECT key, value FROM tags WHERE run_uuid = ?", [first.state["mlflow"]]))
    assert {(first.state["mlflow"], "loss", step, loss) for step, loss in ((1, 2.5), (2, 2.0))} <= set(metrics)
    assert tags["dataset"] == "shapes" and tags["seed"] == "3" and tags["finetune_rows_out"] == "38"


@needs("trackio")
def test_trackio_writes_its_own_database(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = logged(tmp_path, "trackio", {1: 2.5, 2: 2.0})
    [file] = (tmp_path / "trackio").rglob(f"{PROJECT_NAME}.db")
    with sqlite3.connect(file) as store:
        rows = [json.loads(text) for (text,) in store.execute("SELECT metrics FROM metrics ORDER BY step")]
        configs = store.execute("SELECT run_name, config FROM configs").fetchall()
    assert [row["train/loss"] for row in rows if "train/loss" in row] == [2.5, 2.0]
    assert configs[0][0] == run.run_name and json.loads(configs[0][1])["recipe"] == "baseline"


def test_a_missing_tracker_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match="trackers: wandb is not installed.*pip install wandb==.*or remove it from trackers"
    ):
        check_trackers(["wandb"])


class Failing:
    """Tracker whose server is lost at the second row."""

    lines = 0

    def on_train_begin(self, *args, **kwargs): ...

    def on_log(self, *args, **kwargs):
        self.lines += 1
        if self.lines > 1:
            raise ConnectionError("https://me:pass-word@host/api refused with key 12345678")


def test_a_lost_server_ends_only_its_tracker_without_secrets(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "12345678")
    monkeypatch.setattr("dj2mgm.training.trackers.get_reporting_integration_callbacks", lambda names: [lambda: failing])
    monkeypatch.setattr(Trackers, "add_labels", lambda self, name: None)
    failing = Failing()
    callback = GuardedCallback("wandb", Trackers(["wandb"], LABELS, stage(tmp_path), False))
    callback.on_train_begin()
    for _ in range(4):
        callback.on_log()
    callback.on_train_end()
    printed = capsys.readouterr().err
    assert failing.lines == 2 and printed.count("wandb failed and is switched off") == 1
    assert "12345678" not in printed and "pass-word" not in printed and "ConnectionError" in printed


@needs("mlflow")
def test_training_continues_without_an_mlflow_server(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(AssertionError):  # set by `logged`, because the tracker is disabled
        logged(tmp_path, "mlflow", {1: 2.5})
    assert "mlflow failed and is switched off" in capsys.readouterr().err


def test_secrets_of_the_environment_are_replaced(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "open sesame")
    assert mask_secrets("with 'open sesame' at http://a:b@c/d") == "with '…' at http://…@c/d"


def test_numbers_of_training_rows_are_logged(tmp_path):
    (tmp_path / "summary.json").write_text(
        '{"pretrain": {"rows_in": 9, "rows_out": 7, "dropped": {}}, "finetune": null}'
    )
    assert read_row_counts(tmp_path / "summary.json") == {"pretrain_rows_in": 9, "pretrain_rows_out": 7}
    assert read_row_counts(tmp_path / "none.json") == {}
