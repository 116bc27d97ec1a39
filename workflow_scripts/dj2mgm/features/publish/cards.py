"""Cards of a published model and of published image–caption pairs, from the record of their run, for the hub."""

import re

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from dj2mgm.evaluation.groups import is_share
from dj2mgm.features.publish.publication import (
    RECORDS,
    RunRecord,
    build_license_table,
    build_row_count_table,
    format_command,
    format_recipes,
    format_section,
    make_pointer,
)
from dj2mgm.features.publish.publish_settings import (
    ADAPTER_FOLDER,
    STAGE,
    PublishSettings,
    build_license_keys,
    format_inline_code,
)
from dj2mgm.records import VERDICT_FILE
from dj2mgm.score_groups import OWN_GROUP
from dj2mgm.settings.data import CAPTION_QUESTION

IMPORTS = """from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.image_utils import load_image"""
MERGED = "model = AutoModelForImageTextToText.from_pretrained(FOLDER)"
ADAPTED = """from peft import PeftConfig, PeftModel
from transformers import GenerationConfig

base = PeftConfig.from_pretrained(FOLDER).base_model_name_or_path
model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), FOLDER).eval()
model.generation_config = GenerationConfig.from_pretrained(FOLDER)"""
CHAT = """content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
)"""
PREFIX = """inputs = processor(text=processor.image_token + QUESTION, images=image, return_tensors="pt")"""
ANSWER = """answer = model.generate(**inputs, generation_config=model.generation_config)[0]
print(processor.decode(answer[inputs["input_ids"].shape[1]:], skip_special_tokens=True).strip())"""
TABLE = "comparison.csv"
COUNTS = ("n", "seeds")
SHOWN_SETTINGS = (  # file of a stage, path of the value, label
    ("config.yaml", ("learning_rate",), "learning rate"),
    ("config.yaml", ("lr_scheduler",), "schedule"),
    ("config.yaml", ("epochs",), "epochs"),
    ("config.yaml", ("max_length",), "maximum length of a sample in tokens"),
    ("config.yaml", ("lora", "r"), "LoRA rank"),
    ("config.yaml", ("lora", "alpha"), "LoRA alpha"),
    ("config.yaml", ("lora", "dropout"), "LoRA dropout"),
    ("metrics.json", ("engine", "global_batch_size"), "batch size"),
    ("metrics.json", ("engine", "optimizer"), "optimizer"),
    ("metrics.json", ("engine", "zero_stage"), "ZeRO stage"),
    ("metrics.json", ("engine", "bf16"), "bf16"),
    ("metrics.json", ("samples",), "samples seen"),
    ("metrics.json", ("steps",), "steps"),
    ("metrics.json", ("trained_parameters",), "trained parameters"),
    ("metrics.json", ("loss_first",), "first loss"),
    ("metrics.json", ("loss_last",), "last loss"),
    ("metrics.json", ("seed",), "seed"),
)
LOADING_SECTION = """```python
from datasets import load_dataset

rows = load_dataset(".", split="train")  # this folder, or the name of this repository
```"""


def find_library_name(settings: PublishSettings) -> str:
    """Return the hub's name of the library that loads the folder."""
    if settings.weights == "adapter":
        return "peft"
    return "dj2mgm" if settings.mgm else "transformers"


def describe_usage(settings: PublishSettings, adapter: bool, chat: bool) -> list[str]:
    return _use_mgm(settings, adapter) if settings.mgm else _use_transformers(settings, chat)


def _use_transformers(settings: PublishSettings, chat: bool) -> list[str]:
    """Return the section with Python code for transformers; without a chat template, the question is a prefix."""
    load, with_peft = (ADAPTED, " with PEFT") if settings.weights == "adapter" else (MERGED, "")
    return [
        f"Transformers loads it{with_peft}, without running code from this repository.",
        "",
        "```python",
        IMPORTS,
        "",
        'FOLDER = "."  # this folder, or the name of this repository',
        f"QUESTION = {settings.question or CAPTION_QUESTION!r}",
        load,
        "processor = AutoProcessor.from_pretrained(FOLDER, backend='pil')  # the same pixels as in training",
        'image = load_image("photo.jpg")  # turned by its EXIF orientation, as in training',
        CHAT if chat else PREFIX,
        ANSWER,
        "```",
    ]


def _use_mgm(settings: PublishSettings, adapter: bool) -> list[str]:
    """Return the instructions for MGM, which has no class in transformers."""
    merged = settings.weights == "merged"
    lines = [
        "**Transformers has no class for this model (MGM), and this repository contains no code.** Use the project "
        "dj2mgm to ask it about images:",
        "",
        "```bash",
    ]
    if merged:
        lines += ["python workflow_scripts/chat.py --model FOLDER --image photo.jpg --question 'What is this?'", "```"]
    else:
        lines += [
            "# BASE: the assembled model before training (docs/models.md)",
            f"python workflow_scripts/merge_adapter.py --model BASE --stage FOLDER/{STAGE} --output-dir merged",
            "python workflow_scripts/chat.py --model merged --image photo.jpg --question 'What is this?'",
            "```",
        ]
    if adapter:
        folder = f"FOLDER/{ADAPTER_FOLDER}" if merged else "FOLDER"
        base = settings.adapter_base or "LANGUAGE_MODEL"
        lines += [
            "",
            "Stock transformers and PEFT load the LoRA adapter of the language model. Without the vision tower, it "
            "cannot read images:",
            "",
            "```python",
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            f"BASE, ADAPTER = {base!r}, {folder!r}",
            "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE), ADAPTER)",
            "```",
        ]
    return lines


def build_model_card(settings: PublishSettings, records: RunRecord, adapter: bool, chat: bool) -> ModelCard:
    """Return the card of a published model (publication.py).

    Args:
        adapter: whether LoRA was trained.
        chat: whether the processor has a chat template.
    """
    data = ModelCardData(
        **build_license_keys(settings.license),
        base_model=settings.base_models or None,
        library_name=find_library_name(settings),
        pipeline_tag="image-text-to-text",
        tags=["dj2mgm", *(["lora"] if adapter else [])],
        model_name=settings.experiment,
        eval_results=build_eval_results(settings, records),
    )
    lines = [
        f"# {format_inline_code(settings.experiment)}",
        "",
        f"A vision-language model, trained by dj2mgm on {format_inline_code(settings.dataset)}: the experiment "
        f"{format_inline_code(settings.experiment)} of the model {format_inline_code(settings.model)}. Every number in "
        f"this card is a link to its place in `{RECORDS}/`, the record of the run.",
        "",
        *format_section("Use", describe_usage(settings, adapter, chat)),
        *format_section("Base models and license", _describe_bases(settings)),
        *format_section(
            "Data",
            build_license_table(records, settings.licenses, settings.dataset),
            build_row_count_table(records, trained_on=True),
        ),
        *format_section("Training", _build_training_table(records)),
        *format_section("Scores", _build_score_table(settings, records)),
        *format_section("How to reproduce", _describe_reproduction(settings, records), format_recipes(settings)),
        *format_section("Limits", _list_limits(settings, records)),
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines))


def build_eval_results(settings: PublishSettings, records: RunRecord) -> list[EvalResult]:
    """Return the scores for the metadata, each with its place in the record as `args`."""
    kind = re.sub(r"[^A-Za-z0-9_.-]+", "-", settings.dataset).strip("-.") or "dataset"
    scores = records.files[TABLE][settings.experiment].get(OWN_GROUP, {})
    return [
        EvalResult(
            task_type="image-text-to-text",
            dataset_type=kind,
            dataset_name=f"held-out images of {settings.dataset}",
            metric_type=metric,
            metric_value=row["value"],
            metric_args={
                "record": f"{RECORDS}/{TABLE}",
                "place": make_pointer(settings.experiment, OWN_GROUP, metric, "value"),
            },
        )
        for metric, row in scores.items()
    ]


def _describe_bases(settings: PublishSettings) -> list[str]:
    bases = ", ".join(map(format_inline_code, settings.base_models))
    return [
        f"Trained from {bases}." if bases else "It was not trained from a model on the hub.",
        "",
        f"License: {format_inline_code(settings.license)}. The licenses of base models and data also apply.",
    ]


def _build_training_table(records: RunRecord) -> list[str]:
    stages = [stage for stage in ("pretrain", "finetune") if f"{stage}/metrics.json" in records.files]
    lines = [f"| | {' | '.join(stages)} |", f"|---{'|---' * len(stages)}|"]
    for file, path, label in SHOWN_SETTINGS:
        cells = [
            records.link_figure(f"{stage}/{file}", *path) if _has_value(records, stage, file, path) else ""
            for stage in stages
        ]
        if any(cells):
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _has_value(records: RunRecord, stage: str, file: str, path: tuple[str, ...]) -> bool:
    value = records.files[f"{stage}/{file}"]
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return value is not None


def _build_score_table(settings: PublishSettings, records: RunRecord) -> list[str]:
    """Return the table of the first screen's scores, each figure with its place in the records."""
    experiment = settings.experiment
    lines = [
        "On held-out images, with `95 %` intervals. Differences from the baseline are paired by image, on the seeds "
        "that both have. Controls, such as the same model with other images, are in "
        f"[{TABLE}]({RECORDS}/{TABLE}).",
        "",
        "| metric | value | interval | difference | interval | values per seed | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for metric, row in records.files[TABLE][experiment].get(OWN_GROUP, {}).items():
        units = {key: ("points" if "difference" in key else "%") if is_share(metric) else "" for key in row}
        units |= dict.fromkeys(COUNTS, "")
        cell = {key: records.link_figure(TABLE, experiment, OWN_GROUP, metric, key, unit=units[key]) for key in row}
        differs = f"{cell['difference_low']} to {cell['difference_high']}" if row["difference"] is not None else ""
        lines.append(
            f"| {format_inline_code(metric)} | {cell['value']} | {cell['low']} to {cell['high']} "
            f"| {cell['difference'] if differs else ''} | {differs} | {cell['n']} | {cell['seeds']} |"
        )
    return lines


def _describe_reproduction(settings: PublishSettings, records: RunRecord) -> list[str]:
    versions = records.files["finetune/metrics.json"].get("versions", {})
    linked_versions = [f"{name} {records.link_figure('finetune/metrics.json', 'versions', name)}" for name in versions]
    return [*format_command(settings), "", f"Trained with {', '.join(linked_versions)}." if linked_versions else ""]


def _list_limits(settings: PublishSettings, records: RunRecord) -> list[str]:
    """Return the limits of the model, with the warning first if it has learned nothing."""
    seed = records.link_figure("finetune/metrics.json", "seed")
    lines = [
        f"- The weights are from seed {seed}; scores are means over all seeds. With one seed, the interval covers the "
        "choice of images, not the noise of training.",
        "- The scores are for held-out images of its own dataset only; they may not hold for other datasets.",
        "- It may mention things that are not in the image. It was not trained against harmful or biased answers.",
    ]
    if records.files[VERDICT_FILE]["experiments"].get(settings.experiment, {}).get("learning_faults"):
        lines.insert(
            0,
            f"- **Nothing shows that this model learned anything.** [{VERDICT_FILE}]({RECORDS}/{VERDICT_FILE}) states "
            "why.",
        )
    if settings.trained_by_workflow:
        lines.append("- It is a tiny model that demonstrates the workflow. It is not useful for photos.")
    return lines


def build_dataset_card(settings: PublishSettings, records: RunRecord, exported: DatasetCard) -> DatasetCard:
    """Return the card of a published dataset (publication.py), from the card of the export of the same pairs."""
    data = DatasetCardData(
        **build_license_keys(*(license for name, license in settings.licenses.items() if _has_pairs(name, records))),
        task_categories=["image-to-text"],
        size_categories=exported.data.size_categories,
        tags=["dj2mgm"],
        configs=exported.data.configs,
    )
    last_stage = records.stages_of_pairs[-1]
    count = records.link_figure(f"{last_stage}/summary.json", "rows_kept")
    rewriting_note = [
        "- If `original_caption` is not empty, a model wrote the caption; it may mention things that are not in the "
        "image.",
    ]
    lines = [
        f"# {format_inline_code(settings.dataset)}, {format_inline_code(settings.experiment)}",
        "",
        f"{count} image–caption pairs, processed by dj2mgm. Every number is a link to its place in `{RECORDS}/`.",
        "",
        *format_section("Use", [LOADING_SECTION]),
        *format_section("Sources", build_license_table(records, settings.licenses, settings.dataset)),
        *format_section("Processing", build_row_count_table(records, trained_on=False)),
        *format_section("Columns", [_find_section(exported.text, "Columns")]),
        *format_section("How to reproduce", format_command(settings), format_recipes(settings)),
        *format_section(
            "Limits",
            ["- Images and captions of a source remain under its license.", *rewriting_note],
        ),
    ]
    return DatasetCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines))


def _has_pairs(name: str, records: RunRecord) -> bool:
    """Return whether a source or split contributes to the published pairs; instructions are not published."""
    source_summaries = records.files["dataset/summary.json"].get("sources", {})
    return (source_summaries[name]["split"] if name in source_summaries else name) != "finetune"


def _find_section(text: str, title: str) -> str:
    return next(
        (part.partition("\n")[2].strip() for part in text.split("\n## ")[1:] if part.startswith(f"{title}\n")), ""
    )
