"""Metrics of generated captions: CLIPScore, RefCLIPScore and attribute accuracy.

The scores are computed from embeddings of images and texts in the joint space of a CLIP or a SigLIP.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoProcessor, CLIPModel, SiglipModel, SiglipTokenizer

from dj2mgm.cli.messages import Progress
from dj2mgm.compute import select_device
from dj2mgm.data.images import BadImageError, load_image, locate_image
from dj2mgm.errors import InputError
from dj2mgm.evaluation.caption_attributes import measure_attributes
from dj2mgm.evaluation.groups import SECOND_JUDGE_PREFIX, Metrics, Rows
from dj2mgm.evaluation.intervals import Measurements
from dj2mgm.model_files.missing_models import JUDGE_TYPES, check_kind, check_local_model, find_model_folder
from dj2mgm.model_files.model_folders import find_model
from dj2mgm.score_groups import OWN, REFERENCE_CAPTIONS

# CLIPScore and RefCLIPScore (Hessel et al. 2021, arXiv:2104.08718, section 3) with any CLIP or SigLIP of transformers.
# Both use cosines, which a SigLIP has as well. Its scale, bias and sigmoid, which turn cosines into probabilities, are
# not used.

RESCALE = 2.5  # w of the paper
INPUTS_AT_ONCE = 64  # images or texts in a batch
MODEL_CLASSES = {"clip": CLIPModel, "siglip": SiglipModel}
FIRST_LAYER = "patch_embedding.weight"  # end of the tensor's name in CLIP and SigLIP, also within a whole model
DTYPE_TOLERANCE = {"rtol": 2.0**-8, "atol": 1e-6}  # from float32 to bfloat16 or float16 and back


class Embedder:
    """CLIP or SigLIP that embeds images and texts as float32 unit vectors, on the GPU if there is one.

    Args:
        name: local folder or hub id with safetensors weights; remote code is never run.
        key: configuration key of the model, for messages.
    """

    def __init__(self, name: str, key: str = "clip"):
        check_local_model(name)
        folder = find_model(name)  # a folder, because libraries ask the hub for optional files of a hub id
        try:
            model_type = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
            check_kind(name, model_type, key)
            self.processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False)
            self.model = MODEL_CLASSES[model_type].from_pretrained(
                folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            first_line = str(error).strip().splitlines()[0]
            raise InputError(
                f"evaluation model {name!r} cannot be loaded as a CLIP or SigLIP with safetensors weights "
                f"({first_line}); name a from_pretrained folder or a hub id under the key {key}"
            ) from None
        self.name, self.kind = name, JUDGE_TYPES[model_type]
        self.device = select_device()
        self.model.to(self.device).eval()
        self.token_limit = self.model.config.text_config.max_position_embeddings

    @torch.inference_mode()
    def embed_images(self, paths: Sequence[Path]) -> np.ndarray:
        """Return unit vectors (N, D) float32 of images; raise BadImageError for a file that is not an image."""
        features = []
        progress = Progress("images", len(paths))
        for batch in _split(paths):
            pixels = self.processor.image_processor([load_image(path) for path in batch], return_tensors="pt")
            features.append(self.model.get_image_features(**pixels.to(self.device)).pooler_output)
            progress.add(len(batch))
        return normalize_features(features)

    @torch.inference_mode()
    def embed_texts(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors (N, D) float32 of texts, which are cut at the tower's token limit.

        Equal texts are computed once.
        """
        distinct = list(dict.fromkeys(texts))
        features = [self._compute_text_features(batch) for batch in _split(distinct)]
        indices = {text: index for index, text in enumerate(distinct)}
        return normalize_features(features)[[indices[text] for text in texts]]

    def _compute_text_features(self, texts: list[str]) -> torch.Tensor:
        """Return the features (B, D) of texts.

        SigLIP was trained on texts padded to equal length. It attends to the padding, so it takes no mask, and its
        feature is the output at the last position.
        """
        is_padded = self.kind == "SigLIP"
        tokens = self.processor.tokenizer(
            self._normalize_case(texts),
            padding="max_length" if is_padded else True,
            truncation=True,
            max_length=self.token_limit,
            return_tensors="pt",
        ).to(self.device)
        mask = None if is_padded else tokens["attention_mask"]
        return self.model.get_text_features(input_ids=tokens["input_ids"], attention_mask=mask).pooler_output

    def _normalize_case(self, texts: Sequence[str]) -> list[str]:
        """Return the texts in lower case for SigLIP 2, which was trained on such texts but keeps capitals."""
        needs_lower_case = self.kind == "SigLIP" and not isinstance(self.processor.tokenizer, SiglipTokenizer)
        return [text.lower() if needs_lower_case else text for text in texts]

    def count_truncated(self, texts: Sequence[str]) -> int:
        """Count the texts that are longer than the text tower's limit."""
        tokens = self.processor.tokenizer(self._normalize_case(texts), verbose=False)["input_ids"]
        return sum(len(ids) > self.token_limit for ids in tokens)


def _split(items: Sequence) -> list[list]:
    return [list(items[start : start + INPUTS_AT_ONCE]) for start in range(0, len(items), INPUTS_AT_ONCE)]


def normalize_features(features: list[torch.Tensor]) -> np.ndarray:
    """Concatenate batches of features (B, D) to one array (N, D) of unit vectors."""
    return torch.nn.functional.normalize(torch.cat(features), dim=-1).cpu().numpy()


def has_same_image_tower(model: str, other_model: str) -> bool:
    """Return whether two models, local folders or hub ids, have the same image tower.

    Only the name of a hub id that was not downloaded is compared.
    """
    if model.rstrip("/") == other_model.rstrip("/"):
        return True
    return any(
        left.shape == right.shape and torch.allclose(left, right, **DTYPE_TOLERANCE)
        for left in _read_first_layers(model)
        for right in _read_first_layers(other_model)
    )


def _read_first_layers(name: str) -> list[torch.Tensor]:
    """Return the first layer (C, 3, P, P) float32 of each image tower of a model."""
    folder = find_model_folder(name)
    layers = []
    for file in sorted(Path(folder).glob("*.safetensors")) if folder else ():
        with safe_open(file, framework="pt") as tensors:
            names = [key for key in tensors.keys() if key.endswith(FIRST_LAYER)]
            layers += [tensors.get_tensor(key).float() for key in names]
    return layers


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
