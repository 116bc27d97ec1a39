"""The slice of an experiment's configuration that each stage is handed as its config.yaml.

A stage re-runs when its slice changes, so a slice holds what the stage uses and nothing else. Recipes and DeepSpeed
configurations are handed over by content, so that a comment in them re-runs nothing; so are chat formats.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

from dj2mgm.config.chat_templates import OF_THE_TOKENIZER, WITHOUT_CHAT, read_chat_template
from dj2mgm.config.clips import selecting_clips
from dj2mgm.config.recipe_parsing import LIKELIHOOD_GAIN, RECAPTION
from dj2mgm.config.recipes import needing_captioner, needs_clip, needs_trust, read_recipes
from dj2mgm.config.training import (
    FROZEN,
    check_lora_targets,
    choices_of_whole_weights,
    deepspeed_names,
    read_deepspeed,
    solve_batch,
)
from dj2mgm.errors import InputError

STAGE_NOTE = "stage.yaml"  # in the folder of a stage that a run shares: whose it is
CAPTIONS = "results/captions"  # what captioners have said, shared by all experiments
LEAKS = ("summary.json", "leaks.jsonl")  # what pages read of what is in a dataset and evaluated on
Settings = Callable[[dict, dict], dict | None]


@dataclass(frozen=True)
class Stage:
    """One stage of a run, in results/<run>/<name>/. A new stage is one entry of `STAGES` and one rule.

    Args:
        label: what people read.
        rule: what makes it.
        upstream: the nearest stages before it; earlier ones follow from those. Those that an experiment does not have
            are passed over.
        settings: (merged configuration, image folders) → the stage's config.yaml; None where an experiment does not
            have the stage.
        outputs: the files that pages read; the rule may write more. The last one is written last, and stands for all.
        trains: whether it is a training stage, with checkpoints, progress and memory.csv.
        optional: whether experiments may do without.
    """

    label: str
    rule: str
    upstream: tuple[str, ...]
    settings: Settings
    outputs: tuple[str, ...]
    trains: bool = False
    optional: bool = False


def filter_settings(config: dict, images: dict) -> dict:
    recipe = read_recipes(config)["filter"]
    if LIKELIHOOD_GAIN in needing_captioner(recipe):
        raise InputError(
            f"recipe: {LIKELIHOOD_GAIN} asks a trained model, which the filter stage has not; move it to the recipe "
            "that synthesize.recipe names"
        )
    if RECAPTION in needing_captioner(recipe):
        raise InputError(
            f"recipe: {RECAPTION} asks a captioner, which the filter stage has not; move it to the recipe that "
            "synthesize.recipe names"
        )
    settings = _with_recipe(config, images, recipe)
    return settings | ({"clip": config["model"]["clip_score"]} if needs_clip(recipe) else {})


def analysis_settings(config: dict, images: dict) -> dict:
    return _with_recipe(config, images, read_recipes(config)["filter"]) | {
        "clip": config["model"]["clip_score"],
        "cpu_threads": config["cpu_threads"],
    }


def synthesize_settings(config: dict, images: dict) -> dict | None:
    """None for an experiment that synthesizes nothing."""
    recipe = read_recipes(config)["synthesize"]
    if recipe is None:
        return None
    asking, captioner = needing_captioner(recipe), config["synthesize"]["captioner"]
    if LIKELIHOOD_GAIN in asking and captioner != "mgm":
        raise InputError(
            f"synthesize.captioner: {captioner} does not tell how likely captions are, as {LIKELIHOOD_GAIN} asks; "
            "choose mgm"
        )
    # without a captioner, nothing depends on the run's seed: seeds then share the stage
    seed = {} if asking else {"seed": 0}
    return (
        _common(config)
        | seed
        | _with_recipe(config, images, recipe)
        | {
            "gpus": gpus_on_one_node(config),
            "clip": config["model"]["clip_score"],
            "captioner": _captioner(config) if asking else None,
            "captions": CAPTIONS,
        }
    )


def _with_recipe(config: dict, images: dict, recipe: dict) -> dict:
    """Return the settings of every stage that runs a recipe; the stage checks the recipe again."""
    settings = {"image_root": images["pretrain"], "processes": config["filter"]["processes"], "recipe": recipe}
    # only where it makes a difference: otherwise to trust recipes would run the stage again
    return settings | ({"trusted_recipes": True} if config["trusted_recipes"] and needs_trust(recipe) else {})


def jsonl_settings(config: dict, images: dict) -> dict:
    # absolute, so that a moved project folder changes this slice and the training files are written again
    roots = {f"{split}_images": str(Path(images[split]).resolve()) for split in images}
    # asked of a pair that comes with no question of its own
    settings = roots | config["jsonl"] | _common(config) | {"sources": config["sources"]}
    settings |= {"question": _caption_prompt(config)["question"]}
    settings |= {"one_stage": True} if not has_stage_1(config["model"]) else {}
    if _type_of(config["model"].get("transformers")) in WITHOUT_CHAT:
        settings |= {"one_question": True}
    elif not is_mgm(config["model"]):
        settings |= {"several_images": True}
    control_tokens = [_template(config, key)["control_tokens"] for key in ("pretrain_template", "template")]
    control_tokens.append(_special_tokens(config["model"].get("transformers")))
    return settings | {"control_tokens": sorted(set(chain.from_iterable(control_tokens)))}


@cache
def _special_tokens(folder: str | None) -> set[str]:
    """Of the tokenizer in a model's own folder: a text may not hold any."""
    added = _values_in(folder, "tokenizer.json").get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    special = (token.get("content") for token in tokens if token.get("special"))
    return {text for text in special if isinstance(text, str) and text.strip()}


def _type_of(folder: str | None) -> object:
    return _values_in(folder, "config.json").get("model_type")


def _values_in(folder: str | None, name: str) -> dict:
    """A file of a model's own folder; what is wrong with it, the stages say."""
    file = Path(folder or "/nowhere") / name
    try:
        values = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def pretrain_settings(config: dict, images: dict) -> dict | None:
    """None for a model that is fine-tuned as it comes."""
    if not has_stage_1(config["model"]):
        return None
    return _training(config, "pretrain") | {"template": _template(config, "pretrain_template")}


def finetune_settings(config: dict, images: dict) -> dict:
    check_lora_targets(config)
    return _training(config, "finetune") | {"template": _template(config, "template")}


def generate_settings(config: dict, images: dict) -> dict:
    evaluate, template = config["evaluate"], _template(config, "template")
    question = evaluate["caption_question"]
    return _common(config) | {
        "gpus": gpus_on_one_node(config),
        "image_root": images["evaluation"],
        "template": template,
        "question_prompt": evaluate["question_prompt"],
        "captions": {
            "pretrain" if has_stage_1(config["model"]) else "base": _caption_prompt(config),
            "finetune": {"template": template, "question": question} if question else _caption_prompt(config),
        },
        "decoding": _decoding(evaluate),
    }


def evaluate_clip_settings(config: dict, images: dict) -> dict:
    evaluate, clip = config["evaluate"], config["model"]["clip_score"]
    return {
        "cpu_threads": config["cpu_threads"],
        "clip": evaluate["judge_clip"] or clip,
        "second_judge": evaluate["second_judge"],
        "selecting": selecting_clips(read_recipes(config), clip),
        "prompt": evaluate["clip_prompt"],
        "image_root": images["evaluation"],
    }


def evaluate_vqa_settings(config: dict, images: dict) -> dict:
    """None of its own: answers are compared as they are."""
    return {}


def benchmark_settings(name: str, config: dict, images: dict) -> dict | None:
    """None where the benchmark's files are not all configured."""
    files = config["benchmarks"].get(name)
    if files is None or None in files.values():
        return None
    return {
        "benchmark": name,
        "files": files,
        "template": _template(config, "template"),
        "decoding": _decoding(config["evaluate"]),
        "gpus": gpus_on_one_node(config),
        "cpu_threads": config["cpu_threads"],
    }


def evaluation_settings(task: str, config: dict, images: dict) -> dict | None:
    """None for a task that is not asked for."""
    if task not in config["evaluations"]:
        return None
    template, decoding = _template(config, "template"), _decoding(config["evaluate"])
    return _common(config) | {"template": template, "decoding": decoding, "gpus": gpus_on_one_node(config)}


def gpus_on_one_node(config: dict) -> int:
    """What a stage without a launcher uses: it runs on one node."""
    return config["gpus"] // config["nodes"]


def foundation_settings(model: dict, part: str) -> dict:
    return model["foundation"][part]


def is_mgm(model: dict) -> bool:
    return not {"transformers", "tiny"} & model.keys()


def has_stage_1(model: dict) -> bool:
    """Whether what connects towers and language model is trained first: always in MGM, where it is new."""
    return "pretrain" in model or is_mgm(model)


def model_settings(model: dict) -> dict:
    """The parts to assemble, or the folder of a model that is whole already or made here."""
    for key in ("assembled", "transformers"):
        if key in model:
            return {key: model[key]}
    if "tiny" in model:
        return {key: model[key] for key in ("tiny", "language_model", "vision_tower")}
    keys = ("language_model", "vision_tower", "vision_tower_aux", "image_size_aux", "image_token", "dtype")
    return {key: model[key] for key in keys}


def _captioner(config: dict) -> dict:
    name = config["synthesize"]["captioner"]
    # whose model it is, the rules say: they hand over its folders
    keys = {key: value for key, value in config["synthesize"][name].items() if key != "experiment"}
    if keys.get("model", "") is None:
        raise InputError(f"synthesize.{name}.model is not set: name a model of {keys['base_url']}/models")
    return {"name": name} | keys | (_caption_prompt(config) if name == "mgm" else {})


def _caption_prompt(config: dict) -> dict:
    """How a model after stage 1 is asked for a caption; some chat formats have no place for a question."""
    template = _template(config, "pretrain_template")
    question = config["evaluate"]["caption_question"] if template["asks_question"] else ""
    return {"template": template, "question": question}


def _template(config: dict, key: str) -> dict:
    """The content of the chat format that the model's file names under `key`; by default it is the model's own."""
    return read_chat_template(config["model"].get(key, OF_THE_TOKENIZER))


def _common(config: dict) -> dict:
    return {"seed": config["seed"], "cpu_threads": config["cpu_threads"]}


def _decoding(evaluate: dict) -> dict:
    return {key: evaluate[key] for key in ("batch_size", "max_new_tokens")}


def _training(config: dict, stage: str) -> dict:
    gpus, nodes = config["gpus"], config["nodes"]
    if gpus % nodes:
        raise InputError(f"gpus: {gpus} cannot be shared evenly by nodes: {nodes}; choose a multiple of {nodes}")
    settings = _common(config) | {"gpus": gpus, "nodes": nodes} | config[stage]
    settings |= solve_batch(stage, settings)
    score = config["score_while_training"]
    settings |= {"trackers": config["trackers"]}
    settings |= {"score_while_training": score if score["questions"] else None}
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
    """A benchmark's stage, which is not part of the page; it is called benchmarks/<name>."""
    return Stage(
        name,
        rule="answer_benchmark",
        upstream=("finetune",),
        settings=partial(benchmark_settings, name),
        outputs=("answers.jsonl",),
    )


def evaluation_stage(task: str) -> Stage:
    """The stage of a task of lmms-eval; it is called evaluations/<task>."""
    return Stage(
        task,
        rule="score_evaluation",
        upstream=("finetune",),
        settings=partial(evaluation_settings, task),
        outputs=_SCORED,
        optional=True,
    )
