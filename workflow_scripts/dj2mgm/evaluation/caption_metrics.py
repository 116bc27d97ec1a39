"""All metrics of generated captions: CLIPScore, RefCLIPScore and attribute accuracy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoProcessor, CLIPModel

from dj2mgm.compute import default_device
from dj2mgm.data.images import BadImage, load_image, locate_image
from dj2mgm.errors import InputError
from dj2mgm.evaluation.caption_attributes import attribute_metrics
from dj2mgm.evaluation.groups import REFERENCE, Metrics, Rows
from dj2mgm.evaluation.intervals import Measurements
from dj2mgm.messages import Progress

# CLIPScore and RefCLIPScore (Hessel et al. 2021, arXiv:2104.08718, section 3) with any CLIP of transformers.

RESCALE = 2.5  # w of the paper
AT_ONCE = 64  # images or texts that are embedded together


class ClipEmbedder:
    """CLIP's joint space: images and texts as float32 vectors of unit length. On the GPU if there is one."""

    def __init__(self, clip: str):
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
        self.token_limit = self.model.config.text_config.max_position_embeddings

    @torch.inference_mode()
    def embed_images(self, paths: Sequence[Path]) -> np.ndarray:
        """(N, D) float32, unit length.

        Raises:
            BadImage: a file is no image.
        """
        features = []
        progress = Progress("images", len(paths))
        for batch in self._batches(paths):
            pixels = self.processor.image_processor([load_image(path) for path in batch], return_tensors="pt")
            features.append(self.model.get_image_features(**pixels.to(self.device)).pooler_output)
            progress.add(len(batch))
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
        return [list(items[start : start + AT_ONCE]) for start in range(0, len(items), AT_ONCE)]


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


# All metrics of generated captions: CLIPScore, RefCLIPScore and attribute accuracy, for every group and control.


class CaptionJudge:
    """Judges lists of captions of the same evaluation images, whose features are computed once."""

    def __init__(self, rows: Rows, image_root: str | Path, embedder: ClipEmbedder, prompt: str):
        """`rows` are evaluation rows (data/formats.py); `prompt` is put before every caption.

        Raises:
            InputError: an image is missing or unreadable.
        """
        self.rows, self.embedder, self.prompt = rows, embedder, prompt
        try:
            self.images = embedder.embed_images([locate_image(image_root, row["image"]) for row in rows])
        except BadImage as error:
            raise InputError(f"evaluation image {error}; restore the image or remove its evaluation row") from None
        self.owners = np.array([index for index, row in enumerate(rows) for _ in row["captions"]])
        self.references = self._embed([caption for row in rows for caption in row["captions"]])

    def _embed(self, captions: list[str]) -> np.ndarray:
        return self.embedder.embed_texts([self.prompt + caption for caption in captions])

    def metrics(self, captions: list[str]) -> Metrics:
        """Metrics of one caption an image, in the order of the rows. An empty caption says nothing and scores 0."""
        ids = [row["id"] for row in self.rows]
        said = np.array([bool(caption.strip()) for caption in captions])
        features = self._embed(captions)
        score = clip_score(self.images, features) * said
        similarity = reference_similarity(features, self.references, self.owners)
        clip_metrics = {
            "clip_score": Measurements.of(score, ids),
            "ref_clip_score": Measurements.of(ref_clip_score(score, similarity), ids),
        }
        return clip_metrics | attribute_metrics(captions, self.rows)

    def counts(self, captions: list[str]) -> dict[str, int]:
        return {
            "captions": len(captions),
            "empty": sum(not caption.strip() for caption in captions),
            "truncated": self.embedder.count_truncated([self.prompt + caption for caption in captions]),
        }


def measure_captions(
    models: dict[str, dict[str, Rows]], judge: CaptionJudge
) -> tuple[dict[str, Metrics], dict[str, dict[str, int]]]:
    """Metrics of every model on own and shuffled images, and of the control `reference`.

    `models` comes from `groups.read_pairs(path, ("id",))`; the judge's rows are those captions' images, sorted by id.
    The control's captions are the first references, so their similarity to the references is 1: a ceiling.

    Returns:
        {group: metrics} and {group: {"captions", "empty", "truncated"}}
    """
    captions = {
        f"{model}/{images}": [row["caption"] for row in rows]
        for model, pair in models.items()
        for images, rows in pair.items()
    }
    captions[REFERENCE] = [row["captions"][0] for row in judge.rows]
    measured = {group: judge.metrics(texts) for group, texts in captions.items()}
    return measured, {group: judge.counts(texts) for group, texts in captions.items()}


def rows_of_captions(models: dict[str, dict[str, Rows]], evaluation: Rows) -> Rows:
    """The evaluation rows that the captions are about, sorted by id; every model must caption the same ones.

    Raises:
        InputError: there are no captions, models differ, or a caption's id is not in the evaluation split.
    """
    by_id = {row["id"]: row for row in evaluation}
    per_model = {model: [row["id"] for row in pair["own"]] for model, pair in models.items()}
    again = "delete captions.jsonl and run the rule generate_answers again"
    if not per_model or not all(per_model.values()):
        raise InputError(f"there are no captions to evaluate; {again}")
    ids, *others = per_model.values()
    if any(other != ids for other in others):
        raise InputError(f"the models {' and '.join(per_model)} captioned different images; {again}")
    if unknown := [identifier for identifier in ids if identifier not in by_id]:
        raise InputError(f"caption of {unknown[0]!r}: the evaluation split has no such id; {again}")
    return [by_id[identifier] for identifier in ids]
