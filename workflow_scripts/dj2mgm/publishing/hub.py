"""Pushes a folder to the Hugging Face hub in one commit, so a repository holds the whole folder or stays as it was.

The token comes from HF_TOKEN or `hf auth login`, through huggingface_hub, and is never shown.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, get_token, logging
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from dj2mgm.command_line import escape_control
from dj2mgm.config.endpoints import compile_secret_pattern
from dj2mgm.errors import InputError
from dj2mgm.plain_files import check_tree
from dj2mgm.publishing.run_record import FOLDER, MARKER

HUB_FILES = {".gitattributes"}  # created by the hub in each new repository
LONGEST = 200  # characters shown of a server's message
AGAIN = "the repository is complete or unchanged; run the same command again"
STRANGE = (LookupError, TypeError, AttributeError)  # raised by the hub's library for answers of an unknown form


def push(folder: Path, kind: str, repository: str, private: bool) -> str:
    """Push a published folder (`kind`: model or dataset) in one commit to `owner/name`; return the commit's URL.

    `private` applies to a new repository.
    """
    check_tree(folder)
    if get_token() is None:
        raise InputError(
            f"{folder} is ready, but no token was found to push it with; set HF_TOKEN, or run `hf auth login`, and "
            "then run the same command again"
        )
    logging.set_verbosity_error()  # it would print a server's warnings unchanged
    api = HfApi()
    with hub_errors(repository):
        api.whoami()
        api.create_repo(repository, repo_type=kind, private=private, exist_ok=True)
        existing = set(api.list_repo_files(repository, repo_type=kind))
        if existing - HUB_FILES and f"{FOLDER}/{MARKER}" not in existing:
            raise InputError(
                f"the {kind} repository {repository} already exists, and its files were not published from here; "
                "choose another name, or delete it"
            )
        commit = api.upload_folder(
            folder_path=folder,
            repo_id=repository,
            repo_type=kind,
            commit_message=f"Publish {folder.parent.name}",
            delete_patterns="*",  # remove files that are no longer published, in the same commit
        )
        return _clean(commit.commit_url)


@contextmanager
def hub_errors(repository: str) -> Iterator[None]:
    """Turn every failure of the enclosed requests into one sentence."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise InputError(f"{repository} cannot be reached while HF_HUB_OFFLINE is set; unset it") from None
    except (OSError, RuntimeError, ValueError, httpx2.HTTPError, *STRANGE) as error:
        raise InputError(_describe(repository, _cause(error))) from None


def _cause(error: BaseException) -> BaseException:
    """Return the cause of a failed upload, which the hub's library wraps in an error with the file's name."""
    while isinstance(error, RuntimeError) and error.__cause__:
        error = error.__cause__
    return error


def _describe(repository: str, error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status, message = error.response.status_code, _short(str(error.server_message or ""))
        reasons = {
            401: "the hub rejects the token; set a valid one as HF_TOKEN, or run `hf auth login`",
            403: f"the token may not write to {repository} ({message}); choose another name or token",
            409: f"the name {repository} is taken ({message}); choose another one",
            413: f"the hub has no room for {repository} ({message}); free space there, then: {AGAIN}",
            507: f"the hub has no room for {repository} ({message}); free space there, then: {AGAIN}",
        }
        return reasons.get(status, f"the hub refused {repository} (status {status}: {message}); {AGAIN}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"the disk is full, so {repository} was not pushed; free space, and run the same command again"
    if isinstance(error, httpx2.TransportError | ConnectionError | TimeoutError):
        return f"the hub cannot be reached ({_short(str(error)) or type(error).__name__}); {AGAIN}"
    if isinstance(error, STRANGE):
        return f"the hub's answer about {repository} is not understood ({type(error).__name__}); {AGAIN}"
    return f"{repository} could not be pushed ({_short(str(error)) or type(error).__name__}); {AGAIN}"


def _short(text: str) -> str:
    return _clean(" ".join(text.split()))[:LONGEST]


def _clean(text: str) -> str:
    """Return a server's text on one line, without the token if the server repeats it."""
    if token := get_token():
        text = compile_secret_pattern(token).sub("<token>", text)
    return escape_control(text)
