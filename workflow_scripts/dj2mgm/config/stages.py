"""The table of stages, and the slice of the configuration that each stage receives as its config.yaml.

A stage re-runs when its slice changes, so a slice holds only what the stage uses. Recipes, DeepSpeed configurations and
chat formats are passed by content, so that a comment in them re-runs nothing.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

from dj2mgm.config.chat_templates import WITHOUT_CHAT, read_chat_template
from dj2mgm.config.clips import selecting_clips
from dj2mgm.config.recipe_parsing import LIKELIHOOD_GAIN, RECAPTION
from dj2mgm.config.recipes import needing_captioner, needs_clip, needs_trust, read_recipes
from dj2mgm.config.settings.configuration import Experiment
from dj2mgm.config.training import (
    FROZEN,
    choices_of_whole_weights,
    deepspeed_names,
    read_deepspeed,
    solve_batch,
)
from dj2mgm.config.training_checks import check_lora_targets
from dj2mgm.errors import InputError

STAGE_NOTE = "stage.yaml"  # in the folder of a shared stage: names its owner
CAPTIONS = "results/captions"  # answers of captioners, shared by all experiments
LEAKS = ("summary.json", "leaks.jsonl")  # files of a search for leaks that pages read
Settings = Callable[[Experiment, dict], dict | None]


@dataclass(frozen=True)
class Stage:
    """One stage of a run, in results/<run>/<name>/. A new stage is one entry of `STAGES` and one rule.

    Attributes:
        label: name in pages and messages.
        rule: the Snakemake rule that runs it.
        upstream: the nearest stages before it; earlier ones follow from those. Stages that an experiment does not have
            are skipped.
        settings: (merged configuration, image folders) → the stage's config.yaml; None if the experiment does not have
            the stage.
        outputs: the files that pages read; the rule may write more. The last
            one is written last, so the stage is complete if it exists.
        trains: whether it is a training stage, with checkpoints, progress and memory.csv.
        optional: whether an experiment may lack it.
    """

    label: str
    rule: str
    upstream: tuple[str, ...]
    settings: Settings
    outputs: tuple[str, ...]
    trains: bool = False
    optional: bool = False


def filter_settings(config: Experiment, images: dict) -> dict:
    """Return the slice of the filter stage."""
    recipe = read_recipes(config)["filter"]
    if LIKELIHOOD_GAIN in needing_captioner(recipe):
        raise InputError(
            f"recipe: {LIKELIHOOD_GAIN} needs a trained model, which the filter stage does not have; move it to the "
            "recipe that synthesize.recipe names"
        )
    if RECAPTION in needing_captioner(recipe):
        raise InputError(
            f"recipe: {RECAPTION} needs a captioner, which the filter stage does not have; move it to the recipe that "
            "synthesize.recipe names"
        )
    settings = _with_recipe(config, images, recipe)
    return settings | ({"clip": config.model.clip_score} if needs_clip(recipe) else {})


def analysis_settings(config: Experiment, images: dict) -> dict:
    """Return the settings of a dataset's analysis."""
    return _with_recipe(config, images, read_recipes(config)["filter"]) | {
        "clip": config.model.clip_score,
        "cpu_threads": config.cpu_threads,
    }


def synthesize_settings(config: Experiment, images: dict) -> dict | None:
    """Return the slice of the synthesize stage, or None without a recipe."""
    recipe = read_recipes(config)["synthesize"]
    if recipe is None:
        return None
    asking, captioner = needing_captioner(recipe), config.synthesize.captioner
    if LIKELIHOOD_GAIN in asking and captioner != "mgm":
        raise InputError(
            f"synthesize.captioner: {captioner} gives no likelihoods, which {LIKELIHOOD_GAIN} needs; choose mgm"
        )
    # without a captioner, nothing depends on the seed, so all seeds share the stage
    seed = {} if asking else {"seed": 0}
    return (
        _common(config)
        | seed
        | _with_recipe(config, images, recipe)
        | {
            "gpus": gpus_on_one_node(config),
            "clip": config.model.clip_score,
            "captioner": _captioner(config) if asking else None,
            "captions": CAPTIONS,
        }
    )


def _with_recipe(config: Experiment, images: dict, recipe: dict) -> dict:
    """Return the settings of every stage that runs a recipe; the stage checks the recipe again."""
    settings = {"image_root": images["pretrain"], "processes": config.filter.processes, "recipe": recipe}
    # only if it matters: otherwise a change of the key would run the stage again
    return settings | ({"trusted_recipes": True} if config.trusted_recipes and needs_trust(recipe) else {})


def jsonl_settings(config: Experiment, images: dict) -> dict:
    """Return the slice of the jsonl stage."""
    # absolute, so that a moved project folder changes this slice and the training files are written again
    roots = {f"{split}_images": str(Path(images[split]).resolve()) for split in images}
    settings = roots | config.jsonl.model_dump() | _common(config) | {"sources": config.sources}
    settings |= {"question": _caption_prompt(config)["question"]}  # for pairs without a question of their own
    settings |= {"one_stage": True} if not config.model.has_stage_1 else {}
    folder = None if config.model.is_mgm else config.model.given
    if _type_of(folder) in WITHOUT_CHAT:
        settings |= {"one_question": True}
    elif not config.model.is_mgm:
        settings |= {"several_images": True}
    control_tokens = [_template(config, key)["control_tokens"] for key in ("pretrain_template", "template")]
    control_tokens.append(_special_tokens(folder))
    return settings | {"control_tokens": sorted(set(chain.from_iterable(control_tokens)))}


@cache
def _special_tokens(folder: str | None) -> set[str]:
    """Return the special tokens of the tokenizer in a model's folder; no text may contain one."""
    added = _values_in(folder, "tokenizer.json").get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    special = (token.get("content") for token in tokens if token.get("special"))
    return {text for text in special if isinstance(text, str) and text.strip()}


def _type_of(folder: str | None) -> object:
    return _values_in(folder, "config.json").get("model_type")


def _values_in(folder: str | None, name: str) -> dict:
    """Read a JSON file of a model's folder; if it is damaged, the stage that uses it reports it."""
    file = Path(folder or "/nowhere") / name
    try:
        values = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def pretrain_settings(config: Experiment, images: dict) -> dict | None:
    """Return the slice of stage 1, or None for a model without it."""
    if not config.model.has_stage_1:
        return None
    return _training(config, "pretrain") | {"template": _template(config, "pretrain_template")}


def finetune_settings(config: Experiment, images: dict) -> dict:
    """Return the slice of stage 2."""
    check_lora_targets(config)
    return _training(config, "finetune") | {"template": _template(config, "template")}


def generate_settings(config: Experiment, images: dict) -> dict:
    """Return the slice of the generate stage."""
    evaluate, template = config.evaluate, _template(config, "template")
    question = evaluate.caption_question
    return _common(config) | {
        "gpus": gpus_on_one_node(config),
        "image_root": images["evaluation"],
        "template": template,
        "question_prompt": evaluate.question_prompt,
        "captions": {
            "pretrain" if config.model.has_stage_1 else "base": _caption_prompt(config),
            "finetune": {"template": template, "question": question} if question else _caption_prompt(config),
        },
        "decoding": _decoding(config),
    }


def evaluate_clip_settings(config: Experiment, images: dict) -> dict:
    """Return the slice of the evaluate_clip stage."""
    evaluate, clip = config.evaluate, config.model.clip_score
    return {
        "cpu_threads": config.cpu_threads,
        "clip": evaluate.judge_clip or clip,
        "second_judge": evaluate.second_judge,
        "selecting": selecting_clips(read_recipes(config), clip),
        "prompt": evaluate.clip_prompt,
        "image_root": images["evaluation"],
    }


def evaluate_vqa_settings(config: Experiment, images: dict) -> dict:
    """Return an empty slice: answers are compared as they are."""
    return {}


def benchmark_settings(name: str, config: Experiment, images: dict) -> dict | None:
    """Return the slice of a benchmark, or None unless all its files are configured."""
    files = config.benchmarks.model_dump().get(name)
    if files is None or None in files.values():
        return None
    return {
        "benchmark": name,
        "files": files,
        "template": _template(config, "template"),
        "decoding": _decoding(config),
        "gpus": gpus_on_one_node(config),
        "cpu_threads": config.cpu_threads,
    }


def evaluation_settings(task: str, config: Experiment, images: dict) -> dict | None:
    """Return the slice of a task of lmms-eval, or None if `evaluations` does not list it."""
    if task not in config.evaluations:
        return None
    template, decoding = _template(config, "template"), _decoding(config)
    return _common(config) | {"template": template, "decoding": decoding, "gpus": gpus_on_one_node(config)}


def gpus_on_one_node(config: Experiment) -> int:
    """Return the number of GPUs of a stage that runs on one node."""
    return config.gpus // config.nodes


def _captioner(config: Experiment) -> dict:
    name = config.synthesize.captioner
    # the rules pass the folders of the experiment's model
    keys = getattr(config.synthesize, name).model_dump(exclude={"experiment"})
    if keys.get("model", "") is None:
        raise InputError(f"synthesize.{name}.model is not set: name a model of {keys['base_url']}/models")
    return {"name": name} | keys | (_caption_prompt(config) if name == "mgm" else {})


def _caption_prompt(config: Experiment) -> dict:
    """Return the prompt for a caption after stage 1; some chat formats have no place for a question."""
    template = _template(config, "pretrain_template")
    question = config.evaluate.caption_question if template["asks_question"] else ""
    return {"template": template, "question": question}


def _template(config: Experiment, key: str) -> dict:
    """Return the content of the chat format that the model names under `key`."""
    return read_chat_template(getattr(config.model, key))


def _common(config: Experiment) -> dict:
    return {"seed": config.seed, "cpu_threads": config.cpu_threads}


def _decoding(config: Experiment) -> dict:
    return config.evaluate.model_dump(include={"batch_size", "max_new_tokens"})


def _training(config: Experiment, stage: str) -> dict:
    gpus, nodes = config.gpus, config.nodes
    if gpus % nodes:
        raise InputError(f"gpus: {gpus} cannot be shared evenly by nodes: {nodes}; choose a multiple of {nodes}")
    settings = _common(config) | {"gpus": gpus, "nodes": nodes} | getattr(config, stage).model_dump()
    settings |= solve_batch(stage, settings)
    score = config.score_while_training
    settings |= {"trackers": config.trackers}
    settings |= {"score_while_training": score.model_dump() if score.questions else None}
    named = deepspeed_names() if settings["deepspeed"] == "auto" else [settings["deepspeed"]]
    choices = {name: read_deepspeed(name, f"{stage}.deepspeed") for name in named}
    if settings["precision"] in FROZEN:
        choices = choices_of_whole_weights(stage, settings, choices)
    if settings["deepspeed"] == "auto":
        return settings | {"deepspeed": None, "deepspeed_choices": choices}
    return settings | {"deepspeed": choices[settings["deepspeed"]]}


_TRAINED = ("metrics.jsonl", "scores.jsonl", "scored.jsonl", "memory.csv", "metrics.json")
_FILTERED = ("stats.jsonl", "dropped.jsonl", "summary.json")
_SCORED = ("scores.jsonl", "metrics.json")

# in the order in which data flows
STAGES = {
    "filter": Stage(
        "Filter",
        rule="filter_data",
        upstream=(),
        settings=filter_settings,
        outputs=("filtered.jsonl", *_FILTERED),
    ),
    "synthesize": Stage(
        "Captions",
        rule="synthesize_captions",
        upstream=("filter",),
        settings=synthesize_settings,
        outputs=("config.yaml", "synthesized.jsonl", *_FILTERED),
        optional=True,
    ),
    "jsonl": Stage(
        "Training files",
        rule="write_jsonl",
        upstream=("filter", "synthesize"),
        settings=jsonl_settings,
        outputs=("pretrain.jsonl", "summary.json"),
    ),
    "pretrain": Stage(
        "Stage 1: pretraining",
        rule="pretrain",
        upstream=("jsonl",),
        settings=pretrain_settings,
        outputs=_TRAINED,
        trains=True,
        optional=True,
    ),
    "finetune": Stage(
        "Stage 2: fine-tuning",
        rule="finetune",
        upstream=("jsonl", "pretrain"),
        settings=finetune_settings,
        outputs=_TRAINED,
        trains=True,
    ),
    "generate": Stage(
        "Answers",
        rule="generate_answers",
        upstream=("finetune",),
        settings=generate_settings,
        outputs=("captions.jsonl", "answers.jsonl"),
    ),
    "evaluate_clip": Stage(
        "CLIPScore",
        rule="evaluate_clip",
        upstream=("generate",),
        settings=evaluate_clip_settings,
        outputs=("config.yaml", *_SCORED),
    ),
    "evaluate_vqa": Stage(
        "VQA accuracy",
        rule="evaluate_vqa",
        upstream=("generate",),
        settings=evaluate_vqa_settings,
        outputs=_SCORED,
    ),
}
TRAINING = tuple(name for name, stage in STAGES.items() if stage.trains)


def benchmark_stage(name: str) -> Stage:
    """Return the stage benchmarks/<name>, which the report does not show."""
    return Stage(
        name,
        rule="answer_benchmark",
        upstream=("finetune",),
        settings=partial(benchmark_settings, name),
        outputs=("answers.jsonl",),
    )


def evaluation_stage(task: str) -> Stage:
    """Return the stage evaluations/<task> of a task of lmms-eval."""
    return Stage(
        task,
        rule="score_evaluation",
        upstream=("finetune",),
        settings=partial(evaluation_settings, task),
        outputs=_SCORED,
        optional=True,
    )
