"""A filter that drops texts whose likelihood under a trained model does not increase if the model sees the image.

    process:
      - likelihood_gain_filter:
          base_model: results/models/tiny/mgm
          stage: results/shapes/tiny/baseline/pretrain
          keep_fraction: 0.5

The text of a row is a caption, or the answer to the row's question.

The gain of a token is its log-likelihood given the row's image minus its log-likelihood given an arbitrary image. The
gain of a caption is the mean over its tokens. Lin et al. (Revisiting the role of language priors in vision-language
models, ICML 2024, arXiv:2306.01879) rank captions by the pointwise mutual information of caption and image under the
model, estimate its second term from images of the dataset, and weigh that term by α, as here. They average the
likelihood of the whole caption over these images. Here the likelihood of each token, given the tokens before it, is
averaged, so that a single token that no other image explains does not decide about the whole caption. The row's own
image is one of the images, as in InfoNCE (van den Oord et al., 2018, arXiv:1807.03748), so the gain of a token is at
most the logarithm of their number.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens
from data_juicer.utils.model_utils import get_model

from dj2mgm.control_tokens import find_control_token
from dj2mgm.models.questions import GivenAnswer, split_into_parts
from dj2mgm.recipes.recipe_step import LIKELIHOOD_GAIN as NAME

from .declarations import ShareFilter, check_fraction, check_sides
from .mgm_captioning_mapper import MGMCaptioningMapper, make_model_key

STAT = "likelihood_gain"


def compute_likelihood_gain(log_likelihoods: Sequence[Sequence[float]], prior_weight: float) -> float:
    """Return the mean over T tokens of log p(token | own image) − α · log mean p(token | image) over M images, in nats.

    `log_likelihoods` are (M, T), the first row given the row's own image; `prior_weight` is α.
    """
    values = np.array(log_likelihoods)
    prior = np.logaddexp.reduce(values, axis=0) - np.log(len(values))
    return float(np.mean(values[0] - prior_weight * prior))


@OPERATORS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class LikelihoodGainFilter(ShareFilter):
    """A filter that keeps rows whose caption a trained model finds likelier with their own image than with others.

    The stat `likelihood_gain` holds one number in nats per token. Rows without a gain are kept; their stat is empty:

    - rows that do not have exactly one image;
    - rows whose caption contains a control token, which the jsonl stage drops;
    - rows in a batch with fewer than `other_images` other images, since their gain would be on another scale (a
      few rows at the end of a dataset or of a part of it).
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
        """Initialize the operator.

        Args:
            base_model: folder of the assembled model.
            stage: output folder of `pretrain` or `finetune`.
            template: chat template of the stage, as a name in config/chat_templates or the content of such a file.
            question: question for rows without a question. The template `plain` has none.
            min_gain: lowest gain to keep, in nats per token. The default is 0.
            keep_fraction: share of the rows to keep, highest gain first, in place of `min_gain`.
            other_images: number of images of the batch, in addition to the row's own, that stand for any image.
            prior_weight: α. With 1, a caption that needs no image gains nothing. With 0, likely captions are kept.
            batch_size: number of images whose captions are scored together, and that serve as other images.
        """
        # compute_stats_batched divides its rows into parts of similar sizes, so that none is too small
        super().__init__(*args, batch_size=DEFAULT_BATCH_SIZE, **kwargs)
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
        self.model_key = make_model_key(base_model, stage)

    list_model_files = staticmethod(MGMCaptioningMapper.list_model_files)

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Score the rows that have no gain yet, in parts; each image is encoded once for all its rows."""
        unmeasured = [row for row, stats in enumerate(samples[Fields.stats]) if STAT not in stats]
        rows_by_image: dict[str, list[int]] = {}
        for row in unmeasured:
            if len(samples[self.image_key][row] or ()) == 1:
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
        for row in unmeasured:
            samples[Fields.stats][row][STAT] = np.array([gains[row]] if row in gains else [], dtype=np.float64)
        return samples

    def process_single(self, sample: dict) -> bool:
        return all(self.get_keep_boolean(gain, self.min_gain) for gain in sample[Fields.stats][STAT])

    @staticmethod
    def read_scores(stats: dict) -> list[float]:
        return list(stats[STAT])

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
        generator = get_model(self.model_key, rank, self.use_cuda())
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
