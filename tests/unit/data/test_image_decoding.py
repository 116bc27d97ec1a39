"""Every image becomes RGB of the full range or is undecodable, without starting programs or exhausting memory."""

import io
import re
import resource
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from data_juicer.utils import mm_utils
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image, UnidentifiedImageError

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.images import IMAGE_FORMATS, MAX_PIXELS, BadImageError, load_image
from dj2mgm.errors import InputError
from dj2mgm.juicer.recipe_settings import RecipeSettings
from dj2mgm.juicer.run_recipe import FILTERED, run_recipe
from dj2mgm.models.mgm.mgm_generator import MGMGenerator
from dj2mgm.recipes.recipe_parsing import parse_steps
from dj2mgm.reporting.rendering import load_thumbnail
from dj2mgm.storage.files import write_jsonl
from fuzzing import fuzzed
from paths import PROJECT
from tiny_models import tiny_processor

LOSSLESS = {"PNG": {}, "TIFF": {}, "BMP": {}, "PPM": {}, "GIF": {}, "WEBP": {"lossless": True, "exact": True}}
REFUSED = {("I", "TIFF"), ("F", "TIFF"), ("F", "PPM")}
SAME = {"I;16", "I;16B", "I;16L", "I"}  # equivalent tag names in different formats
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
ANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def encode(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png(values: np.ndarray) -> bytes:
    """Encode (H, W) or (H, W, C) uint16 as a PNG with 16 bits per channel."""
    height, width = values.shape[:2]
    color = {2: 4, 3: 2, 4: 6}[values.shape[2]] if values.ndim == 3 else 0
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0)), (b"IDAT", zlib.compress(rows))]
    parts = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in [*chunks, (b"IEND", b"")]
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(
    size: tuple[int, int], data: bytes, bits: list[int], photometric: int, kind: int = 1, order: str = "<"
) -> bytes:
    """Write an uncompressed TIFF of one strip; `kind` is its SampleFormat: 1 unsigned, 2 signed, 3 floating point."""
    width, height = size
    several = struct.pack(f"{order}{len(bits)}H", *bits) if len(bits) > 2 else b""
    offset = 8 + len(data) + len(data) % 2
    tags = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, len(bits), offset if several else bits[0]),
        (259, 3, 1, 1),
        (262, 3, 1, photometric),
        (273, 4, 1, 8),
        (277, 3, 1, len(bits)),
        (278, 4, 1, height),
        (279, 4, 1, len(data)),
        (339, 3, 1, kind),
    ]
    entries = b"".join(
        struct.pack(f"{order}HHI", tag, code, count)
        + (struct.pack(f"{order}HH", value, 0) if code == 3 and count == 1 else struct.pack(f"{order}I", value))
        for tag, code, count, value in tags
    )
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", offset + len(several))
    padded = data + b"\0" * (len(data) % 2)
    return head + padded + several + struct.pack(f"{order}H", len(tags)) + entries + struct.pack(f"{order}I", 0)


def in_12_bits(values: np.ndarray) -> bytes:
    """Pack rows of 12-bit numbers, two into three bytes."""
    left, right = values[:, ::2].astype(int), values[:, 1::2].astype(int)
    return np.stack([left >> 4, (left & 15) << 4 | right >> 8, right & 255], axis=-1).astype(np.uint8).tobytes()


def numbers(seed: int, size: tuple[int, int], *channels: int, below: int = 256) -> np.ndarray:
    """Return random numbers (H, W, …), including the minimum and the maximum."""
    values = np.random.default_rng(seed).integers(0, below, (size[1], size[0], *channels))
    values.flat[0], values.flat[-1] = 0, below - 1
    return values


def grey(levels: np.ndarray) -> np.ndarray:
    return np.repeat(levels[..., None], 3, axis=-1)


def convert_to_rgb(mode: str, pixels: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """Return levels (H, W, 3) from 0 to 255, computed from the definition of a mode."""
    pixels = pixels.astype(float)
    if mode in ("P", "PA"):
        return palette[(pixels if mode == "P" else pixels[..., 0]).astype(int)]
    if mode in ("I;16", "I;16L", "I;16B", "I"):
        return grey(pixels / 257)
    if mode == "CMYK":
        return (255 - pixels[..., :3]) * (255 - pixels[..., 3:]) / 255
    if mode == "YCbCr":  # JFIF
        y, blue, red = pixels[..., 0], pixels[..., 1] - 128, pixels[..., 2] - 128
        channels = (y + 1.402 * red, y - 0.344136 * blue - 0.714136 * red, y + 1.772 * blue)
        return np.stack(channels, axis=-1).clip(0, 255)
    return grey(pixels if pixels.ndim == 2 else pixels[..., 0]) if mode in ("1", "L", "LA") else pixels[..., :3]


def draw_image(mode: str, seed: int, size: tuple[int, int]) -> tuple[Image.Image, np.ndarray, np.ndarray]:
    """Return an image, its values, and its palette (256, 3), if any."""
    palette = numbers(seed, (256, 1), 3)[0]
    if mode == "1":
        values = numbers(seed, size, below=2)
        return Image.fromarray(values.astype(bool)), values * 255, palette
    if mode[0] == "I" or mode == "F":
        values = numbers(seed, size, below=2**16)
        if mode == "F":
            return Image.fromarray(values.astype(np.float32)), values, palette
        type_ = {"I": "<i4", "I;16B": ">u2"}.get(mode, "<u2")
        return Image.frombytes(mode, size, values.astype(type_).tobytes()), values, palette
    channels = Image.getmodebands(mode)
    values = numbers(seed, size, *([channels] if channels > 1 else []))
    image = Image.frombytes(mode, size, values.astype(np.uint8).tobytes())
    if mode in ("P", "PA"):
        image.putpalette(palette.astype(np.uint8).tobytes())
    return image, values, palette


def saved(mode: str, kind: str, seed: int, size: tuple[int, int]) -> tuple[bytes, np.ndarray] | None:
    """Return the file and its expected pixels; None if the format has no such mode."""
    image, values, palette = draw_image(mode, seed, size)
    try:
        data = encode(image, kind, **LOSSLESS[kind])
    except (OSError, ValueError, KeyError):
        return None
    with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as file:
        if file.mode != mode and not {file.mode, mode} <= SAME:
            return None
    return data, convert_to_rgb(mode, values, palette)


MODES = [mode for mode in Image.MODES if mode != "LAB"]  # defined by a color profile
PAIRS = [(mode, kind) for mode in MODES for kind in LOSSLESS if saved(mode, kind, 0, (2, 2))]
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))


def loaded(data: bytes) -> np.ndarray:
    image = load_image(data)
    assert image.mode == "RGB"
    return np.asarray(image).astype(float)


def refusal(data: bytes) -> str:
    with pytest.raises(BadImageError) as error:
        load_image(data)
    assert error.value.reason == "undecodable"
    return str(error.value)


def test_pairs_of_mode_and_format_match_pillow():
    assert len(PAIRS) >= 30 and REFUSED < set(PAIRS)
    assert {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", *SAME} <= {mode for mode, _ in PAIRS}


@pytest.mark.parametrize(("mode", "kind"), PAIRS)
@settings(max_examples=20, **ANY)
@given(seed=st.integers(0, 10**9), size=SIZES)
def test_every_mode_loads_in_its_full_range(mode, kind, seed, size):
    file = saved(mode, kind, seed, size)
    assume(file)  # WebP omits an alpha channel without transparency
    data, expected = file
    if (mode, kind) in REFUSED:
        assert "convert the image to 8 bits" in refusal(data)
    else:
        assert np.abs(loaded(data) - expected).max() <= 1


@settings(max_examples=60, **ANY)
@given(seed=st.integers(0, 10**9), size=SIZES, order=st.sampled_from("<>"))
def test_files_of_16_and_12_bits_load_in_their_full_range(seed, size, order):
    wide = numbers(seed, size, below=2**16)
    colors = numbers(seed, size, 4, below=2**16)
    raw = {True: wide, False: colors}

    def sixteen(values: np.ndarray, photometric: int) -> bytes:
        bits = [16] * (values.shape[2] if values.ndim == 3 else 1)
        return tiff(size, values.astype(f"{order}u2").tobytes(), bits, photometric, order=order)

    assert np.abs(loaded(png(raw[True])) - grey(wide / 257)).max() <= 1
    assert np.abs(loaded(sixteen(wide, 1)) - grey(wide / 257)).max() <= 1
    for channels in (3, 4):
        values = colors[..., :channels]
        assert np.abs(loaded(png(values)) - values[..., :3] / 257).max() <= 1
        assert np.abs(loaded(sixteen(values, 2)) - values[..., :3] / 257).max() <= 1
    assert np.abs(loaded(png(colors[..., :2])) - grey(colors[..., 0] / 257)).max() <= 1
    if order == "<":  # Pillow knows no other
        assert np.abs(loaded(sixteen(wide, 0)) - grey(255 - wide / 257)).max() <= 1, "zero is white"
        size = size[0] * 2, size[1]
        narrow = numbers(seed, size, below=2**12)
        assert np.abs(loaded(tiff(size, in_12_bits(narrow), [12], 1)) - grey(narrow / 4095 * 255)).max() <= 1


@settings(max_examples=100, **ANY)
@given(seed=st.integers(0, 10**9), size=SIZES, greatest=st.integers(1, 65535), kind=st.sampled_from((2, 3, 5, 6)))
def test_a_pnm_loads_in_its_declared_range(seed, size, greatest, kind):
    values = numbers(seed, size, *([3] if kind in (3, 6) else []), below=greatest + 1)
    head = f"P{kind}\n{size[0]} {size[1]}\n{greatest}\n".encode()
    binary = values.astype(">u2" if greatest > 255 else np.uint8).tobytes()
    data = binary if kind > 4 else " ".join(map(str, values.flat)).encode()
    expected = values / greatest * 255
    assert np.abs(loaded(head + data) - (expected if kind in (3, 6) else grey(expected))).max() <= 1


@pytest.mark.parametrize(("bits", "kind", "type_"), [(16, 2, "<i2"), (32, 1, "<u4"), (32, 2, "<i4"), (32, 3, "<f4")])
def test_values_of_unknown_range_are_refused(bits, kind, type_):
    data = tiff((2, 2), np.arange(4).astype(type_).tobytes(), [bits], 1, kind)
    assert "no known range; convert the image to 8 bits" in refusal(data)


def test_the_first_of_several_frames_is_loaded():
    frames = [Image.new("RGB", (4, 3), color) for color in ("red", "green", "blue")]
    for kind in ("GIF", "TIFF", "PNG", "WEBP", "MPO"):
        options = {"lossless": True} if kind == "WEBP" else {"quality": 100} if kind == "MPO" else {}
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert np.abs(loaded(data) - (255, 0, 0)).max() <= 2, kind


@pytest.mark.parametrize(
    ("kind", "longest_side", "size"),
    [("JPEG", 100, (250, 150)), ("JPEG", 300, (1000, 600)), ("JPEG", None, (1000, 600)), ("PNG", 100, (1000, 600))],
)
def test_a_jpeg_is_decoded_at_the_smallest_sufficient_size(kind, longest_side, size):
    smooth = Image.linear_gradient("L").resize((1000, 600))
    decoded = load_image(encode(smooth, kind), longest_side)
    assert decoded.size == size and (longest_side is None or max(size) >= 2 * longest_side)
    assert abs(np.asarray(decoded, int) - np.asarray(smooth.resize(size).convert("RGB"), int)).max() <= 4


@pytest.fixture
def ghostscript(tmp_path, monkeypatch) -> Path:
    """Put a `gs` that writes a marker file first on the path, and let Pillow search for it again."""
    marker, program = tmp_path / "started", tmp_path / "bin/gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{marker}'\n\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return marker


def decode_as_pillow_does(path: Path) -> None:
    with Image.open(path) as image:
        image.load()


def filter_with(operator: str, root: Path) -> None:
    data = root / "data.jsonl"
    write_jsonl(data, [{"id": "1", "text": build_dj_text("a red circle"), "images": ["a.jpg"]}])
    run_recipe(RecipeSettings(root, 1, parse_steps("recipe", [{operator: {}}])), data, root / "out", FILTERED)


def answer_about(path: Path) -> None:
    generator = MGMGenerator.__new__(MGMGenerator)  # needs no model
    generator.processor, generator.device = tiny_processor(), torch.device("cpu")
    list(generator._decode_images([path]))


OPENERS = {
    "the workflow": lambda path: load_image(path),
    "its bytes": lambda path: load_image(path.read_bytes()),
    "a filter of Data-Juicer": lambda path: filter_with("image_shape_filter", path.parent),
    "the integrity filter": lambda path: filter_with("image_integrity_filter", path.parent),
    "an operator's own call of Pillow": decode_as_pillow_does,
    "the report's gallery": lambda path: load_thumbnail(path.parent, path.name),
    "chat.py and the benchmarks": answer_about,
}


@pytest.mark.parametrize("opener", OPENERS)
def test_an_eps_named_jpg_does_not_start_ghostscript(tmp_path, ghostscript, opener):
    path = tmp_path / "a.jpg"
    path.write_bytes(EPS)
    with pytest.raises((BadImageError, InputError, UnidentifiedImageError)) as error:
        OPENERS[opener](path)
    assert not ghostscript.exists()
    if opener == "a filter of Data-Juicer":
        assert "image_shape_filter failed on row '1': BadImageError: undecodable" in str(error.value)


def test_pillow_would_start_the_fake_ghostscript(tmp_path, ghostscript):
    path = tmp_path / "a.jpg"
    path.write_bytes(EPS)
    with pytest.raises(OSError), Image.open(path, formats=["EPS"]) as image:
        image.load()
    assert ghostscript.exists()


def test_only_one_module_opens_images():
    scripts = PROJECT / "workflow_scripts"
    opens = re.compile(r"^[^'\"]*(Image\.open|imread)\(", re.MULTILINE)  # in code, not in a string
    openers = [path for path in scripts.rglob("*.py") if opens.search(path.read_text("utf-8"))]
    assert [str(path.relative_to(scripts)) for path in openers] == ["dj2mgm/data/images.py"]


def test_data_juicer_loads_images_like_the_models():
    modules = [module for name, module in sys.modules.items() if name.startswith("data_juicer.")]
    loaders = [vars(module)["load_image"] for module in modules if "load_image" in vars(module)]
    assert len(loaders) > 20 and set(loaders) == {load_image}


def test_data_juicer_gets_the_full_range_of_16_bit_images(tmp_path):
    wide = np.array([[0, 65535 // 2], [65535 // 4, 65535]])
    path = tmp_path / "a.png"
    path.write_bytes(png(wide))
    assert np.asarray(mm_utils.load_image(str(path)))[..., 0].tolist() == [[0, 127], [64, 255]]


NOISE = Image.effect_noise((24, 16), 90)
SEEDS = [
    encode(NOISE, "PNG"),
    encode(NOISE.convert("RGB"), "PNG"),
    encode(NOISE.convert("P"), "PNG", transparency=3),
    encode(NOISE.convert("1"), "PNG"),
    encode(NOISE, "JPEG"),
    encode(NOISE.convert("CMYK"), "JPEG"),
    encode(NOISE.convert("RGB"), "JPEG", progressive=True),
    encode(NOISE, "MPO", save_all=True, append_images=[NOISE]),
    encode(NOISE, "GIF", save_all=True, append_images=[NOISE.rotate(90)]),
    encode(NOISE, "BMP"),
    encode(NOISE.convert("RGBA"), "BMP"),
    encode(NOISE.convert("RGB"), "TIFF"),
    encode(NOISE.convert("RGB"), "TIFF", compression="tiff_lzw"),
    encode(NOISE.convert("1"), "TIFF", compression="group4"),
    encode(NOISE.convert("I;16"), "TIFF"),
    encode(NOISE.convert("F"), "TIFF"),
    encode(NOISE.convert("RGBA"), "WEBP", lossless=True),
    encode(NOISE, "WEBP"),
    encode(NOISE, "AVIF"),
    encode(NOISE, "PPM"),
    encode(NOISE.convert("I;16"), "PPM"),
    b"P2 3 2 9 1 2 3 4 5 6",
    encode(NOISE, "JPEG2000"),
    encode(NOISE, "ICO"),
    encode(NOISE, "TGA"),
    EPS,
    png(numbers(0, (5, 4), below=2**16)),
    png(numbers(0, (5, 4), 4, below=2**16)),
    tiff((4, 3), in_12_bits(numbers(0, (4, 3), below=2**12)), [12], 1),
]
EDIT = st.tuples(
    st.integers(0, 700), st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from((b"\xff" * 4, b"\0\0")))
)


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_load_in_the_headers_size_or_fail(tmp_path, monkeypatch):
    """Damaged bytes cause no other error, program, file, or memory beyond the largest image's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail(f"started {args}"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = set()

    @fuzzed(2500)
    @given(st.sampled_from(SEEDS), st.lists(EDIT, max_size=5), st.integers(0, 2000))
    def load(seed: bytes, edits: list[tuple[int, bytes]], end: int):
        data = bytearray(seed)
        for offset, new in edits:
            data[offset % len(data) : offset % len(data) + len(new)] = new
        data = bytes(data[: max(end, 1)])
        try:
            image = load_image(data)
        except BadImageError as error:
            assert error.reason == "undecodable" and len(str(error)) > len("undecodable: the image: ")
            outcomes.add("bad")
            return
        outcomes.add("good")
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as header:
            assert (image.mode, image.size) == ("RGB", header.size)

    load()
    assert outcomes == {"bad", "good"}
    assert list(tmp_path.iterdir()) == []
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 9 * MAX_PIXELS


@pytest.mark.filterwarnings("ignore")
def test_image_of_too_many_pixels_is_not_decoded():
    def header(width: int, height: int) -> bytes:
        chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
        size, check = struct.pack(">I", 13), struct.pack(">I", zlib.crc32(chunk))
        return b"\x89PNG\r\n\x1a\n" + size + chunk + check + b"\0\0\0\1IDAT"

    assert "scale it down" in refusal(header(10_000, MAX_PIXELS // 10_000 + 1))
    assert "pixels" in refusal(header(10_000, 100_000))
    assert "pixels" not in refusal(header(10_000, MAX_PIXELS // 10_000)), "this one is truncated"


@pytest.mark.parametrize("error", [struct.error, zlib.error, MemoryError, KeyError])
def test_any_exception_of_a_decoder_means_undecodable(monkeypatch, error):
    monkeypatch.setattr(Image.Image, "convert", lambda *args: (_ for _ in ()).throw(error("odd")))
    assert "odd" in refusal(SEEDS[0])
