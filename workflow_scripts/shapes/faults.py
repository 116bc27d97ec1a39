"""Planting faults into a clean image–caption pair, each at a documented rate.

Every kind of fault is one function that turns (image bytes, caption) into what a crawl would have delivered.
"""

import io
import random
import string

from PIL import Image

from shapes.scenes import Scene, describe, draw_scene

FAULTS = (
    "mismatched",  # the caption of another scene
    "junk_text",  # random characters, links, shouting, one word over and over
    "short_text",  # one or two letters or words
    "duplicate",  # image and caption of an earlier row, byte for byte
    "tiny_image",  # 6 to 24 px
    "extreme_aspect",  # a strip, 6 to 12 times as long as wide
    "truncated_image",  # the second half of the file is missing
    "not_an_image",  # an error page saved under an image's name
)


def png_bytes(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def mismatched_caption(scene: Scene, rng: random.Random) -> str:
    """The caption of another scene; never one that is true of this scene, in whole or of some of its objects."""
    here = [item.attributes() for item in scene.objects]
    while True:
        other = draw_scene(rng)
        if not all(item.attributes() in here for item in other.objects):
            return describe(other)


def junk_caption(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        symbols = string.ascii_letters + string.digits + "#$%&*+/=@^~|<>[]{}"
        return "".join(rng.choice(symbols) for _ in range(rng.randint(30, 90)))
    if kind == 1:
        path = "/".join("".join(rng.choices(string.ascii_lowercase + string.digits, k=9)) for _ in range(4))
        return f"https://{path}.html?ref={rng.randrange(10**9)}"
    if kind == 2:
        return " ".join(
            [rng.choice(("BUY NOW", "click here", "free free", "sale %%%", "!!! ???"))] * rng.randint(20, 40)
        )
    return " ".join(f"{rng.randrange(10**6)}-{rng.randrange(100)}" for _ in range(rng.randint(6, 14)))


def short_caption(rng: random.Random) -> str:
    return rng.choice(("img", "a", "photo", "IMG 0012", "jpg", "x y", "untitled", "thing"))


def tiny(image: Image.Image, rng: random.Random) -> Image.Image:
    side = rng.randint(6, 24)
    return image.resize((side, side), Image.Resampling.BOX)


def strip(image: Image.Image, rng: random.Random) -> Image.Image:
    length = image.width * rng.randint(2, 3)
    width = round(length / rng.uniform(6, 12))
    size = (length, width) if rng.random() < 0.5 else (width, length)
    return image.resize(size, Image.Resampling.BOX)


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def error_page(rng: random.Random) -> bytes:
    return f"<html><body><h1>404 Not Found</h1><p>request {rng.randrange(10**9)}</p></body></html>\n".encode()
