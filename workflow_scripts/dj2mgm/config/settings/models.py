"""Model files, config/models/<name>.yaml: one class for each kind of model."""

from typing import Annotated, Literal

from pydantic import Field

from dj2mgm.config.settings.base import Number, Section, Seed, Unique, setting
from dj2mgm.config.settings.data import BatchSize
from dj2mgm.config.settings.strings import FilePath, Name, Repository
from dj2mgm.config.settings.training import Steps

Width = Annotated[int, Field(ge=1, le=65536)]
Depth = Annotated[int, Field(ge=1, le=1024)]
Pixels = Annotated[int, Field(ge=1, le=8192)]


class ModelFile(Section):
    """Keys of every model file."""

    clip_score: FilePath = setting(..., "CLIP that selects data and, by default, judges captions")
    license: str = setting("", "of what is trained from it, for `snakemake publish`")
    hub_ids: Annotated[list[Repository], Unique()] = setting([], "of its base models")
    settings: dict = setting({}, "keys of config.yaml that the model needs; an experiment may change them")


class ClipRecipe(Section):
    """Training of the tiny CLIP and ConvNeXt."""

    seed: Seed = setting()
    pairs: int = setting(ge=1, le=10**8)
    epochs: int = setting(ge=1, le=100_000)
    batch_size: int = setting(ge=2, le=65536)
    learning_rate: Number = setting(gt=0)
    image_size: Pixels = setting()
    patch_size: Pixels = setting()
    hidden_size: Width = setting()
    num_layers: int = setting(ge=2, le=1024)
    num_heads: Depth = setting()
    convnext_channels: list[Width] = setting(min_length=4, max_length=4)


class LanguageModelRecipe(Section):
    """Training of the tiny language model."""

    seed: Seed = setting()
    patches_per_side: Depth = setting()
    hidden_size: Width = setting()
    num_layers: Depth = setting()
    num_heads: Depth = setting()
    steps: Steps = setting()
    batch_size: BatchSize = setting()
    learning_rate: Number = setting(gt=0)


class Foundation(Section):
    """Parts of a tiny MGM that the workflow trains itself."""

    clip: ClipRecipe = setting()
    language_model: LanguageModelRecipe = setting()


class MgmModel(ModelFile):
    """An MGM that is assembled from three parts: local folders or hub ids."""

    language_model: FilePath = setting()
    vision_tower: FilePath = setting()
    vision_tower_aux: FilePath = setting()
    image_size_aux: Pixels = setting()
    image_token: str = setting()
    pretrain_template: str = setting(..., "a name in config/chat_templates, as `template`")
    template: str = setting()
    dtype: Literal["bfloat16", "float16", "float32"] = setting()
    foundation: Foundation = setting(None, "how the workflow trains the parts")


class AssembledModel(ModelFile):
    """A whole MGM folder, such as a converted checkpoint."""

    assembled: FilePath = setting()
    pretrain_template: str = setting(..., "a name in config/chat_templates, as `template`")
    template: str = setting()


class TransformersModel(ModelFile):
    """A vision-language model of transformers, with its own configuration and processor."""

    transformers: FilePath = setting()
    pretrain: Literal["connector"] = setting(None, "what stage 1 trains; without the key there is none")


class TinyModel(ModelFile):
    """A tiny vision-language model that the workflow makes from the parts of another model file."""

    tiny: Literal["llava", "qwen2.5-vl", "smolvlm"] = setting(..., "foundation/tiny_vlms.py")
    foundation: Name = setting(..., "a model file with a foundation of its own")
    pretrain: Literal["connector"] = setting(None, "what stage 1 trains; without the key there is none")


KINDS = {
    "assembled": AssembledModel,
    "transformers": TransformersModel,
    "tiny": TinyModel,
}  # by the key that only it has


def model_kind(keys: dict) -> type[ModelFile]:
    """Return the class of a model file."""
    return next((kind for key, kind in KINDS.items() if key in keys), MgmModel)
