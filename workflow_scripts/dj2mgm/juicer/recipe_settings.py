"""The resolved settings of the stages that run a recipe: filter, synthesize and analyze."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dj2mgm.config.recipe_parsing import LIKELIHOOD_GAIN, WITH_CLIP, RecipeStep, check_keys, parse_recipe
from dj2mgm.errors import InputError
from dj2mgm.files import SOURCES, read_yaml

FILTER_KEYS = {"image_root", "processes", "recipe"}
SYNTHESIZE_KEYS = FILTER_KEYS | {"seed", "cpu_threads", "gpus", "clip", "captioner", "captions"}
TRUSTED = "trusted_recipes"  # true if the user's configuration sets it, and otherwise missing
TRAINED = "mgm_captioning_mapper"
SIMILARITY_FILTERS = ("batched_image_text_similarity_filter", "image_text_similarity_filter")


@dataclass(frozen=True)
class RecipeSettings:
    """Settings of a stage that runs a recipe."""

    image_root: Path  # absolute folder that the rows' image paths are relative to
    processes: int  # number of processes that share an operator's rows
    steps: Sequence[RecipeStep]  # checked steps of the recipe
    # arguments of the stage by operator, which are used if the recipe does not give them
    arguments: dict[str, dict] = field(default_factory=dict)
    executor: str = "default"  # `default` (this machine) or `ray`
    ray_address: str | None = None  # address of a Ray cluster (None: Ray starts one on this machine)
    gpus: int = 1  # number of GPUs that share the rows of operators with models. Several need Ray

    @property
    def on_ray(self) -> bool:
        return self.executor == "ray" or self.gpus > 1

    def complete(self, steps: Iterable[RecipeStep]) -> list[RecipeStep]:
        """Return the steps with the arguments of the stage."""
        return [step.with_defaults(self.arguments.get(step.name, {})) for step in steps]


@dataclass(frozen=True)
class CaptionerModel:
    """A trained MGM that writes captions."""

    base: Path  # folder of the assembled model
    stage: Path  # output folder of `pretrain` or `finetune`


def read_filter_settings(path: str | Path) -> RecipeSettings:
    """Read `{image_root, processes, recipe: {process}}` and optionally `clip`.

    `processes: null` means every core that this process may use.
    """
    values = _read_values(path, FILTER_KEYS, {"clip"})
    return _make_settings(path, values, clip_arguments(values["clip"]) if "clip" in values else {})


def read_synthesize_settings(path: str | Path, output_dir: Path, model: CaptionerModel | None) -> RecipeSettings:
    """Read filter's keys, `{seed, cpu_threads, gpus, clip, captioner: {name, …}, captions}` and optionally `writer`.

    `captioner: null` means that the recipe names a captioner, or needs none.

    Args:
        output_dir: folder whose name becomes the name of this run's file of captions, unless there is a `writer`.
        model: model that writes captions, for the captioner `mgm`.
    """
    values = _read_values(path, SYNTHESIZE_KEYS, {"writer"})
    captioner = None if values["captioner"] is None else _captioner(path, values["captioner"], model)
    recaption = {
        "hf_clip": values["clip"],
        "captioner": captioner,
        "seed": values["seed"],
        "captions_folder": values["captions"],
        "writer": values.get("writer") or "-".join(output_dir.resolve().parts[-3:]),
    }
    arguments = clip_arguments(values["clip"]) | {"low_similarity_recaption_mapper": recaption}
    if trained := (captioner or {}).get(TRAINED):
        names = ("base_model", "stage", "template", "question")
        arguments |= {LIKELIHOOD_GAIN: {name: trained[name] for name in names}}
    return _make_settings(path, values, arguments)


def _read_values(path: str | Path, required: set[str], optional: set[str]) -> dict:
    """Return the settings file as a mapping with checked keys."""
    values = read_yaml(path)
    if not isinstance(values, dict) or not isinstance(values.get("recipe"), dict):
        keys = ", ".join(sorted(required))
        raise InputError(f"{path}: expected the keys {keys}, with a recipe that has a 'process' list")
    _check_keys(path, values, required, optional | {TRUSTED}, "")
    return values


def _make_settings(path: str | Path, values: dict, arguments: dict[str, dict]) -> RecipeSettings:
    """Return the settings from their checked keys, with the parsed recipe."""
    recipe = parse_recipe(path, values["recipe"], "recipe.", trusted=values.get(TRUSTED, False) is True)
    root, processes = values["image_root"], values["processes"]
    if not isinstance(root, str) or not (Path(root).is_dir() or Path(root).name == SOURCES):
        raise InputError(f"{path}: 'image_root' must be the folder that image paths are relative to, found {root!r}")
    if processes is None:
        processes = len(os.sched_getaffinity(0))
    if not isinstance(processes, int) or isinstance(processes, bool) or processes < 1:
        raise InputError(
            f"{path}: 'processes' must be a whole number from 1, or null for every core; found {processes!r}"
        )
    root = Path(root).resolve()
    arguments = {"image_integrity_filter": {"image_root": str(root)}} | arguments
    gpus = values.get("gpus", 1)
    return RecipeSettings(root, processes, recipe.steps, arguments, recipe.executor, recipe.ray_address, gpus)


def clip_arguments(clip: str) -> dict[str, dict]:
    """Return the CLIP as the argument of each operator with a CLIP."""
    return {name: {"hf_clip": clip} for name in WITH_CLIP}


def _captioner(path: str | Path, values: object, model: CaptionerModel | None) -> dict:
    """Return the captioning operator as in a recipe."""
    name = values.get("name") if isinstance(values, dict) else None
    if name not in CAPTIONERS:
        raise InputError(f"{path}: 'captioner.name' must be {' or '.join(CAPTIONERS)}, found {name!r}")
    return CAPTIONERS[name](path, values, model)


def _blip2(path: str | Path, values: dict, _: CaptionerModel | None) -> dict:
    _check_keys(path, values, {"name", "model", "batch_size"}, set(), "captioner.")
    arguments = {"hf_img2seq": values["model"], "keep_original_sample": False}
    sizes = {"gpu_batch_size": values["batch_size"], "batch_size": values["batch_size"]}
    return {"image_captioning_mapper": arguments | sizes}


def _openai(path: str | Path, values: dict, _: CaptionerModel | None) -> dict:
    keys = {"base_url", "model", "key_variable", "question", "max_tokens", "temperature", "longest_side"}
    keys |= {"concurrency", "timeout_s", "retries", "max_requests", "max_total_tokens"}
    _check_keys(path, values, keys | {"name"}, set(), "captioner.")
    return {"openai_captioning_mapper": {key: values[key] for key in sorted(keys)}}


def _mgm(path: str | Path, values: dict, model: CaptionerModel | None) -> dict:
    keys = {"template", "question", "num_beams", "batch_size", "max_new_tokens"}
    _check_keys(path, values, keys | {"name"}, set(), "captioner.")
    if model is None:
        raise InputError(
            f"{path}: the captioner mgm is a model that this workflow has trained. Name its folders with "
            "--captioner-model (assembled) and --captioner-stage (pretrain's output)"
        )
    if not (model.base / "config.json").is_file():
        raise InputError(f"{model.base} has no config.json, so it is not a captioner's folder. Run its rules first")
    if not any((model.stage / file).is_file() for file in ("projector.safetensors", "adapter/adapter_config.json")):
        raise InputError(
            f"{model.stage} has no projector.safetensors, so it is not a captioner's folder. Run its rules first"
        )
    arguments = {key: values[key] for key in keys}
    return {TRAINED: {"base_model": str(model.base), "stage": str(model.stage)} | arguments}


CAPTIONERS = {"mgm": _mgm, "blip2": _blip2, "openai": _openai}  # by their names in the configuration


def _check_keys(path: str | Path, values: dict, required: set[str], optional: set[str], prefix: str) -> None:
    check_keys(path, values, required | optional, prefix)
    if missing := sorted(required - set(values)):
        raise InputError(f"{path}: the key '{prefix}{missing[0]}' is missing")


@dataclass(frozen=True)
class AnalysisSettings:
    """Settings of the analysis."""

    recipe: RecipeSettings
    clip: str | None  # folder or hub id
    cpu_threads: int | None  # threads of PyTorch; None means every core


def read_analysis_settings(path: str | Path) -> AnalysisSettings:
    """Read `{image_root, processes, recipe: {process}, clip, cpu_threads}`."""
    values = _read_values(path, FILTER_KEYS | {"clip", "cpu_threads"}, set())
    clip, threads = values["clip"], values["cpu_threads"]
    if clip is not None and (not isinstance(clip, str) or not clip):
        raise InputError(f"{path}: 'clip' must be a folder or hub id of a CLIP, or null; found {clip!r}")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise InputError(
            f"{path}: 'cpu_threads' must be a whole number from 1, or null for every core; found {threads!r}"
        )
    return AnalysisSettings(_make_settings(path, values, clip_arguments(clip) if clip else {}), clip, threads)
