"""Drops captions that a trained model finds no more likely for seeing the image.

    process:
      - likelihood_gain_filter:
          base_model: results/models/tiny/mgm
          stage: results/baseline/pretrain
          keep_fraction: 0.5

The gain of a token is its log-likelihood given the image, less that given any image; of a caption it is the mean
over its tokens. Lin et al. (Revisiting the role of language priors in vision-language models, ICML 2024,
arXiv:2306.01879) rank captions by the pointwise mutual information of caption and image under the model, estimate its
second term from images of the dataset, and weigh that by α, as here. They average the likelihood of the caption as a
whole over these images; here that of each token is averaged, given the tokens before it, so that one token that no
other image explains does not settle the whole caption. The row's own image is one of them, as in InfoNCE (van den Oord
et al., 2018, arXiv:1807.03748), so that no token gains more than the logarithm of their number.
"""

from collections.abc import Sequence
from functools import partial
from math import ceil

import numpy as np
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens
from data_juicer.utils.model_utils import get_model

from dj2mgm.control_tokens import find_control
from dj2mgm.questions import parts_of

from .keep_fraction import FractionFilter, check_fraction, check_sides
from .mgm_captioning_mapper import MGMCaptioningMapper, load_generator

NAME = "likelihood_gain_filter"
STAT = "likelihood_gain"


def likelihood_gain(log_likelihoods: Sequence[Sequence[float]], prior_weight: float) -> float:
    """Mean over T tokens of log p(token | own image) − α · log of the mean of p(token | image) over M images, in nats.

    Args:
        log_likelihoods: (M, T), given the row's own image first.
    """
    given = np.array(log_likelihoods)
    prior = np.logaddexp.reduce(given, axis=0) - np.log(len(given))
    return float(np.mean(given[0] - prior_weight * prior))


@OPERATORS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class LikelihoodGainFilter(FractionFilter):
    """Keeps rows whose caption a trained model finds more likely given their image than given any.

    The stat `likelihood_gain` holds one number in nats a token. It is empty for a row that has not exactly one image,
    whose caption holds a control token (jsonl drops it), or that comes with fewer than `other_images` others, beside
    which its gain would be on another scale: the last few of a dataset, or of a part of it. Such a row is kept.
    """

    _accelerator = "cuda"
    _batched_op = True
    limit = "min_gain"

    def __init__(
        self,
        base_model: str,
        stage: str,
        template: str | dict = "plain",
        question: str = "",
        min_gain: float | None = None,
        keep_fraction: float | None = None,
        other_images: int = 8,
        prior_weight: float = 1.0,
        batch_size: int = 32,
        *args,
        **kwargs,
    ):
        """
        Initialization method.

        :param base_model: folder of the assembled model.
        :param stage: output folder of `pretrain` or `finetune`.
        :param template: chat format of the stage: a name in config/chat_templates, or the content of its file.
        :param question: what is asked; `plain` asks nothing.
        :param min_gain: lowest gain to keep, in nats a token. The default is 0.
        :param keep_fraction: instead of `min_gain`: the share of rows to keep, highest gain first.
        :param other_images: how many images of the batch stand for any image, beside the row's own.
        :param prior_weight: α. With 1, a caption that needs no image gains nothing; with 0, likely captions are kept.
        :param batch_size: images whose captions are scored together, which are also each other's other images.
        """
        super().__init__(*args, batch_size=DEFAULT_BATCH_SIZE, **kwargs)  # divided here: no row shall be left alone
        check_fraction(keep_fraction)
        check_sides(keep_fraction=(keep_fraction, min_gain))
        if not 1 <= other_images < batch_size:
            raise ValueError(f"other_images must be from 1 to batch_size - 1, {batch_size - 1}; found {other_images}")
        if not 0 <= prior_weight <= 1:
            raise ValueError(f"prior_weight must be from 0 to 1, found {prior_weight}")
        self.base_model = base_model
        self.stage = stage
        self.template = template
        self.question = question
        self.min_gain = 0.0 if min_gain is None else min_gain
        self.keep_fraction = keep_fraction
        self.other_images = other_images
        self.prior_weight = prior_weight
        self.images_at_once = batch_size
        self.model_key = partial(load_generator, base_model, stage)

    model_files = staticmethod(MGMCaptioningMapper.model_files)

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Score the rows that have no gain yet, some at a time, of each image of which one encoding serves all."""
        waiting = [row for row, stats in enumerate(samples[Fields.stats]) if STAT not in stats]
        rows_of: dict[str, list[int]] = {}
        for row in waiting:
            if len(samples[self.image_key][row] or ()) == 1:
                rows_of.setdefault(samples[self.image_key][row][0], []).append(row)
        gains: dict[int, float] = {}
        parts = min(ceil(len(rows_of) / self.images_at_once), len(rows_of) // (self.other_images + 1))
        for images in np.array_split(np.array(list(rows_of), dtype=object), max(1, parts)):  # all of about one size
            captions = {
                row: (place, remove_special_tokens(samples[self.text_key][row]))
                for place, image in enumerate(images)
                for row in rows_of[image]
            }
            gains |= self._gains(images.tolist(), captions, rank)
        for row in waiting:
            samples[Fields.stats][row][STAT] = np.array([gains[row]] if row in gains else [], dtype=np.float64)
        return samples

    def process_single(self, sample: dict) -> bool:
        return all(self.get_keep_boolean(gain, self.min_gain) for gain in sample[Fields.stats][STAT])

    @staticmethod
    def scores_of(stats: dict) -> list[float]:
        """A row's part in the scores that `keep_fraction` is a share of."""
        return list(stats[STAT])

    def _gains(self, images: list[str], captions: dict[int, tuple[int, str]], rank: int | None) -> dict[int, float]:
        """By row, of its image's place and its caption, beside other images; nothing where these are too few."""
        compared = self.other_images + 1
        if len(images) < compared:
            return {}
        # evenly spread: neighbors may be alike
        steps = [step * len(images) // compared for step in range(compared)]
        generator = get_model(self.model_key, rank, self.use_cuda())
        control = generator.control_tokens(self.template)
        rows = [row for row, (_, caption) in captions.items() if not find_control(caption, control)]
        asked = [((captions[row][0] + step) % len(images), captions[row][1]) for row in rows for step in steps]
        found = generator.log_likelihoods(images, asked, self.question, self.template)
        return dict(
            zip(rows, (likelihood_gain(part, self.prior_weight) for part in parts_of(found, compared)), strict=True)
        )
