"""The whole configuration: keys of an experiment, and keys for several experiments."""

from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf, SerializeAsAny, create_model

from dj2mgm.script_modules import import_feature_modules
from dj2mgm.settings.base import Number, Section, Seed, UniqueItems, section, setting
from dj2mgm.settings.data import FilterSection, JsonlSection, Shares, SynthesizeSection
from dj2mgm.settings.evaluation import EvaluateSection
from dj2mgm.settings.models import ModelFile
from dj2mgm.settings.string_formats import FilePath, Name
from dj2mgm.settings.targets import (
    CARDS,
    Control,
    DecontaminateSection,
    ExperimentNames,
    FinetuneMinimalSection,
    PlanSection,
    ReportSection,
)
from dj2mgm.settings.training_stages import FinetuneSection, PretrainSection, ScoreSettings

Amount = Annotated[Number, Field(ge=0, le=1e9)]


class ExperimentOnlyKeys(Section):
    """Keys of an experiment that a model's `settings` may not hold."""

    dataset: FilePath = setting(
        "shapes",
        "file config/datasets/<name>.yaml; a folder or file with images and texts in any known format; after "
        "`snakemake fetch`, the id of a dataset of the hub, or a file config/hub/<name>.yaml",
    )
    model: FilePath = setting(
        "tiny",
        "file config/models/<name>.yaml, whose `settings` the experiment's settings override; or the folder or hub id "
        "of a vision-language model of transformers",
    )
    recipe: Name = setting(
        "baseline", "recipe of the filter stage: file config/recipes/<name>.yaml, in Data-Juicer's own format"
    )
    without: Annotated[list[str], UniqueItems()] = setting([], "operators to leave out of the recipes")
    arguments: dict[str, dict[str, Any] | None] = setting(
        {},
        "by operator: arguments that replace those in the recipes, as {words_num_filter: {max_num: 12}}; null: remove "
        "the recipe's arguments",
    )
    controls: Annotated[list[Control], UniqueItems()] = setting(
        [],
        "control experiments on the experiment's page; random: as many rows, drawn at random from those that the "
        "baseline's recipe keeps; half_learning_rate: both sides at half of their learning rates (docs/experiments.md)",
    )
    seeds: Annotated[list[Seed], UniqueItems()] = setting(
        [0],
        "seeds of training, sampling and shuffling; one run each, averaged in the report",
        min_length=1,
        max_length=1000,
    )
    description: str = setting("", "purpose of the experiment, in a sentence; the report shows it")


def drop_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """Return those settings of an experiment that are not the defaults."""
    fields = ExperimentOnlyKeys.model_fields
    return {key: value for key, value in settings.items() if value != fields[key].default}


class ModelOverridableKeys(Section):
    """Keys of an experiment that a model's `settings` may hold, too."""

    sources: dict[str, Amount] = setting(
        {},
        "amount of each source of a dataset: how often a row is used (2.0), or the number of rows (500); without an "
        "entry: every row once",
    )
    shares: Shares = setting(
        {},
        "share of a stage's samples that a source has (0.35), instead of an amount. The other sources share the "
        "rest in proportion to their amounts",
    )
    gpus: int = setting(
        1,
        "GPUs of training, captioning and answering, one process each; 1 on a machine without a GPU",
        ge=1,
        le=1024,
    )
    nodes: int = setting(1, "nodes that share training's GPUs evenly; more than 1 with Slurm only", ge=1, le=4096)
    cpu_threads: Annotated[int, Field(ge=1, le=4096)] | None = setting(
        None, "threads of a job; null: one for each core that the job may run on"
    )
    trackers: Annotated[list[Literal["tensorboard", "wandb", "mlflow", "trackio"]], UniqueItems()] = setting(
        ["tensorboard"],
        "trackers that show both training stages while they run (docs/running.md)",
    )
    filter: FilterSection = section(FilterSection, "the filters")
    synthesize: SynthesizeSection = section(
        SynthesizeSection, "after the filters: captions that do not fit their image are rewritten"
    )
    jsonl: JsonlSection = section(JsonlSection, "training files")
    pretrain: PretrainSection = section(
        PretrainSection,
        "stage 1 trains projector and patch info mining; language model and towers are frozen. auto in "
        "micro_batch_size, gradient_accumulation_steps, activation_checkpointing and deepspeed: the fastest training "
        "plan that fits GPU and host when the stage starts (docs/memory.md)",
    )
    finetune: FinetuneSection = section(
        FinetuneSection, "stage 2 trains the language model, with LoRA or fully, and the projector"
    )
    score_while_training: ScoreSettings = section(
        ScoreSettings,
        "scores on held-out answers at each checkpoint of both stages, for the report: their likelihood, and the share "
        "that greedy decoding gets right",
    )
    evaluate: EvaluateSection = section(EvaluateSection, "captions and answers of the trained model, and their scores")


class CoreKeys(Section):
    """Keys for several experiments, which experiment files cannot set."""

    foundation: Literal["shipped", "train"] = setting(
        "shipped",
        "shipped: the trained tiny models in config/foundation; train: train them here",
    )
    trusted_recipes: bool = setting(
        False,
        "true: recipes may use all of Data-Juicer: run code, query servers, write and delete files "
        "(docs/data_reference.md)",
    )
    report: ReportSection = section(ReportSection, "the page that compares experiments")
    experiment: ExperimentNames = setting(
        [],
        "experiment of a target that is about one, such as `plan` or `publish`; a list of several for export, publish "
        "and crate; []: the target's own default",
    )
    gpu: Literal[tuple(CARDS)] | None = setting(
        None, "card of another machine that `snakemake plan` plans for; null: this machine's"
    )
    plan: PlanSection = section(PlanSection, "`snakemake plan`: memory that it assumes to be free")
    decontaminate: DecontaminateSection = section(
        DecontaminateSection,
        "excludes near-duplicates of further images from training, besides those of held-out and benchmark images",
    )
    finetune_minimal: FinetuneMinimalSection = section(
        FinetuneMinimalSection,
        "`snakemake finetune_minimal`: does training run here, and does it fit? A few steps of both stages",
    )


# Targets that use a key; another target refuses it on the command line. Every target uses the other keys.
TARGETS_BY_KEY = {
    "experiment": ("plan", "finetune_minimal"),
    "gpu": ("plan",),
    "plan": ("plan",),
    "finetune_minimal": ("finetune_minimal",),
}


# What features add: `TARGETS_BY_KEY`; and `KEYS`, a class with their own keys, if they have some.
_FEATURE_KEYS = import_feature_modules("keys")
for _module in _FEATURE_KEYS:
    TARGETS_BY_KEY |= {key: (*TARGETS_BY_KEY.get(key, ()), *names) for key, names in _module.TARGETS_BY_KEY.items()}
_BASES = (*(_module.KEYS for _module in _FEATURE_KEYS if hasattr(_module, "KEYS")), CoreKeys)
SharedKeys = create_model("SharedKeys", __base__=_BASES, __doc__=CoreKeys.__doc__)


class Configuration(SharedKeys, ModelOverridableKeys, ExperimentOnlyKeys):
    """All keys of config/config.yaml."""


class Experiment(Configuration):
    """Merged keys of an experiment, with its model and one of its seeds."""

    model: SerializeAsAny[InstanceOf[ModelFile]]
    seed: Seed = 0
