"""Experiment trackers of a training stage, through transformers' own callbacks.

A tracker's environment variables decide where it writes. Without them, it writes on this machine. An error in a
tracker, such as an unreachable server, ends the tracker and not the training. TensorBoard only writes files, and is
enabled by transformers' training arguments.
"""

import importlib
import importlib.util
import json
import os
import re
import secrets
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlparse

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from dj2mgm.cli.messages import note, warn
from dj2mgm.errors import InputError
from dj2mgm.storage.files import read_json, write_json

SET_VARIABLES = "DJ2MGM_SET"  # environment variable with the names of variables that this module has set
REQUIREMENTS = {
    "tensorboard": "tensorboard==2.21.0",
    "wandb": "wandb==0.31.0",
    "mlflow": "mlflow-skinny==3.17.2 sqlalchemy==2.0.58 alembic==1.20.1",
    # --no-deps, because trackio's requirements would downgrade pillow to 12
    "trackio": "--no-deps trackio==0.43.0 gradio-client==2.7.2 orjson==3.13.0 brotli==1.2.1",
}
PROJECT_NAME = "dj2mgm"
# Timeouts in seconds if a server does not answer, unless the environment sets others.
TIMEOUTS = {
    "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "60",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
SECRET_NAME = re.compile(r"API_KEY|TOKEN|PASSWORD|SECRET")
STATE_FILE = "trackers.json"  # file next to the checkpoints with the trackers' runs, which a resumed stage continues


def check_trackers(names: list[str]) -> None:
    """Check that the packages of the trackers are installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"trackers: {name} is not installed in this environment. Install it by `pip install "
                f"{REQUIREMENTS[name]}` (docs/running.md), or remove it from trackers"
            )


class Trackers:
    """Trackers of one stage, in its first process only.

    Args:
        names: names of the trackers.
        labels: labels of the run, such as experiment, seed, dataset and recipe.
        checkpoints: folder of the stage's checkpoints.
        resumed: whether the stage resumes from a checkpoint. Then the trackers' runs are continued, too.
    """

    def __init__(self, names: list[str], labels: dict[str, object], checkpoints: Path, resumed: bool):
        self.names = [name for name in names if name != "tensorboard"]
        self.labels, self.file = labels, checkpoints / STATE_FILE
        saved_state = read_json(self.file) if resumed and self.file.exists() else {}
        self.state = {"id": saved_state.get("id") or secrets.token_hex(4), "mlflow": saved_state.get("mlflow")}
        parts = (str(labels[key]) for key in ("experiment", "seed", "stage") if key in labels)
        self.run_name = f"{'-'.join(parts)}-{self.state['id']}"

    def make_callbacks(self) -> list[TrainerCallback]:
        """Return callbacks, after setting the trackers' environment variables that are not set yet."""
        if self.names:
            write_json(self.file, self.state)
            self._set_environment()
        # each callback has its own class, because Trainer warns about two callbacks of one class
        return [type(name, (GuardedCallback,), {})(name, self) for name in self.names]

    def add_labels(self, name: str) -> None:
        """Add labels and the run's id to a run that has started."""
        tracker = importlib.import_module(name)  # imported here, because it may not be installed
        if name == "mlflow":
            self.state["mlflow"] = tracker.active_run().info.run_id
            write_json(self.file, self.state)
        else:
            tracker.config.update(self.labels, allow_val_change=True)

    def _set_environment(self) -> None:
        """Set the trackers' variables, except those that the user has set; the state keeps ids across restarts."""
        folder, text = self._find_folder(), {key: str(value) for key, value in self.labels.items()}
        values = TIMEOUTS | {
            "WANDB_PROJECT": PROJECT_NAME,
            "WANDB_DIR": str(folder),
            "WANDB_RUN_ID": self.state["id"],
            "WANDB_RESUME": "allow",
            "WANDB_RUN_GROUP": text.get("experiment", PROJECT_NAME),
            "WANDB_TAGS": ",".join(text[key] for key in ("stage", "dataset", "recipe", "model") if key in text),
            "WANDB_CONSOLE": "off",  # the stage's output stays in its log
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "MLFLOW_EXPERIMENT_NAME": PROJECT_NAME,
            "MLFLOW_TAGS": json.dumps(text),
        }
        if self.state["mlflow"]:
            values["MLFLOW_RUN_ID"] = self.state["mlflow"]
        if "wandb" in self.names and "WANDB_MODE" not in os.environ and not _has_wandb_key():
            values["WANDB_MODE"] = "offline"
            note(f"wandb: there is no API key, so the run stays in {folder}/wandb; `wandb sync` uploads it")
        for name in os.environ.pop(SET_VARIABLES, "").split():  # set before this process was started again
            os.environ.pop(name, None)
        new = values.keys() - os.environ.keys()
        os.environ |= {name: values[name] for name in new} | {SET_VARIABLES: " ".join(sorted(new))}

    def _find_folder(self) -> Path:
        """Return the folder of all results, or the stage's folder if its experiment is unknown."""
        stage = self.file.absolute().parent.parent
        return next((folder.parent for folder in stage.parents if folder.name == self.labels.get("experiment")), stage)


class GuardedCallback(TrainerCallback):
    """A callback of transformers that is switched off at its first error."""

    def __init__(self, name: str, trackers: Trackers):
        self.name, self.trackers = name, trackers
        self.callback: TrainerCallback | None = None

    def on_train_begin(self, *args, **kwargs) -> None:
        try:
            [make] = get_reporting_integration_callbacks([self.name])
            self.callback = make()
        except Exception as error:
            self._switch_off(error)
        self._forward("on_train_begin", *args, **kwargs)
        if self.callback:
            self._add_labels()

    def on_log(self, *args, **kwargs) -> None:
        self._forward("on_log", *args, **kwargs)

    def on_train_end(self, *args, **kwargs) -> None:
        self._forward("on_train_end", *args, **kwargs)

    def _forward(self, event: str, *args, **kwargs) -> None:
        if self.callback:
            try:
                getattr(self.callback, event)(*args, **kwargs)
            except Exception as error:
                self._switch_off(error)

    def _add_labels(self) -> None:
        try:
            self.trackers.add_labels(self.name)
        except Exception as error:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self.callback = None
        reason = next(iter(str(error).splitlines()), "")[:200]
        warn(f"{self.name} failed and is switched off from here on ({type(error).__name__}: {mask_secrets(reason)})")


def mask_secrets(text: str) -> str:
    """Mask passwords in addresses, and values of environment variables that hold secrets."""
    text = re.sub(r"//[^/@\s]*@", "//…@", text)
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and len(value) > 3:
            text = text.replace(value, "…")
    return text


def _has_wandb_key() -> bool:
    """Return whether a key is in the environment or comes from an earlier `wandb login`.

    wandb itself is not used, because it would not read its variables again.
    """
    if {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & os.environ.keys():
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return bool(netrc(os.environ.get("NETRC")).authenticators(host or ""))
    except (OSError, NetrcParseError):
        return False


def read_row_counts(summary: Path) -> dict[str, int]:
    """Read the numbers of rows of the training files from their summary; empty if there is none."""
    if not summary.is_file():
        return {}
    counts = read_json(summary)
    return {
        f"{split}_{key}": counts[split][key]
        for split in ("pretrain", "finetune")
        for key in ("rows_in", "rows_out", "repeated")
        if key in (counts.get(split) or {})
    }
