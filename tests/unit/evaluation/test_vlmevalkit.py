"""This workflow's models in VLMEvalKit, with and without an image.

VLMEvalKit is not in the package index. A fake provides the functions that the adapter uses; a checkout named by
VLMEVALKIT replaces it.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from forked_python import forked_python
from paths import PROJECT
from tiny_models import save_image, tiny_mgm, tiny_processor

BASE = """
class BaseModel:
    def __init__(self):
        self.dump_image_func = None

    def generate(self, message, dataset=None):
        return self.generate_inner(message, dataset)

    def message_to_promptimg(self, message, dataset=None):
        texts = [part["value"] for part in message if part["type"] == "text"]
        images = [part["value"] for part in message if part["type"] == "image"]
        return "\\n".join(texts), (images or [None])[0]
"""
RUN = """
import json, sys
from vlmeval.config import supported_VLM
model = supported_VLM[sys.argv[2]]()
image = {"type": "image", "value": sys.argv[6]}
texts = [{"type": "text", "value": text} for text in ("How many?", "<image> A")]
print(json.dumps([sys.argv[1:], model.generate([image, *texts], "MMStar"), model.generate(texts)]))
"""


def write_kit(folder: Path) -> Path:
    files = {"__init__.py": "", "config.py": "supported_VLM = {}", "vlm/__init__.py": "", "vlm/base.py": BASE}
    for name, text in files.items():
        (folder / "vlmeval" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "vlmeval" / name).write_text(text)
    (folder / "run.py").write_text(RUN)
    return folder


def start(folder: Path, kit: Path, *flags: str) -> subprocess.CompletedProcess:
    script = str(PROJECT / "workflow_scripts/run_vlmevalkit.py")
    command = [forked_python(), script, "--kit", str(kit), "--model", str(folder / "mgm"), *flags]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_registered_model_answers_with_an_image_and_without(tmp_path):
    tiny_mgm().save_pretrained(tmp_path / "mgm")
    tiny_processor().save_pretrained(tmp_path / "mgm")
    image, kit = save_image(tmp_path / "a.png"), write_kit(tmp_path / "kit")
    flags = ["--template", "gemma", "--max-new-tokens", "5", "--data", "MMStar", "--image", str(image)]
    done = start(tmp_path, kit, *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    arguments, *answers = json.loads(done.stdout.splitlines()[-1])
    assert arguments == ["--model", "dj2mgm", "--data", "MMStar", "--image", str(image)]
    generator = MGMGenerator(tmp_path / "mgm", None)
    expected = [list(generator.answer([shown], ["How many?\n  A"], "gemma", 5, 1)) for shown in (image, None)]
    assert [[answer] for answer in answers] == expected and answers[0] != answers[1]


def test_other_folders_are_refused_in_a_sentence(tmp_path):
    done = start(tmp_path, tmp_path / "nowhere", "--data", "MMStar")
    assert done.returncode == 2 and "name a checkout of VLMEvalKit" in done.stderr


@pytest.mark.skipif(
    "VLMEVALKIT" not in os.environ, reason="VLMEvalKit is not in the package index: VLMEVALKIT names a checkout"
)
def test_the_fake_has_the_real_interface():
    text = (Path(os.environ["VLMEVALKIT"]) / "vlmeval/vlm/base.py").read_text()
    for method in (
        "def message_to_promptimg(self, message, dataset=None)",
        "return self.generate_inner(message, dataset)",
    ):
        assert method in text
    assert "supported_VLM = {}" in (Path(os.environ["VLMEVALKIT"]) / "vlmeval/config.py").read_text()
    assert "supported_VLM[" in (Path(os.environ["VLMEVALKIT"]) / "run.py").read_text()
