"""Models and datasets on this machine: folders, and repositories in the hub's cache."""

import os
import re
from pathlib import Path

COMMIT = re.compile("[0-9a-f]{40}")  # Git names contents as it names commits


def is_folder_path(part: str) -> bool:
    """Return whether a part of a model is named by a folder, not by a hub id (`owner/name` or `name`)."""
    return part.startswith((".", "/", "~", "model_zoo/")) or part.count("/") > 1


def find_cached_snapshot(hub_id: str, kind: str) -> Path | None:
    """Return the folder of a repository in the hub's cache on this machine, or None if it is not there.

    The cache's layout is documented (https://huggingface.co/docs/huggingface_hub/guides/manage-cache). Not every
    environment that reads configurations has the hub's library.

    Args:
        hub_id: id of the repository.
        kind: `models` or `datasets`.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", Path(os.environ.get("HF_HOME", default), "hub"))).expanduser()
    repository = cache / f"{kind}--{hub_id.replace('/', '--')}"
    main = repository / "refs/main"
    commit = main.read_bytes().decode("ascii", errors="replace") if main.is_file() else ""
    snapshot = repository / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def find_model(part: str) -> str:
    """Return the folder of a model: in the hub's cache if it has the hub id, otherwise as it is named."""
    if is_folder_path(part) or os.path.isdir(part):
        return part
    return str(find_cached_snapshot(part, "models") or part)
