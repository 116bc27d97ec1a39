"""`fetch.py` with a hub server in this process: output, downloads, checks, continued and refused downloads."""

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from dj2mgm.settings.models import CLIP
from fetch_command import run_fetch
from hub_server import REVISION, TOKEN, HubServer, Repository

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


def fetched(tmp_path: Path, kind: str, hub_id: str) -> dict[str, bytes]:
    folder = tmp_path / f"home/hub/{kind}s--{hub_id.replace('/', '--')}/snapshots/{REVISION}"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_model_and_dataset_are_downloaded_without_code(hub, fetch, tmp_path):
    done = fetch(hub.url, model=MODEL, dataset=DATASET)
    assert done.returncode == 0, done.stderr
    assert f"model {MODEL}: license apache-2.0, 0.00 GB in 4 files, to {tmp_path}/home/hub" in done.stdout
    assert f"model {CLIP}: license not stated" in done.stdout and f"dataset {DATASET}: license cc-by-4.0" in done.stdout
    assert done.stdout.endswith(f"next: snakemake --cores 16 baseline --config model={MODEL} dataset={DATASET}\n")
    names = {"config.json", "model.safetensors", "tokenizer.json", "processor_config.json"}
    assert fetched(tmp_path, "model", MODEL).keys() == names
    assert fetched(tmp_path, "model", MODEL)["model.safetensors"] == WEIGHTS
    assert fetched(tmp_path, "dataset", DATASET).keys() == {"README.md", "data/train.parquet"}
    hub.requests.clear()
    assert "nothing to fetch" in fetch(hub.url, model=MODEL, dataset=DATASET).stdout and hub.requests == []


def test_a_broken_connection_is_retried(hub, fetch, tmp_path):
    hub.cut["model.safetensors"] = 1_000_000
    assert fetch(hub.url, model=MODEL).returncode == 0
    assert fetched(tmp_path, "model", MODEL)["model.safetensors"] == WEIGHTS


def test_slow_response_headers_time_out(hub, fetch):
    hub.slow_heads.add(f"/api/models/{MODEL}")
    started = time.monotonic()
    done = fetch(hub.url, timeout=1, model=MODEL)
    assert done.returncode == 2 and "the hub cannot be reached (" in done.stderr
    assert time.monotonic() - started < 60, "all 100 s of the answer were waited for"


def test_an_interrupted_download_keeps_its_complete_files(hub, fetch):
    def fail_last(path: str, _: int) -> int | None:
        if not path.endswith("model.safetensors"):
            return None
        latest = time.monotonic() + 5
        while not {"config.json", "tokenizer.json"} <= {file for _, file, _ in hub.sent} and time.monotonic() < latest:
            time.sleep(0.05)
        time.sleep(0.5)  # the client writes these files
        return 400

    hub.fails = fail_last
    done = fetch(hub.url, model=MODEL)
    assert done.returncode and "run the same command again" in done.stderr, done.stderr
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
    assert fetched(tmp_path, "model", MODEL)["model.safetensors"] == WEIGHTS


def test_a_truncated_file_in_the_cache_is_downloaded_again(hub, fetch, tmp_path):
    assert fetch(hub.url, model=MODEL).returncode == 0
    [weights] = tmp_path.glob(f"home/hub/models--{MODEL.replace('/', '--')}/snapshots/*/model.safetensors")
    weights.resolve().write_bytes(WEIGHTS[:-1])
    assert "was deleted; run the same command again" in fetch(hub.url, model=MODEL).stderr
    assert fetch(hub.url, model=MODEL).returncode == 0
    assert fetched(tmp_path, "model", MODEL)["model.safetensors"] == WEIGHTS


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
        ({"size": -1}, "has no valid size"),
        ({"size": "1"}, "has no valid size"),
        ({"blobId": None}, "has no checksum"),
        ({"sha": "../../../../mine"}, "'../../../../mine' is not a commit"),
    ],
)
def test_an_answer_with_impossible_values_is_refused(hub, fetch, tmp_path, changed, problem):
    """A file outside of the cache is neither replaced nor deleted."""
    (tmp_path / "mine.json").write_text("{}")
    hub.repositories[f"datasets/{DATASET}"].files["rows.json"] = b"[]"
    hub.described[DATASET] = {
        key: value.format(folder=tmp_path) if key == "rfilename" else value for key, value in changed.items()
    }
    done = fetch(hub.url, dataset=DATASET)
    assert done.returncode == 2 and problem in done.stderr and hub.sent == []
    assert (tmp_path / "mine.json").read_text() == "{}" and not (tmp_path / "mine").exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_download_outside_of_the_cache_is_not_accepted(hub, fetch, tmp_path, is_there):
    """The hub's library builds a path from the server's ETag."""
    mine = tmp_path / "mine.parquet"
    if is_there:
        mine.write_text("mine")
    hub.etags["data/train.parquet"] = str(mine)
    done = fetch(hub.url, dataset=DATASET)
    assert done.returncode == 2 and "is a link out of its folder" in done.stderr
    assert not is_there or mine.read_text() == "mine"


def test_images_with_any_suffix_are_downloaded(hub, fetch, tmp_path):
    names = {"a/1.JPG", "a/2.jpg", "b[1].png", "README.md"}
    files = dict.fromkeys((*names, "a/notes.md", ".hidden/3.jpg", "a/.4.jpg"), b"image")
    hub.repositories[f"datasets/{DATASET}"] = Repository(False, files)
    assert fetch(hub.url, dataset=DATASET).returncode == 0
    assert fetched(tmp_path, "dataset", DATASET).keys() == names


def test_a_missing_network_is_reported_in_one_sentence(fetch):
    done = fetch("http://127.0.0.1:9", model=MODEL)
    assert done.returncode and "the hub cannot be reached" in done.stderr and "Traceback" not in done.stderr


def test_pickled_towers_of_an_mgm_are_converted(hub, fetch, tmp_path):
    """The language model's repository is already cached, and CLIP has no safetensors."""
    (tmp_path / "model_zoo/gemma-2b-it").mkdir(parents=True)
    (tmp_path / "model_zoo/convnext-large-d-320").mkdir()
    torch.save({"text_model.embeddings.position_ids": torch.arange(4)}, tmp_path / "weights.bin")
    clip = {"config.json": b'{"model_type": "clip"}', "pytorch_model.bin": (tmp_path / "weights.bin").read_bytes()}
    hub.repositories["models/openai/clip-vit-large-patch14-336"] = Repository(False, clip)
    done = fetch(hub.url, model="mgm-2b")
    assert done.returncode == 0, done.stderr
    [weights] = (tmp_path / "model_zoo/clip-vit-large-patch14-336").glob("*.safetensors")
    assert load_file(weights)["text_model.embeddings.position_ids"].tolist() == [0, 1, 2, 3]
