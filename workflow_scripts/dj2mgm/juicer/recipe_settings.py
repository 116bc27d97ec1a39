"""Checked steps of a stage's recipe, with the arguments that the stage adds to them."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dj2mgm.data.instruction_rows import COLUMNS
from dj2mgm.errors import InputError
from dj2mgm.recipes.catalogue import (
    INSTRUCTION_OPERATOR,
    INSTRUCTIONS,
    LIKELIHOOD_GAIN,
    MEASURING_OPERATORS,
    PAIRS,
    RATING_OPERATOR,
    RECAPTION_OPERATOR,
    WITH_CLIP,
    read_defaults,
)
from dj2mgm.recipes.recipe_parsing import RecipeStep, parse_recipe
from dj2mgm.settings.data import (
    FilterSettings,
    RecipeStageSettings,
    SynthesizeSettings,
    TrainedCaptionerSettings,
)
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.image_files import IMAGE_FOLDERS_FILE

SIMILARITY_FILTERS = ("batched_image_text_similarity_filter", "image_text_similarity_filter")


@dataclass(frozen=True)
class RecipeSettings:
    """A stage's recipe, ready to run."""

    image_root: Path  # absolute folder that the rows' image paths are relative to
    processes: int  # number of processes that share an operator's rows
    steps: Sequence[RecipeStep]  # already checked
    # arguments of the stage by operator; arguments in the recipe have precedence
    arguments: dict[str, dict] = field(default_factory=dict)
    executor: str = "default"  # `default` (this machine) or `ray`
    ray_address: str | None = None  # address of a Ray cluster (None: Ray starts one on this machine)
    gpus: int = 1  # number of GPUs that share the rows of operators with models. Several need Ray
    rows: str = PAIRS  # `pairs` or `instructions`

    @property
    def columns(self) -> dict[str, object]:
        """Columns that operators see in addition to the columns of pairs, with the default of each column."""
        return COLUMNS if self.rows == INSTRUCTIONS else {}

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

    def __post_init__(self):
        """Raise InputError unless both are folders of a captioner."""
        weights = ("projector.safetensors", "adapter/adapter_config.json")
        for folder, names in {self.base: ("config.json",), self.stage: weights}.items():
            if not any((folder / name).is_file() for name in names):
                raise InputError(f"{folder} has no {names[0]}, so it is not a captioner's folder. Run its rules first")


@dataclass(frozen=True)
class InstructionFiles:
    """The dataset's files for a recipe of instructions."""

    instructions: Path
    evaluation: Path


def read_filter_settings(path: str | Path) -> RecipeSettings:
    return prepare_filters(path, load_settings(FilterSettings, path))


def prepare_filters(path: str | Path, settings: FilterSettings) -> RecipeSettings:
    """Return the recipe of the filter stage or of an analysis."""
    return prepare_recipe(path, settings, build_clip_arguments(settings.clip))


def prepare_synthesis(
    path: str | Path,
    settings: SynthesizeSettings,
    output_dir: Path,
    model: CaptionerModel | None,
    files: InstructionFiles | None = None,
) -> RecipeSettings:
    """Return the recipe of the synthesize stage.

    Args:
        path: file of the settings, for messages.
        settings: `captioner: null` means that the recipe names a captioner, or needs none.
        output_dir: folder whose name becomes the name of this run's file of captions, unless there is a `writer`.
        model: model that writes captions, for the captioner `mgm`.
        files: files of the dataset, for a recipe of instructions.
    """
    trained = settings.captioner if isinstance(settings.captioner, TrainedCaptionerSettings) else None
    if trained and model is None:
        raise InputError(
            f"{path}: the captioner mgm is a model that this workflow has trained. Name its folders with "
            "--captioner-model (assembled) and --captioner-stage (pretrain's output)"
        )
    folders = {"base_model": str(model.base), "stage": str(model.stage)} if model else {}
    writer_arguments = {
        "captioner": settings.captioner and settings.captioner.as_operator(**folders),
        "seed": settings.seed,
        "captions_folder": settings.captions,
        "writer": settings.writer or "-".join(output_dir.resolve().parts[-3:]),
    }
    arguments = build_clip_arguments(settings.clip) | {
        RECAPTION_OPERATOR: {"hf_clip": settings.clip} | writer_arguments
    }
    arguments |= {RATING_OPERATOR: {key: value for key, value in writer_arguments.items() if key != "seed"}}
    if files:
        file_arguments = {"question_file": str(files.instructions), "held_out_file": str(files.evaluation)}
        arguments |= {INSTRUCTION_OPERATOR: writer_arguments | file_arguments}
    if trained:
        arguments |= dict.fromkeys(MEASURING_OPERATORS, folders | {"template": trained.template})
        arguments[LIKELIHOOD_GAIN] = arguments[LIKELIHOOD_GAIN] | {"question": trained.question}
    return prepare_recipe(path, settings, arguments, settings.gpus)


def prepare_recipe(
    path: str | Path, settings: RecipeStageSettings, arguments: dict[str, dict], gpus: int = 1
) -> RecipeSettings:
    """Return the parsed recipe of a stage with the arguments that the stage adds."""
    recipe = parse_recipe(path, settings.recipe, "recipe.", trusted=settings.trusted_recipes)
    root = Path(settings.image_root)
    if not (root.is_dir() or root.name == IMAGE_FOLDERS_FILE):
        raise InputError(f"{path}: image_root: there is no folder {root}, which image paths are relative to")
    root = root.resolve()
    processes = settings.processes or len(os.sched_getaffinity(0))
    arguments = {"image_integrity_filter": {"image_root": str(root)}} | arguments
    executor = (recipe.executor, recipe.ray_address, gpus)
    return RecipeSettings(root, processes, recipe.steps, arguments, *executor, recipe.rows)


def build_clip_arguments(clip: str | None) -> dict[str, dict]:
    """Return the CLIP as the argument of each operator with a CLIP."""
    return {name: {"hf_clip": clip} for name in WITH_CLIP} if clip else {}


def count_slots(settings: RecipeSettings) -> int:
    """Return the number of new questions about each image that the recipe requests."""
    default = read_defaults(INSTRUCTION_OPERATOR)["per_image"]
    return max(
        (step.arguments.get("per_image", default) for step in settings.steps if step.name == INSTRUCTION_OPERATOR),
        default=0,
    )
