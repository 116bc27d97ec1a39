"""Any captioning operator of Data-Juicer as a function from images to captions, which are kept on disk.

No image is captioned twice, and no answer of a server is paid for twice. The operator always gets batches of the same
size (the last image is repeated), because matrix products of another shape round differently. If it draws at random,
the random numbers depend only on the seed and the images of the batch. Batches therefore do not depend on which
captions are already known.

A model's texts are untrusted input (`find_text_problem`).

`<folder>/<captioner's fingerprint>/<writer>.jsonl` has one line per image:

    {"image": "<sha256 of the file>", "candidates": ["a red circle"], "log_likelihoods": [-1.2]}

A captioner on a server may add `problem` and `tokens`. If a captioner draws at random, `image` is "<sha256>:<batch>",
since its captions depend on all images of the batch. For an answer to a question about the image, it is "<sha256 of the
file>-<SHA-256 of the question, 32 digits>". A store reads all files of its fingerprint and appends to its own file
only, so that simultaneous runs share captions. The files may come from someone else, together with results, so their
lines are checked and links are not followed.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from inspect import signature
from itertools import count
from pathlib import Path
from typing import IO, Annotated

from data_juicer.ops import load_ops
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import SpecialTokens, get_special_tokens
from loguru import logger
from pydantic import BaseModel, ConfigDict, Field

from dj2mgm.cli.messages import Progress, note
from dj2mgm.data.formats import build_dj_text
from dj2mgm.errors import InputError
from dj2mgm.settings.string_formats import MAX_TOKENS, find_control_token
from dj2mgm.storage.files import compute_sha256, open_plain
from dj2mgm.storage.image_files import compute_image_digest
from dj2mgm.storage.streaming import DiskMap

from .declarations import (
    Captions,
    Declarations,
    ServerCaptioner,
    argument,
    find_model_files,
    get_declarations,
    take_report,
)

CANDIDATES_KEY = "caption_candidates"
LOG_LIKELIHOODS = "caption_log_likelihoods"
NO_ANSWER = Captions([""], None, "no answer")
ENOUGH_TO_JUDGE = 5  # rows; one or two without a usable text do not prove that a model is broken
TOO_MANY_UNUSABLE = 0.1
MAX_LINE_BYTES = 2**24
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


class _Row(BaseModel):
    """A line of a store."""

    model_config = ConfigDict(strict=True)

    image: str
    candidates: Annotated[list[str], Field(min_length=1)]
    log_likelihoods: list[float] | None
    problem: Annotated[str, Field(pattern="^[a-z ]{1,50}$")] | None = None
    tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None


def has_captions(folder: Path, fingerprint: str) -> bool:
    return any(path.is_file() and path.stat().st_size for path in (folder / fingerprint).glob("*.jsonl"))


class CaptionStore:
    """The captions of one captioner by the image's key, which is the image's SHA-256 or begins with it."""

    def __init__(self, folder: Path | None, fingerprint: str, writer: str, alone: bool = False):
        """Open this process's file and read all files of the captioner.

        Args:
            folder: folder of all captioners' captions (None: captions are kept in this process only).
            writer: name of the file to which new captions are appended. Processes that share a name get one file each.
            alone: whether other processes with the same captioner wait until this store is closed, so that no caption
                is paid for twice.
        """
        self.earlier_counts = (0, 0)  # images, and tokens that their captions have cost, in all files
        self._lines = DiskMap()
        self._file = self._turn = None
        if folder is not None:
            own_folder = folder / fingerprint
            own_folder.mkdir(parents=True, exist_ok=True)
            self._turn = _take_turn(own_folder / "turn") if alone else None
            self._file = _open_own_file(own_folder, writer)
            for path in sorted(own_folder.glob("*.jsonl")):
                self._lines.fill(self._count(_read(path)))

    def _count(self, rows: Iterable[tuple[str, Captions]]) -> Iterator[tuple[str, str]]:
        for image, captions in rows:
            count, tokens = self.earlier_counts
            self.earlier_counts = count + 1, tokens + (captions.tokens or 0)
            yield image, _format_line(image, captions)

    def get(self, images: Iterable[str]) -> dict[str, Captions]:
        """Return the captions of the images that have any."""
        lines = {image: self._lines.get(image) for image in images}
        return {image: _read_captions(json.loads(line)) for image, line in lines.items() if line is not None}

    def add(self, batch: dict[str, Captions]) -> None:
        """Write a batch to disk; it is complete there when this returns."""
        lines = {image: _format_line(image, captions) for image, captions in batch.items()}
        if self._file:
            self._file.write("".join(lines.values()).encode())
            self._file.flush()
        self._lines.fill(lines.items())

    def close(self) -> None:
        for file in filter(None, (self._file, self._turn)):
            file.close()


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


class StoredAnswersOperator(Declarations):
    """An operator that asks a model, if its arguments name one, and keeps the answers on disk."""

    _captioner: Captioner | None = None
    captions_folder: str | None = argument(None, "folder in which answers are kept for other runs (None: nowhere)")
    # runs at the same time need different names
    writer: str = argument("captions", "name of this run's file in that folder")

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


def _take_turn(path: Path) -> IO[bytes]:
    """Open and lock a file that one process has at a time; the lock ends with the process at the latest."""
    file = _open_regular(path)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        note(f"waiting for another run that requests the same captions (lock file {path})")
        fcntl.lockf(file, fcntl.LOCK_EX)
    return file


def _open_own_file(folder: Path, writer: str) -> IO[bytes]:
    """Open and lock `<writer>.jsonl`, or a numbered file if another process has locked it; cut off a torn last line."""
    for number in count(1):
        path = folder / f"{writer}{f'-{number}' if number > 1 else ''}.jsonl"
        file = _open_regular(path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        _cut_torn_line(file)
        return file


def _open_regular(path: Path) -> IO[bytes]:
    """Open a regular file for reading and appending, and create it if there is none; links are not followed."""
    if path.is_symlink() or path.exists() and not path.is_file():
        raise InputError(f"{path} is a link, folder or pipe. Delete it, or put a copy of the file there")
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o666), "ab+")


def _format_line(image: str, captions: Captions) -> str:
    row = {"image": image, "candidates": captions.candidates, "log_likelihoods": captions.log_likelihoods}
    row |= {key: value for key in ("problem", "tokens") if (value := getattr(captions, key)) is not None}
    return json.dumps(row, ensure_ascii=False) + "\n"


def _read_captions(row: dict) -> Captions:
    return Captions(row["candidates"], row["log_likelihoods"], row.get("problem"), row.get("tokens"))


def _cut_torn_line(file: IO[bytes]) -> None:
    """Cut off an incomplete last line, which a killed writer may have left."""
    file.seek(0)
    file.truncate(sum(len(line) for line in _read_lines(file) if line.endswith(b"\n")))


def _read_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines; a line of more than `MAX_LINE_BYTES` bytes, which no store writes, is the last one."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            return


def _read(path: Path) -> Iterator[tuple[str, Captions]]:
    with open_plain(path, path.parent, None) as file:
        for number, line in enumerate(_read_lines(file), start=1):
            if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                return  # another process is writing this line
            try:
                row = _Row.model_validate_json(line)
                if row.log_likelihoods is not None and len(row.log_likelihoods) != len(row.candidates):
                    raise ValueError("candidates and log-likelihoods of different numbers")
            except ValueError:
                raise InputError(f"{path}, line {number}: expected a row of captions. Delete the file") from None
            yield row.image, _read_captions(row.model_dump())
