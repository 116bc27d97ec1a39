"""The templates' environment and the embedded images, alike for every page."""

import base64
import io
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image


def environment() -> Environment:
    """Templates of this folder; all values are escaped: captions are what a model or a crawl wrote."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def data_uri(image: Image.Image, longest_side: int, quality: int) -> str:
    """The image as WebP, shrunk in place to `longest_side` px if it is larger."""
    image.thumbnail((longest_side, longest_side))
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
