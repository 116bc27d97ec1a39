"""Reader of a folder of images, each with its caption in a text file of the same name; others are counted."""

from collections.abc import Iterator
from pathlib import Path

from dj2mgm.data.formats import build_conversation
from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.data.json_rows import MAX_ROW, make_row_size_error, open_input
from dj2mgm.data.sources.source import Source
from dj2mgm.errors import InputError
from dj2mgm.storage.plain_files import check_no_null


def read(source: Source) -> Iterator[dict]:
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
        yield build_conversation(str(stem), str(relative), "", _read_text(source, caption_file))


def _read_text(source: Source, file: Path) -> str:
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
