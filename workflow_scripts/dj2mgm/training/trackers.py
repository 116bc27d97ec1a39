"""Experiment trackers that show a training stage, through transformers' own callbacks.

A tracker's environment variables decide where it writes, as everywhere; without them it writes on this machine. What
goes wrong in one, such as a server that is down, ends that tracker and not the training. TensorBoard writes files only:
transformers is told of it by its settings.
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

from dj2mgm.errors import InputError
from dj2mgm.files import read_json, write_json
from dj2mgm.messages import note, warn

SET = "DJ2MGM_SET"  # names of environment variables that came from here
REQUIREMENTS = {
    "tensorboard": "tensorboard==2.21.0",
    "wandb": "wandb==0.31.0",
    "mlflow": "mlflow-skinny==3.17.2 sqlalchemy==2.0.58 alembic==1.20.1",
    # its own requirements would take pillow back to 12
    "trackio": "--no-deps trackio==0.43.0 gradio-client==2.7.2 orjson==3.13.0 brotli==1.2.1",
}
PROJECT = "dj2mgm"
# Where a server does not answer, so much is waited for, unless the environment says otherwise; seconds.
PATIENCE = {
    "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "60",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
SECRETS = re.compile(r"API_KEY|TOKEN|PASSWORD|SECRET")
STATE = "trackers.json"  # beside the checkpoints: which runs a resumed stage goes on with


def check_trackers(names: list[str]) -> None:
    """
    Raises:
        InputError: a tracker's package is not in this environment.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(
                f"trackers: {name} is not installed in this environment; `pip install {REQUIREMENTS[name]}` installs "
                "it (docs/running.md), or leave it out"
            )


class Trackers:
    """Of one stage; only its first process has them.

    Args:
        labels: what the run is about: experiment, seed, dataset, recipe and so on.
        checkpoints: the folder of the stage's checkpoints.
        resumed: whether the stage goes on from one of them: then its runs go on, too.
    """

    def __init__(self, names: list[str], labels: dict[str, object], checkpoints: Path, resumed: bool):
        self.names = [name for name in names if name != "tensorboard"]
        self.labels, self.file = labels, checkpoints / STATE
        kept = read_json(self.file) if resumed and self.file.exists() else {}
        self.state = {"id": kept.get("id") or secrets.token_hex(4), "mlflow": kept.get("mlflow")}
        words = (str(labels[key]) for key in ("experiment", "seed", "stage") if key in labels)
        self.run_name = f"{'-'.join(words)}-{self.state['id']}"

    def callbacks(self) -> list[TrainerCallback]:
        """Sets what is not set of the trackers' environment variables."""
        if self.names:
            write_json(self.file, self.state)
            self._set_environment()
        # each of a class of its own, since Trainer warns of two of one
        return [type(name, (Guarded,), {})(name, self) for name in self.names]

    def add_labels(self, name: str) -> None:
        """To a run that has begun."""
        tracker = importlib.import_module(name)  # here, since it need not be installed
        if name == "mlflow":
            self.state["mlflow"] = tracker.active_run().info.run_id
            write_json(self.file, self.state)
        else:
            tracker.config.update(self.labels, allow_val_change=True)

    def _set_environment(self) -> None:
        folder, text = self._folder(), {key: str(value) for key, value in self.labels.items()}
        values = PATIENCE | {
            "WANDB_PROJECT": PROJECT,
            "WANDB_DIR": str(folder),
            "WANDB_RUN_ID": self.state["id"],
            "WANDB_RESUME": "allow",
            "WANDB_RUN_GROUP": text.get("experiment", PROJECT),
            "WANDB_TAGS": ",".join(text[key] for key in ("stage", "dataset", "recipe", "model") if key in text),
            "WANDB_CONSOLE": "off",  # what the stage prints stays in its log
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "MLFLOW_EXPERIMENT_NAME": PROJECT,
            "MLFLOW_TAGS": json.dumps(text),
        }
        if self.state["mlflow"]:
            values["MLFLOW_RUN_ID"] = self.state["mlflow"]
        if "wandb" in self.names and "WANDB_MODE" not in os.environ and not _has_wandb_key():
            values["WANDB_MODE"] = "offline"
            note(f"wandb: there is no key, so the run stays in {folder}/wandb; `wandb sync` uploads it")
        for name in os.environ.pop(SET, "").split():  # by this process, before it was started again
            os.environ.pop(name, None)
        new = values.keys() - os.environ.keys()
        os.environ |= {name: values[name] for name in new} | {SET: " ".join(sorted(new))}

    def _folder(self) -> Path:
        """Of all experiments' results, or of the stage where nothing says whose it is."""
        stage = self.file.absolute().parent.parent
        return next((folder.parent for folder in stage.parents if folder.name == self.labels.get("experiment")), stage)


class Guarded(TrainerCallback):
    """A callback of transformers that is left out from its first error on."""

    def __init__(self, name: str, trackers: Trackers):
        self.name, self.trackers = name, trackers
        self.callback: TrainerCallback | None = None

    def on_train_begin(self, *args, **kwargs) -> None:
        try:
            [make] = get_reporting_integration_callbacks([self.name])
            self.callback = make()
        except Exception as error:
            self._leave_out(error)
        self._tell("on_train_begin", *args, **kwargs)
        if self.callback:
            self._tell_labels()

    def on_log(self, *args, **kwargs) -> None:
        self._tell("on_log", *args, **kwargs)

    def on_train_end(self, *args, **kwargs) -> None:
        self._tell("on_train_end", *args, **kwargs)

    def _tell(self, event: str, *args, **kwargs) -> None:
        if self.callback:
            try:
                getattr(self.callback, event)(*args, **kwargs)
            except Exception as error:
                self._leave_out(error)

    def _tell_labels(self) -> None:
        try:
            self.trackers.add_labels(self.name)
        except Exception as error:
            self._leave_out(error)

    def _leave_out(self, error: Exception) -> None:
        self.callback = None
        reason = next(iter(str(error).splitlines()), "")[:200]
        warn(f"{self.name} failed and is left out from here on ({type(error).__name__}: {without_secrets(reason)})")


def without_secrets(text: str) -> str:
    """Without passwords in addresses and values of variables that hold keys."""
    text = re.sub(r"//[^/@\s]*@", "//…@", text)
    for name, value in os.environ.items():
        if SECRETS.search(name) and len(value) > 3:
            text = text.replace(value, "…")
    return text


def _has_wandb_key() -> bool:
    """Of the environment, or of an earlier `wandb login`. wandb itself is not asked: it would not look at its variables
    again."""
    if {"WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"} & os.environ.keys():
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return bool(netrc(os.environ.get("NETRC")).authenticators(host or ""))
    except (OSError, NetrcParseError):
        return False


def data_flow(summary: Path) -> dict[str, int]:
    """How many rows the training files have of those that were given, from the summary beside them, if it is there."""
    if not summary.is_file():
        return {}
    counts = read_json(summary)
    return {
        f"{split}_{key}": counts[split][key]
        for split in ("pretrain", "finetune")
        for key in ("rows_in", "rows_out", "repeated")
        if key in (counts.get(split) or {})
    }
