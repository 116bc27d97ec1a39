"""Metrics of generated captions: CLIPScore, RefCLIPScore and attribute accuracy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.errors import InputError
from dj2mgm.evaluation.caption_attributes import measure_attributes
from dj2mgm.evaluation.embedder import Embedder
from dj2mgm.evaluation.groups import SECOND_JUDGE_PREFIX, Metrics, Rows
from dj2mgm.evaluation.intervals import Measurements
from dj2mgm.score_groups import OWN, REFERENCE_CAPTIONS

# CLIPScore and RefCLIPScore (Hessel et al. 2021, arXiv:2104.08718, section 3) with any CLIP or SigLIP of transformers.
# Both use cosines, which a SigLIP has as well. Its scale, bias and sigmoid, which turn cosines into probabilities, are
# not used.

RESCALE = 2.5  # w of the paper


def compute_clip_score(images: np.ndarray, captions: np.ndarray) -> np.ndarray:
    """Return CLIP-S(c, v) = w · max(cos(c, v), 0), w = 2.5, of N pairs of unit vectors: (N, D) → (N,)."""
    return RESCALE * np.maximum((images * captions).sum(axis=-1), 0)


def compute_reference_similarity(captions: np.ndarray, references: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Return max(max over references r of cos(c, r), 0) of each caption, (N,).

    Args:
        captions: (N, D) unit vectors.
        references: (R, D) unit vectors of all references, at least one per caption.
        owners: (R,) int, index of each reference's caption.
    """
    best = np.zeros(len(captions), dtype=captions.dtype)
    np.maximum.at(best, owners, (captions[owners] * references).sum(axis=-1))
    return best


def compute_ref_clip_score(score: np.ndarray, similarity: np.ndarray) -> np.ndarray:
    """Return RefCLIP-S(c, R, v) (N,), the harmonic mean of CLIP-S and reference similarity, 0 if either is 0."""
    total = score + similarity
    return np.divide(2 * score * similarity, total, out=np.zeros_like(total), where=total > 0)


class CaptionJudge:
    """Judge of captions of the same evaluation images, whose features are computed once for each embedder.

    Args:
        rows: evaluation rows (data/formats.py), each with its `image_id`.
        image_root: folder of the images.
        embedders: the judge and optionally the second judge, whose metrics begin with `SECOND_JUDGE_PREFIX`.
        prompt: text before every caption.
    """

    def __init__(self, rows: Rows, image_root: str | Path, embedders: Sequence[Embedder], prompt: str):
        self.rows, self.prompt = rows, prompt
        self.embedders = dict(zip(("", SECOND_JUDGE_PREFIX), embedders, strict=False))
        try:
            paths = [locate_image(image_root, row["image"]) for row in rows]
            self.images = {prefix: embedder.embed_images(paths) for prefix, embedder in self.embedders.items()}
        except BadImageError as error:
            raise InputError(f"evaluation image {error}; restore the image or remove its evaluation row") from None
        self.owners = np.array([index for index, row in enumerate(rows) for _ in row["captions"]])
        references = [caption for row in rows for caption in row["captions"]]
        self.references = {prefix: self._embed(prefix, references) for prefix in self.embedders}

    def _embed(self, prefix: str, captions: list[str]) -> np.ndarray:
        return self.embedders[prefix].embed_texts([self.prompt + caption for caption in captions])

    def compute_metrics(self, captions: list[str]) -> Metrics:
        """Compute the metrics of one caption per image, in the order of the rows; an empty caption scores 0."""
        clip_metrics: Metrics = {}
        for prefix in self.embedders:
            clip_metrics |= self._measure_scores(prefix, captions)
        return clip_metrics | measure_attributes(captions, self.rows)

    def _measure_scores(self, prefix: str, captions: list[str]) -> Metrics:
        images = [row["image_id"] for row in self.rows]
        has_text = np.array([bool(caption.strip()) for caption in captions])
        features = self._embed(prefix, captions)
        score = compute_clip_score(self.images[prefix], features) * has_text
        similarity = compute_reference_similarity(features, self.references[prefix], self.owners)
        return {
            f"{prefix}clip_score": Measurements.from_values(score, images),
            f"{prefix}ref_clip_score": Measurements.from_values(compute_ref_clip_score(score, similarity), images),
        }

    def count_captions(self, captions: list[str]) -> dict[str, int]:
        texts = [self.prompt + caption for caption in captions]
        return {"captions": len(captions), "empty": sum(not caption.strip() for caption in captions)} | {
            f"{prefix}truncated": embedder.count_truncated(texts) for prefix, embedder in self.embedders.items()
        }


def measure_captions(
    models: dict[str, dict[str, Rows]], judge: CaptionJudge
) -> tuple[dict[str, Metrics], dict[str, dict[str, int]]]:
    """Measure every model on own and shuffled images, and the control `reference`.

    The control's captions are the first references. Their similarity to the references is 1, so their RefCLIPScore is
    an upper bound. The judge's rows are the evaluation rows of the captions (from
    `groups.read_paired_rows(path, ("id",))`), sorted by id.

    Returns:
        {group: metrics} and {group: {"captions", "empty", "truncated", "second_truncated" with a second judge}}
    """
    captions = {
        f"{model}/{images}": [row["caption"] for row in rows]
        for model, pair in models.items()
        for images, rows in pair.items()
    }
    captions[REFERENCE_CAPTIONS] = [row["captions"][0] for row in judge.rows]
    metrics = {group: judge.compute_metrics(texts) for group, texts in captions.items()}
    return metrics, {group: judge.count_captions(texts) for group, texts in captions.items()}


def select_captioned(models: dict[str, dict[str, Rows]], evaluation: Rows) -> Rows:
    """Return the evaluation rows with captions, sorted by id, with their `image_id`."""
    by_id = {row["id"]: row for row in evaluation}
    first_pair = next(iter(models.values()))
    return [by_id[row["id"]] | {"image_id": row["image_id"]} for row in first_pair[OWN]]
