"""Names of image files, and of the file that names the image folders of several sources."""

import os
from pathlib import Path

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif"),
)
HEIF_SUFFIXES = (".heic", ".heif", ".hif")  # photos of phones
CONVERT_HEIF = "convert .heic and .heif to JPEG, because Pillow cannot read them"
CONVERT_RENAMED_HEIF = "Convert the photos to JPEG with a program that reads HEIF; another file name is not enough."
SHRINK_IMAGES = "`mogrify -resize '1024x1024>' <images>`"
IMAGE_FOLDERS_FILE = "sources.json"  # folders by source, instead of one image folder


def leads_up(path: str) -> bool:
    """Return whether a relative path begins with `..`, also after a detour."""
    return os.path.normpath(path).split(os.sep)[0] == os.pardir


def rebase_image_path(path: str, file: str | Path, folder: str | Path) -> str:
    """Return the image path of a row relative to the image folder.

    A path that leaves the folder with `..`, or that names no file in it, may be relative to the row's file instead. If
    it leaves the folder from there, too, it is returned unchanged, and `locate_image` refuses it.
    """
    is_up = leads_up(path)
    if not is_up and os.path.lexists(os.path.join(folder, path)):
        return path
    root, home = os.path.realpath(folder), os.path.realpath(os.path.dirname(file))
    if is_up and not leads_up(os.path.relpath(os.path.join(root, path), root)):
        return path
    target = os.path.join(home, path)
    relative = os.path.relpath(target, root)
    return relative if not leads_up(relative) and (is_up or os.path.lexists(target)) else path
