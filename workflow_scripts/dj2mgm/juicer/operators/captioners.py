"""Any captioning operator of Data-Juicer as a function from images to captions, which are kept on disk.

No image is captioned twice, and no answer of a server is paid for twice. The operator always gets batches of the same
size (the last image is repeated), because matrix products of another shape round differently. If it draws at random,
the random numbers depend only on the seed and the images of the batch. Batches therefore do not depend on which
captions are already known.

A model's texts are untrusted input (`find_text_problem`).
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path

from data_juicer.ops import load_ops
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import SpecialTokens, get_special_tokens
from loguru import logger

from dj2mgm.cli.messages import Progress
from dj2mgm.control_tokens import find_control_token
from dj2mgm.data.formats import build_dj_text
from dj2mgm.errors import InputError
from dj2mgm.storage.files import compute_sha256
from dj2mgm.storage.image_files import compute_image_digest

from .caption_store import CaptionStore, has_captions
from .declarations import Captions, Declarations, ServerCaptioner, find_model_files, get_declarations, take_report

CANDIDATES_KEY = "caption_candidates"
LOG_LIKELIHOODS = "caption_log_likelihoods"
NO_ANSWER = Captions([""], None, "no answer")
ENOUGH_TO_JUDGE = 5  # rows; one or two without a usable text do not prove that a model is broken
TOO_MANY_UNUSABLE = 0.1
CONTROL_TOKEN, WRONG_SCHEMA = "control token", "wrong schema"
# turns that chat templates write as plain text, and tokens of the templates of unsupported models
TURN_MARKER = re.compile(r"\b(?:USER|ASSISTANT|HUMAN|SYSTEM) ?:|\[/?(?:INST|IMG)\b|<\uff5c[^>]*>|<<SYS>>")
# tags, entities, Markdown, links
MARKUP = re.compile(r"</?[A-Za-z!?][^>]*>|&[A-Za-z#]\w*;|```|\*\*|!\[|\]\(|https?://|\{\{|\\[A-Za-z]+\{")
# characters that are invisible, move a terminal's cursor, end a line or change the direction of text
UNUSABLE = re.compile(
    r"[\ud800-\udfff\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
    r"|(?<![^\x00-\x7f])[\u200c-\u200f](?![^\x00-\x7f])"  # joiners and marks of other scripts, and of emojis
)


class Captioner:
    """A captioning operator of Data-Juicer's registry, and the file in which this run keeps its captions."""

    def __init__(
        self, spec: dict, seed: int, folder: str | None = None, writer: str = "captions", kind: str = "captions"
    ):
        """Build the operator {operator: {argument: value}} of a recipe.

        Args:
            spec: the operator.
            seed: seed of an operator that draws at random.
            folder: folder in which captions are kept for other runs (None: they are not kept).
            writer: name of this run's file in that folder.
            kind: name of the captions, for the progress.
        """
        if not isinstance(spec, dict) or len(spec) != 1:
            raise ValueError(f"captioner must be one operator, {{name: {{argument: value}}}}; found {spec!r}")
        [(self.name, arguments)] = spec.items()
        self.arguments = dict(arguments or {})
        self.seed = seed
        self.folder = Path(folder) if folder else None
        self.writer = writer
        self.kind = kind
        [self.operator] = load_ops([{self.name: dict(self.arguments)}])
        self.batch_size = self.operator.batch_size
        self.draws_at_random = get_declarations(self.operator).draws_at_random
        # captions come from a server singly, in any order, and at a cost
        self.is_server = isinstance(self.operator, ServerCaptioner)

    def caption(self, images: list[str]) -> tuple[list[Captions], int]:
        """Return the captions of each image, and the number of images without captions from earlier."""
        return self._get(self._make_keys([compute_image_digest(image) for image in images]), images)

    def ask(self, images: list[str], questions: list[str]) -> list[Captions]:
        """Return a server's answer to each question about an image; equal pairs are asked once."""
        keys = [
            f"{compute_image_digest(image)}-{hashlib.sha256(question.encode()).hexdigest()[:32]}"
            for image, question in zip(images, questions, strict=True)
        ]
        return self._get(keys, images, dict(zip(keys, questions, strict=True)))[0]

    def check_ready(self) -> None:
        """Check that the captioner's server answers, unless there are captions of it already."""
        if self.is_server and not (self.folder and has_captions(self.folder, self.compute_fingerprint())):
            self.operator.connect()

    def close(self) -> None:
        """Close this run's file of captions."""
        if "_store" in self.__dict__:
            self.__dict__.pop("_store").close()

    @cached_property
    def _store(self) -> CaptionStore:
        """Captions on disk, opened by the process that captions, at its first caption."""
        fingerprint = self.compute_fingerprint() if self.folder else ""
        return CaptionStore(self.folder, fingerprint, self.writer, alone=self.is_server)

    def _get(
        self, keys: list[str], images: list[str], questions: dict[str, str] | None = None
    ) -> tuple[list[Captions], int]:
        """Return the captions by key, and the number of new ones; questions are by the same keys."""
        stored = self._store.get(keys)
        # an image without captions is captioned again with all images of its batch
        missing_batches = {_find_batch(key) for key in keys if key not in stored}
        missing = {key: image for key, image in zip(keys, images, strict=True) if _find_batch(key) in missing_batches}
        new_count = sum(key in missing for key in keys)
        progress = Progress(f"{self.kind} by {self.name}", len(missing))

        def keep(captions: dict[str, Captions]) -> None:
            self._store.add(captions)
            stored.update(captions)
            progress.add(len(captions))

        missing_keys = list(missing)
        if self.is_server and missing_keys:
            self.operator.connect(self._store.earlier_counts)
            self.operator.request_captions(
                list(missing.values()),
                lambda index, captions: keep({missing_keys[index]: captions}),
                questions and [questions[key] for key in missing_keys],
            )
        elif missing_keys:
            for batch in self._split_batches(missing_keys):
                keep(dict(zip(batch, self([missing[key] for key in batch], batch), strict=True)))
        return [stored.get(key, NO_ANSWER) for key in keys], new_count

    def _make_keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys under which captions are kept, from the SHA-256 of the images.

        A key is the SHA-256 itself, or `<image>:<batch>` if the captioner draws at random.
        """
        if not self.draws_at_random:
            return list(hashes)
        batches = self._split_batches(list(dict.fromkeys(hashes)))
        keys = {image: f"{image}:{_compute_digest(','.join(batch)).hex()}" for batch in batches for image in batch}
        return [keys[image] for image in hashes]

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
            from dj2mgm.compute import set_seed  # imports torch, which a captioner that draws at random needs anyway

            set_seed(int.from_bytes(_compute_digest(f"{self.seed}:{','.join(keys)}")[:4], "big"))
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
        settings = list_argument_defaults(type(self.operator)) | self.arguments
        return {key: _normalize_number(getattr(self.operator, key, value), value) for key, value in settings.items()}


class StoredAnswersOperator(Declarations, interface=True):
    """An operator that asks a model, if its arguments name one, and keeps the answers on disk."""

    _captioner: Captioner | None = None

    @property
    def budget(self) -> str | None:
        """Fingerprint of a captioner on a server, which stands for one common budget; None for other captioners."""
        return self._captioner.compute_fingerprint() if self._captioner and self._captioner.is_server else None

    def check_ready(self) -> None:
        if self._captioner:
            self._captioner.check_ready()

    def close(self) -> None:
        if self._captioner:
            self._captioner.close()

    def _take_server_counts(self) -> dict:
        """Return the counts of the captioner's server since the last call, by their key in a report."""
        operator = self._captioner and self._captioner.operator
        server = take_report(operator) if operator else {}
        return {get_declarations(operator).report_key: server} if server else {}


def list_argument_defaults(operator: type) -> dict[str, object]:
    """Return the defaults of an operator's own arguments by name."""
    parameters = signature(operator.__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def warn_of_unusable(sentence: str, unusable: dict[str, int], total: int, consequence: str) -> None:
    """Warn if more than a tenth of a model's answers cannot be used: `<count> of <total> <sentence> (<reasons>); …`."""
    count = sum(unusable.values())
    if count > TOO_MANY_UNUSABLE * total:
        logger.warning(f"{count} of {total} {sentence} ({format_reasons(unusable)}); {consequence}")


def format_reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))


def find_text_problem(text: str, max_length: int) -> str | None:
    """Return why a model's text cannot be used (`empty`, `too long`, `control token`, …), or None."""
    if not text:
        return "empty"
    if len(text) > max_length:
        return "too long"
    if find_control_token(text, get_special_tokens().values()) or TURN_MARKER.search(text):
        return CONTROL_TOKEN
    if UNUSABLE.search(text):
        return "control character"
    return "markup" if MARKUP.search(text) else None


def cut_object(text: str) -> str:
    """Return the JSON object in a model's answer: many models write a sentence or a fence around it."""
    return text[text.find("{") : text.rfind("}") + 1]


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


def _compute_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
