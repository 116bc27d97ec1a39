"""The workflow's own Data-Juicer operators."""

import os
from pathlib import Path

import pytest
from PIL import Image

import dj2mgm.juicer.patched_data_juicer  # noqa: F401  (importing Data-Juicer makes PIL accept truncated images, which these tests count on)
from dj2mgm.juicer.operators.deduplicators import compute_image_text_hash
from dj2mgm.juicer.operators.image_integrity_filter import classify_image_integrity


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
