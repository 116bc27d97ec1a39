"""The slice of an experiment's configuration that each stage is handed as its config.yaml.

A stage re-runs when its slice changes, so a slice holds what the stage uses and nothing else. Recipes and DeepSpeed
configurations are handed over by content, so that a comment in them re-runs nothing.
"""

from pathlib import Path

from errors import InputError
from settings.batch import solve_batch
from settings.deepspeed import deepspeed_names, read_deepspeed
from settings.lora_targets import check_lora_targets
from settings.recipes import needs_clip, read_recipes

TRAINING = ("pretrain", "finetune")
CAPTIONS = "results/captions"  # what captioners have said, shared by all experiments


def filter_settings(config: dict, images: dict) -> dict:
    recipe = read_recipes(config)["filter"]
    settings = {"image_root": images["pretrain"], "processes": config["filter"]["processes"], "recipe": recipe}
    return settings | ({"clip": config["model"]["clip_score"]} if needs_clip(recipe) else {})


def analysis_settings(config: dict, images: dict) -> dict:
    return {
        "image_root": images["pretrain"],
        "processes": config["filter"]["processes"],
        "recipe": read_recipes(config)["filter"],
        "clip": config["model"]["clip_score"],
        "cpu_threads": config["cpu_threads"],
    }


def synthesize_settings(config: dict, images: dict) -> dict | None:
    """None for an experiment that synthesizes nothing."""
    recipe, synthesize = read_recipes(config)["synthesize"], config["synthesize"]
    if recipe is None:
        return None
    # whose model it is, the rules say: they hand over its folders
    captioner = {key: value for key, value in synthesize[synthesize["captioner"]].items() if key != "experiment"}
    if synthesize["captioner"] == "mgm":
        captioner |= _caption_prompt(config)
    return _common(config) | {
        "image_root": images["pretrain"],
        "processes": config["filter"]["processes"],
        "gpus": gpus_on_one_node(config),
        "recipe": recipe,
        "clip": config["model"]["clip_score"],
        "captioner": {"name": synthesize["captioner"]} | captioner,
        "captions": CAPTIONS,
    }


def jsonl_settings(config: dict, images: dict) -> dict:
    # absolute, so that a moved project folder changes this slice and the training files are written anew
    roots = {f"{split}_images": str(Path(images[split]).resolve()) for split in images}
    # asked of a pair that comes with no question of its own
    return roots | config["jsonl"] | _common(config) | {"question": _caption_prompt(config)["question"]}


def pretrain_settings(config: dict, images: dict) -> dict:
    return _training(config, "pretrain") | {"template": config["model"]["pretrain_template"]}


def finetune_settings(config: dict, images: dict) -> dict:
    check_lora_targets(config)
    return _training(config, "finetune") | {"template": config["model"]["template"]}


def generate_settings(config: dict, images: dict) -> dict:
    evaluate, template = config["evaluate"], config["model"]["template"]
    question = evaluate["caption_question"]
    return _common(config) | {
        "gpus": gpus_on_one_node(config),
        "image_root": images["evaluation"],
        "template": template,
        "question_prompt": evaluate["question_prompt"],
        "captions": {
            "pretrain": _caption_prompt(config),
            "finetune": {"template": template, "question": question} if question else _caption_prompt(config),
        },
        "decoding": _decoding(evaluate),
    }


def evaluate_clip_settings(config: dict, images: dict) -> dict:
    evaluate = config["evaluate"]
    return {
        "cpu_threads": config["cpu_threads"],
        "clip": config["model"]["clip_score"],
        "prompt": evaluate["clip_prompt"],
        "image_root": images["evaluation"],
        "batch_size": evaluate["batch_size"],
    }


def textvqa_settings(config: dict, images: dict) -> dict | None:
    return _benchmark(config, "textvqa")


def mmbench_settings(config: dict, images: dict) -> dict | None:
    return _benchmark(config, "mmbench")


# in the order in which data flows
SETTINGS_OF = {
    "filter": filter_settings,
    "synthesize": synthesize_settings,
    "jsonl": jsonl_settings,
    "pretrain": pretrain_settings,
    "finetune": finetune_settings,
    "generate": generate_settings,
    "evaluate_clip": evaluate_clip_settings,
    "benchmarks/textvqa": textvqa_settings,
    "benchmarks/mmbench": mmbench_settings,
}


def gpus_on_one_node(config: dict) -> int:
    """What a stage without a launcher uses: it runs on one node."""
    return config["gpus"] // config["nodes"]


def foundation_settings(model: dict, part: str) -> dict:
    return model["foundation"][part]


def assemble_settings(model: dict) -> dict:
    """Of a model that is not assembled yet."""
    keys = ("language_model", "vision_tower", "vision_tower_aux", "image_size_aux", "image_token", "dtype")
    return {key: model[key] for key in keys}


def _caption_prompt(config: dict) -> dict:
    """How a model after stage 1 is asked for a caption; the plain template has no place for a question."""
    template = config["model"]["pretrain_template"]
    return {"template": template, "question": "" if template == "plain" else config["evaluate"]["caption_question"]}


def _common(config: dict) -> dict:
    return {"seed": config["seed"], "cpu_threads": config["cpu_threads"]}


def _decoding(evaluate: dict) -> dict:
    return {key: evaluate[key] for key in ("batch_size", "max_new_tokens")}


def _benchmark(config: dict, name: str) -> dict | None:
    """None where the benchmark's files are not all configured."""
    files = config["benchmarks"][name]
    if None in files.values():
        return None
    return {
        "benchmark": name,
        "files": files,
        "template": config["model"]["template"],
        "decoding": _decoding(config["evaluate"]),
        "gpus": gpus_on_one_node(config),
        "cpu_threads": config["cpu_threads"],
    }


def _training(config: dict, stage: str) -> dict:
    gpus, nodes = config["gpus"], config["nodes"]
    if gpus % nodes:
        raise InputError(f"gpus: {gpus} cannot be shared evenly by nodes: {nodes}; choose a multiple of {nodes}")
    settings = _common(config) | {"gpus": gpus, "nodes": nodes} | config[stage]
    settings |= solve_batch(stage, settings)
    if settings["deepspeed"] == "auto":
        choices = {name: read_deepspeed(name, f"{stage}.deepspeed") for name in deepspeed_names()}
        return settings | {"deepspeed": None, "deepspeed_choices": choices}
    return settings | {"deepspeed": read_deepspeed(settings["deepspeed"], f"{stage}.deepspeed")}
