"""Pushes to a hub server in this process: one commit or none, one-sentence errors, and no token in the output."""

import json
from http.server import BaseHTTPRequestHandler

import pytest

from dj2mgm.features.publish.publication import MARKER
from dj2mgm.storage.files import write_json
from hub_scripts import run_hub_script
from hub_server import TOKEN, HubServer, Repository

CARD = '---\nlicense: mit\n---\n\n# `mine`\n\n[5](records/dataset/summary.json "/pretrain") rows\n'
KEY = "models/me/mine"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "published/mine/model"
    write_json(folder / "records/dataset/summary.json", {"pretrain": 5})
    write_json(folder / "records" / MARKER, {"published_by": "dj2mgm"})
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    for name in ("model.safetensors", "adapter_model.safetensors"):
        (folder / name).write_bytes(name.encode() * 1000)
    return folder


@pytest.fixture
def push(folder, tmp_path):
    def run(url: str, *flags: str, repository: str = "me/mine", token: str | None = TOKEN, **environment: str):
        target = ["--folder", folder.relative_to(tmp_path), "--kind", "model", "--repository", repository]
        arguments = [*target, "--output", "pushed.json", *(flags or ["--private"])]
        done = run_hub_script("push_to_hub.py", *arguments, folder=tmp_path, url=url, token=token, **environment)
        output = done.stdout + done.stderr
        assert TOKEN not in output and "Traceback" not in output, output
        contents = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
        assert not any(TOKEN.encode() in content for content in contents)
        assert (done.returncode == 0) == (tmp_path / "pushed.json").exists()
        return done.returncode, output

    return run


def read_files(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def stored(hub: HubServer) -> dict[str, bytes]:
    return {name: content for name, content in hub.repositories[KEY].files.items() if name != ".gitattributes"}


def test_each_push_is_one_commit_to_a_private_repository(push, folder, tmp_path):
    with HubServer() as hub:
        status, output = push(hub.url)
        assert status == 0, output
        assert stored(hub) == read_files(folder)
        assert hub.repositories[KEY].private and hub.repositories[KEY].commits == ["Publish mine"]
        assert json.loads((tmp_path / "pushed.json").read_text())["repository"] == "me/mine"
        assert push(hub.url)[0] == 0 and len(hub.repositories[KEY].commits) == 1, "nothing new is no commit"
        (folder / "adapter_model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(b"other" * 1000)
        assert push(hub.url)[0] == 0
        assert stored(hub) == read_files(folder) and len(hub.repositories[KEY].commits) == 2


@pytest.mark.parametrize("failing", ["/store/", "/commit/main"])
def test_failed_upload_commits_nothing_and_can_be_repeated(push, folder, failing, tmp_path):
    def fail(path: str, number: int) -> int | None:
        started = sum("/store/" in request for request in hub.requests)  # uploads of two large files
        return 418 if failing in path and (failing != "/store/" or started > 1) else None

    with HubServer() as hub:
        hub.fails = fail
        status, output = push(hub.url)
        assert status == 2 and "(status 418: planned failure" in output and "run the same command again" in output
        assert stored(hub) == {} and hub.repositories[KEY].commits == []
        hub.fails = lambda path, number: None
        assert push(hub.url)[0] == 0
        assert stored(hub) == read_files(folder) and len(hub.repositories[KEY].commits) == 1


def test_a_missing_token_is_reported_in_one_sentence(push, tmp_path):
    with HubServer() as hub:
        status, output = push(hub.url, token=None)
        assert status == 2 and "set HF_TOKEN, or run `hf auth login`" in output
        assert "published/mine/model is ready" in output and hub.requests == []


def test_each_failure_of_the_hub_has_a_one_sentence_message(push, folder):
    with HubServer() as hub:
        failures = [
            (dict(token="hf_wrong"), "the hub rejects the token"),
            (dict(repository="you/mine"), "the token may not write to you/mine (You don't have the rights"),
            (dict(HF_HUB_OFFLINE="1"), "cannot be reached while HF_HUB_OFFLINE is set"),
        ]
        for variables, sentence in failures:
            status, output = push(hub.url, **variables)
            assert status == 2 and sentence in output and len(output.strip().splitlines()) == 1, output
        hub.fails = lambda path, number: 507 if path.startswith("/store/") else None
        status, output = push(hub.url)
        assert status == 2 and "the hub has no room for me/mine" in output
    status, output = push(hub.url)  # after the server has stopped
    assert status == 2 and "the hub cannot be reached" in output and len(output.strip().splitlines()) == 1, output


ENCODED = "".join(f"%{ord(c):02x}" for c in TOKEN)


def test_token_repeated_by_the_hub_is_masked(push, folder, tmp_path, monkeypatch):
    def warn(handler) -> None:
        handler.send_header("X-HF-Warning", f"token; {TOKEN}")
        BaseHTTPRequestHandler.end_headers(handler)

    with HubServer() as hub:
        monkeypatch.setattr(hub.RequestHandlerClass, "end_headers", warn)
        refusal = {"error": f"\x1b[31m{ENCODED} and {TOKEN} may not"}
        with monkeypatch.context() as patch:
            patch.setattr(hub.RequestHandlerClass, "_api", lambda self, *_: self._send(403, refusal))
            status, output = push(hub.url)
        assert (
            status == 2 and "<token> and <token> may not" in output and ENCODED not in output and "\x1b" not in output
        )
        answer = {"commitUrl": f"{hub.url}/me/mine/commit/\x1b[2J{TOKEN}/{ENCODED}", "commitOid": "1" * 40}
        monkeypatch.setattr(hub.RequestHandlerClass, "_commit", lambda self, *_: self._send(200, answer))
        status, output = push(hub.url)
        assert status == 0, output
        assert "\\x1b[2J<token>/<token>" in output and "\x1b" not in output
        assert json.loads((tmp_path / "pushed.json").read_text())["commit"] in output


@pytest.mark.parametrize(("ask", "answer"), [("_commit", {}), ("_api", [1])])
def test_an_unknown_answer_is_reported_in_one_sentence(push, folder, monkeypatch, ask, answer):
    with HubServer() as hub:
        monkeypatch.setattr(hub.RequestHandlerClass, ask, lambda self, *_: self._send(200, answer))
        status, output = push(hub.url)
    assert status == 2 and len(output.strip().splitlines()) == 1, output
    assert "the repository is complete or unchanged; run the same command again" in output


def test_other_files_are_never_overwritten(push, folder):
    with HubServer() as hub:
        hub.repositories[KEY] = Repository(False, {".gitattributes": b"", "README.md": b"my thesis"})
        status, output = push(hub.url)
        assert status == 2 and "already exists, and its files were not published from here" in output
        assert stored(hub) == {"README.md": b"my thesis"}
