"""Any Data-Juicer operator that captions images, as a function from images to captions.

The operator is handed full batches only, always of the same size (the last image is repeated), because matrix products
of another shape round differently; where it draws at random, the random numbers follow from the seed and the images.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature

from data_juicer.ops import load_ops
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import SpecialTokens, get_special_tokens

from dj2mgm.control_tokens import CONTROL
from dj2mgm.data.formats import text_of
from dj2mgm.errors import InputError
from dj2mgm.files import sha256_of

from ..declarations import answers_one_by_one, draws_at_random, model_files, without_effect

CANDIDATES = "caption_candidates"
LOG_LIKELIHOODS = "caption_log_likelihoods"


@dataclass(frozen=True)
class Captions:
    """A captioner's captions of one image, its own favorite first; no log-likelihoods where it tells none.

    `problem`: why none of them can be used, where the captioner itself says so; `tokens`: what they cost on a server.
    """

    candidates: list[str]
    log_likelihoods: list[float] | None
    problem: str | None = None
    tokens: int | None = None


NO_ANSWER = Captions([""], None, "no answer")


class Captioner:
    """A captioning operator of Data-Juicer's registry.

    Args:
        spec: {operator: {argument: value}}, as in a recipe.
        seed: of an operator that draws at random.
    """

    def __init__(self, spec: dict, seed: int):
        [(self.name, arguments)] = spec.items()
        self.arguments = dict(arguments or {})
        self.seed = seed
        [self.operator] = load_ops([{self.name: dict(self.arguments)}])
        self.batch_size = self.operator.batch_size
        self.draws_at_random = draws_at_random(self.operator)

    @property
    def is_server(self) -> bool:
        """Whether captions come one by one, in any order, and cost something."""
        return answers_one_by_one(self.operator)

    def caption(
        self, images: dict[str, str], spent: tuple[int, int], keep: Callable[[dict[str, Captions]], None]
    ) -> None:
        """Hand captions of image files by their SHA-256 to `keep`, some at a time, as soon as they are there.

        Args:
            images: by their SHA-256. Those that a server gives no answer about are left out.
            spent: how many captions there were when this process began, and what they had cost in tokens.
        """
        hashes = list(images)
        if self.is_server and hashes:
            self.operator.connect(spent)
            self.operator.captions_as_they_come(
                list(images.values()), lambda place, captions: keep({hashes[place]: captions})
            )
            return
        for start in range(0, len(hashes), self.batch_size):
            batch = hashes[start : start + self.batch_size]
            keep(dict(zip(batch, self([images[hashed] for hashed in batch], batch), strict=True)))

    def __call__(self, images: Sequence[str], hashes: Sequence[str]) -> list[Captions]:
        """Captions of up to `batch_size` image files, whose SHA-256 hashes are given too."""
        padded = [*images, *[images[-1]] * (self.batch_size - len(images))]
        samples = {
            self.operator.text_key: [text_of("")] * len(padded),
            self.operator.image_key: [[image] for image in padded],
            Fields.meta: [{} for _ in padded],
        }
        if self.draws_at_random:
            _seed_everything(f"{self.seed}:{','.join(hashes)}")
        captioned = self.operator.process(samples)
        texts, metas = captioned[self.operator.text_key], captioned[Fields.meta]
        if len(texts) != len(padded):
            raise InputError(
                f"captioner {self.name} made {len(texts)} rows out of {len(padded)}; it must give one for each image "
                "(image_captioning_mapper does with keep_original_sample: false)"
            )
        return [_captions(text, meta) for text, meta in zip(texts, metas, strict=True)][: len(images)]

    def fingerprint(self) -> str:
        """SHA-256 over everything that captions depend on, wherever the model's folder lies, however they are written."""
        arguments = {key: value for key, value in self._settings().items() if key not in without_effect(self.operator)}
        if not self.is_server:  # whose model is a name, even where a folder is called so
            arguments = {key: value for key, value in arguments.items() if not _is_folder(value)}
        digest = hashlib.sha256()
        seed = self.seed if self.draws_at_random else None
        digest.update(json.dumps([self.name, arguments, self.batch_size, seed], sort_keys=True).encode())
        for file in model_files({self.name: self.arguments}):
            digest.update(file.name.encode() + sha256_of(file).encode())
        return digest.hexdigest()

    def _settings(self) -> dict:
        """The operator's arguments, defaults filled in, as it has kept them; 0.0 as 0, since YAML tells them apart."""
        known = signature(type(self.operator).__init__).parameters.values()
        settings = {each.name: each.default for each in known if each.default is not each.empty} | self.arguments
        return {key: _one_spelling(getattr(self.operator, key, value), value) for key, value in settings.items()}


def problem_of(caption: str, max_length: int) -> str | None:
    """Why a caption cannot be used: `empty`, `too long` or `control token`; None for one that can.

    A line break counts as a control token: it ends a caption in the stage-1 template.
    """
    if not caption:
        return "empty"
    if len(caption) > max_length:
        return "too long"
    special = any(token in caption for token in get_special_tokens().values())
    if special or CONTROL.search(caption) or len(caption.splitlines()) > 1:
        return "control token"
    return None


def _one_spelling(kept: object, given: object) -> object:
    value = kept if isinstance(kept, str | int | float | None) else given
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_folder(value: object) -> bool:
    return isinstance(value, str) and os.path.isdir(value)


def _captions(text: str, meta: dict) -> Captions:
    if CANDIDATES in meta:
        return Captions(meta[CANDIDATES].tolist(), meta[LOG_LIKELIHOODS].tolist())
    # cut off at the ends only: a special token within the caption must stay visible
    caption = text.strip().removeprefix(SpecialTokens.image).removesuffix(SpecialTokens.eoc).strip()
    return Captions([caption], None)


def _seed_everything(key: str) -> None:
    from dj2mgm.compute import set_seed  # and with it torch: a captioner that draws at random is a model

    set_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big"))
