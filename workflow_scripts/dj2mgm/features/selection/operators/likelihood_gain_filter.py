"""A filter that keeps texts that a trained model finds likelier with their own image than with others.

    process:
      - likelihood_gain_filter: {keep_fraction: 0.5}

The gain of a token is its log-likelihood given the row's image minus its log-likelihood given an arbitrary
image. The gain of a caption, or of the answer to the row's question, is the mean over its tokens. Lin et al.
(Revisiting the role of language priors in vision-language models, ICML 2024, arXiv:2306.01879) rank captions by the
pointwise mutual information of caption and image under the model, estimate its second term from images of the
dataset, and weigh that term by α, as here. They average the likelihood of the whole caption over these images. Here
the likelihood of each token, given the tokens before it, is averaged, so that a single token that no other image
explains does not decide about the whole caption. The row's own image is one of the images, as in InfoNCE (van den
Oord et al., 2018, arXiv:1807.03748), so the gain of a token is at most the logarithm of their number.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens

from dj2mgm.control_tokens import find_control_token
from dj2mgm.juicer.operators.declarations import ShareLimits, ValueFilter, argument
from dj2mgm.juicer.operators.trained_model_operators import TrainedModelOperator
from dj2mgm.models.questions import GivenAnswer, split_into_parts
from dj2mgm.recipes.catalogue import LIKELIHOOD_GAIN as GAIN


def compute_likelihood_gain(log_likelihoods: Sequence[Sequence[float]], prior_weight: float) -> float:
    """Return the mean over T tokens of log p(token | own image) − α · log mean p(token | image) over M images, in nats.

    `log_likelihoods` are (M, T), the first row given the row's own image; `prior_weight` is α.
    """
    values = np.array(log_likelihoods)
    prior = np.logaddexp.reduce(values, axis=0) - np.log(len(values))
    return float(np.mean(values[0] - prior_weight * prior))


@OPERATORS.register_module(GAIN)
@UNFORKABLE.register_module(GAIN)
class LikelihoodGainFilter(TrainedModelOperator, ShareLimits, ValueFilter):
    """A filter that keeps rows whose caption a trained model finds likelier with their own image than with others.

    The stat `likelihood_gain` holds one number in nats per token. Rows without a gain are kept; their stat is empty:

    - rows that do not have exactly one image;
    - rows whose caption contains a control token, which the jsonl stage drops;
    - rows in a batch with fewer than `other_images` other images, since their gain would be on another scale (a
      few rows at the end of a dataset or of a part of it).
    """

    stat = "likelihood_gain"
    limit = "min_gain"
    bounds = ("min_gain", None)

    question: str = argument("", "question for rows without a question. The template `plain` has none")
    min_gain: float | None = argument(None, "lowest gain to keep, in nats per token; by default 0")
    keep_fraction: float | None = argument(None, "share of the rows, highest gain first, in place of `min_gain`")
    other_images: int = argument(8, "other images of the batch that stand for any image")
    # with 1, a caption that needs no image gains nothing; with 0, likely captions are kept
    prior_weight: float = argument(1.0, "α")
    batch_size: int = argument(32, "images whose captions are scored together, and that serve as other images")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # compute_stats_batched divides its rows into parts of similar sizes, so that none is too small
        self.images_at_once, self.batch_size = self.batch_size, DEFAULT_BATCH_SIZE
        self.min_gain = self.min_gain or 0.0

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Score the rows that have no gain yet, in parts; each image is encoded once for all its rows."""
        rows_by_image: dict[str, list[int]] = {}
        for row, stats in enumerate(samples[Fields.stats]):
            if self.stat not in stats and len(samples[self.image_key][row] or ()) == 1:
                rows_by_image.setdefault(samples[self.image_key][row][0], []).append(row)
        gains: dict[int, float] = {}
        questions = samples.get("question") or [""] * len(samples[self.text_key])
        parts = min(ceil(len(rows_by_image) / self.images_at_once), len(rows_by_image) // (self.other_images + 1))
        for images in np.array_split(np.array(list(rows_by_image), dtype=object), max(1, parts)):
            captions = {
                row: GivenAnswer(
                    index, questions[row] or self.question, remove_special_tokens(samples[self.text_key][row])
                )
                for index, image in enumerate(images)
                for row in rows_by_image[image]
            }
            gains |= self._compute_gains(images.tolist(), captions, rank)
        return self.fill(samples, gains)

    @staticmethod
    def read_scores(stats: dict) -> list[float]:
        return list(stats[LikelihoodGainFilter.stat])

    def _compute_gains(self, images: list[str], captions: dict[int, GivenAnswer], rank: int | None) -> dict[int, float]:
        """Return the gains by row; empty if there are too few other images.

        Args:
            images: paths of different images.
            captions: caption by row; `about` is the index of its image in `images`.
            rank: process of the operator.
        """
        image_count = self.other_images + 1
        if len(images) < image_count:
            return {}
        # evenly spread, since neighbors may be similar
        steps = [step * len(images) // image_count for step in range(image_count)]
        generator = self._load_model(rank)
        control = generator.list_control_tokens(self.template)
        rows = [
            row
            for row, (_, question, text) in captions.items()
            if not find_control_token(f"{question}\n{text}", control)
        ]
        answers = [
            captions[row]._replace(about=(captions[row].about + step) % len(images)) for row in rows for step in steps
        ]
        log_likelihoods = generator.compute_answer_log_likelihoods(images, answers, self.template)
        return dict(
            zip(
                rows,
                (
                    compute_likelihood_gain(part, self.prior_weight)
                    for part in split_into_parts(log_likelihoods, image_count)
                ),
                strict=True,
            )
        )
