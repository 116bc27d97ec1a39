"""Card of a trained model, from the record of its run."""

import re

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from dj2mgm.config.licenses import card_license
from dj2mgm.data.export_card import code
from dj2mgm.evaluation.groups import is_share
from dj2mgm.publishing import usage
from dj2mgm.publishing.run_record import FOLDER, RunRecord, command, pointer, recipes, row_counts, section, sources

OWN = "finetune/own"  # the fine-tuned model's own scores, each question with its own image
TABLE = "comparison.csv"
COUNTS = ("n", "seeds")
SETTINGS = (  # file of a stage, path of the value, label
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


def model_card(settings: dict, records: RunRecord, adapter: bool, chat: bool) -> ModelCard:
    """Return the card of a published model (config/publishing.py).

    `adapter` tells whether LoRA was trained, `chat` whether the processor has a chat template.
    """
    data = ModelCardData(
        **card_license(settings["license"]),
        base_model=settings["base_models"] or None,
        library_name=usage.library(settings),
        pipeline_tag="image-text-to-text",
        tags=["dj2mgm", *(["lora"] if adapter else [])],
        model_name=settings["experiment"],
        eval_results=eval_results(settings, records),
    )
    lines = [
        f"# {code(settings['experiment'])}",
        "",
        f"A vision-language model, trained by dj2mgm on {code(settings['dataset'])}: the experiment "
        f"{code(settings['experiment'])} of the model {code(settings['model'])}. Every number in this card is a link "
        f"to its place in `{FOLDER}/`, the record of the run.",
        "",
        *section("Use", usage.how_to_use(settings, adapter, chat)),
        *section("Base models and license", _bases(settings)),
        *section(
            "Data", sources(records, settings["licenses"], settings["dataset"]), row_counts(records, trained_on=True)
        ),
        *section("Training", _training(records)),
        *section("Scores", _scores(settings, records)),
        *section("How to reproduce", _reproduce(settings, records), recipes(settings)),
        *section("Limits", _limits(settings, records)),
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines))


def eval_results(settings: dict, records: RunRecord) -> list[EvalResult]:
    """Return the scores for the metadata, each with its place in the record as `args`."""
    kind = re.sub(r"[^A-Za-z0-9_.-]+", "-", settings["dataset"]).strip("-.") or "dataset"
    found = records.files[TABLE][settings["experiment"]].get(OWN, {})
    return [
        EvalResult(
            task_type="image-text-to-text",
            dataset_type=kind,
            dataset_name=f"held-out images of {settings['dataset']}",
            metric_type=metric,
            metric_value=row["value"],
            metric_args={
                "record": f"{FOLDER}/{TABLE}",
                "place": pointer(settings["experiment"], OWN, metric, "value"),
            },
        )
        for metric, row in found.items()
    ]


def _bases(settings: dict) -> list[str]:
    bases = ", ".join(map(code, settings["base_models"]))
    return [
        f"Trained from {bases}." if bases else "It was not trained from a model on the hub.",
        "",
        f"License: {code(settings['license'])}. The licenses of base models and data also apply.",
    ]


def _training(records: RunRecord) -> list[str]:
    stages = [stage for stage in ("pretrain", "finetune") if f"{stage}/metrics.json" in records.files]
    lines = [f"| | {' | '.join(stages)} |", f"|---{'|---' * len(stages)}|"]
    for file, path, label in SETTINGS:
        cells = [
            records.figure(f"{stage}/{file}", *path) if _has(records, stage, file, path) else "" for stage in stages
        ]
        if any(cells):
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _has(records: RunRecord, stage: str, file: str, path: tuple[str, ...]) -> bool:
    value = records.files[f"{stage}/{file}"]
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return value is not None


def _scores(settings: dict, records: RunRecord) -> list[str]:
    experiment = settings["experiment"]
    lines = [
        "On held-out images, with `95 %` intervals. Differences from the baseline are paired by image. Controls, such "
        f"as the same model with other images, are in [{TABLE}]({FOLDER}/{TABLE}).",
        "",
        "| metric | value | interval | difference | interval | values per seed | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for metric, row in records.files[TABLE][experiment].get(OWN, {}).items():
        units = {key: ("points" if "difference" in key else "%") if is_share(metric) else "" for key in row}
        units |= dict.fromkeys(COUNTS, "")
        cell = {key: records.figure(TABLE, experiment, OWN, metric, key, unit=units[key]) for key in row}
        differs = f"{cell['difference_low']} to {cell['difference_high']}" if row["difference"] is not None else ""
        lines.append(
            f"| {code(metric)} | {cell['value']} | {cell['low']} to {cell['high']} "
            f"| {cell['difference'] if differs else ''} | {differs} | {cell['n']} | {cell['seeds']} |"
        )
    return lines


def _reproduce(settings: dict, records: RunRecord) -> list[str]:
    versions = records.files["finetune/metrics.json"].get("versions", {})
    shown = [f"{name} {records.figure('finetune/metrics.json', 'versions', name)}" for name in versions]
    return [*command(settings), "", f"Trained with {', '.join(shown)}." if shown else ""]


def _limits(settings: dict, records: RunRecord) -> list[str]:
    seed = records.figure("finetune/metrics.json", "seed")
    lines = [
        f"- The weights are from seed {seed}; scores are means over all seeds. With one seed, the interval covers the "
        "choice of images, not the noise of training.",
        "- The scores are for held-out images of its own dataset only; they may not hold for other datasets.",
        "- It may mention things that are not in the image. It was not trained against harmful or biased answers.",
    ]
    if settings["made_here"]:
        lines.append("- It is a tiny model that demonstrates the workflow. It is not useful for photos.")
    return lines
