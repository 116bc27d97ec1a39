"""Pushing to a hub that is a server of this test: one commit or none, one sentence for each failure, no token shown."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler

import pytest
from hub_server import TOKEN, HubServer, Repository
from places import PROJECT

from dj2mgm.files import write_json, write_yaml
from dj2mgm.library_messages import SWITCHES
from dj2mgm.publishing.records import MARK

CARD = '---\nlicense: mit\n---\n\n# `mine`\n\n[5](records/dataset/summary.json "/pretrain") rows\n'
KEY = "models/me/mine"


@pytest.fixture
def folder(tmp_path):
    write_json(tmp_path / "results/summary.json", {"pretrain": 5})
    write_yaml(tmp_path / "config.yaml", {"records": {"dataset/summary.json": "results/summary.json"}})
    folder = tmp_path / "published/mine/model"
    write_json(folder / "records/dataset/summary.json", {"pretrain": 5})
    write_json(folder / "records" / MARK, {"published_by": "dj2mgm"})
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    for name in ("model.safetensors", "adapter_model.safetensors"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


@pytest.fixture
def push(folder, tmp_path):
    def run(url: str, *flags: str, repository: str = "me/mine", token: str | None = TOKEN, **environment: str):
        command = [sys.executable, PROJECT / "workflow_scripts/push_to_hub.py", "--config", "config.yaml"]
        command += ["--folder", folder.relative_to(tmp_path), "--kind", "model", "--repository", repository]
        given = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", **SWITCHES, "HF_HOME": str(tmp_path / "home")}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        done = subprocess.run(
            [*command, "--output", "pushed.json", *(flags or ["--private"])],
            cwd=tmp_path,
            env=inherited | given | ({"HF_TOKEN": token} if token else {}) | environment,
            capture_output=True,
            text=True,
        )
        said = done.stdout + done.stderr
        assert TOKEN not in said and "Traceback" not in said, said
        kept = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
        assert not any(TOKEN.encode() in content for content in kept)
        assert (done.returncode == 0) == (tmp_path / "pushed.json").exists()
        return done.returncode, said

    return run


def files_of(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def held(hub: HubServer) -> dict[str, bytes]:
    return {name: content for name, content in hub.repositories[KEY].files.items() if name != ".gitattributes"}


def test_a_folder_is_pushed_whole_in_one_commit_to_a_private_repository(push, folder, tmp_path):
    with HubServer() as hub:
        status, said = push(hub.url)
        assert status == 0, said
        assert held(hub) == files_of(folder)
        assert hub.repositories[KEY].private and hub.repositories[KEY].commits == ["Publish mine"]
        assert json.loads((tmp_path / "pushed.json").read_text())["repository"] == "me/mine"


def test_a_second_push_commits_what_has_changed_and_takes_away_what_is_gone(push, folder, tmp_path):
    with HubServer() as hub:
        assert push(hub.url)[0] == 0
        assert push(hub.url)[0] == 0 and len(hub.repositories[KEY].commits) == 1, "nothing new is no commit"
        (folder / "adapter_model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(b"other" * 1000)
        assert push(hub.url)[0] == 0
        assert held(hub) == files_of(folder) and len(hub.repositories[KEY].commits) == 2


@pytest.mark.parametrize("failing", ["/store/", "/commit/main", "/preupload/main", "/objects/batch"])
def test_an_upload_that_fails_commits_nothing_and_the_same_command_finishes(push, folder, failing, tmp_path):
    def fail(path: str, number: int) -> int | None:
        started = sum("/store/" in asked for asked in hub.asked)  # of two large files
        return 418 if failing in path and (failing != "/store/" or started > 1) else None

    with HubServer() as hub:
        hub.fails = fail
        status, said = push(hub.url)
        assert status == 2 and "(status 418: planned failure" in said and "run the same command again" in said
        assert held(hub) == {} and hub.repositories[KEY].commits == []
        hub.fails = lambda path, number: None
        assert push(hub.url)[0] == 0
        assert held(hub) == files_of(folder) and len(hub.repositories[KEY].commits) == 1


def test_without_a_token_one_sentence_says_how_to_push(push, tmp_path):
    with HubServer() as hub:
        status, said = push(hub.url, token=None)
        assert (
            status == 2 and "published/mine/model is ready" in said and "set HF_TOKEN, or run `hf auth login`" in said
        )
        assert hub.asked == []


def test_each_failure_of_the_hub_is_one_sentence(push, folder):
    with HubServer() as hub:
        failures = [
            (dict(token="hf_wrong"), "the hub does not accept the token"),
            (dict(repository="you/mine"), "the token may not write to you/mine (You don't have the rights"),
            (dict(HF_HUB_OFFLINE="1"), "cannot be pushed to while HF_HUB_OFFLINE is set"),
        ]
        for given, sentence in failures:
            status, said = push(hub.url, **given)
            assert status == 2 and sentence in said and len(said.strip().splitlines()) == 1, said
        hub.fails = lambda path, number: 507 if path.startswith("/store/") else None
        status, said = push(hub.url)
        assert status == 2 and "the hub has no room for me/mine" in said
    status, said = push(hub.url)  # it is down now
    assert status == 2 and "the hub cannot be reached" in said and len(said.strip().splitlines()) == 1, said


ENCODED = "".join(f"%{ord(c):02x}" for c in TOKEN)


def test_a_hub_that_repeats_the_token_gets_it_shown_nowhere(push, folder, tmp_path, monkeypatch):
    def warn(handler) -> None:
        handler.send_header("X-HF-Warning", f"token; {TOKEN}")
        BaseHTTPRequestHandler.end_headers(handler)

    with HubServer() as hub:
        monkeypatch.setattr(hub.RequestHandlerClass, "end_headers", warn)
        refusal = {"error": f"\x1b[31m{ENCODED} and {TOKEN} may not"}
        with monkeypatch.context() as patch:
            patch.setattr(hub.RequestHandlerClass, "_api", lambda self, *_: self._send(403, refusal))
            status, said = push(hub.url)
        assert status == 2 and "<token> and <token> may not" in said and ENCODED not in said and "\x1b" not in said
        answer = {"commitUrl": f"{hub.url}/me/mine/commit/\x1b[2J{TOKEN}/{ENCODED}", "commitOid": "1" * 40}
        monkeypatch.setattr(hub.RequestHandlerClass, "_commit", lambda self, *_: self._send(200, answer))
        status, said = push(hub.url)
        assert status == 0, said
        assert "\\x1b[2J<token>/<token>" in said and "\x1b" not in said
        assert json.loads((tmp_path / "pushed.json").read_text())["commit"] in said


@pytest.mark.parametrize(("ask", "answer"), [("_commit", {}), ("_commit", []), ("_api", [1]), ("_api", "x")])
def test_an_answer_of_another_shape_is_one_sentence(push, folder, monkeypatch, ask, answer):
    with HubServer() as hub:
        monkeypatch.setattr(hub.RequestHandlerClass, ask, lambda self, *_: self._send(200, answer))
        status, said = push(hub.url)
    assert status == 2 and len(said.strip().splitlines()) == 1, said
    assert "the repository holds all of the folder or what it held before; run the same command again" in said


def test_somebody_elses_files_are_never_overwritten(push, folder):
    with HubServer() as hub:
        hub.repositories[KEY] = Repository(False, {".gitattributes": b"", "README.md": b"my thesis"})
        status, said = push(hub.url)
        assert status == 2 and "is there already, and what it holds was not published from here" in said
        assert held(hub) == {"README.md": b"my thesis"}


def test_a_card_that_says_something_else_than_its_record_is_not_pushed(push, folder):
    (folder / "README.md").write_text(CARD.replace("[5]", "[6]"), encoding="utf-8")
    with HubServer() as hub:
        status, said = push(hub.url)
        assert status == 2 and "states 6, and records/dataset/summary.json /pretrain is 5" in said
        assert hub.asked == []
