"""A report on a model and a dataset of the hub from `snakemake fetch` and `snakemake baseline`."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dj2mgm.settings.models import CLIP
from hub_server import HubServer, Repository
from tiny_clip import save_tiny_clip
from tiny_families import save_tiny_family

MODEL, DATASET = "somebody/Little-VLM-1B", "somebody/scenes"
QUICK = "{max_steps: 2, global_batch_size: 4, micro_batch_size: 4, gradient_accumulation_steps: 1, max_length: 256}"


def read_files(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def captioned_images(number: int) -> bytes:
    """Return Parquet in the form of the hub's datasets, with captions and images as structs of bytes and path."""
    rng, rows = np.random.default_rng(0), []
    for row in range(number):
        content = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(content, "PNG")
        image = {"bytes": content.getvalue(), "path": f"{row}.png"}
        rows.append({"image": image, "caption": f"a red circle left of {row} blue squares"})
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), content)
    return content.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    save_tiny_family("smolvlm", tmp_path / "model")
    clip = save_tiny_clip(tmp_path / "clip")
    with HubServer() as hub:
        hub.repositories[f"models/{MODEL}"] = Repository(False, read_files(tmp_path / "model"))
        hub.repositories[f"models/{CLIP}"] = Repository(False, read_files(clip))
        rows = {"README.md": b"", "data/train-00000-of-00001.parquet": captioned_images(30)}
        hub.repositories[f"datasets/{DATASET}"] = Repository(False, rows, card={"license": "cc-by-4.0"})
        for name, value in {"ENDPOINT": hub.url, "HOME": str(tmp_path / "home"), "HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(f"HF_{name}", value)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        yield hub


@pytest.mark.slow
def test_a_report_is_made_from_a_model_and_dataset_of_the_hub(fresh, hub):
    config = (f"model={MODEL}", f"dataset={DATASET}", f"finetune={QUICK}", "evaluate={max_new_tokens: 4}")
    printed = fresh.run("baseline", ok=False, config=config)
    assert f"run `snakemake fetch --config dataset={DATASET}` first" in printed
    assert "run it alone" in fresh.run("fetch", "baseline", ok=False, config=config)
    assert f"dataset {DATASET}: license cc-by-4.0" in fresh.run("fetch", config=config)
    hub.requests.clear()
    printed = fresh.run("baseline", config=config)
    assert f"dataset {DATASET}: recognized as parquet" in printed
    assert len(list(fresh.folder.glob("results/*/*/baseline/report/report.html"))) == 1
    assert hub.requests == []


def test_a_missing_network_is_reported_once(fresh, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    printed = fresh.run("fetch", ok=False, config=(f"model={MODEL}",))
    assert printed.count("the hub cannot be reached") == 1 and printed.count(f"hf download {MODEL}") == 1
