"""Writers of exported rows in formats of other tools, into a folder of their own, and the card of an export."""

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from dj2mgm.data.formats import build_conversation, build_dj_text
from dj2mgm.data.images import BadImageError, detect_suffix
from dj2mgm.errors import InputError, quote_value
from dj2mgm.features.publish.publish_settings import ExportSettings, format_inline_code
from dj2mgm.records import RecipeSummary
from dj2mgm.storage.files import write_json_list, write_jsonl
from dj2mgm.storage.image_files import read_file, read_file_size

SHARD_BYTES = 500 * 10**6
ROW_GROUP_ROWS = 100  # the size of Hugging Face datasets for images: small, so displaying one row decodes few others
TEXT_FIELDS = ("id", "caption", "question", "original_caption", "source")
LOADING_CODE = {
    "parquet": "from datasets import load_dataset\n\nrows = load_dataset(FOLDER, split='train')",
    "webdataset": "import webdataset\n\nrows = webdataset.WebDataset('FOLDER/{00000..NNNNN}.tar').decode('pil')",
    "llava": "# a LLaVA file: data.json, with image paths relative to this folder",
    "dj": "# a Data-Juicer file: data.jsonl, with image paths relative to this folder",
}
COLUMNS = {
    "parquet": "Columns",
    "webdataset": "Keys of a sample's `.json`",
    "llava": "Keys of a row's `about`",
    "dj": "Keys of a row's `about`",
}
SIZE_CATEGORIES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
)


@dataclass(frozen=True)
class Sample:
    """Image, caption and scores of an exported row."""

    id: str
    image: Path  # file, or member of a tar file
    caption: str
    question: str
    original_caption: str  # empty unless a captioner wrote a new caption
    source: str  # empty for a dataset of one source
    scores: dict[str, float | None]  # by name of the statistic; all samples have the same names

    def build_metadata(self) -> dict:
        return {name: getattr(self, name) for name in TEXT_FIELDS} | self.scores


def write_parquet(samples: Iterable[Sample], folder: Path) -> int:
    """Write Hugging Face's layout, `data/train-00000.parquet`, …, with images as bytes in datasets' Image type."""
    (folder / "data").mkdir()
    count = bytes_left = 0
    with ExitStack() as shard:
        for number, rows in enumerate(_group_rows(samples)):
            size = sum(read_file_size(row.image) for row in rows)
            if bytes_left < size:
                shard.close()
                schema, bytes_left = _build_schema(rows[0]), SHARD_BYTES
                file = folder / f"data/train-{number:05d}.parquet"
                writer = shard.enter_context(pq.ParquetWriter(file, schema))
            columns = [row.build_metadata() | {"image": _build_image(row)} for row in rows]
            writer.write_table(pa.Table.from_pylist(columns, schema), row_group_size=ROW_GROUP_ROWS)
            count, bytes_left = count + len(rows), bytes_left - size
    return count


def _build_schema(sample: Sample) -> pa.Schema:
    fields = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}
    fields |= dict.fromkeys(TEXT_FIELDS, pa.string()) | dict.fromkeys(sample.scores, pa.float64())
    features = {name: {"dtype": str(kind), "_type": "Value"} for name, kind in fields.items() if name != "image"}
    info = {"info": {"features": {"image": {"_type": "Image"}} | features}}
    return pa.schema(fields, metadata={"huggingface": json.dumps(info)})


def _build_image(sample: Sample) -> dict:
    content, suffix = _read_image(sample)
    return {"bytes": content, "path": f"{sample.image.stem}{suffix}"}


def _read_image(sample: Sample) -> tuple[bytes, str]:
    """Return the bytes of a sample's image, and the suffix of their format."""
    try:
        content = read_file(sample.image)
        return content, detect_suffix(content)
    except (BadImageError, OSError) as error:
        raise InputError(
            f"row {quote_value(sample.id)}: {sample.image} cannot be exported ({error}); replace the image, or take "
            "the row out of the dataset"
        ) from None


def write_webdataset(samples: Iterable[Sample], folder: Path) -> int:
    """Write tar shards `00000.tar`, …; a sample is an image, its caption as `.txt`, and its metadata as `.json`."""
    count, tar = 0, None
    with ExitStack() as shard:
        for count, sample in enumerate(samples, start=1):
            if tar is None or tar.offset > SHARD_BYTES:
                shard.close()
                number = len(list(folder.iterdir()))
                tar = shard.enter_context(tarfile.open(folder / f"{number:05d}.tar", "w", format=tarfile.USTAR_FORMAT))
            metadata = json.dumps(sample.build_metadata(), ensure_ascii=False)
            content, suffix = _read_image(sample)
            files = {suffix: content}
            files |= {".txt": sample.caption.encode(), ".json": metadata.encode()}
            for suffix, content in files.items():
                info = tarfile.TarInfo(f"{count - 1:09d}{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return count


def write_llava(samples: Iterable[Sample], folder: Path) -> int:
    """Write `data.json` with conversations and the images; each row's metadata is in `about`."""

    def build_row(sample: Sample, image: str) -> dict:
        return build_conversation(sample.id, image, sample.question, sample.caption) | {
            "about": sample.build_metadata()
        }

    return write_json_list(folder / "data.json", (build_row(*pair) for pair in _copy_images(samples, folder)))


def write_dj(samples: Iterable[Sample], folder: Path) -> int:
    """Write Data-Juicer's `data.jsonl` and the images."""

    def build_row(sample: Sample, image: str) -> dict:
        question = {"question": sample.question} if sample.question else {}
        texts = {"id": sample.id, "text": build_dj_text(sample.caption), "images": [image]}
        return texts | question | {"about": sample.build_metadata()}

    return write_jsonl(folder / "data.jsonl", (build_row(*pair) for pair in _copy_images(samples, folder)))


def _copy_images(samples: Iterable[Sample], folder: Path) -> Iterator[tuple[Sample, str]]:
    """Copy the images, a thousand per folder; yield each sample with its image's new path."""
    for number, sample in enumerate(samples):
        content, suffix = _read_image(sample)
        path = Path("images", f"{number // 1000:05d}", f"{number:09d}{suffix}")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        yield sample, str(path)


def _group_rows(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    iterator = iter(samples)
    while group := list(islice(iterator, ROW_GROUP_ROWS)):
        yield group


WRITERS = {"dj": write_dj, "llava": write_llava, "parquet": write_parquet, "webdataset": write_webdataset}


def build_export_card(
    settings: ExportSettings,
    kind: str,
    count: int,
    rewritten: int,
    scores: list[str],
    dataset: dict,
    stages: dict[str, RecipeSummary],
) -> str:
    """Return the card of an exported dataset.

    Args:
        kind: format of the export, a key of LOADING_CODE.
        count: number of exported pairs.
        rewritten: number of pairs with a caption that synthesis wrote.
        scores: names of the statistics.
        dataset: summary.json of the dataset.
        stages: numbers of rows at each step of filters and synthesis, by stage.
    """
    sources = {name: source for name, source in dataset.get("sources", {}).items() if source["split"] == "pretrain"}
    licenses = {name: settings.licenses.get(name) for name in sources or settings.licenses}
    synthesized = f" A model wrote {rewritten} of the captions." if rewritten else ""
    statistics = ", ".join(f"`{name}`" for name in scores)
    lines = [
        *("---", yaml.safe_dump(_build_front_matter(kind, count, licenses), sort_keys=False).strip(), "---", ""),
        *(f"# {format_inline_code(settings.dataset)}, {format_inline_code(settings.experiment)}", ""),
        *(f"{count} image–caption pairs, filtered by dj2mgm.{synthesized}", ""),
        *("```python", LOADING_CODE[kind], "```", ""),
        *("## Sources", "", *_list_sources(sources, licenses, dataset["pretrain"]), ""),
        *("## Processing", "", *_list_steps(dataset, stages), ""),
        *(f"## {COLUMNS[kind]}", ""),
        "`id`, `caption`, `question`, `source`; `original_caption` if a model wrote",
        *(f"another caption; and the statistics of the operators: {statistics}.", ""),
        *("## Recipes", ""),
    ]
    for stage, recipe in settings.recipes:
        if recipe:
            lines += [f"{stage}:", "", "```yaml", yaml.safe_dump(recipe, sort_keys=False).strip(), "```", ""]
    return "\n".join(lines)


def _build_front_matter(kind: str, count: int, licenses: dict[str, str | None]) -> dict:
    """Return the values that the hub reads; the license, if each source states one."""
    head: dict = {"task_categories": ["image-to-text"], "size_categories": [_find_size_category(count)]}
    distinct_licenses = set(licenses.values())
    if distinct_licenses and all(distinct_licenses):
        head["license"] = distinct_licenses.pop().lower() if len(distinct_licenses) == 1 else "other"
    if kind == "parquet":
        head["configs"] = [{"config_name": "default", "data_files": "data/*.parquet"}]
    return head


def _list_sources(sources: dict[str, dict], licenses: dict[str, str | None], pairs: int) -> list[str]:
    if not sources:
        license_names = ", ".join(sorted({text for text in licenses.values() if text}))
        return [f"{pairs} pairs of one source. License: {_escape_cell(license_names or 'not stated')}."]
    rows = (
        f"| {name} | {source['format']} | {_escape_cell(licenses[name] or 'not stated')} | {source['rows']} |"
        for name, source in sources.items()
    )
    return ["| source | format | license | rows |", "|---|---|---|---|", *rows]


def _list_steps(dataset: dict, stages: dict[str, RecipeSummary]) -> list[str]:
    pairs, held_out = dataset["pretrain"], dataset.get("left_out", {}).get("pretrain", 0)
    steps = [step for summary in stages.values() for step in summary.operators]
    return [
        *("| step | rows in | dropped | rows out |", "|---|---|---|---|"),
        *([f"| held out for evaluation | {pairs + held_out} | {held_out} | {pairs} |"] if held_out else []),
        *(f"| `{step.operator}` | {step.rows_in} | {step.dropped} | {step.rows_out} |" for step in steps),
    ]


def _escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _find_size_category(count: int) -> str:
    return next((name for limit, name in SIZE_CATEGORIES if count < limit), "10M<n<100M")
