"""Any Data-Juicer operator that captions images, as a function from images to captions.

The operator is handed full batches only, always of the same size (the last image is repeated), because matrix products
of another shape round differently. Where it draws at random, the random numbers follow from the seed and the images of
the batch, and from these alone: batches are formed whatever captions are known already.
"""

import hashlib
import json
import os
from collections.abc import Callable, Container, Iterator, Sequence
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
        """Hand captions of image files to `keep`, some at a time, as soon as they are there.

        Args:
            images: by their keys, as `waiting` leaves them. Those that a server gives no answer about are left out.
            spent: how many captions there were when this process began, and what they had cost in tokens.
        """
        keys = list(images)
        if self.is_server and keys:
            self.operator.connect(spent)
            self.operator.captions_as_they_come(
                list(images.values()), lambda place, captions: keep({keys[place]: captions})
            )
            return
        for batch in self._batches(keys):
            keep(dict(zip(batch, self([images[key] for key in batch], batch), strict=True)))

    def keys_of(self, hashes: Sequence[str]) -> list[str]:
        """What the captions of images are kept under, given the images' SHA-256: just that, or `<image>:<batch>` of a
        captioner that draws at random."""
        if not self.draws_at_random:
            return list(hashes)
        batches = self._batches(list(dict.fromkeys(hashes)))
        keys = {image: f"{image}:{_digest(','.join(batch)).hex()}" for batch in batches for image in batch}
        return [keys[image] for image in hashes]

    @staticmethod
    def waiting(images: dict[str, str], known: Container[str]) -> dict[str, str]:
        """The images, by their keys, that have no captions yet, and with them their whole batches."""
        missing = {_batch_of(key) for key in images if key not in known}
        return {key: image for key, image in images.items() if _batch_of(key) in missing}

    def _batches(self, items: list[str]) -> Iterator[list[str]]:
        return (items[start : start + self.batch_size] for start in range(0, len(items), self.batch_size))

    def __call__(self, images: Sequence[str], keys: Sequence[str]) -> list[Captions]:
        """Captions of up to `batch_size` image files, whose keys are given too."""
        padded = [*images, *[images[-1]] * (self.batch_size - len(images))]
        samples = {
            self.operator.text_key: [text_of("")] * len(padded),
            self.operator.image_key: [[image] for image in padded],
            Fields.meta: [{} for _ in padded],
        }
        if self.draws_at_random:
            _seed_everything(f"{self.seed}:{','.join(keys)}")
        captioned = self.operator.process(samples)
        texts, metas = captioned[self.operator.text_key], captioned[Fields.meta]
        if len(texts) != len(padded):
            raise InputError(
                f"captioner {self.name} made {len(texts)} rows out of {len(padded)}; it must give one for each image "
                "(image_captioning_mapper does with keep_original_sample: false)"
            )
        return [_captions(text, meta) for text, meta in zip(texts, metas, strict=True)][: len(images)]

    def fingerprint(self) -> str:
        """SHA-256 over everything that captions depend on, not where the model lies or how that is written."""
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


def _batch_of(key: str) -> str:
    """Of a captioner that draws nothing, each image is one by itself."""
    return key.rpartition(":")[2]


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

    set_seed(int.from_bytes(_digest(key)[:4], "big"))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
