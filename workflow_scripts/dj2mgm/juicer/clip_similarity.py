"""CLIP similarities of many image-text pairs; equal texts and equal images are encoded once.

The module imports torch and transformers, so operators import it at first use of the model.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from data_juicer.utils.model_utils import check_model_home
from PIL import Image
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, CLIPImageProcessorPil, CLIPModel

from dj2mgm.errors import InputError
from dj2mgm.model_files.missing_models import check_local_model
from dj2mgm.model_files.model_folders import find_missing_parts, find_model

RGB_LEVELS = 256
SIMILAR_LENGTH = 1.25  # largest ratio of the text lengths in a forward pass


class ClipSimilarity:
    """A CLIP on one device, in float32, with its own processor."""

    def __init__(self, clip: str, device: str):
        """Load the model and its processor from a `save_pretrained` folder or a hub id; remote code is never run."""
        clip = check_model_home(clip)
        check_local_model(clip)
        folder = find_model(clip)  # a folder: for a hub id, libraries request optional files from the hub
        missing = find_missing_parts(Path(folder)) if os.path.isdir(folder) else []
        try:
            if not any(part.startswith("config ") for part in missing):
                architecture = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
                if architecture != "clip":
                    raise ValueError(f"it is a model of type {architecture!r}")
            if missing:
                raise InputError(
                    f"CLIP folder {clip} has no {' and no '.join(missing)}. "
                    "Save the whole model and its processor there, with save_pretrained"
                )
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            model = CLIPModel.from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError, SafetensorError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise InputError(
                f"hf_clip {clip!r} is not a folder or hub id of a CLIP model with safetensors weights ({first_line}). "
                "Name one in the recipe"
            ) from None
        self.device = torch.device(device)
        self.model = model.to(self.device).eval()
        self.tokenizer = processor.tokenizer
        self.pixels = PixelBatches(processor.image_processor, self.device)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str], images: Sequence, load: Callable[..., Image.Image]) -> np.ndarray:
        """Return the similarity of text i and image i as Data-Juicer's own filter defines it: logit / 100.

        Args:
            texts: n texts. Texts beyond the text tower's limit are cut and keep their end token.
            images: n hashable names of images.
            load: function that returns the RGB image of a name.

        Returns:
            (N,) float64: cosine · exp(logit_scale) / 100, which is the cosine for OpenAI's CLIPs.
        """
        text_indices, image_indices = _index_distinct(texts), _index_distinct(images)
        with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
            text_features = self._embed_texts(list(text_indices))
            image_features = self._embed_images(list(image_indices), load)
        left = text_features[[text_indices[text] for text in texts]]  # (N, D)
        right = image_features[[image_indices[image] for image in images]]  # (N, D)
        similarity = (left * right).sum(dim=-1) * self.model.logit_scale.exp() / 100.0
        return similarity.cpu().numpy().astype(np.float64)

    @torch.inference_mode()
    def embed(self, images: Sequence, load: Callable[..., Image.Image]) -> np.ndarray:
        """Return unit vectors (N, D) float32 of N hashable names of images, which `load` returns in RGB."""
        indices = _index_distinct(images)
        with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
            features = self._embed_images(list(indices), load)
        return features[[indices[image] for image in images]].cpu().numpy()

    @torch.inference_mode()
    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors (N, D) float32 of N texts; too long texts are cut and keep their end token."""
        indices = _index_distinct(texts)
        return self._embed_texts(list(indices))[[indices[text] for text in texts]].cpu().numpy()

    def _embed_texts(self, texts: list[str]) -> torch.Tensor:
        """Return unit vectors (N, D), in one pass per group of similar lengths to limit the padding."""
        config = self.model.config.text_config
        tokens = self.tokenizer(texts, truncation=True, max_length=config.max_position_embeddings)["input_ids"]
        features = torch.empty(len(texts), self.model.config.projection_dim, device=self.device)
        for group in _group_by_length(tokens):
            # padding on the right needs no mask: the tower is causal, and its output is read at the first end token
            rows = [torch.tensor(tokens[index]) for index in group]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=config.eos_token_id)
            output = self.model.text_model(input_ids=padded.to(self.device)).pooler_output
            features[group] = self.model.text_projection(output)
        return torch.nn.functional.normalize(features, dim=-1)

    def _embed_images(self, images: list, load: Callable[..., Image.Image]) -> torch.Tensor:
        """Return unit vectors (N, D)."""
        output = self.model.vision_model(pixel_values=self.pixels(images, load)).pooler_output
        return torch.nn.functional.normalize(self.model.visual_projection(output), dim=-1)


class PixelBatches:
    """The exact output of a CLIP image processor for many images, computed faster.

    The usual pipeline (shortest edge resized by PIL, center cropped, rescaled, normalized) stays in uint8 up to the
    end. A table of 256 values per channel, which the processor fills once, then replaces its arithmetic. For any other
    pipeline the processor itself runs.
    """

    def __init__(self, processor, device: torch.device):
        self.processor = processor
        self.device = device
        self.table = None
        if _is_usual(processor):
            ramp = np.arange(RGB_LEVELS, dtype=np.uint8)
            ramp = Image.fromarray(np.repeat(ramp[None, :, None], 3, axis=2))  # (1, 256, 3)
            levels = processor(ramp, do_resize=False, do_center_crop=False, return_tensors="pt").pixel_values
            self.table = levels.reshape(-1).to(device)  # (3 · 256,) float32
            self.short, self.resample = processor.size["shortest_edge"], processor.resample
            self.crop = processor.crop_size["height"], processor.crop_size["width"]
            self.channel_start = (torch.arange(3, dtype=torch.int32) * RGB_LEVELS).reshape(1, 3, 1, 1).to(device)

    def __call__(self, images: Sequence, load: Callable[..., Image.Image]) -> torch.Tensor:
        """Load and prepare images in PyTorch's number of threads; return (N, 3, H, W) float32 on the device."""
        prepare = load if self.table is None else lambda image: self._resize_and_crop(load(image))
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            prepared = list(threads.map(prepare, images))
        if self.table is None:
            return self.processor(prepared, return_tensors="pt").pixel_values.to(self.device)
        levels = torch.from_numpy(np.stack(prepared)).to(self.device).permute(0, 3, 1, 2)  # (N, 3, H, W) uint8
        table_indices = levels.to(torch.int32) + self.channel_start
        return self.table.index_select(0, table_indices.reshape(-1)).reshape(table_indices.shape)

    def _resize_and_crop(self, image: Image.Image) -> np.ndarray:
        """Return (H, W, 3) uint8, with sizes rounded like in `CLIPImageProcessorPil`."""
        width, height = image.size
        long = int(self.short * max(width, height) / min(width, height))
        width, height = (self.short, long) if width <= height else (long, self.short)
        resized = np.asarray(image.resize((width, height), self.resample))
        crop_height, crop_width = self.crop
        top, left = (height - crop_height) // 2, (width - crop_width) // 2
        return resized[top : top + crop_height, left : left + crop_width]


def _is_usual(processor) -> bool:
    """Return whether every image is resized to its shortest edge and then cropped inside the result, all by PIL."""
    short = processor.size.get("shortest_edge")
    return (
        type(processor) is CLIPImageProcessorPil
        and processor.do_resize
        and processor.do_center_crop
        and bool(short)
        and not processor.size.get("longest_edge")
        and max(processor.crop_size["height"], processor.crop_size["width"]) <= short
    )


def _index_distinct(items: Sequence) -> dict:
    """Return the distinct items in their order, each with its index."""
    return {item: index for index, item in enumerate(dict.fromkeys(items))}


def _group_by_length(sequences: Sequence[Sequence]) -> list[list[int]]:
    """Return indices of the sequences, shortest first, in groups whose lengths differ by at most `SIMILAR_LENGTH`."""
    groups: list[list[int]] = []
    for index in sorted(range(len(sequences)), key=lambda index: len(sequences[index])):
        if not groups or len(sequences[index]) > SIMILAR_LENGTH * len(sequences[groups[-1][0]]):
            groups.append([])
        groups[-1].append(index)
    return groups
