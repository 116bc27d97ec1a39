"""Every stage rotates images once by their EXIF orientation, like transformers."""

import base64
import io
import json
import struct
import tarfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_juicer.utils import mm_utils
from PIL import ExifTags, Image
from transformers.image_utils import load_image as turned_by_transformers

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.images import BadImageError, load_image, read_image_size
from dj2mgm.data.near_duplicates import compute_signature
from dj2mgm.evaluation.leak_search import Reference, read_references
from dj2mgm.features.analyze.analysis import STATS
from dj2mgm.features.lmms_eval.exchange import save_once
from dj2mgm.features.publish.exports import Sample, write_parquet
from dj2mgm.features.servers.operators.openai_captioning_mapper import OpenAICaptioningMapper
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.recipes.recipe_parsing import parse_steps
from dj2mgm.reporting.rendering import load_thumbnail
from dj2mgm.storage.files import read_jsonl, write_jsonl
from dj2mgm.storage.image_files import read_members
from tiny_models import tiny_processor

COLORS = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8))
FORMATS = ("JPEG", "MPO", "PNG", "PNG, EXIF last", "PNG, text last", "WEBP", "WEBP, XMP", "TIFF", "TIFF, XMP", "AVIF")
XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="{}"/></rdf:RDF></x:xmpmeta>'
)


def make_exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def encode(kind: str, orientation: int, image: Image.Image = COLORS) -> bytes:
    file, (kind, _, metadata) = io.BytesIO(), kind.partition(", ")
    xmp = XMP.format(orientation).encode()
    options = {"XMP": {"xmp": xmp}, "": {"exif": make_exif(orientation)}}.get(metadata, {})
    if kind == "TIFF" and metadata == "XMP":
        options = {"tiffinfo": {ExifTags.Base.XMLPacket: xmp}}
    image.save(file, kind, **options)
    content = file.getvalue()
    last = {
        "EXIF last": chunk(b"eXIf", make_exif(orientation).tobytes()[6:]),
        "text last": chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
    }
    end = chunk(b"IEND", b"")
    return content.removesuffix(end) + last[metadata] + end if metadata in last else content


@pytest.mark.parametrize("kind", FORMATS)
def test_images_are_rotated_as_in_transformers(tmp_path, kind):
    shown = set()
    for orientation in range(1, 9):
        path = tmp_path / f"{orientation}.image"
        path.write_bytes(encode(kind, orientation))
        expected = turned_by_transformers(str(path))
        for source in (path, path.read_bytes(), io.BytesIO(path.read_bytes())):
            image = load_image(source)
            assert np.array_equal(np.asarray(image), np.asarray(expected)), orientation
            assert np.array_equal(np.asarray(turned_by_transformers(image)), np.asarray(expected)), "turned twice"
        assert read_image_size(path) == expected.size == (COLORS.size if orientation < 5 else COLORS.size[::-1])
        shown.add(image.tobytes())
    assert len(shown) == 8


def test_pixels_stay_without_valid_orientation(tmp_path):
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        file = io.BytesIO()
        COLORS.save(file, kind)
        with Image.open(file) as image:
            assert load_image(file.getvalue()).tobytes() == image.convert("RGB").tobytes()
    for exif in (b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"Exif\0\0nonsense", make_exif(9).tobytes()):
        file = io.BytesIO()
        COLORS.save(file, "JPEG", exif=exif)
        with Image.open(file) as image:
            assert load_image(file.getvalue()).tobytes() == image.convert("RGB").tobytes(), exif
            assert read_image_size(file.getvalue()) == COLORS.size


def test_size_of_png_with_trailing_text_needs_no_decoding(monkeypatch):
    end = chunk(b"IEND", b"")
    content = encode("PNG", 1).removesuffix(end) + chunk(b"tEXt", b"date:create\x002026-11-24") + end
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("decoded"))
    assert read_image_size(content) == COLORS.size


def in_a_tar(path: Path) -> np.ndarray:
    with tarfile.open(path.with_suffix(".tar"), "w") as tar:
        tar.add(path, path.name)
    [member] = read_members(path.with_suffix(".tar"))
    return np.asarray(load_image(str(member)))


def by_data_juicer(path: Path) -> dict:
    """Return statistics of Data-Juicer's own filters in the filter stage."""
    write_jsonl(path.parent / "data.jsonl", [{"id": "1", "text": build_dj_text("red"), "images": [path.name]}])
    recipe = [{"image_shape_filter": {}}, {"image_aspect_ratio_filter": {"min_ratio": 0.1, "max_ratio": 9}}]
    run_recipe(
        RecipeSettings(path.parent, 1, parse_steps("recipe", recipe)),
        path.parent / "data.jsonl",
        path.parent / "out",
        FILTERED,
    )
    [stats] = read_jsonl(path.parent / "out" / STATS)
    return stats


def for_the_model(path: Path) -> list:
    generator = MGMGenerator.__new__(MGMGenerator)  # needs no model
    generator.processor, generator.device = tiny_processor(), torch.device("cpu")
    return [pixels.tolist() for pixels in generator._decode_images([path])]


def sent_to_a_server(path: Path) -> np.ndarray:
    captioner = SimpleNamespace(longest_side=1000)
    content = base64.b64decode(OpenAICaptioningMapper._encode_image(captioner, str(path)).partition(",")[2])
    return np.asarray(turned_by_transformers(save_as(path.parent / "sent.jpg", content)))


def save_as(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def exported(path: Path) -> tuple[bool, list]:
    """Return the size of an exported image, whose bytes stay unchanged and which `datasets` rotates."""
    from datasets import load_dataset

    sample = Sample("1", path, "red", "", "", "", {})
    (path.parent / "export").mkdir()
    write_parquet([sample], path.parent / "export")
    rows = load_dataset("parquet", data_dir=str(path.parent / "export/data"), split="train", cache_dir=path.parent)
    return np.asarray(rows[0]["image"].convert("RGB")).tolist()


READERS = {
    "the loader of training, scoring and benchmarks": lambda path: np.asarray(load_image(path)),
    "the loader of tar files": in_a_tar,
    "Data-Juicer's loader": lambda path: np.asarray(mm_utils.load_image(str(path))),
    "Data-Juicer's filters": by_data_juicer,
    "MGM": for_the_model,
    "a captioning server": sent_to_a_server,
    "lmms-eval": lambda path: np.asarray(load_image(save_once(turned_by_transformers(str(path)), path.parent))),
    "the gallery": lambda path: load_thumbnail(path.parent, path.name),
    "perceptual hashes": lambda path: compute_signature(load_image(path)),
    "the search for leaks": lambda path: read_references({Reference("a", ("0",)): path}, 1).signatures,
    "the parquet export": exported,
}


@pytest.mark.parametrize("reader", READERS)
def test_each_stage_uses_the_upright_image(tmp_path, reader):
    seen = []
    for kind in ("JPEG", "PNG, EXIF last", "WEBP, XMP"):
        folder = tmp_path / kind
        (folder / "turned").mkdir(parents=True)
        (folder / "upright").mkdir()
        turned, upright = folder / "turned/a.img", folder / "upright/a.img"
        turned.write_bytes(encode(kind, 6))
        turned_by_transformers(str(turned)).save(upright, "PNG")
        outputs = [json.dumps(plain(READERS[reader](path)), default=str) for path in (turned, upright)]
        assert outputs[0] == outputs[1], kind
        seen.append(outputs[0])
    lying = tmp_path / "lying"
    lying.write_bytes(encode("PNG", 1))
    assert json.dumps(plain(READERS[reader](lying)), default=str) not in seen, "the reader cannot tell them apart"


def plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_a_header_that_no_decoder_accepts_is_undecodable():
    damaged = encode("AVIF", 1).replace(b"iloc", b"xxxx")
    for read in (read_image_size, load_image):
        with pytest.raises(BadImageError, match="undecodable"):
            read(damaged)
