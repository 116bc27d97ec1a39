"""The real architecture of a model without its weights, from the config.json files of its parts.

A part that is not on this machine is looked up by its folder's name in config/architectures, then on the hub.

- `Architecture`: a causal language model, trained on texts only.
- `MGMArchitecture`, `VLMArchitecture`: models of images and texts.
- `find_architecture`, `load_architecture`: from a name, a folder, a config.json or a hub id.
"""

import copy
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    ConvNextConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import check_local_model
from dj2mgm.model_files.model_folders import check_config, check_model_folder, find_model, is_folder_path
from dj2mgm.models.mgm import MGMConfig, MGMForConditionalGeneration
from dj2mgm.models.mgm.mgm_family import MGMFamily
from dj2mgm.models.mgm.modeling_mgm import select_positions
from dj2mgm.models.vision_language import IGNORE_INDEX, cast_images
from dj2mgm.models.vlm.encoder import ProcessorEncoder
from dj2mgm.models.vlm.vlm_family import (
    TransformersFamily,
    build_substitute_operations,
    has_bidirectional_images,
    make_trainable,
    supports_sdpa,
)
from dj2mgm.planning.meta_kernels import ATTENTION, MASKED_ATTENTION, IntegersOnCPU
from dj2mgm.servers.hub import check_library_downloads
from dj2mgm.settings.base import build_schema
from dj2mgm.settings.config_files import locate_config_file, read_config
from dj2mgm.settings.models import MgmParts, detect_model_kind
from dj2mgm.settings.validation import validate_settings
from dj2mgm.storage.files import FIX_FILE_REMEDY, read_json

DEFAULT_IMAGE_SIZE = (640, 480)  # px, if there is no data yet
MAX_VALUES_OF_IMAGE = 2**16  # integers of an image's field; positions and sizes of patches have fewer, masks have more


class PlanningError(InputError):
    """A model without a memory plan, which may still be trainable."""


@dataclass(frozen=True)
class MicroBatch:
    """Sizes of the samples that are computed together.

    Attributes:
        samples: number of samples.
        sequence_length: tokens of each sample.
        answer_tokens: number of tokens at the end of each sample that carry loss.
        images_per_sample: images per sample.
    """

    samples: int
    sequence_length: int
    answer_tokens: int
    images_per_sample: float


@dataclass(frozen=True, eq=False)
class Architecture:
    """A model to plan for; this class is a causal language model, trained on texts only."""

    name: str
    config: PretrainedConfig

    @property
    def hidden_size(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def image_tokens(self) -> int:
        """Tokens of a sample's image; 0 for a text model."""
        return 0

    def count_image_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a sample's image as the loader returns it to a model with weights of `dtype`."""
        return 0

    @property
    def attention(self) -> str:
        """Name of the stand-in for the language model's attention, registered with transformers."""
        return ATTENTION

    def build(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return the model on the meta device, with the shape and dtype of every parameter and without memory."""
        with torch.device("meta"):
            model = self._make().to(dtype)
        model.tie_weights()
        return model

    def _make(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(self.config)

    def get_language_model(self, model: PreTrainedModel) -> nn.Module:
        """Return the language model without its head; its attribute `layers` holds the layers."""
        return model.base_model

    def prepare_inputs(self, batch: MicroBatch, device: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a batch from which `compute` starts; none if it makes its own."""
        return {}

    def compute(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor], batch: MicroBatch) -> None:
        """Run a forward and backward pass of a model on the meta device, from the prepared inputs of this batch."""
        self._compute_loss(model, batch).backward()

    def _compute_loss(self, model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
        hidden = self.get_language_model(model)(
            inputs_embeds=self._embed_tokens(model, batch.samples, batch.sequence_length), use_cache=False
        ).last_hidden_state
        hidden = hidden[:, -batch.answer_tokens :].flatten(0, 1)
        return cross_entropy(model.get_output_embeddings()(hidden).float(), _make_targets(hidden))

    def _embed_tokens(self, model: PreTrainedModel, samples: int, tokens: int) -> torch.Tensor:
        return model.get_input_embeddings()(torch.empty(samples, tokens, dtype=torch.long, device="meta"))


@dataclass(frozen=True, eq=False)
class MGMArchitecture(Architecture):
    """MGM, whose samples have one image each."""

    config: MGMConfig

    @property
    def image_tokens(self) -> int:
        return self.config.num_image_tokens

    def count_image_bytes(self, dtype: torch.dtype) -> int:
        return 3 * self.config.image_size_aux**2  # three channels of bytes

    def build(self, dtype: torch.dtype) -> PreTrainedModel:
        model = super().build(dtype)
        patches = torch.empty(1, self.image_tokens, self.config.vision_config.hidden_size, dtype=dtype, device="meta")
        convolutions = MGMFamily.find_parts(model).depthwise_convolutions  # the first one of each stage
        stages = [patches.new_empty(1, layer.in_channels, side, side) for layer, side in convolutions]
        with torch.no_grad():  # caches the weights of interpolations, so that the first trace equals all others
            model.model.patch_info_mining(patches, *stages)
        return model

    def _make(self) -> PreTrainedModel:
        return MGMForConditionalGeneration(self.config)

    def get_language_model(self, model: PreTrainedModel) -> nn.Module:
        return model.base_model.language_model

    def _compute_loss(self, model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
        text_embeddings = self._embed_tokens(model, batch.samples, batch.sequence_length - self.image_tokens)
        side, language_model = self.config.image_size_aux, self.get_language_model(model)
        pixels = torch.empty(math.ceil(batch.samples * batch.images_per_sample), 3, side, side, device="meta")
        image_embeddings = model.model.get_image_features(pixels)[: batch.samples]
        embeddings = torch.cat([image_embeddings * 1.0, text_embeddings], dim=1)  # scaled, like Gemma's word embeddings
        positions = torch.empty(batch.samples * batch.answer_tokens, dtype=torch.long, device="meta")
        select_positions(language_model.layers[-1], positions, embeddings)
        hidden = language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        hidden = hidden[:, -batch.answer_tokens :].flatten(0, 1)
        return model.lm_head(hidden, _make_targets(hidden))


def _make_targets(hidden: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(hidden), dtype=torch.long, device="meta")


@dataclass(frozen=True, eq=False)
class VLMArchitecture(Architecture):
    """A vision-language model of transformers. Every sample has the image that `encode_row` makes without a row."""

    encoder: ProcessorEncoder
    item: dict

    @property
    def image_tokens(self) -> int:
        """Tokens of an image inside the chat template, with a question and an answer of one letter."""
        return len(self.item["input_ids"])

    def count_image_bytes(self, dtype: torch.dtype) -> int:
        fields = {name: value for name, value in self.item.items() if isinstance(value, torch.Tensor)}
        return sum(value.numel() * value.element_size() for value in cast_images(fields, dtype).values())

    def _make(self) -> PreTrainedModel:
        config = copy.deepcopy(self.config)  # from_config changes it
        return make_trainable(AutoModelForImageTextToText.from_config(config))

    def get_language_model(self, model: PreTrainedModel) -> nn.Module:
        return model.get_decoder()

    @property
    def attention(self) -> str:
        if not supports_sdpa(self.config):
            return "eager"
        return MASKED_ATTENTION if has_bidirectional_images(self.config.model_type) else ATTENTION

    def build(self, dtype: torch.dtype) -> PreTrainedModel:
        with self._planning_errors():
            return super().build(dtype)

    def compute(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor], batch: MicroBatch) -> None:
        """Run a forward and backward pass without data.

        Images of shorter samples are left out, because towers keep no tensors of them.

        Raises:
            PlanningError: the model's code needs data.
        """
        with self._planning_errors(), IntegersOnCPU(build_substitute_operations(self.config.model_type)):
            model(**inputs).loss.backward()

    def prepare_inputs(self, batch: MicroBatch, device: str) -> dict[str, torch.Tensor]:
        """Return the samples of a batch.

        Positions and numbers of tokens stay on the CPU, because shapes depend on them. All other tensors are on
        `device`. No shape depends on masks of pixels, and computing with their values took most of a trace.
        """
        padding = [self.encoder.end_of_turn] * (batch.sequence_length - len(self.item["input_ids"]))
        token_ids = self.item["input_ids"] + padding
        labels = [IGNORE_INDEX] * (len(token_ids) - batch.answer_tokens) + token_ids[
            len(token_ids) - batch.answer_tokens :
        ]
        item = {name: _move_pixels(value, device) for name, value in self.item.items()}
        tensors = self.encoder.batch(
            [item | {"input_ids": token_ids, "labels": labels}] * batch.samples, len(token_ids)
        )
        return tensors | {"labels": tensors["labels"].to(device)}

    @contextmanager
    def _planning_errors(self) -> Iterator[None]:
        """Raise a PlanningError instead of an exception of the model's own code."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise PlanningError(
                f"the memory plan cannot follow models of type {self.config.model_type} ({lines[0]})"
            ) from error


def _move_pixels(value: object, device: str) -> object:
    """Move a field of an image to the device if it is a tensor of fractions, or has a number for every pixel."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device) if value.is_floating_point() or value.numel() > MAX_VALUES_OF_IMAGE else value


def find_architecture(model: str) -> Architecture:
    """Find a model by the name of a file in config/models or config/presets, by a folder, config.json or hub id."""
    for path in (
        locate_config_file("models", f"{model}.yaml"),
        locate_config_file("presets", f"{model}.yaml"),
        Path(model),
    ):
        if path.suffix == ".yaml" and path.is_file():
            keys = read_config(path)
            if "model" in keys:  # a preset
                return load_architecture(path.stem, Path(keys["model"]))
            kind = detect_model_kind(keys)
            file = validate_settings(kind, read_config(path, build_schema(kind)), str(path)).with_name(path.stem)
            return load_architecture(path.stem, Path(find_model(file.config_folder)) if file.config_folder else file)
    return load_architecture(model, Path(find_model(model)))


def load_architecture(name: str, model: MgmParts | Path, text: bool = False) -> Architecture:
    """Load the architecture of a model.

    Args:
        name: name of the model in messages.
        model: parts of an MGM, or a folder or config.json of transformers, or a hub id.
        text: whether the model is trained on texts only, even if it has a vision tower.
    """
    if isinstance(model, Path):
        return _load_folder(name, str(model), text)
    config = MGMConfig(
        text_config=_read_model_config(model.language_model),
        vision_config=_read_model_config(model.vision_tower, CLIPVisionConfig),
        vision_aux_config=_read_model_config(model.vision_tower_aux, ConvNextConfig),
        image_size_aux=model.image_size_aux,
    )
    return MGMArchitecture(name, config)


def _load_folder(name: str, folder: str, text: bool) -> Architecture:
    config = _read_model_config(folder)
    if config.model_type == MGMConfig.model_type:
        return MGMArchitecture(name, config)
    if text or not hasattr(config, "vision_config"):
        return Architecture(name, config)
    path = _find_part(folder)
    if not path.is_dir():
        raise InputError(f"{folder}: planning for a model of images and texts needs its folder, with its processor")
    return build_vlm_architecture(name, TransformersFamily(path))


def build_vlm_architecture(name: str, family: TransformersFamily) -> VLMArchitecture:
    """Build the architecture of a vision-language model, with a blank image of DEFAULT_IMAGE_SIZE in every sample."""
    encoder = family.make_encoder("", sys.maxsize)
    return VLMArchitecture(name, family.config, encoder, encoder.build_sample(DEFAULT_IMAGE_SIZE))


def _find_part(part: str) -> Path:
    """Return a part's folder or config.json, or the entry of config/architectures if the part is not here."""
    path = Path(part)
    names = (path.name.lower(), f"{path.name.lower()}.json")
    shipped = (file for file in (locate_config_file("architectures", name) for name in names) if file.exists())
    return path if path.exists() else next(shipped, path)


def _read_model_config(part: str, kind: type[PretrainedConfig] | None = None) -> PretrainedConfig:
    """Read the configuration of a part (a folder, config.json or hub id), whole or its sub-configuration of a class.

    Raises:
        InputError: the configuration cannot be used.
        PlanningError: the configuration cannot be found.
    """
    path = _find_part(part)
    if not path.exists() and is_folder_path(part):
        problem, remedy = "the folder is missing", "correct the path"
        if part.startswith("model_zoo/"):
            remedy = "docs/models.md names its source"
        elif part.startswith("results/"):
            problem, remedy = "not made yet", "`snakemake plan` or the first training makes it"
        raise PlanningError(f"{part}: {problem}; {remedy}")
    if path.is_dir():
        check_model_folder(path)
    elif path.exists():
        check_config(path)
    else:
        check_local_model(part)
        check_library_downloads()
    kind = kind or (MGMConfig if _read_model_type(path) == MGMConfig.model_type else AutoConfig)
    try:
        return kind.from_pretrained(path if path.exists() else part, trust_remote_code=False)
    except Exception as error:  # errors of transformers' own checks, too
        reason = " ".join(str(error).split()).split(". ")[0][:200]
        if path.exists():
            raise InputError(
                f"{path}: the configuration cannot be used ({reason}). Fix it, or download it again"
            ) from None
        raise PlanningError(
            f"{part}: its config.json is neither here nor in config/architectures, and the hub gives none ({reason}). "
            "`snakemake fetch` of this model, with internet, brings it"
        ) from None


def _read_model_type(path: Path) -> str | None:
    file = path / "config.json" if path.is_dir() else path
    return read_json(file, remedy=FIX_FILE_REMEDY).get("model_type") if file.is_file() else None
