"""Paths of images inside their folder, and undecodable images."""

import os
import random

import pytest
from PIL import Image, ImageFile

from dj2mgm.data.images import BadImageError, load_image, locate_image
from tiny_models import save_image


def reason(function, *arguments) -> str:
    with pytest.raises(BadImageError) as error:
        function(*arguments)
    assert error.value.reason in BadImageError.REASONS
    return error.value.reason


@pytest.fixture
def root(tmp_path):
    save_image(tmp_path / "images" / "a.png")
    save_image(tmp_path / "secret.png")
    return tmp_path / "images"


def noise(path, **options):
    """Return an image that compresses badly, so that half of its file lacks many pixels."""
    rng = random.Random(0)
    Image.frombytes("RGB", (64, 48), rng.randbytes(64 * 48 * 3)).save(path, **options)
    return path


def test_a_path_inside_the_folder_becomes_absolute(root, monkeypatch):
    monkeypatch.chdir(root.parent)
    assert locate_image("images", "a.png") == root / "a.png"
    assert locate_image("images", "x/../a.png") == root / "a.png"
    assert locate_image(root, str(root / "a.png")) == root / "a.png"


@pytest.mark.parametrize("folder", ["Größe 山 und", "a'b\"c$d", "[brackets]*?"])
def test_folders_with_spaces_and_any_letters_work(tmp_path, folder):
    path = save_image(tmp_path / folder / "ein Bild.png")
    assert locate_image(tmp_path, f"{folder}/ein Bild.png") == path
    assert load_image(path).size == (40, 30)


UNUSABLE = dict.fromkeys(
    ("../secret.png", "a/../../secret.png", "{above}/secret.png", "../images2/b.png"),
    "outside",
) | dict.fromkeys(
    ("b.png", "", ".", "a.png/b.png", "n\0ull.png", "n" * 300 + ".png", "\ud800.png", "circle.png"), "missing"
)


@pytest.mark.parametrize(("relative", "expected"), [*UNUSABLE.items(), ("zero.png", "empty")])
def test_an_unusable_path_has_a_reason(root, relative, expected):
    save_image(root.parent / "images2/b.png")
    (root / "circle.png").symlink_to(root / "circle.png")
    (root / "zero.png").touch()
    assert reason(locate_image, root, relative.format(above=root.parent)) == expected


def test_links_may_not_leave_the_image_folder(root, tmp_path):
    (root / "leaves.png").symlink_to(tmp_path / "secret.png")
    (root / "stays.png").symlink_to(root / "a.png")
    (root / "up").symlink_to(tmp_path)
    assert reason(locate_image, root, "leaves.png") == "outside"
    assert reason(locate_image, root, "up/secret.png") == "outside"
    assert locate_image(root, "stays.png") == root / "a.png"
    (tmp_path / "link").symlink_to(root)
    assert locate_image(tmp_path / "link", "a.png") == root / "a.png", "the folder itself may be a link"


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.gif", "a.bmp"])
@pytest.mark.parametrize("lenient", [False, True])
def test_truncated_files_are_undecodable_for_any_pillow_setting(tmp_path, name, lenient, monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", lenient)
    whole = noise(tmp_path / name)
    load_image(whole)
    data = whole.read_bytes()
    for share in (0.1, 0.5, 0.9):
        whole.write_bytes(data[: int(len(data) * share)])
        ImageFile.LOAD_TRUNCATED_IMAGES = lenient
        assert reason(load_image, whole) == "undecodable"


def test_a_file_without_an_image_is_undecodable(tmp_path):
    path = tmp_path / "page.png"
    for data in (b"<html>404</html>", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", os.urandom(500)):
        path.write_bytes(data)
        assert reason(load_image, path) == "undecodable"
