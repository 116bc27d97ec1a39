"""The workflow's own Data-Juicer operators."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import dj2mgm.juicer.patched_data_juicer  # noqa: F401  (importing Data-Juicer makes PIL accept truncated images, which these tests count on)
from dj2mgm.juicer.operators.deduplicators import compute_image_text_hash
from dj2mgm.juicer.operators.image_integrity_filter import classify_image_integrity
from paths import PROJECT


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "root" / "photo.png"
    path.parent.mkdir()
    Image.effect_noise((32, 32), 50).convert("RGB").save(path)
    return path


def test_a_complete_image_inside_the_folder_is_ok(photo):
    assert classify_image_integrity([str(photo)], str(photo.parent)) == "ok"


def test_each_kind_of_broken_image_has_its_reason(photo, tmp_path):
    root = photo.parent
    (root / "empty.png").touch()
    (root / "page.png").write_text("<html>404</html>")
    (root / "half.png").write_bytes(photo.read_bytes()[: photo.stat().st_size // 2])
    (tmp_path / "elsewhere.png").write_bytes(photo.read_bytes())
    (root / "link.png").symlink_to(tmp_path / "elsewhere.png")
    reasons = {
        name: classify_image_integrity([os.path.join(root, name)], str(root))
        for name in ("gone.png", "empty.png", "page.png", "half.png", "../elsewhere.png", "link.png", "/etc/hostname")
    }
    assert reasons == {
        "gone.png": "missing",
        "empty.png": "empty",
        "page.png": "undecodable",
        "half.png": "undecodable",
        "../elsewhere.png": "outside",
        "link.png": "outside",
        "/etc/hostname": "outside",
    }


def test_the_hash_depends_on_pixels_and_text(photo):
    copy, other = photo.with_name("copy.png"), photo.with_name("other.png")
    copy.write_bytes(photo.read_bytes())
    other.write_bytes(photo.read_bytes() + b"\0")  # same pixels, other bytes
    reference = compute_image_text_hash([str(photo)], "a cat")
    assert compute_image_text_hash([str(copy)], "a cat") == reference
    assert compute_image_text_hash([str(photo)], "a cat ") != reference
    assert compute_image_text_hash([str(other)], "a cat") != reference


def test_data_juicer_loads_operators_by_their_path():
    """Load operators like `dj-process --custom-operator-paths`; import the library first because it blocks installs."""
    code = (
        "import dj2mgm.juicer.patched_data_juicer, sys\n"
        "dj2mgm.juicer.patched_data_juicer.prepare_process()\n"
        "assert sys.stdin.read() == '', 'questions get no answer'\n"
        "from data_juicer.config.config import load_custom_operators\n"
        "from data_juicer.ops import load_ops\n"
        "assert 'dj2mgm.juicer.operators' not in sys.modules\n"
        "load_custom_operators(['workflow_scripts/dj2mgm/juicer/operators'])\n"
        "ops = load_ops([{'image_integrity_filter': {'image_root': '/'}}, {'image_text_deduplicator': {}}])\n"
        "batch = {'text': ['a'], 'images': [['/nowhere.png']], '__dj__stats__': [{}]}\n"
        "print(ops[0].compute_stats(batch)['__dj__stats__'], [op._name for op in ops])\n"
    )
    environment = os.environ | {"PYTHONPATH": "workflow_scripts"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env=environment, input="y\n", capture_output=True, text=True
    )
    expected = "[{'image_integrity': 'missing'}] ['image_integrity_filter', 'image_text_deduplicator']"
    assert done.stdout.strip() == expected, done.stderr
