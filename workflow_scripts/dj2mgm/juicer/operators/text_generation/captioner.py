"""Any captioning operator of Data-Juicer as a function from images to captions.

The operator always gets batches of the same size (the last image is repeated), because matrix products of another shape
round differently. If it draws at random, the random numbers depend only on the seed and the images of the batch.
Batches therefore do not depend on which captions are already known.
"""

import hashlib
import json
import os
from collections.abc import Callable, Container, Iterator, Sequence
from inspect import signature

from data_juicer.ops import load_ops
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import SpecialTokens

from dj2mgm.data.formats import build_dj_text
from dj2mgm.errors import InputError
from dj2mgm.storage.files import compute_sha256

from ..declarations import Captions, ServerCaptioner, find_model_files, get_declarations

CANDIDATES_KEY = "caption_candidates"
LOG_LIKELIHOODS = "caption_log_likelihoods"


NO_ANSWER = Captions([""], None, "no answer")


def cut_object(text: str) -> str:
    """Return the JSON object in a model's answer: many models write a sentence or a fence around it."""
    return text[text.find("{") : text.rfind("}") + 1]


class Captioner:
    """A captioning operator of Data-Juicer's registry."""

    def __init__(self, spec: dict, seed: int):
        """Build the operator {operator: {argument: value}} of a recipe; `seed` is for operators that draw at random."""
        [(self.name, arguments)] = spec.items()
        self.arguments = dict(arguments or {})
        self.seed = seed
        [self.operator] = load_ops([{self.name: dict(self.arguments)}])
        self.batch_size = self.operator.batch_size
        self.draws_at_random = get_declarations(self.operator).draws_at_random

    @property
    def is_server(self) -> bool:
        """True if captions come from a server, singly, in any order, and at a cost."""
        return isinstance(self.operator, ServerCaptioner)

    def caption(
        self,
        images: dict[str, str],
        spent: tuple[int, int],
        keep: Callable[[dict[str, Captions]], None],
        questions: dict[str, str] | None = None,
    ) -> None:
        """Pass captions of image files to `keep`, some at a time, as soon as they exist.

        Args:
            images: image files by key, as `find_missing` returns them.
            spent: number and cost in tokens of the captions that existed when this process began.
            keep: function that receives captions by the key of their image. It is not called for images about which the
                server gives no answer.
            questions: questions by the same keys, for a captioner on a server (None: the question of its arguments).
        """
        keys = list(images)
        if self.is_server and keys:
            self.operator.connect(spent)
            question_list = questions and [questions[key] for key in keys]
            self.operator.request_captions(
                list(images.values()), lambda index, captions: keep({keys[index]: captions}), question_list
            )
            return
        for batch in self._split_batches(keys):
            keep(dict(zip(batch, self([images[key] for key in batch], batch), strict=True)))

    def make_keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys under which captions are kept, from the SHA-256 of the images.

        A key is the SHA-256 itself, or `<image>:<batch>` if the captioner draws at random.
        """
        if not self.draws_at_random:
            return list(hashes)
        batches = self._split_batches(list(dict.fromkeys(hashes)))
        keys = {image: f"{image}:{_compute_digest(','.join(batch)).hex()}" for batch in batches for image in batch}
        return [keys[image] for image in hashes]

    @staticmethod
    def find_missing(images: dict[str, str], stored: Container[str]) -> dict[str, str]:
        """Return the images to caption, by key: images without stored captions, and all images of their batches."""
        missing_batches = {_find_batch(key) for key in images if key not in stored}
        return {key: image for key, image in images.items() if _find_batch(key) in missing_batches}

    def _split_batches(self, items: list[str]) -> Iterator[list[str]]:
        return (items[start : start + self.batch_size] for start in range(0, len(items), self.batch_size))

    def __call__(self, images: Sequence[str], keys: Sequence[str]) -> list[Captions]:
        """Return captions of up to `batch_size` image files, given with their keys."""
        padded = [*images, *[images[-1]] * (self.batch_size - len(images))]
        samples = {
            self.operator.text_key: [build_dj_text("")] * len(padded),
            self.operator.image_key: [[image] for image in padded],
            Fields.meta: [{} for _ in padded],
        }
        if self.draws_at_random:
            _seed_everything(f"{self.seed}:{','.join(keys)}")
        captioned = self.operator.process(samples)
        texts, metas = captioned[self.operator.text_key], captioned[Fields.meta]
        if len(texts) != len(padded):
            raise InputError(
                f"captioner {self.name} returned {len(texts)} rows for {len(padded)} images. Set its arguments so that "
                "it returns one row per image (image_captioning_mapper: keep_original_sample: false)"
            )
        return [_build_captions(text, meta) for text, meta in zip(texts, metas, strict=True)][: len(images)]

    def compute_fingerprint(self) -> str:
        """Return the SHA-256 over all settings and files that captions depend on, but not the model's location."""
        without_effect = get_declarations(self.operator).without_effect
        arguments = {key: value for key, value in self._read_settings().items() if key not in without_effect}
        if not self.is_server:  # a server's model is a name, even if there is a folder of that name
            arguments = {key: value for key, value in arguments.items() if not _is_folder(value)}
        digest = hashlib.sha256()
        seed = self.seed if self.draws_at_random else None
        digest.update(json.dumps([self.name, arguments, self.batch_size, seed], sort_keys=True).encode())
        for file in find_model_files({self.name: self.arguments}):
            digest.update(file.name.encode() + compute_sha256(file).encode())
        return digest.hexdigest()

    def _read_settings(self) -> dict:
        """Return the values of the operator's arguments, given or default, as the operator stores them.

        0.0 becomes 0, so that both spellings in YAML have the same fingerprint.
        """
        parameters = signature(type(self.operator).__init__).parameters.values()
        settings = {
            parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty
        } | self.arguments
        return {key: _normalize_number(getattr(self.operator, key, value), value) for key, value in settings.items()}


def _normalize_number(stored: object, argument: object) -> object:
    value = stored if isinstance(stored, str | int | float | None) else argument
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _find_batch(key: str) -> str:
    """Return the key's batch; if the captioner does not draw at random, each image is its own batch."""
    return key.rpartition(":")[2]


def _is_folder(value: object) -> bool:
    return isinstance(value, str) and os.path.isdir(value)


def _build_captions(text: str, meta: dict) -> Captions:
    if CANDIDATES_KEY in meta:
        return Captions(meta[CANDIDATES_KEY].tolist(), meta[LOG_LIKELIHOODS].tolist())
    # only at the ends: a special token within the caption must stay visible
    caption = text.strip().removeprefix(SpecialTokens.image).removesuffix(SpecialTokens.eoc).strip()
    return Captions([caption], None)


def _seed_everything(key: str) -> None:
    from dj2mgm.compute import set_seed  # imports torch, which a captioner that draws at random needs anyway

    set_seed(int.from_bytes(_compute_digest(key)[:4], "big"))


def _compute_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
