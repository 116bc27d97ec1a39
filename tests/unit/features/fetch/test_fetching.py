"""`fetch.py` with a hub server in this process: output, downloads, checks, continued and refused downloads."""

import errno
import gzip
import json
import os
import re
import socket
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError
from safetensors.torch import load_file, save

from dj2mgm import servers
from dj2mgm.errors import InputError
from dj2mgm.features.fetch import repositories
from dj2mgm.features.fetch.repositories import HubSource, download, look_up
from dj2mgm.servers.hub import check_library_downloads
from dj2mgm.settings.models import CLIP
from hub_scripts import run_fetch
from hub_server import REVISION, TOKEN, HubServer, Repository
from paths import PROJECT

MODEL, DATASET = "Somebody/Their-VLM-2B", "somebody/photos"
CONFIG = json.dumps({"model_type": "smolvlm", "vision_config": {"hidden_size": 8}}).encode()
CLIP_FILES = {"config.json": b'{"model_type": "clip"}', "model.safetensors": save({"clip": torch.zeros(1)})}
WEIGHTS = save({"weight": torch.arange(512_000, dtype=torch.int32)})


@pytest.fixture
def hub():
    with HubServer() as hub:
        files = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
        files["processor_config.json"] = b'{"chat_template": "{{ messages }}"}'
        others = {"pytorch_model.bin": b"pickle", "modeling.py": b"import os", "onnx/model.safetensors": b"other"}
        hub.repositories[f"models/{MODEL}"] = Repository(False, files | others, card={"license": "apache-2.0"})
        hub.repositories[f"models/{CLIP}"] = Repository(False, CLIP_FILES)
        rows = {"README.md": b"---\n", "data/train.parquet": b"rows", "load.py": b"import os", ".env": b"secret"}
        hub.repositories[f"datasets/{DATASET}"] = Repository(False, rows, card={"license": "cc-by-4.0"})
        yield hub


@pytest.fixture
def fetch(tmp_path):
    return partial(run_fetch, tmp_path)


@pytest.fixture
def download_here(hub, tmp_path, monkeypatch):
    """Download the dataset in this process, which is quicker than `fetch`."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home/hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    return lambda pattern="*.parquet": download(look_up(HubSource(DATASET, "dataset", (pattern,))))


def fetched(tmp_path: Path, kind: str, hub_id: str) -> dict[str, bytes]:
    folder = tmp_path / f"home/hub/{kind}s--{hub_id.replace('/', '--')}/snapshots/{REVISION}"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_model_and_dataset_are_downloaded_without_code(hub, fetch, tmp_path):
    hub.cut["model.safetensors"] = 1_000_000  # this connection breaks, and the download continues
    done = fetch(hub.url, model=MODEL, dataset=DATASET)
    assert done.returncode == 0, done.stderr
    assert f"model {MODEL}: license apache-2.0, 0.00 GB in 4 files, to {tmp_path}/home/hub" in done.stdout
    assert f"model {CLIP}: license not stated" in done.stdout and f"dataset {DATASET}: license cc-by-4.0" in done.stdout
    assert done.stdout.endswith(f"next: snakemake baseline --config model={MODEL} dataset={DATASET}\n")
    names = {"config.json", "model.safetensors", "tokenizer.json", "processor_config.json"}
    assert fetched(tmp_path, "model", MODEL).keys() == names
    assert fetched(tmp_path, "model", MODEL)["model.safetensors"] == WEIGHTS
    assert fetched(tmp_path, "dataset", DATASET).keys() == {"README.md", "data/train.parquet"}
    hub.requests.clear()
    assert "nothing to fetch" in fetch(hub.url, model=MODEL, dataset=DATASET).stdout and hub.requests == []


def test_slow_response_headers_time_out(hub, download_here, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.slow_heads.add(f"/api/datasets/{DATASET}")
    started = time.monotonic()
    with pytest.raises(InputError, match=r"the hub cannot be reached \("):
        download_here()
    assert time.monotonic() - started < 60, "all 100 s of the answer were waited for"


def test_an_interrupted_download_keeps_its_complete_files(hub, fetch):
    def fail_last(path: str, _: int) -> int | None:
        if not path.endswith("model.safetensors"):
            return None
        latest = time.monotonic() + 5
        while not {"config.json", "tokenizer.json"} <= {file for _, file, _ in hub.sent} and time.monotonic() < latest:
            time.sleep(0.05)
        time.sleep(0.5)  # the client writes these files
        return 501

    hub.fails = fail_last
    done = fetch(hub.url, model=MODEL)
    assert done.returncode and "run the same command again" in done.stderr, done.stderr
    assert "continues" not in done.stderr, "a file that is not complete is downloaded as a whole"
    hub.fails = lambda path, number: None
    hub.sent.clear()
    assert fetch(hub.url, model=MODEL).returncode == 0
    assert {file for method, file, _ in hub.sent if method == "GET"} == {"model.safetensors", *CLIP_FILES}


def test_a_file_with_another_checksum_is_deleted(hub, fetch, tmp_path):
    hub.altered["model.safetensors"] = WEIGHTS[::-1]
    done = fetch(hub.url, model=MODEL)
    assert done.returncode and "model.safetensors differs from the hub's checksum, and was deleted" in done.stderr
    hub.altered.clear()
    assert fetch(hub.url, model=MODEL).returncode == 0
    [weights] = tmp_path.glob(f"home/hub/models--{MODEL.replace('/', '--')}/snapshots/*/model.safetensors")
    assert weights.read_bytes() == WEIGHTS
    weights.resolve().write_bytes(WEIGHTS[:-1])
    assert fetch(hub.url, model=MODEL).returncode == 0
    assert weights.read_bytes() == WEIGHTS, "a truncated file in the cache is downloaded again"


def test_message_for_a_gated_model_names_token_and_page(hub, fetch):
    hub.repositories[f"models/{MODEL}"].gated = True
    done = fetch(hub.url, model=MODEL)
    assert "license apache-2.0, gated" in done.stdout
    assert f"{MODEL} is gated; accept its terms at {hub.url}/{MODEL}, and set your token as HF_TOKEN" in done.stderr
    assert fetch(hub.url, token=TOKEN, model=MODEL).returncode == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model": "some/unknown"}, "the hub shows no model some/unknown to you; correct the name or"),
        ({"model": "some/pickled"}, "some/pickled has no weights as safetensors; choose another model"),
        ({"dataset": "some/empty"}, "some/empty has no files of rows or images"),
    ],
)
def test_unusable_repositories_are_refused_before_a_download(hub, fetch, config, message):
    hub.repositories["models/some/pickled"] = Repository(False, {"config.json": CONFIG, "pytorch_model.bin": b""})
    hub.repositories["datasets/some/empty"] = Repository(False, {"load.py": b""})
    done = fetch(hub.url, **config)
    assert done.returncode and message in done.stderr and "Traceback" not in done.stderr
    assert hub.sent == []


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"rfilename": "{folder}/mine.json"}, "is not a file's path in a repository"),
        ({"rfilename": "a\0.json"}, "is not a file's path in a repository"),
        ({"size": -1}, "has no valid size"),
        ({"size": "1"}, "has no valid size"),
        ({"blobId": None}, "has no checksum"),
        ({"blobId": "../../../../mine"}, "'../../../../mine', which is not a commit or checksum"),
        ({"lfs": {"sha256": "{folder}/mine", "size": 1, "pointerSize": 1}}, "which is not a commit or checksum"),
        ({"rfilename": "a" * 300 + ".json"}, "is not a file's path in a repository"),
        ({"sha": "../../../../mine"}, "'../../../../mine', which is not a commit or checksum"),
        ({"sha": "12"}, "'12' is not a commit"),
    ],
)
def test_an_answer_with_impossible_values_is_refused(hub, download_here, tmp_path, changed, problem):
    """A file outside of the cache is neither replaced nor deleted."""
    (tmp_path / "mine.json").write_text("{}")
    hub.repositories[f"datasets/{DATASET}"].files["rows.json"] = b"[]"
    hub.described[DATASET] = {
        key: value.format(folder=tmp_path) if key == "rfilename" else value for key, value in changed.items()
    }
    with pytest.raises(InputError, match=re.escape(problem)):
        download_here("*.json")
    assert hub.sent == [] and [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "mine.json"]
    assert (tmp_path / "mine.json").read_text() == "{}"


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("name", ["{folder}/mine", "../../../../../mine", "a" * 300], ids=repr)
def test_names_in_the_head_of_a_file_are_no_paths(hub, download_here, tmp_path, header, name):
    """The hub's library would write the content to the path that the server names, before any check."""
    hub.heads["data/train.parquet"] = {header: name.format(folder=tmp_path)}
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InputError, match=r"data/train\.parquet .* is not a commit or checksum"):
        download_here()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "mine"]
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
def test_libraries_do_not_use_the_names_as_paths(hub, download_here, tmp_path, header):
    """`plan` reads the configuration of a hub id with the hub's library."""
    hub.heads["config.json"] = {header: "../../../../../mine"}
    check_library_downloads()
    with pytest.raises(ValueError, match="is not a commit or checksum"):
        hf_hub_download(MODEL, "config.json", cache_dir=tmp_path / "home/hub", endpoint=hub.url)
    assert not list(tmp_path.rglob("mine"))


def test_libraries_do_not_use_the_commit_of_an_error_as_path(hub, download_here, tmp_path):
    """The hub's library remembers that a file is missing in a folder with the name of the commit."""
    headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": f"{tmp_path}/mine", "Content-Length": "0"}
    hub.answers[f"/{MODEL}/resolve/main/config.json"] = (404, headers, b"")
    check_library_downloads()
    with pytest.raises(ValueError, match="is not a commit or checksum"):
        hf_hub_download(MODEL, "config.json", cache_dir=tmp_path / "home/hub", endpoint=hub.url)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("key", ["sha", "oid", "lfs"])
def test_libraries_do_not_use_names_in_descriptions_as_paths(hub, download_here, tmp_path, key):
    """The hub's library would write the commit of a branch to the path that the description names."""
    name = f"{tmp_path}/mine"
    hub.described[MODEL] = {key: {"oid": name, "size": 1, "pointerSize": 1} if key == "lfs" else name}
    check_library_downloads()
    api = HfApi(endpoint=hub.url)
    with pytest.raises(ValueError, match="is not a commit or checksum"):
        if key == "sha":
            api.resolve_revision(MODEL, cache_dir=tmp_path / "home/hub")
        else:
            list(api.list_repo_tree(MODEL))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, {"ETag": '"' + "A1" * 20 + '"'}),
        (200, {"ETag": '"d41d8cd98f00b204e9800998ecf8427e-2"'}),
        (200, {"ETag": "a/b", "X-Linked-Etag": "0" * 40}),
        (404, {"ETag": 'W/"f-mY2VvLxuxB/KhsoOdQTlMTccuAQ"', "X-Error-Code": "EntryNotFound"}),
    ],
    ids=["capitals", "parts", "linked", "error"],
)
def test_libraries_accept_other_names_of_contents(hub, download_here, tmp_path, status, headers):
    headers |= {"X-Repo-Commit": REVISION, "Content-Length": "2"}
    hub.answers[f"/{MODEL}/resolve/main/config.json"] = (status, headers, b"{}")
    check_library_downloads()
    with pytest.raises(RemoteEntryNotFoundError) if status == 404 else nullcontext():
        file = hf_hub_download(MODEL, "config.json", cache_dir=tmp_path / "home/hub", endpoint=hub.url)
        assert Path(file).read_bytes() == b"{}"


def test_libraries_download_files_of_any_size(hub, download_here, tmp_path, monkeypatch):
    monkeypatch.setattr(servers.hub, "MAX_ANSWER_BYTES", 2**10)
    check_library_downloads()
    file = hf_hub_download(MODEL, "model.safetensors", cache_dir=tmp_path / "home/hub", endpoint=hub.url)
    assert Path(file).read_bytes() == WEIGHTS


def test_a_file_longer_than_declared_is_cut_off(hub, download_here, tmp_path):
    hub.endless.add("data/train.parquet")
    with pytest.raises(InputError, match="the answer has more than the expected 4 bytes"):
        download_here()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


API, FILE = f"/api/datasets/{DATASET}", f"/datasets/{DATASET}/resolve/{REVISION}/data/train.parquet"


@pytest.mark.parametrize(
    ("path", "status", "headers", "body", "message"),
    [
        (FILE, 429, {"Retry-After": "1000000"}, b"", "the hub requests a pause of 1000000 s"),
        (API, 503, {"Retry-After": "Fri, 31 Dec 9999 23:59:59 GMT"}, b"", "the hub requests a pause of"),
        (API, 429, {"RateLimit": '"api";r=0;t=1000000'}, b"", "the hub requests a pause of 1000000 s"),
        (API, 429, {"Retry-After": "9" * 400}, b"", "the hub requests a pause of 1000000000 s"),
        (FILE, 429, {"RateLimit": f'"api";r=0;t={"9" * 400}'}, b"", "the hub requests a pause of 1000000000 s"),
        (FILE, 200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(2**24), mtime=0), "the answer is compressed"),
        (API, 200, {"Content-Encoding": "zstd"}, b"", "the answer is compressed"),
        (FILE, 200, {"Content-Length": str(2**40)}, bytes(2**21), "the answer has more than the expected"),
        (API, 200, {"Content-Length": str(2**40)}, bytes(2**21), "the answer has more than the expected"),
        (API, 404, {"Content-Length": str(2**40)}, bytes(2**21), "the answer has more than the expected"),
        (FILE, 302, {"Content-Length": str(2**40), "Location": "/"}, bytes(2**21), "has more than the expected"),
        (FILE, 200, {}, b" " * 1000, "is too slow"),
        (API, 200, {}, b" " * 1000, "is too slow"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_answers_of_the_hub_have_limits(hub, download_here, monkeypatch, path, status, headers, body, message):
    if status == 200:
        monkeypatch.setattr(servers.hub, "MAX_ANSWER_BYTES", 2**20)
    hub.repositories[f"datasets/{DATASET}"].files["data/train.parquet"] = b"rows" * 1000
    hub.answers[path] = (status, {"Content-Length": str(len(body))} | headers if headers else {}, body)
    started = time.monotonic()
    with pytest.raises(InputError, match=message):
        download_here()
    assert time.monotonic() - started < 20


def test_a_login_page_is_named(hub, download_here):
    hub.answers["/login"] = (200, {"Content-Type": "text/html", "Content-Length": "19"}, b"\n<html>login</html>")
    hub.answers[f"/api/datasets/{DATASET}"] = (302, {"Location": "/login", "Content-Length": "0"}, b"")
    with pytest.raises(InputError, match="answers with a web page instead of the hub's data. If the network has"):
        download_here()


@pytest.mark.parametrize("hops", [5, 6])
def test_redirects_are_few(hub, download_here, hops):
    """Each redirect's answer is kept in memory until the last one."""
    for hop in range(hops):
        target = f"/hop{hop + 1}" if hop + 1 < hops else f"/api/models/{MODEL}"
        path = f"/hop{hop}" if hop else f"/api/datasets/{DATASET}"
        hub.answers[path] = (302, {"Location": target, "Content-Length": "0"}, b"")
    message = "Exceeded maximum allowed redirects" if hops > 5 else "has no files"
    with pytest.raises(InputError, match=message):
        download_here()


def test_a_folder_in_the_place_of_a_branch_is_reported(download_here, tmp_path):
    branch = tmp_path / "home/hub/datasets--somebody--photos/refs/main"
    branch.mkdir(parents=True)
    with pytest.raises(InputError, match=rf"Is a directory: {branch}\)\. Move it away") as raised:
        download_here()
    assert "HF_ENDPOINT" not in str(raised.value)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "Name a folder on another file system"),
        (errno.EACCES, "Give this user access to it"),
        (errno.ENOSPC, "Free space"),
    ],
)
def test_a_cache_that_cannot_be_written_gets_its_remedy(download_here, monkeypatch, number, remedy):
    def fail(path: Path, *_):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(repositories, "replace_file", fail)
    with pytest.raises(InputError, match=rf"{os.strerror(number)}: .*\. {remedy}") as raised:
        download_here()
    assert "which keeps complete files" not in str(raised.value) and "HF_ENDPOINT" not in str(raised.value)


@pytest.mark.parametrize(("status", "is_temporary"), [(304, False), (204, False), (410, False), (500, True)])
def test_only_temporary_failures_are_to_be_repeated(hub, download_here, status, is_temporary):
    hub.answers[f"/api/datasets/{DATASET}"] = (status, {"Content-Length": "0"}, b"")
    with pytest.raises(InputError) as raised:
        download_here()
    assert ("HF_ENDPOINT" not in str(raised.value)) == is_temporary and ": )" not in str(raised.value)


def test_images_with_any_suffix_are_downloaded(hub, fetch, tmp_path):
    names = {"a/1.JPG", "a/2.jpg", "b[1].png", "README.md"}
    files = dict.fromkeys((*names, "a/notes.md", ".hidden/3.jpg", "a/.4.jpg"), b"image")
    hub.repositories[f"datasets/{DATASET}"] = Repository(False, files)
    assert fetch(hub.url, dataset=DATASET).returncode == 0
    assert fetched(tmp_path, "dataset", DATASET).keys() == names


def test_steps_without_internet_are_on_one_screen(fetch, tmp_path):
    data = {"dataset": "finevision/chartqa", "fetch": {"benchmarks": ["textvqa"]}}
    done = fetch("http://127.0.0.1:9", model="mgm-2b", **data)
    assert done.returncode and "the hub cannot be reached (Connection refused)" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert len(lines) < 24 and "HTTPS_PROXY" in lines[0] and "HF_ENDPOINT" in lines[0]
    gemma = "hf download google/gemma-2b-it --local-dir model_zoo/gemma-2b-it"
    assert f"{gemma}   # 5.0 GB, license gemma, gated" in lines
    page = (PROJECT / "docs/models.md").read_text(encoding="utf-8")
    documented = re.findall(r"^hf download .*--local-dir.*$", page, re.MULTILINE)
    assert documented[0] == gemma and set(documented) <= {line.partition("   #")[0] for line in lines}
    [again] = [line for line in lines if line.startswith("snakemake fetch")]
    assert again.startswith("snakemake fetch --config dataset=finevision/chartqa 'fetch={benchmarks: [textvqa]}'  ")
    assert "# also converts " in again and "finevision/chartqa (license other)" in again
    [plain] = [line for line in lines if "hf download HuggingFaceM4/FineVision" in line]
    assert "--include 'chartqa/train-*.parquet'" in plain and plain.endswith(
        "dataset=downloads/finevision-whole/chartqa"
    )
    for files in (
        "model_zoo/gemma-2b-it/{*.safetensors,*.json,*.jinja,*.model,*.txt}",
        "downloads/finevision/chartqa/{rows.parquet,.fetched.json}",
        "downloads/textvqa/{questions.jsonl,answers.json,images,.fetched.json}",
    ):
        assert files in lines


@pytest.mark.parametrize("problem", ["offline", "name"])
def test_other_reasons_get_the_same_steps(fetch, tmp_path, problem):
    url = "http://no-such-host.invalid" if problem == "name" else "http://127.0.0.1:9"
    done = fetch(url, offline=problem == "offline", model="qwen3-vl-2b", dataset="llava-pretrain")
    assert done.returncode and ("HF_HUB_OFFLINE" in done.stderr) == (problem == "offline")
    lines = done.stdout.splitlines()
    assert "HTTPS_PROXY" in lines[0]
    assert "  hf download Qwen/Qwen3-VL-2B-Instruct   # 4.3 GB, license apache-2.0" in lines
    assert f"  {tmp_path}/home/hub/models--Qwen--Qwen3-VL-2B-Instruct/{{blobs,refs,snapshots}}" in lines
    assert "  downloads/llava-pretrain/{rows.json,*/,.fetched.json}" in lines
    assert "unzip -q -n downloads/llava-pretrain-whole/images.zip" in done.stdout


@pytest.mark.parametrize("backlog", [0, 9])
def test_a_network_that_drops_packets_is_reported_in_seconds(fetch, backlog):
    """A full backlog drops the packets that open a connection; otherwise it opens, and nothing answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as silent, ExitStack() as others:
        for _ in range(4 if backlog == 0 else 0):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(silent.getsockname())
        started = time.monotonic()
        done = fetch(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=1, model=MODEL)
    assert time.monotonic() - started < 30
    assert done.returncode and "no answer within 1 s" in done.stderr and "HTTPS_PROXY" in done.stdout


def test_pickled_towers_of_an_mgm_are_converted(hub, fetch, tmp_path):
    """The language model's repository is already cached, and CLIP has no safetensors."""
    from dj2mgm.features.fetch import conversion  # noqa: F401 (the fork would import it anew)

    (tmp_path / "model_zoo/gemma-2b-it").mkdir(parents=True)
    (tmp_path / "model_zoo/convnext-large-d-320").mkdir()
    torch.save({"text_model.embeddings.position_ids": torch.arange(4)}, tmp_path / "weights.bin")
    clip = {"config.json": b'{"model_type": "clip"}', "pytorch_model.bin": (tmp_path / "weights.bin").read_bytes()}
    hub.repositories["models/openai/clip-vit-large-patch14-336"] = Repository(False, clip)
    done = fetch(hub.url, model="mgm-2b")
    assert done.returncode == 0, done.stderr
    [weights] = (tmp_path / "model_zoo/clip-vit-large-patch14-336").glob("*.safetensors")
    assert load_file(weights)["text_model.embeddings.position_ids"].tolist() == [0, 1, 2, 3]
