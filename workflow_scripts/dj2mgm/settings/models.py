"""Model files, config/models/<name>.yaml, chat templates, config/chat_templates, and presets, config/presets.

A stage receives the content of a chat template, so that a change re-runs the stage, and a comment does not.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from dj2mgm.errors import InputError, quote_value
from dj2mgm.settings.base import Number, Section, Seed, StageSettings, UniqueItems, build_schema, setting
from dj2mgm.settings.config_files import list_config_names, locate_config_file, read_config, suggest_name
from dj2mgm.settings.data import BatchSize
from dj2mgm.settings.string_formats import FilePath, Name, Repository, has_format, make_name
from dj2mgm.settings.training_stages import Steps
from dj2mgm.settings.validation import validate_settings

OF_THE_TOKENIZER = "tokenizer"
Text = Annotated[str, Field(min_length=1)]
WITHOUT_CHAT = ("paligemma",)  # types of models that take one question about one image, without a chat template


class ChatTemplateFile(Section):
    """A file in config/chat_templates."""

    asks_question: bool = setting(..., "whether the template has a place for a question, as stage 2 needs")
    chat_template: Text = setting(..., "Jinja, as transformers renders it; `{% generation %}` marks the answer")
    stop_tokens: list[Text] = setting(..., "end an answer, in addition to the tokenizer's end-of-sequence token")
    control_tokens: list[Text] = setting(..., "no question and no answer may contain one")


def list_chat_template_names() -> list[str]:
    """Return the names of the files, and `tokenizer`."""
    return sorted([OF_THE_TOKENIZER, *list_config_names("chat_templates")])


def read_chat_template(name: str) -> dict:
    """Return a chat template: {name, asks_question, chat_template, stop_tokens, control_tokens}.

    The tokenizer's own template is empty here; the stage fills it in.

    Raises:
        InputError: the name is unknown, or its file has a wrong key or value.
    """
    if name not in (names := list_chat_template_names()):
        raise InputError(f"template: unknown chat template {name!r}; {suggest_name(name, names)}")
    if name == OF_THE_TOKENIZER:
        return {"name": name, "asks_question": True, "chat_template": "", "stop_tokens": [], "control_tokens": []}
    return {"name": name} | _read_content(locate_config_file("chat_templates", f"{name}.yaml"))


def check_chat_templates(source: str, model: dict) -> None:
    """Check the two chat templates that a model file names.

    Raises:
        InputError: a name is unknown, or the template of stage 2 has no place for a question.
    """
    for key, needs_question in (("pretrain_template", False), ("template", True)):
        if key not in model:  # the model has its own
            continue
        names = list_chat_template_names()
        if model[key] in names and (not needs_question or read_chat_template(model[key])["asks_question"]):
            continue
        valid_names = [name for name in names if not needs_question or read_chat_template(name)["asks_question"]]
        raise InputError(
            f"{source}: {key!r} must be one of {', '.join(valid_names)}, found {quote_value(model[key])}; a file in "
            "config/chat_templates adds one"
        )


@cache  # every stage of every run needs it
def _read_content(path: Path) -> dict:
    return validate_settings(
        ChatTemplateFile, read_config(path, build_schema(ChatTemplateFile)), str(path)
    ).model_dump()


class PresetFile(Section):
    """A text model, its data, and changed keys of config.yaml's `pretrain`."""

    model: FilePath = setting(..., "folder or hub id")
    data: FilePath = setting(..., "jsonl of texts")
    training: dict = setting(..., "keys of config.yaml's `pretrain`")


Width = Annotated[int, Field(ge=1, le=65536)]
Depth = Annotated[int, Field(ge=1, le=1024)]
Pixels = Annotated[int, Field(ge=1, le=8192)]
TinyKind = Literal["llava", "qwen2.5-vl", "smolvlm"]  # features/foundation/tiny_vlms.py
Dtype = Literal["bfloat16", "float16", "float32"]
Percent = Annotated[Number, Field(ge=0, le=100)]
CLIP = "openai/clip-vit-large-patch14"  # default of models without a file; selects data and judges captions


class MgmParts(Section):
    """Parts of an MGM (folders or hub ids), and how images enter it."""

    language_model: FilePath = setting()
    vision_tower: FilePath = setting()
    vision_tower_aux: FilePath = setting()
    image_size_aux: Pixels = setting()
    image_token: str = setting()


class MgmAssembly(MgmParts, StageSettings):
    """Settings of the stage that assembles an MGM."""

    dtype: Dtype = setting()


class TinyAssembly(StageSettings):
    """Settings of the stage that makes a tiny vision-language model from trained parts."""

    tiny: TinyKind = setting()
    language_model: FilePath = setting()
    vision_tower: FilePath = setting()


PHOTO_MODEL = "qwen3-vl-2b"  # advised for photos instead of a tiny model


class ModelFile(Section):
    """Keys of every model file.

    Attributes:
        is_mgm: whether it is an MGM, whose stage 1 trains a new projector.
        has_stage_1: whether stage 1 trains the projector first.
        trained_by_workflow: whether the workflow trains its parts itself.
        trained_type: `model_type` of the language model that the workflow trains; None if it trains none.
    """

    is_mgm: ClassVar[bool] = False
    trained_by_workflow: ClassVar[bool] = False
    trained_type: ClassVar[str | None] = None
    has_stage_1: ClassVar[bool] = True
    _name: str = PrivateAttr("")

    clip: FilePath = setting(..., "CLIP that selects data and, by default, judges captions")
    license: str = setting("", "license of models that are trained from it, for `snakemake publish`")
    hub_ids: Annotated[list[Repository], UniqueItems()] = setting([], "hub ids of its base models")
    settings: dict = setting({}, "keys of config.yaml that the model needs; an experiment may change them")

    @property
    def name(self) -> str:
        """Name of the model file."""
        return self._name

    @property
    def folder_name(self) -> str:
        """Name of the folder of its runs' results: the name of its file; for a hub id or path, with a digest of it."""
        if has_format("name", self.name):
            return self.name
        return f"{make_name(self.name.rstrip('/').rpartition('/')[2])}-{sha256(self.name.encode()).hexdigest()[:8]}"

    def with_name(self, name: str) -> Self:
        """Return a copy with the name of its file, and without `settings`, which are merged into experiments."""
        set_fields = {key: value for key, value in self if key in self.model_fields_set and key != "settings"}
        model = type(self).model_construct(**set_fields)
        model._name = name
        return model

    @property
    def whole_model(self) -> str | None:
        """Folder or hub id of a whole model that is used unchanged."""
        return None

    @property
    def language_model_source(self) -> str:
        """Folder or hub id of the language model, or of the whole model that contains it."""
        return self.whole_model or self.parts["language_model"]

    @property
    def config_folder(self) -> str | None:
        """Folder or hub id with the config.json of the whole model; None if each part has its own."""
        return self.folder

    @property
    def folder(self) -> str:
        """`whole_model`, or the folder in which the workflow makes the whole model."""
        return self.whole_model or f"results/models/{self.name}/{'mgm' if self.is_mgm else 'vlm'}"

    @property
    def parts(self) -> dict[str, str]:
        """Folders and hub ids of its parts, by key."""
        keys = ("language_model", "vision_tower", "vision_tower_aux")
        return {key: getattr(self, key) for key in keys if hasattr(self, key)}

    @property
    def trained_parts(self) -> "MgmModel | None":
        """Model file whose parts the workflow trains and this model uses; None if it trains none."""
        return None

    @model_serializer(mode="wrap")
    def _serialize_set_fields(self, handler: SerializerFunctionWrapHandler) -> dict:
        set_fields = {key: value for key, value in handler(self).items() if key in self.model_fields_set}
        return set_fields | ({"name": self.name} if self.name else {})


class ClipRecipe(Section):
    """Training of the tiny CLIP and ConvNeXt."""

    seed: Seed = setting()
    pairs: int = setting(ge=1, le=10**8)
    epochs: int = setting(ge=1, le=100_000)
    batch_size: int = setting(ge=2, le=65536)
    learning_rate: Number = setting(gt=0)
    image_size: Pixels = setting(..., "side of CLIP's images; the high-resolution tower takes whole scenes")
    patch_size: Pixels = setting()
    hidden_size: Width = setting()
    num_layers: int = setting(ge=2, le=1024)
    num_heads: Depth = setting()
    convnext_channels: list[Width] = setting(min_length=4, max_length=4)


class LanguageModelRecipe(Section):
    """Training of the tiny language model."""

    seed: Seed = setting()
    patches_per_side: Depth = setting(..., "patches per side of the CLIP tower, and words per side of the board")
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


class MgmModel(MgmParts, ModelFile):
    """An MGM that is assembled from three parts."""

    pretrain_template: str = setting(..., "name of a file in config/chat_templates, like `template`")
    template: str = setting()
    dtype: Dtype = setting()
    foundation: Foundation = setting(None, "how the workflow trains the parts")
    is_mgm: ClassVar[bool] = True

    @property
    def config_folder(self) -> None:
        return None

    @property
    def trained_by_workflow(self) -> bool:
        return self.foundation is not None

    @property
    def trained_type(self) -> str | None:
        return "gemma" if self.trained_by_workflow else None  # features/foundation/tiny_parts.py

    @property
    def trained_parts(self) -> "MgmModel | None":
        return self if self.trained_by_workflow else None

    def build_assembly_settings(self) -> MgmAssembly:
        """Return the settings of the stage that makes the whole model."""
        return MgmAssembly.from_sections(self)


class AssembledModel(ModelFile):
    """A whole MGM folder, such as a converted checkpoint."""

    assembled: FilePath = setting()
    pretrain_template: str = setting(..., "name of a file in config/chat_templates, like `template`")
    template: str = setting()
    is_mgm: ClassVar[bool] = True

    @property
    def whole_model(self) -> str:
        return self.assembled


class VlmModel(ModelFile):
    """A vision-language model of transformers, whose processor has the chat template."""

    pretrain: Literal["connector"] = setting(None, "what stage 1 trains; without the key, there is no stage 1")
    template: ClassVar[str] = OF_THE_TOKENIZER
    pretrain_template: ClassVar[str] = OF_THE_TOKENIZER

    @property
    def has_stage_1(self) -> bool:
        """True if stage 1 trains the projector between towers and language model."""
        return self.pretrain is not None


class PublishedScores(Section):
    """Scores that a model's authors have published, in percent."""

    textvqa: Percent | None = setting(None, "on TextVQA's validation questions")
    mmbench: Percent | None = setting(None, "on MMBench's English questions")
    mmmu: Percent | None = setting(None, "on MMMU's validation questions")
    source: str = setting(..., "page with the scores")


class TransformersModel(VlmModel):
    """A vision-language model that transformers loads unchanged."""

    transformers: FilePath = setting(..., "folder or hub id")
    clip: FilePath = setting(CLIP, "CLIP that selects data and, by default, judges captions")
    # facts for messages and pages, which change no result
    size_gb: Number | None = setting(None, "GB of its files on the hub", gt=0, exclude=True)
    gated: bool = setting(False, "whether the hub gives it only to users who have accepted its terms", exclude=True)
    scores: PublishedScores | None = setting(None, exclude=True)

    @property
    def whole_model(self) -> str:
        return self.transformers


class TinyModel(VlmModel):
    """A tiny vision-language model that the workflow makes from the parts of another model file."""

    tiny: TinyKind = setting()
    foundation: Name = setting(..., "name of the model file whose `foundation` trains the parts")
    trained_by_workflow: ClassVar[bool] = True
    trained_type: ClassVar[str] = "llama"  # features/foundation/tiny_vlms.py
    _trained_parts: MgmModel | None = PrivateAttr(None)

    def with_parts(self, model: MgmModel) -> Self:
        """Return a copy that is made from the parts of `model`."""
        copy = self.model_copy()
        copy._trained_parts = model
        return copy

    @property
    def trained_parts(self) -> MgmModel | None:
        return self._trained_parts

    @property
    def language_model(self) -> str:
        """Folder of the language model."""
        return self._trained_parts.language_model

    @property
    def vision_tower(self) -> str:
        """Folder of the vision tower."""
        return self._trained_parts.vision_tower

    def build_assembly_settings(self) -> TinyAssembly:
        """Return the settings of the stage that makes the whole model."""
        return TinyAssembly.from_sections(self, language_model=self.language_model, vision_tower=self.vision_tower)

    @model_serializer(mode="wrap")
    def _serialize_set_fields(self, handler: SerializerFunctionWrapHandler) -> dict:
        set_fields = {key: value for key, value in handler(self).items() if key in self.model_fields_set}
        parts = {"foundation": self._trained_parts.model_dump()} | self.parts if self._trained_parts else {}
        return set_fields | parts | ({"name": self.name} if self.name else {})


# class of a model file by a key that only this kind has; a file without these keys is an MgmModel
MODEL_KINDS = {"assembled": AssembledModel, "transformers": TransformersModel, "tiny": TinyModel}


def detect_model_kind(keys: dict) -> type[ModelFile]:
    """Return the class of a model file."""
    return next((kind for key, kind in MODEL_KINDS.items() if key in keys), MgmModel)
