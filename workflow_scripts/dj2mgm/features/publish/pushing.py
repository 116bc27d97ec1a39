"""Upload of a folder to the Hugging Face hub in one commit, so a repository holds the whole folder or stays as it was.

The token comes from HF_TOKEN or `hf auth login`, through huggingface_hub, and is never shown.
"""

from pathlib import Path

from huggingface_hub import get_token

from dj2mgm.errors import InputError
from dj2mgm.features.publish.publication import MARKER, RECORDS
from dj2mgm.servers.hub import Request, check_hub_answers, clean, hub_errors, make_quiet_api
from dj2mgm.storage.files import check_tree

HUB_FILES = {".gitattributes"}  # created by the hub in each new repository
PUSH_REMEDY = "the repository is complete or unchanged; run the same command again"


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
    api = make_quiet_api()
    check_hub_answers(_make_request(repository))
    with hub_errors(_make_request(repository)):
        api.whoami()
        api.create_repo(repository, repo_type=kind, private=private, exist_ok=True)
        existing = set(api.list_repo_files(repository, repo_type=kind))
        if existing - HUB_FILES and f"{RECORDS}/{MARKER}" not in existing:
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
        return clean(commit.commit_url)


def _make_request(repository: str) -> Request:
    no_room = f"the hub has no room for {repository} ({{message}}); free space there, then: {PUSH_REMEDY}"
    return Request(
        repository,
        "pushed",
        PUSH_REMEDY,
        {
            403: f"the token may not write to {repository} ({{message}}); choose another name or token",
            409: f"the name {repository} is taken ({{message}}); choose another one",
            413: no_room,
            507: no_room,
        },
    )
