"""A captioner that names the strongest of an image's three color channels.

Copied to workflow_scripts/dj2mgm/juicer/operators/color_captioning_mapper.py, it works in a recipe of synthesis:

    process:
      - low_similarity_recaption_mapper: {keep_fraction: 0.5, captioner: {color_captioning_mapper: {}}}

A captioner is a Data-Juicer mapper that gives one row for each row, with a new text. With several candidates and
log-likelihoods: trained_model_operators.py in that folder.
"""

import numpy as np
from data_juicer.ops.base_op import OPERATORS, Mapper

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.images import load_image
from dj2mgm.juicer.operators.declarations import Declarations

NAME = "color_captioning_mapper"
CHANNELS = ("red", "green", "blue")


@OPERATORS.register_module(NAME)
class ColorCaptioningMapper(Declarations, Mapper):
    """A mapper that replaces each text by a caption of the row's one image, such as "a mostly red picture"."""

    _batched_op = True  # Data-Juicer's: the method below takes a batch of rows
    draws_at_random = False  # the same image always gets the same caption

    def process_batched(self, samples: dict) -> dict:
        samples[self.text_key] = [build_dj_text(_write_caption(image)) for [image] in samples[self.image_key]]
        return samples


def _write_caption(path: str) -> str:
    means = np.asarray(load_image(path).convert("RGB")).mean(axis=(0, 1))  # (3,)
    return f"a mostly {CHANNELS[means.argmax()]} picture"
