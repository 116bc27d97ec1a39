"""CLIPScore and RefCLIPScore (Hessel et al. 2021, arXiv:2104.08718, section 3) with any CLIP of transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoProcessor, CLIPModel

from compute import default_device
from errors import InputError
from formats.images import load_image

RESCALE = 2.5  # w of the paper


class ClipEmbedder:
    """CLIP's joint space: images and texts as float32 vectors of unit length. On the GPU if there is one."""

    def __init__(self, clip: str, batch_size: int):
        """`clip` is a local folder or a hub id with safetensors weights; remote code is never run.

        Raises:
            InputError: it cannot be loaded as a CLIP model.
        """
        try:
            self.processor = AutoProcessor.from_pretrained(clip, trust_remote_code=False)
            self.model = CLIPModel.from_pretrained(
                clip, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise InputError(
                f"evaluation model {clip!r} cannot be loaded as a CLIP model with safetensors weights ({first_line}); "
                "name a from_pretrained folder or a hub id under the key clip"
            ) from None
        self.device = default_device()
        self.model.to(self.device).eval()
        self.batch_size = batch_size
        self.token_limit = self.model.config.text_config.max_position_embeddings

    @torch.inference_mode()
    def embed_images(self, paths: Sequence[Path]) -> np.ndarray:
        """(N, D) float32, unit length.

        Raises:
            BadImage: a file is no image.
        """
        features = []
        for batch in tqdm(self._batches(paths), desc="CLIP image batches", mininterval=5):
            pixels = self.processor.image_processor([load_image(path) for path in batch], return_tensors="pt")
            features.append(self.model.get_image_features(**pixels.to(self.device)).pooler_output)
        return unit_length(features)

    @torch.inference_mode()
    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """(N, D) float32, unit length. Texts beyond the tower's token limit are cut; equal texts are computed once."""
        distinct = list(dict.fromkeys(texts))
        features = []
        for batch in self._batches(distinct):
            tokens = self.processor.tokenizer(
                batch, padding=True, truncation=True, max_length=self.token_limit, return_tensors="pt"
            )
            output = self.model.get_text_features(
                input_ids=tokens["input_ids"].to(self.device), attention_mask=tokens["attention_mask"].to(self.device)
            )
            features.append(output.pooler_output)
        place = {text: index for index, text in enumerate(distinct)}
        return unit_length(features)[[place[text] for text in texts]]

    def count_truncated(self, texts: Sequence[str]) -> int:
        """How many of the texts are longer than the text tower's limit."""
        tokens = self.processor.tokenizer(list(texts), verbose=False)["input_ids"]
        return sum(len(ids) > self.token_limit for ids in tokens)

    def _batches(self, items: Sequence) -> list[list]:
        return [list(items[start : start + self.batch_size]) for start in range(0, len(items), self.batch_size)]


def unit_length(features: list[torch.Tensor]) -> np.ndarray:
    """Batches of features (B, D) as one array (N, D) of unit vectors."""
    return torch.nn.functional.normalize(torch.cat(features), dim=-1).cpu().numpy()


def clip_score(images: np.ndarray, captions: np.ndarray) -> np.ndarray:
    """CLIP-S(c, v) = w · max(cos(c, v), 0), w = 2.5, of N pairs of unit vectors (N, D). Returns (N,)."""
    return RESCALE * np.maximum((images * captions).sum(axis=-1), 0)


def reference_similarity(captions: np.ndarray, references: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """max(max over references r of cos(c, r), 0) of each caption.

    Args:
        captions: (N, D) unit vectors.
        references: (R, D) unit vectors of all references, one or more a caption.
        owners: (R,) int, the caption that each reference belongs to.

    Returns:
        (N,)
    """
    best = np.zeros(len(captions), dtype=captions.dtype)
    np.maximum.at(best, owners, (captions[owners] * references).sum(axis=-1))
    return best


def ref_clip_score(score: np.ndarray, similarity: np.ndarray) -> np.ndarray:
    """RefCLIP-S(c, R, v): the harmonic mean of CLIP-S(c, v) and the reference similarity, 0 where either is 0. (N,)"""
    total = score + similarity
    return np.divide(2 * score * similarity, total, out=np.zeros_like(total), where=total > 0)
