"""A mapper that replaces each text by the caption that a trained MGM writes for the row's image.

    process:
      - mgm_captioning_mapper: {base_model: results/models/tiny/mgm, stage: results/shapes/tiny/baseline/pretrain}

The prompt is the prompt of the model's stage 1. With `template: plain` it is the image alone. All captions of beam
search are kept in the row's meta with their log-likelihoods, most likely per token first. The first caption becomes the
text.
"""

from functools import cache, partial
from pathlib import Path

import numpy as np
from data_juicer.ops.base_op import OPERATORS, TAGGING_OPS, UNFORKABLE, Mapper
from data_juicer.utils.constant import Fields
from data_juicer.utils.model_utils import get_model

from dj2mgm.data.formats import build_dj_text

from .captioners import CANDIDATES_KEY, LOG_LIKELIHOODS, list_argument_defaults
from .declarations import Declarations, list_weight_files

NAME = "mgm_captioning_mapper"


def load_captioner(base_model: str, stage: str, device: str):
    from dj2mgm.models.generators import load_generator as load  # here because it imports torch and transformers

    return load(Path(base_model), Path(stage), device)


@cache
def make_model_key(base_model: str, stage: str) -> partial:
    """Return the key of a model for `get_model`, which is the same for all operators with this model."""
    return partial(load_captioner, base_model, stage)


def complete_arguments(arguments: dict | None) -> dict:
    """Return the arguments of this operator with its defaults, for another operator that uses the same model."""
    return list_argument_defaults(MGMCaptioningMapper) | (arguments or {})


@OPERATORS.register_module(NAME)
@TAGGING_OPS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class MGMCaptioningMapper(Declarations, Mapper):
    """A mapper that captions rows with exactly one image by beam search, and does not change other rows.

    It sets `text` (image token, caption, end-of-chunk token), and in the meta `caption_candidates` (strings) and
    `caption_log_likelihoods` (nats, including the token that ends the caption).
    """

    _accelerator = "cuda"
    _batched_op = True
    draws_at_random = False

    def __init__(
        self,
        base_model: str,
        stage: str,
        template: str | dict = "plain",
        question: str = "",
        num_beams: int = 4,
        batch_size: int = 64,
        max_new_tokens: int = 40,
        *args,
        **kwargs,
    ):
        """Initialize the operator.

        Args:
            base_model: folder of the assembled model.
            stage: output folder of `pretrain` or `finetune`.
            template: chat template of the stage, as a name in config/chat_templates or the content of such a file.
            question: question for the model. The template `plain` has none.
            num_beams: number of beams, and of captions for each image.
            batch_size: images captioned together.
            max_new_tokens: number of tokens at which a caption is cut.
        """
        super().__init__(*args, batch_size=batch_size, **kwargs)
        self.base_model = base_model
        self.stage = stage
        self.template = template
        self.question = question
        self.num_beams = num_beams
        self.max_new_tokens = max_new_tokens
        self.model_key = make_model_key(base_model, stage)

    @staticmethod
    def list_model_files(arguments: dict) -> list[Path]:
        """Return the files that the captions depend on; a stage's folder also has records and checkpoints."""
        base, stage = (Path(arguments.get(name, "")) for name in ("base_model", "stage"))
        trained = (stage / f"{name}.safetensors" for name in ("projector", "language_model"))
        return [
            *list_weight_files(base),
            *(file for file in trained if file.is_file()),
            *list_weight_files(stage / "adapter"),
        ]

    def process_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Replace the texts of rows with one image; other rows have no candidates."""
        rows = [row for row, images in enumerate(samples[self.image_key]) if images and len(images) == 1]
        generator = get_model(self.model_key, rank, self.use_cuda())
        answers = generator.generate_candidates(
            [samples[self.image_key][row][0] for row in rows],
            question=self.question,
            template=self.template,
            num_beams=self.num_beams,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
        )
        captions: list[list[tuple[str, float]]] = [[] for _ in samples[self.text_key]]
        for row, candidates in zip(rows, answers, strict=True):
            captions[row] = candidates
            samples[self.text_key][row] = build_dj_text(candidates[0][0])
        for meta, candidates in zip(samples[Fields.meta], captions, strict=True):
            # typed, so that a batch without captions has columns of the same types
            meta[CANDIDATES_KEY] = np.array([caption for caption, _ in candidates], dtype=np.str_)
            meta[LOG_LIKELIHOODS] = np.array([value for _, value in candidates], dtype=np.float64)
        return samples
