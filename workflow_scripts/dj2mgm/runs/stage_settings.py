"""The settings that each stage receives as its config.yaml, and checks of training settings.

A stage re-runs when its settings change, so they hold only the values that it uses. Recipes, DeepSpeed configurations
and chat templates are passed by content, so that a comment in them re-runs nothing.
"""

import json
import os
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import list_selecting_clips
from dj2mgm.recipes.catalogue import (
    ANSWERING_OPERATORS,
    INSTRUCTION_OPERATOR,
    MEASURING_OPERATORS,
    RECAPTION_OPERATOR,
)
from dj2mgm.runs.experiment_recipes import (
    check_captioner,
    check_rows,
    check_templates,
    is_for_instructions,
    list_operators_without_captioner,
    needs_clip,
    needs_trust,
    read_recipes,
)
from dj2mgm.score_groups import FINETUNED, PRETRAINED, UNTRAINED
from dj2mgm.settings.config_files import locate_config_file, read_json_config
from dj2mgm.settings.configuration import Configuration, Experiment
from dj2mgm.settings.data import (
    CAPTIONERS,
    CaptionerSettings,
    CaptionPrompt,
    FilterSettings,
    JsonlSettings,
    SynthesizeSettings,
)
from dj2mgm.settings.evaluation import (
    Decoding,
    GenerateSettings,
    JudgeSettings,
)
from dj2mgm.settings.models import WITHOUT_CHAT, ModelFile, read_chat_template
from dj2mgm.settings.training_stages import (
    AUTO,
    FLASH_ATTENTION,
    FROZEN,
    TrainingStageSettings,
    check_batch_sizes,
    list_deepspeed_names,
    read_deepspeed,
    refuse_unknown_targets,
    select_unpartitioned_choices,
    solve_training_batch,
)

GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
GATED_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# by transformers' model type; for other types, the stage reads the model itself (trained_weights.py)
PROJECTIONS = dict.fromkeys(("gemma", "gemma2", "llama", "mistral", "qwen2", "qwen3"), GATED_PROJECTIONS)


def require_flash_attention(config: Configuration) -> None:
    """Raise InputError if a stage needs FlashAttention and its package is not installed here."""
    for stage in ("pretrain", "finetune"):
        if getattr(config, stage).attn_implementation == FLASH_ATTENTION and find_spec("flash_attn") is None:
            raise InputError(
                f"{stage}.attn_implementation: {FLASH_ATTENTION} needs the package flash-attn, which is not installed; "
                "install it, or set auto, which uses it if it is installed"
            )


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, by the device files of Linux and of WSL."""
    return any(map(os.path.exists, GPU_DEVICES))


def require_fp8_device(config: Configuration) -> None:
    """Raise InputError if a stage computes in FP8 and this machine has no NVIDIA GPU; the stage checks its type."""
    for stage in ("pretrain", "finetune"):
        if getattr(config, stage).precision == "fp8" and not has_gpu():
            raise InputError(f"{stage}.precision: fp8 needs an NVIDIA GPU, and this machine has none; set bf16 or auto")


def check_lora_targets(config: Experiment) -> None:
    """Raise InputError if the language model has no projection with the name of a LoRA target."""
    lora, projections = config.finetune.lora, PROJECTIONS.get(_find_language_model_type(config.model))
    if lora and lora.targets != "all" and projections:
        refuse_unknown_targets(lora.targets, projections)


def _find_language_model_type(model: ModelFile) -> str | None:
    """Return the type of the language model, or None if no file states it."""
    if model.trained_type:
        return model.trained_type
    folder = Path(model.language_model_source)
    for file in (folder / "config.json", locate_config_file("architectures", f"{folder.name.lower()}.json")):
        try:
            values = read_json_config(file)
        except InputError:  # reported by the stage that reads the file
            continue
        language_model = values.get("text_config") if model.whole_model else values
        return language_model.get("model_type") if isinstance(language_model, dict) else None
    return None


CAPTIONS_FOLDER = "results/captions"  # answers of captioners, shared by all experiments


def build_filter_settings(config: Experiment, images: dict) -> FilterSettings:
    """Return the filter stage's settings; refuse recipes that need instructions or a captioner."""
    recipe = read_recipes(config)["filter"]
    if is_for_instructions(recipe):
        raise InputError(f"recipe: {config.recipe} is for instructions; name it in synthesize.recipe")
    models = dict.fromkeys((RECAPTION_OPERATOR, *ANSWERING_OPERATORS), "a captioner") | dict.fromkeys(
        MEASURING_OPERATORS, "a trained model"
    )
    for operator in list_operators_without_captioner(recipe):
        raise InputError(
            f"recipe: {operator} needs {models[operator]}, which the filter stage does not have; move it to the recipe "
            "that synthesize.recipe names"
        )
    clip = {"clip": config.model.clip} if needs_clip(recipe) else {}
    return FilterSettings.from_sections(config.filter, **build_recipe_values(config, images, recipe), **clip)


def build_synthesize_settings(config: Experiment, images: dict) -> SynthesizeSettings | None:
    """Return the settings of the synthesize stage, or None without a recipe."""
    recipe = read_recipes(config)["synthesize"]
    if recipe is None:
        return None
    check_rows(recipe)
    check_captioner(recipe, config.synthesize.captioner)
    if is_for_instructions(recipe) and config.model.is_mgm:
        check_templates(recipe, config.synthesize.captioner)
    captioned_operators = list_operators_without_captioner(recipe)
    # without a captioner, no result depends on the seed, so all seeds share the stage
    seed = config.seed if captioned_operators else 0
    return SynthesizeSettings.from_sections(
        config.filter,
        **build_recipe_values(config, images, recipe, "finetune" if is_for_instructions(recipe) else "pretrain"),
        seed=seed,
        cpu_threads=config.cpu_threads,
        gpus=count_gpus_per_node(config),
        clip=config.model.clip,
        captioner=_build_captioner(config, is_for_instructions(recipe)) if captioned_operators else None,
        captions=CAPTIONS_FOLDER,
        **_find_evaluation_images(recipe, images),
    )


def _find_evaluation_images(recipe: dict, images: dict) -> dict:
    """Return the folder of held-out images if the recipe writes instructions about the images of pairs."""
    if not any(INSTRUCTION_OPERATOR in step for step in recipe["process"]):
        return {}
    if images["pretrain"] != images["finetune"]:
        raise InputError(
            f"synthesize.recipe: {INSTRUCTION_OPERATOR} needs one image folder for pairs and instructions, found "
            f"{images['pretrain']} and {images['finetune']}; make a folder that contains both"
        )
    return {"evaluation_images": images["evaluation"]}


def build_recipe_values(config: Experiment, images: dict, recipe: dict, split: str = "pretrain") -> dict:
    """Return the settings that every stage with a recipe has."""
    # only if the recipe needs trust: otherwise a change of the key would run the stage again
    trust = {"trusted_recipes": True} if config.trusted_recipes and needs_trust(recipe) else {}
    return {"image_root": images[split], "recipe": recipe} | trust


def build_jsonl_settings(config: Experiment, images: dict) -> JsonlSettings:
    """Return the settings of the jsonl stage."""
    # absolute, so that a moved project folder changes them and the training files are written again
    roots = {f"{split}_images": str(Path(images[split]).resolve()) for split in images}
    folder = None if config.model.is_mgm else config.model.whole_model
    limits = {"one_stage": True} if not config.model.has_stage_1 else {}
    if _read_model_type(folder) in WITHOUT_CHAT:
        limits |= {"one_question": True}
    elif not config.model.is_mgm:
        limits |= {"several_images": True}
    if config.jsonl.fraction != 1:
        limits["used_fraction"] = config.jsonl.fraction
    control_tokens = [_read_template(config, key)["control_tokens"] for key in ("pretrain_template", "template")]
    control_tokens.append(_read_special_tokens(folder))
    return JsonlSettings.from_sections(
        config,
        config.jsonl,
        question=_build_caption_prompt(config).question,
        control_tokens=sorted(set(chain.from_iterable(control_tokens))),
        **roots | limits,
    )


@cache
def _read_special_tokens(folder: str | None) -> set[str]:
    """Return the special tokens of the tokenizer in a model's folder; no text may contain one."""
    added_tokens = _read_values(folder, "tokenizer.json").get("added_tokens")
    entries = [token for token in added_tokens if isinstance(token, dict)] if isinstance(added_tokens, list) else []
    special_texts = (token.get("content") for token in entries if token.get("special"))
    return {text for text in special_texts if isinstance(text, str) and text.strip()}


def _read_model_type(folder: str | None) -> object:
    return _read_values(folder, "config.json").get("model_type")


def _read_values(folder: str | None, name: str) -> dict:
    """Read a JSON file of a model's folder; if it is damaged, the stage that uses it reports it."""
    if folder is None:
        return {}
    file = Path(folder) / name
    try:
        values = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def build_pretrain_settings(config: Experiment, images: dict) -> TrainingStageSettings | None:
    """Return the settings of stage 1, or None for a model without it."""
    return _build_training_settings(config, "pretrain", "pretrain_template") if config.model.has_stage_1 else None


def build_finetune_settings(config: Experiment, images: dict) -> TrainingStageSettings:
    """Return the settings of stage 2."""
    check_lora_targets(config)
    return _build_training_settings(config, "finetune", "template")


def _build_training_settings(config: Experiment, stage: str, template: str) -> TrainingStageSettings:
    """Return the settings of a training stage, with batch sizes solved and DeepSpeed's files read."""
    gpus, nodes, section = config.gpus, config.nodes, getattr(config, stage)
    if gpus % nodes:
        raise InputError(f"gpus: {gpus} cannot be shared evenly by nodes: {nodes}; choose a multiple of {nodes}")
    names = list_deepspeed_names() if section.deepspeed == AUTO else [section.deepspeed]
    choices = {name: read_deepspeed(name, f"{stage}.deepspeed") for name in names}
    if section.precision in FROZEN:
        choices = select_unpartitioned_choices(stage, section, choices)
    sizes = dict(section) | {"gpus": gpus}
    if section.deepspeed != AUTO:
        check_batch_sizes(section.deepspeed, choices[section.deepspeed], stage, sizes)
    deepspeed = {"deepspeed": None, "deepspeed_choices": choices}
    return TrainingStageSettings.from_sections(
        config,
        section,
        score_while_training=config.score_while_training if config.score_while_training.questions else None,
        template=_read_template(config, template),
        **solve_training_batch(stage, sizes),
        **deepspeed if section.deepspeed == AUTO else {"deepspeed": choices[section.deepspeed]},
    )


def build_generate_settings(config: Experiment, images: dict) -> GenerateSettings:
    """Return the settings of the generate stage."""
    answer_values, question = build_answer_values(config), config.evaluate.caption_question
    answer_prompt = CaptionPrompt.from_sections(template=answer_values["template"], question=question)
    stage_1 = PRETRAINED if config.model.has_stage_1 else UNTRAINED
    return GenerateSettings.from_sections(
        config,
        config.evaluate,
        **answer_values,
        image_root=images["evaluation"],
        captions={
            stage_1: _build_caption_prompt(config),
            FINETUNED: answer_prompt if question else _build_caption_prompt(config),
        },
    )


def build_evaluate_clip_settings(config: Experiment, images: dict) -> JudgeSettings:
    """Return the settings of the evaluate_clip stage."""
    clip = config.model.clip
    return JudgeSettings.from_sections(
        config,
        config.evaluate,
        clip=config.evaluate.judge_clip or clip,
        selecting=list_selecting_clips(read_recipes(config), clip),
        prompt=config.evaluate.clip_prompt,
        image_root=images["evaluation"],
    )


def count_gpus_per_node(config: Experiment) -> int:
    """Return the number of GPUs of a stage that runs on one node."""
    return config.gpus // config.nodes


def build_answer_values(config: Experiment) -> dict:
    """Return the values of every stage in which the trained model answers."""
    decoding, template = Decoding.from_sections(config.evaluate), _read_template(config, "template")
    return {"gpus": count_gpus_per_node(config), "template": template, "decoding": decoding}


def _build_captioner(config: Experiment, answers: bool) -> CaptionerSettings:
    """Return the settings of the captioner, or of the model that `answers` questions."""
    name = config.synthesize.captioner
    captioner = getattr(config.synthesize, name)
    if getattr(captioner, "model", "") is None:
        raise InputError(f"synthesize.{name}.model is not set: name a model of {captioner.base_url}/models")
    prompt = CaptionPrompt.from_sections(template=_read_template(config, "template"), question="") if answers else None
    return CAPTIONERS[name].from_sections(prompt or _build_caption_prompt(config), captioner, name=name)


def _build_caption_prompt(config: Experiment) -> CaptionPrompt:
    """Return the prompt for a caption after stage 1; some chat templates have no place for a question."""
    template = _read_template(config, "pretrain_template")
    question = config.evaluate.caption_question if template["asks_question"] else ""
    return CaptionPrompt.from_sections(template=template, question=question)


def _read_template(config: Experiment, key: str) -> dict:
    """Return the content of the chat template that the model names under `key`."""
    return read_chat_template(getattr(config.model, key))
