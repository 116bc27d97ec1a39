"""Downloads of models and datasets from the Hugging Face hub; every file is compared with the hub's checksum.

Only files with known names are downloaded: weights as safetensors, configurations and tokenizers of models, rows and
images of datasets. Code is never downloaded. Pickled weights are downloaded only for a conversion to safetensors.
"""

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import httpx2
from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from dj2mgm.cli.messages import Progress
from dj2mgm.dataset_resolution.experiment_dataset import find_hub_dataset
from dj2mgm.errors import InputError, pluralize
from dj2mgm.model_files.missing_models import ModelDownload, is_complete
from dj2mgm.model_files.model_folders import COMMIT, MODEL_SUFFIXES, find_cached_snapshot, is_folder_path
from dj2mgm.servers.hub import (
    BUSY_STATUS_CODES,
    MAX_BYTES,
    MAX_MESSAGE_LENGTH,
    SHOWN_CHARACTERS,
    Request,
    clean,
    hub_errors,
    make_quiet_api,
)
from dj2mgm.settings.config_files import list_config_names
from dj2mgm.settings.string_formats import has_format
from dj2mgm.storage.files import BLOBS, SNAPSHOTS, can_be_path, replace_file, write_text
from dj2mgm.storage.image_files import IMAGE_SUFFIXES

CONFIGURATION_PATTERNS = tuple(f"*{suffix}" for suffix in MODEL_SUFFIXES if suffix != ".safetensors")
SAFETENSORS_PATTERNS = ("model*.safetensors",)
# patterns of weight files by the conversion that they need, for repositories without usable safetensors
PICKLED = {
    "safetensors": (*SAFETENSORS_PATTERNS, "pytorch_model*.bin"),
    "convnext": ("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
}
ROW_FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.tsv", "*.tar", "*.txt", "readme.md")
IMAGE_FILES = tuple(f"*{suffix}" for suffix in IMAGE_SUFFIXES)
RESUME_REMEDY = "run the same command again, which keeps complete files"
DISK_RESERVE_BYTES = 2**30  # bytes that stay free on the disk
SHA256 = re.compile("[0-9a-f]{64}")
MAX_FILE_BYTES = 2**50
CONNECTIONS = 8
ATTEMPTS = 5  # attempts in a row at a file that bring little
MIN_ATTEMPT_BYTES = 2**20  # bytes of an attempt that brings enough


@dataclass(frozen=True)
class RepositoryFile:
    """A file on the hub.

    Attributes:
        hub_id: id of the repository.
        kind: `model` or `dataset`.
        revision: commit.
        file: path and size, which the description of the repository states.
    """

    hub_id: str
    kind: str
    revision: str
    file: RepoSibling

    def read(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of a range, which ends with the file. A broken connection is continued.

        Raises:
            ValueError: the server sends more bytes than requested, too slowly, or other bytes.
        """
        end = self.file.size if end is None else min(end, self.file.size)
        failed = 0
        while start < end:
            begin = start
            try:
                for part in self._read_once(start, end):
                    yield part
                    start += len(part)
            except httpx2.TransportError:
                failed = failed + 1 if start - begin < MIN_ATTEMPT_BYTES else 1
                if failed == ATTEMPTS:
                    raise
            else:
                if start < end:
                    raise ValueError(f"{self.file.rfilename} is cut off")

    def _read_once(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of one answer to a request for a range."""
        url = hf_hub_url(self.hub_id, self.file.rfilename, repo_type=self.kind, revision=self.revision)
        headers = build_hf_headers(token=get_token()) | {"Range": f"bytes={start}-{end - 1}"}
        with http_stream_backoff(
            "GET",
            url,
            headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            retry_on_exceptions=(),
            retry_on_status_codes=BUSY_STATUS_CODES,
            extensions={MAX_BYTES: end - start},
        ) as answer:
            hf_raise_for_status(answer)
            if start and answer.status_code != 206:
                raise ValueError(f"the server does not send parts of {self.file.rfilename}")
            yield from answer.iter_raw()


@dataclass(frozen=True)
class HubSource:
    """A repository to download.

    Attributes:
        hub_id: id of the repository.
        kind: `model` or `dataset`.
        patterns: patterns of the names of its files, without weights.
        weights: patterns of the names of its weights; the first pattern that matches a file is used.
        folder: folder of the downloaded files; None for the hub's cache.
        is_selection: whether `patterns` select some files of a dataset, not all of known kinds.
        license: license for messages, if the repository's card states none.
        copied_to: folder of the converted copy; None if nothing is converted.
    """

    hub_id: str
    kind: str
    patterns: tuple[str, ...]
    weights: tuple[str, ...] = ()
    folder: str | None = None
    is_selection: bool = False
    license: str = "not stated"
    copied_to: str | None = None

    @property
    def request(self) -> Request:
        """Request with the messages for its failures."""
        page = f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.hub_id}"
        return Request(
            self.hub_id,
            "downloaded",
            RESUME_REMEDY,
            {
                401: f"the hub shows no {self.kind} {self.hub_id} to you; correct the name or, if it is private or "
                "gated, set a valid token as HF_TOKEN",
                403: f"{self.hub_id} is gated; accept its terms at {page}, and set your token as HF_TOKEN",
                404: f"the hub has no {self.kind} {self.hub_id}; correct the name or, if it is private, set HF_TOKEN",
            },
        )


@dataclass(frozen=True)
class Repository:
    """A repository as the hub describes it, with the files to download.

    Attributes:
        revision: commit.
        license: license that its card states.
        gated: whether only users who have accepted its terms can download it.
    """

    source: HubSource
    revision: str
    files: tuple[RepoSibling, ...]
    license: str
    gated: bool

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size or 0 for file in self.files)

    @property
    def folder(self) -> Path:
        """Folder of the downloaded files."""
        return Path(self.source.folder) if self.source.folder else self._cache_folder / SNAPSHOTS / self.revision

    @property
    def _cache_folder(self) -> Path:
        return Path(constants.HF_HUB_CACHE, f"{self.source.kind}s--{self.source.hub_id.replace('/', '--')}")

    def describe(self) -> str:
        """Return a line about license, size and target folder."""
        files = f"{pluralize(len(self.files), 'file')}"
        return (
            f"{self.source.kind} {self.source.hub_id}: license {self.license}{', gated' if self.gated else ''}, "
            f"{self.size / 1e9:.2f} GB in {files}, to {self.source.folder or constants.HF_HUB_CACHE}"
            + (f", and as a copy in the workflow's form to {self.source.copied_to}" if self.source.copied_to else "")
        )


def build_model_source(download: ModelDownload) -> HubSource:
    """Return the repository of a model or of a part of one."""
    weights = PICKLED[download.conversion] if download.conversion else SAFETENSORS_PATTERNS
    return HubSource(download.hub_id, "model", CONFIGURATION_PATTERNS, weights, download.folder)


def build_dataset_source(dataset: str) -> HubSource | None:
    """Return the repository of a dataset, or None if the dataset is on this machine."""
    if dataset in list_config_names("datasets") or os.path.exists(dataset) or is_folder_path(dataset):
        return None
    if find_hub_dataset(dataset):  # see known_data.py
        return None
    if not has_format("repository", dataset) or find_cached_snapshot(dataset, "datasets"):
        return None
    return HubSource(dataset, "dataset", (*ROW_FILES, *IMAGE_FILES))


def look_up(source: HubSource) -> Repository:
    """Ask the hub about a repository.

    Raises:
        InputError: the hub does not show it, or it has no files of a known kind.
    """
    with hub_errors(source.request):
        info = make_quiet_api().repo_info(source.hub_id, repo_type=source.kind, files_metadata=True)
        files = tuple(_select_files(source, info.siblings or ()))
        card = info.card_data
        license_name = clean(str((card and card.get("license")) or source.license))[:MAX_MESSAGE_LENGTH]
        _check_answer(info.sha, files)
        repository = Repository(source, str(info.sha), files, license_name, bool(info.gated))
    if not files:
        needed = "weights as safetensors" if source.weights else "files of rows or images"
        if source.is_selection:
            raise InputError(f"{source.hub_id} has no files {' or '.join(source.patterns)}; correct the subset's name")
        raise InputError(f"{source.hub_id} has no {needed}; choose another {source.kind}")
    return repository


def _select_files(source: HubSource, files: Iterable[RepoSibling]) -> list[RepoSibling]:
    """Return the files to download. Files in subfolders of a model are left out; without weights, there are none."""
    files = [file for file in files if not _is_hidden(file)]
    if source.is_selection:
        return [file for file in files if _matches(file.rfilename, source.patterns)]
    if source.kind == "dataset":
        return [file for file in files if _matches(file.rfilename.lower(), source.patterns)]
    files = [file for file in files if "/" not in file.rfilename]
    for pattern in source.weights:
        if weights := [file for file in files if fnmatchcase(file.rfilename, pattern)]:
            return [*(file for file in files if _matches(file.rfilename, source.patterns)), *weights]
    return []


def _check_answer(commit: object, files: Iterable[RepoSibling]) -> None:
    """Check the values of the hub's answer that become paths, sums and checksums.

    Raises:
        ValueError: a value is not valid. The server may not be the hub, so its answer is untrusted.
    """
    if not COMMIT.fullmatch(str(commit)):
        raise ValueError(f"{commit!r} is not a commit")
    for file in files:
        if not {"", ".", ".."}.isdisjoint(file.rfilename.split("/")) or not can_be_path(file.rfilename):
            raise ValueError(f"{file.rfilename[:SHOWN_CHARACTERS]!r} is not a file's path in a repository")
        if not isinstance(file.size, int) or not 0 <= file.size <= MAX_FILE_BYTES:
            raise ValueError(f"{file.rfilename} has no valid size")
        if not (SHA256 if file.lfs else COMMIT).fullmatch(str(_read_checksum(file))):
            raise ValueError(f"{file.rfilename} has no checksum")


def _is_hidden(file: RepoSibling) -> bool:
    return any(part.startswith(".") for part in file.rfilename.split("/"))


def _matches(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_room(repositories: Iterable[Repository]) -> None:
    """Raise InputError if a disk has no room for the repositories on it."""
    needed: list[tuple[str | Path, int]] = []
    for repository in repositories:
        needed.append((repository.source.folder or constants.HF_HUB_CACHE, repository.size))
        if repository.source.copied_to:
            needed.append((repository.source.copied_to, repository.size))
    check_space(needed)


def check_space(needed: Iterable[tuple[str | Path, int]]) -> None:
    """Raise InputError if a disk has no room for the bytes that its folders need."""
    sizes: dict[int, int] = {}
    existing_folders: dict[int, Path] = {}
    for folder, size in needed:
        existing_folder = _find_existing(Path(folder))
        device = existing_folder.stat().st_dev
        existing_folders[device] = existing_folder
        sizes[device] = sizes.get(device, 0) + size
    for device, size in sizes.items():
        existing_folder = existing_folders[device]
        free = shutil.disk_usage(existing_folder).free
        if size + DISK_RESERVE_BYTES > free:
            raise InputError(
                f"{existing_folder} has {free / 1e9:.1f} GB free, and the downloads need {size / 1e9:.1f} GB and 1 GB "
                "to spare; free space, or set HF_HOME to a folder on another disk"
            )


def _find_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def download(repository: Repository) -> Path:
    """Download the files of a repository, and return their folder. Complete files are not downloaded again.

    In the hub's cache, a file is a link to its content, which has the name of its checksum. The names are those of the
    description that `look_up` has checked; headers of the server's answers are not used.

    Raises:
        InputError: the hub cannot be reached, or a file differs from the hub's checksum.
    """
    meter = _Meter(repository.size)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for _ in pool.map(partial(_download_file, repository, meter), repository.files):
            pass
    if repository.source.folder is None:
        with hub_errors(repository.source.request):  # the file by which the cache finds the branch
            write_text(repository.folder.parents[1] / "refs/main", repository.revision)
    return repository.folder


class _Meter:
    """Progress of several downloads in threads, in megabytes."""

    def __init__(self, total_bytes: int):
        self._progress = Progress("MB", total_bytes // 10**6)
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self._bytes += number
            if megabytes := self._bytes // 10**6 - self._progress.done:
                self._progress.add(megabytes)


def _download_file(repository: Repository, meter: _Meter, file: RepoSibling) -> None:
    """Download a file, unless it is whole, under a temporary name, and move it to its place once it is verified."""
    source, path = repository.source, repository.folder / file.rfilename
    is_cached = source.folder is None
    content = repository.folder.parents[1] / BLOBS / _read_checksum(file) if is_cached else path
    with hub_errors(source.request):
        if _is_whole(path, file) or _is_whole(content, file):
            meter.add(file.size)
        else:
            digest, on_hub = _start_digest(file), RepositoryFile(source.hub_id, source.kind, repository.revision, file)
            with replace_file(content, "wb") as target:
                for part in on_hub.read():
                    target.write(part)
                    digest.update(part)
                    meter.add(len(part))
                if digest.hexdigest() != _read_checksum(file):
                    raise InputError(
                        f"{source.hub_id}: {file.rfilename} differs from the hub's checksum, and was deleted; "
                        f"{RESUME_REMEDY}"
                    )
        if is_cached and not _is_whole(path, file):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(os.path.relpath(content, path.parent))


def _is_whole(path: Path, file: RepoSibling) -> bool:
    """Return whether a file is there, and has the content of the file on the hub."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    with open(path, "rb") as content:
        return hashlib.file_digest(content, lambda: _start_digest(file)).hexdigest() == _read_checksum(file)


def _read_checksum(file: RepoSibling) -> str:
    return file.lfs.sha256 if file.lfs else file.blob_id


def _start_digest(file: RepoSibling) -> "hashlib._Hash":
    """Return the digest of a file's content: SHA-256, or the one by which Git names it."""
    return hashlib.sha256() if file.lfs else hashlib.sha1(b"blob %d\0" % file.size)


def convert(download: ModelDownload) -> None:
    """Convert downloaded weights if the model needs another format, and they are not converted yet."""
    if not download.conversion or is_complete(download.converted):
        return
    from dj2mgm.features.fetch import conversion  # imports torch, which takes seconds, and few models need it

    convert_weights = {
        "safetensors": conversion.convert_to_safetensors,
        "convnext": conversion.convert_openclip_convnext,
    }
    convert_weights[download.conversion](Path(download.folder), Path(download.converted))
