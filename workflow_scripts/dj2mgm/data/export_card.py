"""Card of an exported dataset, in the Hugging Face hub's format."""

import yaml

from dj2mgm.config.settings.sharing import ExportSettings

USE = {
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
MARKS = str.maketrans({"|": "\\|", "`": "'"})
SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"), (10**7, "1M<n<10M"))


def export_card(
    settings: ExportSettings,
    kind: str,
    count: int,
    rewritten: int,
    scores: list[str],
    dataset: dict,
    stages: dict[str, dict],
) -> str:
    """Return the card of an exported dataset.

    Args:
        kind: format of the export, a key of USE.
        count: number of exported pairs.
        rewritten: number of pairs with a caption that synthesis wrote.
        scores: names of the statistics.
        dataset: summary.json of the dataset.
        stages: summary.json of filters and synthesis, by stage.
    """
    sources = {name: source for name, source in dataset.get("sources", {}).items() if source["split"] == "pretrain"}
    stated = [settings.licenses.get(name) for name in sources or settings.licenses]
    licenses = sorted({text for text in stated if text})
    head = {"task_categories": ["image-to-text"], "size_categories": [_size(count)]}
    if licenses and all(stated):
        head |= {"license": licenses[0].lower()} if len(licenses) == 1 else {"license": "other"}
    if kind == "parquet":
        head["configs"] = [{"config_name": "default", "data_files": "data/*.parquet"}]
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", ""]
    lines += [f"# {code(settings.dataset)}, {code(settings.experiment)}", ""]
    synthesized = f" A model wrote {rewritten} of the captions." if rewritten else ""
    lines += [f"{count} image–caption pairs, filtered by dj2mgm.{synthesized}", ""]
    lines += ["```python", USE[kind], "```", "", "## Sources", ""]
    if sources:
        lines += ["| source | format | license | rows |", "|---|---|---|---|"]
        named = {name: _cell(settings.licenses.get(name) or "not stated") for name in sources}
        lines += [
            f"| {name} | {source['format']} | {named[name]} | {source['rows']} |" for name, source in sources.items()
        ]
    else:
        lines += [f"{dataset['pretrain']} pairs of one source. License: {_cell(', '.join(licenses) or 'not stated')}."]
    lines += ["", "## Processing", "", "| step | rows in | dropped | rows out |", "|---|---|---|---|"]
    pairs, held_out = dataset["pretrain"], dataset.get("left_out", {}).get("pretrain", 0)
    lines += [f"| held out for evaluation | {pairs + held_out} | {held_out} | {pairs} |"] if held_out else []
    for summary in stages.values():
        lines += [
            f"| `{step['operator']}` | {step['rows_in']} | {step['dropped']} | {step['rows_out']} |"
            for step in summary["operators"]
        ]
    lines += [
        "",
        f"## {COLUMNS[kind]}",
        "",
        "`id`, `caption`, `question`, `source`; `original_caption` if a model wrote",
    ]
    lines += [
        "another caption; and the statistics of the operators: " + ", ".join(f"`{name}`" for name in scores) + "."
    ]
    lines += ["", "## Recipes", ""]
    for stage, recipe in settings.recipes:
        if recipe:
            lines += [f"{stage}:", "", "```yaml", yaml.safe_dump(recipe, sort_keys=False).strip(), "```", ""]
    return "\n".join(lines)


def code(text: str) -> str:
    """Return a name as inline code; names are untrusted and may contain digits and Markdown marks."""
    return f"`{' '.join(text.split()).translate(MARKS)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _size(count: int) -> str:
    return next((name for limit, name in SIZES if count < limit), "10M<n<100M")
