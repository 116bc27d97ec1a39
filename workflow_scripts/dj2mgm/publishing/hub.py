"""Pushing a folder to the Hugging Face hub: in one commit, so that a repository holds all of it or is as before.

The token comes from HF_TOKEN or `hf auth login`, as huggingface_hub finds it, and is shown nowhere.
"""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, get_token, logging
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from dj2mgm.command_line import one_line
from dj2mgm.errors import InputError
from dj2mgm.plain_files import check_tree
from dj2mgm.publishing.records import FOLDER, MARK

OF_THE_HUB = {".gitattributes"}  # what it puts into each new repository
LONGEST = 200  # characters of what somebody else says
AGAIN = "the repository holds all of the folder or what it held before; run the same command again"
STRANGE = (LookupError, TypeError, AttributeError)  # what answers of another shape cause in the hub's library


def push(folder: Path, kind: str, repository: str, private: bool) -> str:
    """
    Args:
        kind: `model` or `dataset`.
        private: of a repository that does not exist yet.

    Returns:
        The address of the commit.

    Raises:
        InputError: there is no token, or the hub does not take the folder; the sentence says what to do.
    """
    check_tree(folder)
    if get_token() is None:
        raise InputError(
            f"{folder} is ready, and there is no token to push it with: set HF_TOKEN, or run `hf auth login`, and then "
            "the same command again"
        )
    logging.set_verbosity_error()  # a server's warnings are printed as they are
    api = HfApi()
    with faults(repository):
        api.whoami()
        api.create_repo(repository, repo_type=kind, private=private, exist_ok=True)
        held = set(api.list_repo_files(repository, repo_type=kind))
        if held - OF_THE_HUB and f"{FOLDER}/{MARK}" not in held:
            raise InputError(
                f"the {kind} repository {repository} is there already, and what it holds was not published from here; "
                "choose another name, or delete it"
            )
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=repository,
            repo_type=kind,
            commit_message=f"Publish {folder.parent.name}",
            delete_patterns="*",  # what is published no more, in the same commit
        )
        return _clean(commit.commit_url)


@contextmanager
def faults(repository: str) -> Iterator[None]:
    """Around requests: whatever goes wrong becomes one sentence."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise InputError(f"{repository} cannot be pushed to while HF_HUB_OFFLINE is set; unset it") from None
    except (OSError, RuntimeError, ValueError, httpx2.HTTPError, *STRANGE) as error:
        raise InputError(_sentence(repository, _cause(error))) from None


def _cause(error: BaseException) -> BaseException:
    """What made the upload of one file fail, which the hub's library raises with the file's name."""
    while isinstance(error, RuntimeError) and error.__cause__:
        error = error.__cause__
    return error


def _sentence(repository: str, error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status, said = error.response.status_code, _short(str(error.server_message or ""))
        reasons = {
            401: "the hub does not accept the token: set a valid one as HF_TOKEN, or run `hf auth login`",
            403: f"the token may not write to {repository} ({said}): choose another name, or a token that may",
            409: f"the name {repository} is taken ({said}): choose another one",
            413: f"the hub has no room for {repository} ({said}); {AGAIN} when there is",
            507: f"the hub has no room for {repository} ({said}); {AGAIN} when there is",
        }
        return reasons.get(status, f"the hub refused {repository} (status {status}: {said}); {AGAIN}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full while {repository} is pushed; make room, and run the same command again"
    if isinstance(error, httpx2.TransportError | ConnectionError | TimeoutError):
        return f"the hub cannot be reached ({_short(str(error)) or type(error).__name__}): {AGAIN}"
    if isinstance(error, STRANGE):
        return f"the hub's answer about {repository} is not understood ({type(error).__name__}): {AGAIN}"
    return f"{repository} could not be pushed ({_short(str(error)) or type(error).__name__}); {AGAIN}"


def _short(text: str) -> str:
    return _clean(" ".join(text.split()))[:LONGEST]


def _clean(text: str) -> str:
    """What a server says, without the token if it repeats that, also percent-encoded, and on one line."""
    if token := get_token():
        text = re.sub("".join(f"(?:{re.escape(c)}|%(?i:{ord(c):02x}))" for c in token), "<token>", text)
    return one_line(text)
