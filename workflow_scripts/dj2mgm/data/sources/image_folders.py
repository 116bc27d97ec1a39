"""Readers of images next to their captions: folders of files, and WebDataset's tar shards.

In a folder, the caption is in a text file of the image's name. In a shard, which is read in place, files with the same
base name form a sample. Its caption is in `<key>.txt`, or in `<key>.json` under a usual column name, and a conversation
is in the json.
"""

import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path, PurePosixPath

from dj2mgm.data.formats import build_conversation
from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.data.sources.source import Source, build_conversation_row, find_column, read_cell
from dj2mgm.dataset_resolution.row_media import OTHER_SUFFIXES, find_unread_media, read_row_media
from dj2mgm.errors import InputError, quote_value
from dj2mgm.storage.files import check_no_null
from dj2mgm.storage.image_files import IMAGE_SUFFIXES, Member, read_members
from dj2mgm.storage.streaming import MAX_ROW, DiskMap, check_object, make_row_size_error, open_input, parse_json


def read_folder(source: Source) -> Iterator[dict]:
    stems: dict[Path, Path] = {}
    for image in source.files:
        relative = image.relative_to(source.images)
        stem = relative.with_suffix("")
        if stem in stems:
            raise InputError(f"{image} and {stems[stem]} share a caption file; rename one")
        stems[stem] = image
        caption_file = image.with_suffix(".txt")
        if not caption_file.is_file():
            source.uncaptioned.add(str(image))
            if source.keep_uncaptioned:
                yield build_conversation(str(stem), str(relative), "", "")
            continue
        yield build_conversation(str(stem), str(relative), "", _read_caption_file(source, caption_file))


def _read_caption_file(source: Source, file: Path) -> str:
    """Return the caption in a UTF-8 file, which must be inside the image folder and have at most MAX_ROW bytes."""
    try:
        locate_image(source.images, str(file.relative_to(source.images)))
    except BadImageError as error:
        if error.reason == "outside":
            raise InputError(
                f"{file} is a link to a file outside of {source.images}; replace it by a copy of the file"
            ) from None
    try:
        with open_input(file) as text:
            if (size := file.stat().st_size) > MAX_ROW:
                raise make_row_size_error(str(file), size)
            return check_no_null(text.read().strip(), file)
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 ({error}); save the file as UTF-8") from None


COMPRESSION_COMMANDS = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"\x28\xb5\x2f\xfd": "unzstd"}
KEEP_TOGETHER = "the files of a sample must be neighbors in the archive; write it again (tar --sort=name does)"


def read_webdataset(source: Source) -> Iterator[dict]:
    """Yield a row per sample of all shards; a key that occurs in two places raises InputError."""
    shards = DiskMap()  # shard of each key
    for shard in source.files:
        try:
            for key, sample in groupby(_read_parts(source, shard), key=_get_key):
                if (first := shards.get(key)) == str(shard):
                    raise InputError(f"{shard}: the files of key {key!r} are in two places; {KEEP_TOGETHER}")
                if first is not None:
                    raise InputError(f"{shard}: key {key!r} is already used in {first}; rename the sample")
                shards.fill([(key, str(shard))])
                yield from _read_sample(source, shard, key, list(sample))
        except UnicodeEncodeError as error:
            raise InputError(
                f"{shard}: the name {quote_value(error.object)} is not UTF-8; write the archive again with UTF-8 names"
            ) from None
        except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError) as error:
            if program := _find_decompressor(shard):
                raise InputError(
                    f"{shard} is compressed, so images cannot be read in place; write a plain tar file: "
                    f"{program} < {shard.name} > plain/{shard.name}"
                ) from None
            raise InputError(f"{shard} is damaged or not a plain tar file ({error}); download it again") from None


def _read_parts(source: Source, shard: Path) -> Iterator[Member]:
    """Yield the files of samples; names without a dot or with a leading dot (`._a.jpg`) belong to no sample."""
    for member in read_members(shard):
        if member.name.rpartition("/")[2].find(".") > 0:
            yield member
        else:
            source.unread.add(f"{shard}/{member.name}")


def _find_decompressor(shard: Path) -> str | None:
    with open_input(shard, "rb") as file:
        begin = file.read(6)
    return next((program for magic, program in COMPRESSION_COMMANDS.items() if begin.startswith(magic)), None)


def _get_key(member: Member) -> str:
    """Return the name up to the first dot after the last slash.

    Raises:
        UnicodeEncodeError: the name is not UTF-8.
        InputError: the name has control characters, such as a line break, which no path in results/ has.
    """
    member.name.encode()
    if re.search(r"[\x00-\x1f\x7f]", member.name):
        raise InputError(
            f"{member.archive}: the name {quote_value(member.name)} has line breaks or other control characters; write "
            "the archive again with other names"
        )
    folder, slash, name = member.name.rpartition("/")
    return folder + slash + name.partition(".")[0]


def _read_sample(source: Source, shard: Path, key: str, sample: list[Member]) -> Iterator[dict]:
    """Yield a conversation or a captioned image, if there is one; count images without captions, and other files."""
    location = f"{shard}, key {quote_value(key)}"
    parts = {member.name[len(key) :].lower(): member for member in sample}
    if len(parts) < len(sample):
        raise InputError(f"{location}: two of its files have the same suffix; rename one")
    base = shard.relative_to(source.images)
    images = [
        f"{base}/{member.offset}+{member.size}/{PurePosixPath(member.name).name}"
        for suffix, member in parts.items()
        if suffix.endswith(IMAGE_SUFFIXES)
    ]
    others = [suffix for suffix in parts if not suffix.endswith(IMAGE_SUFFIXES) and suffix not in (".txt", ".json")]
    for suffix in others:
        source.unread.add(f"{shard}/{parts[suffix].name}")
    metadata = _read_json(parts[".json"], location) if ".json" in parts else {}
    turns_key = find_column(shard, list(metadata), "conversations", source, needed=False)
    if turns_key:
        media = read_row_media(metadata | {"conversations": metadata[turns_key]}, stored=images)
        if other := next((suffix for suffix in others if suffix.endswith(OTHER_SUFFIXES)), ""):
            media = replace(media, unread=f"its file {other} is not read")
        yield build_conversation_row(key, media, metadata[turns_key], location)
        return
    if len(images) != 1:
        raise InputError(
            f"{location}: it has {len(images)} images, but a caption belongs to one (the suffixes are "
            f"{', '.join(parts)}); {KEEP_TOGETHER}"
        )
    question_key = find_column(shard, list(metadata), "question", source, needed=False)
    prompt = read_cell(metadata[question_key], question_key, location) if question_key else ""
    text_key = None
    if ".txt" in parts and not source.columns.text:
        caption = _read_member_text(parts[".txt"], location)
    elif metadata:
        text_key = find_column(Path(location), list(metadata), "text", source)
        caption = read_cell(metadata[text_key], text_key, location)
    else:
        source.uncaptioned.add(f"{shard}/{images[0].rpartition('/')[2]}")
        if not source.keep_uncaptioned:
            return
        caption = ""
    unread = find_unread_media(metadata, images, {text_key, question_key}, stored=True)
    yield build_conversation(key, images[0], prompt, caption, unread)


def _read_member_text(member: Member, location: str) -> str:
    if member.size > MAX_ROW:
        raise make_row_size_error(f"{location}, {member.name}", member.size)
    try:
        return check_no_null(member.read().decode("utf-8-sig").strip(), f"{location}, {member.name}")
    except UnicodeDecodeError as error:
        raise InputError(f"{location}: {member.name} is not UTF-8 ({error}); write it again") from None


def _read_json(member: Member, location: str) -> dict:
    try:
        return check_object(parse_json(_read_member_text(member, location)), location)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{location}: {member.name} is not valid JSON ({error}); write it again") from None
