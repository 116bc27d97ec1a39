"""Family of MGM models; implements `dj2mgm/models/vision_language.py`."""

from pathlib import Path

import torch
from torch import nn

from dj2mgm.data.chat_template import ChatTemplate
from dj2mgm.data.formats import list_images
from dj2mgm.data.images import load_image
from dj2mgm.errors import InputError
from dj2mgm.models.loss import find_answer_positions
from dj2mgm.models.mgm.configuration_mgm import MGMConfig
from dj2mgm.models.mgm.mgm_generator import MGMGenerator, load_trained
from dj2mgm.models.mgm.modeling_mgm import MGMForConditionalGeneration, find_image_positions
from dj2mgm.models.mgm.processing_mgm import MGMProcessor
from dj2mgm.models.vision_language import IGNORE_INDEX, ModelParts, check_image_fits


class MGMFamily:
    """MGM in a folder."""

    has_stock_class = False

    def __init__(self, folder: Path):
        self.folder = folder
        self.processor = MGMProcessor.from_pretrained(folder)
        self.config = MGMConfig.from_pretrained(folder)

    def make_encoder(self, template: str | dict, max_length: int) -> "MGMEncoder":
        return MGMEncoder(self.processor, template, max_length)

    def load(self, dtype: torch.dtype, attention: str) -> MGMForConditionalGeneration:
        return MGMForConditionalGeneration.from_pretrained(
            self.folder, dtype=dtype, attn_implementation={"text_config": attention}, trust_remote_code=False
        )

    def prepare_inputs(self, batch: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Return the batch on the device; pixels stay float32, in which the model scales images down."""
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
        if "pixel_values" in batch:
            batch["pixel_values"] = self.processor.normalize_pixels(batch["pixel_values"])
        return batch

    def load_trained_model(self, stage: Path | None, dtype: torch.dtype | str) -> MGMForConditionalGeneration:
        return load_trained(self.folder, stage, dtype)

    def make_generator(self, stage: Path | None, device: str | torch.device | None) -> MGMGenerator:
        return MGMGenerator(self.folder, stage, device)

    def save_processor(self, folder: Path) -> None:
        self.processor.save_pretrained(folder)

    @staticmethod
    def find_parts(model: nn.Module) -> ModelParts:
        """Return the parts of a model with or without wrappers."""
        mgm = find_mgm(model)
        clip, convnext = mgm.model.vision_tower, mgm.model.vision_tower_aux
        blocks = [block for stage in convnext.encoder.stages for block in stage.layers]
        finest = mgm.config.image_size_aux // mgm.config.vision_aux_config.patch_size
        norms = [convnext.embeddings.layernorm, *(stage.downsampling_layer[0] for stage in convnext.encoder.stages[1:])]
        return ModelParts(
            towers=[*clip.encoder.layers, *blocks],
            compiled_tower_modules=norms,
            decoder=mgm.model.language_model.layers,
            head=mgm.lm_head,
            externally_read=[mgm.model.patch_info_mining],
            initialized_in_stage_1=[mgm.model.projector, mgm.model.patch_info_mining],
            depthwise_convolutions=[
                (stage.layers[0].dwconv, finest >> number) for number, stage in enumerate(convnext.encoder.stages)
            ],
        )


def find_mgm(model: nn.Module) -> MGMForConditionalGeneration:
    """Return the MGM inside a model and its wrappers."""
    [mgm] = [module for module in model.modules() if isinstance(module, MGMForConditionalGeneration)]
    return mgm


class MGMEncoder:
    """Encoder of conversations with one image or none.

    Pixels stay bytes until they are on the GPU. As normalized float32, images of a few steps would take gigabytes of
    memory, and their transfer four times as long.
    """

    def __init__(self, processor: MGMProcessor, template: str | dict, max_length: int):
        if max_length <= processor.num_image_tokens:
            raise InputError(
                f"max_length {max_length} leaves no room for text after the {processor.num_image_tokens} tokens of an "
                "image; raise it"
            )
        self.template = ChatTemplate.load(template, processor.tokenizer)
        self.control_tokens = self.template.control_tokens
        self.processor = processor
        self.max_length = max_length

    @property
    def blank_tokens(self) -> int:
        return 0

    @property
    def stops(self) -> frozenset[int]:
        return frozenset(self.template.stop_ids(self.processor.tokenizer))

    def count_tokens(self, row: dict) -> tuple[int, int]:
        labels = self._encode(row)["labels"]
        return len(labels), len(labels) - labels.count(IGNORE_INDEX)

    def count_image_tokens(self, row: dict) -> int:
        return 0  # all images are resized to the same size

    def encode_row(self, row: dict | None) -> dict:
        """Return {input_ids, labels, pixel_values: (3, S', S') uint8 or None}."""
        if row is None:
            item = {"input_ids": [self.processor.tokenizer.pad_token_id], "labels": [IGNORE_INDEX]}
            return item | {"pixel_values": None}
        item = self._encode(row) | {"pixel_values": None}
        if images := list_images(row):
            item["pixel_values"] = self.processor.resize_images([load_image(images[0])])[0]
        return item

    def batch(self, items: list[dict], width: int) -> dict[str, torch.Tensor]:
        """Return input_ids and labels (B, width), pixel_values (images, 3, S', S') uint8, and their positions.

        There is no attention mask. Padding is on the right, where causal attention does not see it, it carries no
        loss, and the fast kernels compute attention without a mask.
        """
        input_ids = torch.full((len(items), width), self.processor.tokenizer.pad_token_id)
        labels = torch.full((len(items), width), IGNORE_INDEX)
        for row, item in enumerate(items):
            length = len(item["input_ids"])
            input_ids[row, :length] = torch.tensor(item["input_ids"])
            labels[row, :length] = torch.tensor(item["labels"])
        # found here on the host, so that nothing waits for the GPU
        batch = {"input_ids": input_ids, "labels": labels, "answer_positions": find_answer_positions(labels)}
        images = [item["pixel_values"] for item in items if item["pixel_values"] is not None]
        if images:
            batch["pixel_values"] = torch.stack(images)
            batch["image_positions"] = find_image_positions(input_ids, self.processor.image_token_id)
        return batch

    def _encode(self, row: dict) -> dict[str, list[int]]:
        if len(list_images(row)) > 1:
            raise InputError(f"row {row['id']}: has {len(list_images(row))} images, but MGM takes one; delete the row")
        segments = self.template.render_segments(row["conversations"])
        item = self.processor.encode(segments)
        check_image_fits(row, item["input_ids"], self.processor.image_token_id, self.max_length)
        return {key: ids[: self.max_length] for key, ids in item.items()}
