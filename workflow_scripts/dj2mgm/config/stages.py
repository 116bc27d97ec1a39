"""The table of stages, and the settings that each stage receives as its config.yaml.

A stage re-runs when its settings change, so they hold only the values that it uses. Recipes, DeepSpeed configurations
and chat formats are passed by content, so that a comment in them re-runs nothing.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path

from dj2mgm.config.models.chat_templates import WITHOUT_CHAT, read_chat_template
from dj2mgm.config.models.clips import selecting_clips
from dj2mgm.config.recipes.experiment_recipes import (
    is_for_instructions,
    needing_captioner,
    needs_clip,
    needs_trust,
    read_recipes,
)
from dj2mgm.config.recipes.recipe_operators import allowed_operators
from dj2mgm.config.recipes.recipe_parsing import (
    ANSWERING,
    INSTRUCT,
    MEASURING,
    RATE,
    RECAPTION,
    REPAIR,
    WITH_QUESTIONS,
)
from dj2mgm.config.settings.base import StageSettings
from dj2mgm.config.settings.configuration import Experiment
from dj2mgm.config.settings.data import (
    CAPTIONERS,
    AnalysisSettings,
    CaptionerSettings,
    FilterSettings,
    JsonlSettings,
    SynthesizeSettings,
)
from dj2mgm.config.settings.evaluation import (
    AnswerSettings,
    BenchmarkSettings,
    Decoding,
    GenerateSettings,
    InfluenceSettings,
    JudgeSettings,
)
from dj2mgm.config.settings.generation_prompts import CaptionPrompt
from dj2mgm.config.settings.training_stages import TrainingStageSettings
from dj2mgm.config.training import (
    AUTO,
    FROZEN,
    choices_of_whole_weights,
    deepspeed_names,
    read_deepspeed,
    solve_training_batch,
)
from dj2mgm.config.training_checks import check_lora_targets
from dj2mgm.errors import InputError, UnsuitableDataset

STAGE_NOTE = "stage.yaml"  # in the folder of a shared stage: names its owner
CAPTIONS = "results/captions"  # answers of captioners, shared by all experiments
EVALUATIONS, BASE_EVALUATIONS = "evaluations/", "base_evaluations/"  # prefixes of stages, before the name of a task
TASK_PREFIXES = (EVALUATIONS, BASE_EVALUATIONS)
LEAKS = ("summary.json", "leaks.jsonl")  # files of a search for leaks that pages read
Settings = Callable[[Experiment, dict], StageSettings | None]


@dataclass(frozen=True)
class Stage:
    """One stage of a run, in results/<run>/<name>/. A new stage is one entry of `STAGES` and one rule.

    Attributes:
        label: name in pages and messages.
        rule: the Snakemake rule that runs it.
        upstream: the nearest stages before it; earlier ones follow from those. Stages that an experiment does not have
            are skipped.
        settings: function (merged configuration, image folders) → the stage's config.yaml; None if the experiment
            does not have the stage.
        outputs: the files that pages read; the rule may write more. The last
            one is written last, so the stage is complete if it exists.
        trains: whether it is a training stage, with checkpoints, progress and memory.csv.
        optional: whether an experiment may lack it.
        uses_dataset: whether its output depends on the dataset.
    """

    label: str
    rule: str
    upstream: tuple[str, ...]
    settings: Settings
    outputs: tuple[str, ...]
    trains: bool = False
    optional: bool = False
    uses_dataset: bool = True


def filter_settings(config: Experiment, images: dict) -> FilterSettings:
    """Return the settings of the filter stage."""
    recipe = read_recipes(config)["filter"]
    if is_for_instructions(recipe):
        raise InputError(f"recipe: {config.recipe} is for instructions; name it in synthesize.recipe")
    models = dict.fromkeys((RECAPTION, *ANSWERING), "a captioner") | dict.fromkeys(MEASURING, "a trained model")
    for operator in needing_captioner(recipe):
        raise InputError(
            f"recipe: {operator} needs {models[operator]}, which the filter stage does not have; move it to the recipe "
            "that synthesize.recipe names"
        )
    clip = {"clip": config.model.clip_score} if needs_clip(recipe) else {}
    return FilterSettings.of(config.filter, **_recipe_values(config, images, recipe), **clip)


def analysis_settings(config: Experiment, images: dict) -> AnalysisSettings:
    """Return the settings of a dataset's analysis."""
    values = _recipe_values(config, images, read_recipes(config)["filter"])
    return AnalysisSettings.of(config.filter, clip=config.model.clip_score, cpu_threads=config.cpu_threads, **values)


def synthesize_settings(config: Experiment, images: dict) -> SynthesizeSettings | None:
    """Return the settings of the synthesize stage, or None without a recipe."""
    recipe = read_recipes(config)["synthesize"]
    if recipe is None:
        return None
    _check_rows(recipe)
    _check_captioner(recipe, config.synthesize.captioner)
    if is_for_instructions(recipe) and config.model.is_mgm:
        _check_templates(recipe, config.synthesize.captioner)
    asking = needing_captioner(recipe)
    seed = config.seed if asking else 0  # without a captioner, nothing depends on it, so all seeds share the stage
    return SynthesizeSettings.of(
        config.filter,
        **_recipe_values(config, images, recipe, "finetune" if is_for_instructions(recipe) else "pretrain"),
        seed=seed,
        cpu_threads=config.cpu_threads,
        gpus=gpus_on_one_node(config),
        clip=config.model.clip_score,
        captioner=_captioner(config, is_for_instructions(recipe)) if asking else None,
        captions=CAPTIONS,
        **_held_out(recipe, images),
    )


def _check_rows(recipe: dict) -> None:
    """Check that the operators of a recipe fit its rows, which are pairs or instructions."""
    names = [name for step in recipe["process"] for name in step]
    if is_for_instructions(recipe):
        writers = {RECAPTION, *(name for name, operator in allowed_operators().items() if operator.writes_captions)}
        if writing := next((name for name in names if name in writers), None):
            raise InputError(
                f"synthesize.recipe: {writing} would replace the answers of instructions by captions; remove it (or "
                f"rows: instructions), or use {REPAIR}"
            )
    elif asking := next((name for name in names if name in WITH_QUESTIONS), None):
        raise InputError(f"synthesize.recipe: {asking} reads questions; add rows: instructions to the recipe")


def _check_captioner(recipe: dict, captioner: str) -> None:
    """Check that the captioner of the settings can do what the operators need that have none of their own."""
    needing, settings = needing_captioner(recipe), CAPTIONERS[captioner]
    measuring = [operator for operator in needing if operator in MEASURING]
    if measuring and not settings.tells_likelihood:
        raise InputError(
            f"synthesize.captioner: {captioner} gives no likelihoods, which {measuring[0]} needs; choose mgm, or name "
            "the model's folders in the recipe (base_model and stage)"
        )
    if RATE in needing and captioner == "mgm" and not is_for_instructions(recipe):
        raise InputError(
            f"synthesize.recipe: {RATE} needs a model that answers questions, which stage 1 does not; add rows: "
            "instructions to the recipe, or choose synthesize.captioner: openai"
        )
    answering = [operator for operator in needing if operator in ANSWERING]
    if answering and not settings.answers_questions:
        raise InputError(
            f"synthesize.captioner: {captioner} answers no questions, which {answering[0]} needs; choose mgm or openai"
        )
    steps = {name: arguments or {} for step in recipe["process"] for name, arguments in step.items() if name in needing}
    if steps.get(INSTRUCT, {}).get("questions") == "dataset" and not settings.tells_likelihood:
        raise InputError(
            f"synthesize.captioner: {captioner} cannot answer questions of the dataset; choose mgm, or questions: "
            f"model for {INSTRUCT}"
        )
    missing = [name for name in ("base_model", "stage", "template") if steps.get(REPAIR, {}).get(name) is None]
    if REPAIR in steps and missing and not settings.tells_likelihood:
        raise InputError(
            f"synthesize.captioner: {captioner} gives no likelihoods, which {REPAIR} needs; choose mgm, or name the "
            f"model that measures in the recipe ({', '.join(missing)} of {REPAIR})"
        )


def _check_templates(recipe: dict, captioner: str) -> None:
    """Check that operators with an MGM of their own name a chat format that has a place for questions."""
    for name, arguments in (item for step in recipe["process"] for item in step.items()):
        stated_arguments = arguments or {}
        template = stated_arguments.get("template", "plain" if not CAPTIONERS[captioner].tells_likelihood else None)
        own_model = name in (*MEASURING, REPAIR) and stated_arguments.get("base_model") is not None
        if own_model and isinstance(template, str) and not read_chat_template(template)["asks_question"]:
            raise InputError(
                f"synthesize.recipe: {name}: template {template} leaves questions out; name the chat format of the "
                "model's stage 2, which its file in config/models/ has as template"
            )


def check_without_instructions(dataset: str, settings: SynthesizeSettings | None) -> None:
    """Check that the synthesize stage needs no instructions of the dataset, which has none."""
    if settings is None or not is_for_instructions(settings.recipe):
        return
    written = (step[INSTRUCT] or {} for step in settings.recipe["process"] if INSTRUCT in step)
    if not any(arguments.get("questions") != "dataset" for arguments in written):
        raise UnsuitableDataset(
            f"synthesize.recipe: the dataset {dataset} has no instructions, which this recipe needs; add them "
            f"(docs/data.md), or write them with {INSTRUCT} and questions: model"
        )


def _held_out(recipe: dict, images: dict) -> dict:
    """Return the folder of held-out images if the recipe writes instructions about the images of pairs."""
    if not any(INSTRUCT in step for step in recipe["process"]):
        return {}
    if images["pretrain"] != images["finetune"]:
        raise InputError(
            f"synthesize.recipe: {INSTRUCT} needs one image folder for pairs and instructions, found "
            f"{images['pretrain']} and {images['finetune']}; make a folder that contains both"
        )
    return {"evaluation_images": images["evaluation"]}


def _recipe_values(config: Experiment, images: dict, recipe: dict, split: str = "pretrain") -> dict:
    # only if the recipe needs trust: otherwise a change of the key would run the stage again
    trust = {"trusted_recipes": True} if config.trusted_recipes and needs_trust(recipe) else {}
    return {"image_root": images[split], "recipe": recipe} | trust


def jsonl_settings(config: Experiment, images: dict) -> JsonlSettings:
    """Return the settings of the jsonl stage."""
    # absolute, so that a moved project folder changes them and the training files are written again
    roots = {f"{split}_images": str(Path(images[split]).resolve()) for split in images}
    folder = None if config.model.is_mgm else config.model.ready_made
    limits = {"one_stage": True} if not config.model.has_stage_1 else {}
    if _read_model_type(folder) in WITHOUT_CHAT:
        limits |= {"one_question": True}
    elif not config.model.is_mgm:
        limits |= {"several_images": True}
    if config.jsonl.fraction != 1:
        limits["used_fraction"] = config.jsonl.fraction
    control_tokens = [_template(config, key)["control_tokens"] for key in ("pretrain_template", "template")]
    control_tokens.append(_special_tokens(folder))
    return JsonlSettings.of(
        config,
        config.jsonl,
        question=_caption_prompt(config).question,
        control_tokens=sorted(set(chain.from_iterable(control_tokens))),
        **roots | limits,
    )


@cache
def _special_tokens(folder: str | None) -> set[str]:
    """Return the special tokens of the tokenizer in a model's folder; no text may contain one."""
    added = _values_in(folder, "tokenizer.json").get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    special = (token.get("content") for token in tokens if token.get("special"))
    return {text for text in special if isinstance(text, str) and text.strip()}


def _read_model_type(folder: str | None) -> object:
    return _values_in(folder, "config.json").get("model_type")


def _values_in(folder: str | None, name: str) -> dict:
    """Read a JSON file of a model's folder; if it is damaged, the stage that uses it reports it."""
    file = Path(folder or "/nowhere") / name
    try:
        values = json.loads(file.read_bytes()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def pretrain_settings(config: Experiment, images: dict) -> TrainingStageSettings | None:
    """Return the settings of stage 1, or None for a model without it."""
    return _training(config, "pretrain", "pretrain_template") if config.model.has_stage_1 else None


def finetune_settings(config: Experiment, images: dict) -> TrainingStageSettings:
    """Return the settings of stage 2."""
    check_lora_targets(config)
    return _training(config, "finetune", "template")


def _training(config: Experiment, stage: str, template: str) -> TrainingStageSettings:
    gpus, nodes, section = config.gpus, config.nodes, getattr(config, stage)
    if gpus % nodes:
        raise InputError(f"gpus: {gpus} cannot be shared evenly by nodes: {nodes}; choose a multiple of {nodes}")
    named = deepspeed_names() if section.deepspeed == AUTO else [section.deepspeed]
    choices = {name: read_deepspeed(name, f"{stage}.deepspeed") for name in named}
    if section.precision in FROZEN:
        choices = choices_of_whole_weights(stage, section, choices)
    deepspeed = {"deepspeed": None, "deepspeed_choices": choices}
    return TrainingStageSettings.of(
        config,
        section,
        score_while_training=config.score_while_training if config.score_while_training.questions else None,
        template=_template(config, template),
        **solve_training_batch(stage, dict(section) | {"gpus": gpus}),
        **deepspeed if section.deepspeed == AUTO else {"deepspeed": choices[section.deepspeed]},
    )


def generate_settings(config: Experiment, images: dict) -> GenerateSettings:
    """Return the settings of the generate stage."""
    answering, question = _answering(config), config.evaluate.caption_question
    answer_prompt = CaptionPrompt.of(template=answering["template"], question=question)
    stage_1 = "pretrain" if config.model.has_stage_1 else "base"
    return GenerateSettings.of(
        config,
        config.evaluate,
        **answering,
        image_root=images["evaluation"],
        captions={stage_1: _caption_prompt(config), "finetune": answer_prompt if question else _caption_prompt(config)},
    )


def evaluate_clip_settings(config: Experiment, images: dict) -> JudgeSettings:
    """Return the settings of the evaluate_clip stage."""
    clip = config.model.clip_score
    return JudgeSettings.of(
        config,
        config.evaluate,
        clip=config.evaluate.judge_clip or clip,
        selecting=selecting_clips(read_recipes(config), clip),
        prompt=config.evaluate.clip_prompt,
        image_root=images["evaluation"],
    )


def benchmark_settings(name: str, config: Experiment, images: dict) -> BenchmarkSettings | None:
    """Return the settings of a benchmark, or None unless all its files are configured."""
    files = config.benchmarks.model_dump().get(name)
    if files is None or None in files.values():
        return None
    return BenchmarkSettings.of(config, benchmark=name, files=files, **_answering(config))


def answer_settings(task: str, config: Experiment, images: dict) -> AnswerSettings | None:
    """Return the settings of a task of lmms-eval, or None if `evaluations` does not list it."""
    return AnswerSettings.of(config, **_answering(config)) if task in config.evaluations else None


def base_answer_settings(task: str, config: Experiment, images: dict) -> AnswerSettings | None:
    """Return the settings of a task of lmms-eval for the model before training, which are the same for all seeds."""
    settings = answer_settings(task, config, images)
    return settings and settings.model_copy(update={"seed": 0})


def influence_settings(config: Experiment, images: dict) -> InfluenceSettings:
    """Return the settings of the search for training rows behind wrong answers."""
    template = _template(config, "template")
    return InfluenceSettings.of(config, config.influence, template=template, max_length=config.finetune.max_length)


def gpus_on_one_node(config: Experiment) -> int:
    """Return the number of GPUs of a stage that runs on one node."""
    return config.gpus // config.nodes


def _answering(config: Experiment) -> dict:
    """Return the values of every stage in which the trained model answers."""
    decoding, template = Decoding.of(config.evaluate), _template(config, "template")
    return {"gpus": gpus_on_one_node(config), "template": template, "decoding": decoding}


def _captioner(config: Experiment, answers: bool) -> CaptionerSettings:
    """Return the settings of the captioner, or of the model that `answers` questions."""
    name = config.synthesize.captioner
    captioner = getattr(config.synthesize, name)
    if getattr(captioner, "model", "") is None:
        raise InputError(f"synthesize.{name}.model is not set: name a model of {captioner.base_url}/models")
    prompt = CaptionPrompt.of(template=_template(config, "template"), question="") if answers else None
    return CAPTIONERS[name].of(prompt or _caption_prompt(config), captioner, name=name)


def _caption_prompt(config: Experiment) -> CaptionPrompt:
    """Return the prompt for a caption after stage 1; some chat formats have no place for a question."""
    template = _template(config, "pretrain_template")
    question = config.evaluate.caption_question if template["asks_question"] else ""
    return CaptionPrompt.of(template=template, question=question)


def _template(config: Experiment, key: str) -> dict:
    """Return the content of the chat format that the model names under `key`."""
    return read_chat_template(getattr(config.model, key))


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
        settings=lambda config, images: StageSettings(),  # answers are compared without a judge
        outputs=_SCORED,
    ),
}
TRAINING = tuple(name for name, stage in STAGES.items() if stage.trains)


def benchmark_stages(name: str) -> dict[str, Stage]:
    """Return the stages of a benchmark by name, which the report does not show: of both models, as for tasks."""
    common = {"rule": "answer_benchmark", "settings": partial(benchmark_settings, name), "outputs": ("answers.jsonl",)}
    return {
        f"benchmarks/{name}": Stage(name, upstream=("finetune",), **common),
        f"base_benchmarks/{name}": Stage(f"{name}, before training", upstream=(), uses_dataset=False, **common),
    }


def evaluation_stages(task: str) -> dict[str, Stage]:
    """Return the stages of a task of lmms-eval by name: of the fine-tuned model, and of the model before training."""
    common = {"rule": "score_evaluation", "outputs": _SCORED, "optional": True}
    before = partial(base_answer_settings, task)
    return {
        f"{EVALUATIONS}{task}": Stage(task, upstream=("finetune",), settings=partial(answer_settings, task), **common),
        f"{BASE_EVALUATIONS}{task}": Stage(
            f"{task}, before training", upstream=(), settings=before, uses_dataset=False, **common
        ),
    }


# stages that the report does not show, and that run at request only
INFLUENCE = {
    "influence": Stage(
        "Influence",
        rule="trace_influence",
        upstream=("generate",),
        settings=influence_settings,
        outputs=("influence.jsonl", "influence.html"),
        optional=True,
    )
}


def find_stage(name: str) -> Stage:
    """Return a stage of a report by its name, which may be that of a task of lmms-eval."""
    return STAGES[name] if name in STAGES else evaluation_stages(name.partition("/")[2])[name]
