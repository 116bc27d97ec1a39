"""Card of an exported dataset, in the Hugging Face hub's format."""

import yaml

from dj2mgm.features.publish.publish_settings import ExportSettings
from dj2mgm.records import RecipeSummary

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
ESCAPED_MARKS = str.maketrans({"|": "\\|", "`": "'"})
SIZE_CATEGORIES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
)


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


def format_inline_code(text: str) -> str:
    """Return a name as inline code; names are untrusted and may contain digits and Markdown marks."""
    return f"`{' '.join(text.split()).translate(ESCAPED_MARKS)}`"


def _escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _find_size_category(count: int) -> str:
    return next((name for limit, name in SIZE_CATEGORIES if count < limit), "10M<n<100M")
