"""All metrics of generated captions: CLIPScore, RefCLIPScore and attribute accuracy, for every group and control."""

from pathlib import Path

import numpy as np

from errors import InputError
from evaluation.caption_attributes import attribute_metrics
from evaluation.clip_score import ClipEmbedder, clip_score, ref_clip_score, reference_similarity
from evaluation.groups import REFERENCE, Metrics, Rows
from evaluation.intervals import Measurements
from formats.images import BadImage, locate_image


class CaptionJudge:
    """Judges lists of captions of the same evaluation images, whose features are computed once."""

    def __init__(self, rows: Rows, image_root: str | Path, embedder: ClipEmbedder, prompt: str):
        """`rows` are evaluation rows (formats/evaluation_jsonl.py); `prompt` is put before every caption.

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
