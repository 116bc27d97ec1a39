"""Answers, captions and likelihoods of a vision-language model of transformers."""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import PIL.Image
import torch
from transformers import GenerationConfig, PreTrainedModel

from dj2mgm.cli.messages import note
from dj2mgm.data.formats import build_conversation, build_text_conversation
from dj2mgm.data.images import load_image
from dj2mgm.models.greedy_search import GreedySearch, Prompts, find_end
from dj2mgm.models.questions import (
    Candidates,
    GivenAnswer,
    Image,
    QuestionBatch,
    check_control_tokens,
    cut_at_stop,
    make_image_key,
    split_into_parts,
    with_new_images,
)
from dj2mgm.models.vision_language import IGNORE_INDEX, PIXELS_KEY, Generator
from dj2mgm.models.vlm.encoder import BLANK_IMAGE_SIZE, PIXEL_MASK, ProcessorEncoder, concatenate
from dj2mgm.storage.streaming import map_in_order

CPU_BATCH_SIZE, GPU_BATCH_SIZE = 16, 64  # batch size for "auto"; a GPU with too little memory halves it
MAX_DECODING_PROCESSES = 8  # most processes that decode and resize images for a GPU
IMAGES_AHEAD = 4  # images per process that are processed while a GPU answers questions
ENCODED_AT_ONCE = 16  # images in a pass through the vision tower, before which the GPU need not wait for others
CACHE_BYTES = 2**31  # most bytes of cached features, for further questions about their images
DEEPSTACK = "deepstack_features"
PIXEL_FIELDS = (PIXELS_KEY, PIXEL_MASK)
T, R = TypeVar("T"), TypeVar("R")


class ProcessedImage(NamedTuple):
    """Outputs of the processor for an image: arrays for the model, and the text that replaces it in a prompt.

    Arrays of bfloat16, which NumPy does not have, are viewed as int16. Processors return no other int16.
    """

    inputs: dict[str, np.ndarray]
    replacement: str


class EncodedImage(NamedTuple):
    """Features of an image from the vision tower, and its other inputs."""

    replacement: str  # Text that replaces the image in a prompt
    inputs: dict[str, torch.Tensor]  # Further inputs of the model, such as the image's size in patches
    features: list[torch.Tensor]  # Inputs of the language model, (tokens, H) for each part of the image
    deepstack: list[list[torch.Tensor]]  # The same for each layer of the language model that takes further features

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in chain(self.features, *self.deepstack))


def list_stop_tokens(model: PreTrainedModel, encoder: ProcessorEncoder) -> list[int]:
    """Return the tokens that end an answer for the tokenizer, the chat template or the model's generation config."""
    ends = model.generation_config.eos_token_id
    model_ends = ends if isinstance(ends, list) else [ends]
    return sorted(encoder.stops | {*model_ends} - {None})


def build_stopping_criteria(encoder: ProcessorEncoder, stops: list[int], max_new_tokens: int) -> dict:
    pad = encoder.tokenizer.pad_token_id
    return {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": stops,
        "pad_token_id": stops[0] if pad is None else pad,
    }


class TransformersGenerator(Generator):
    """Generator for a vision-language model of transformers, with its head, on the device on which it runs."""

    def __init__(self, model: PreTrainedModel, encoder: ProcessorEncoder):
        self.model, self.encoder = model.eval(), encoder
        self.stops = list_stop_tokens(model, encoder)
        model.generation_config = GenerationConfig()  # answers are greedy; the folder's sampling settings are ignored
        self._cache: dict[object, EncodedImage] = {}  # by path
        self._fitting_rows = sys.maxsize  # most rows together for which the GPU's memory is not known to be too small
        self._search: GreedySearch | None = None  # of the last answers
        self._output, self._stacked = dict, False  # type of the towers' output, and whether its features are one tensor
        self._takes_features = model._supports_mm_encoder_outputs() and hasattr(model.base_model, "get_image_features")
        if not self._takes_features:
            note(
                f"models of type {model.config.model_type} do not accept precomputed features; images are encoded "
                "again for each question"
            )
        reader = model.base_model.get_image_features if self._takes_features else model.forward
        self._input_names = inspect.signature(reader).parameters.keys()
        self._image_token = encoder.tokenizer.convert_ids_to_tokens(encoder.image_token_id)
        self._selects_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def close(self) -> None:
        del self.model
        self._cache.clear()

    def list_control_tokens(self, template: str | dict) -> Collection[str]:
        return self.encoder.control_tokens

    def choose_batch_size(self, max_new_tokens: int = 0) -> int:
        return GPU_BATCH_SIZE if self.model.device.type == "cuda" else CPU_BATCH_SIZE

    @torch.inference_mode()
    def answer_batches(
        self, batches: list[QuestionBatch], template: str | dict, max_new_tokens: int
    ) -> Iterator[list[str]]:
        """Yield the answers of each batch; `template` is ignored, because the processor has its own chat template."""
        ends = build_stopping_criteria(self.encoder, self.stops, max_new_tokens)
        self._search = search = GreedySearch(self.model, self.stops, ends["pad_token_id"], max_new_tokens)
        try:
            for batch, new in with_new_images(batches, self._cache, self._encode_images):
                if batch.images == [None]:
                    encoded = [self._encode_blank()]
                else:
                    encoded = self._get_encoded(list(map(make_image_key, batch.images)), new)
                rows = [(encoded[number], text) for number, text in zip(batch.about, batch.questions, strict=True)]
                yield self._run_in_parts(partial(self._answer_rows, search=search), rows)
        finally:
            search.free()

    def _answer_rows(self, rows: list[tuple[EncodedImage | None, str]], search: GreedySearch) -> list[str]:
        images, questions = map(list, zip(*rows, strict=True))
        tokens = self.encoder.tokenize_prompts([image and image.replacement for image in images], questions)
        if None in images:
            return self._decode(search(Prompts(tokens, [0] * len(rows), list(range(len(rows))), self._make_inputs)))
        distinct = {id(image): image for image in images}
        numbers = {key: number for number, key in enumerate(distinct)}
        prefixes = [
            find_end(ids, self.encoder.image_token_id) if self.encoder.has_causal_prompts() else 0 for ids in tokens
        ]
        make_inputs = partial(self._make_inputs, distinct=list(distinct.values()))
        return self._decode(search(Prompts(tokens, prefixes, [numbers[id(image)] for image in images], make_inputs)))

    def _make_inputs(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        images: Sequence[int],
        with_features: bool,
        distinct: list[EncodedImage] | None = None,
    ) -> dict:
        """Return the model's inputs for rows of tokens about `images`, indices of `distinct`."""
        tokens = {"input_ids": ids, "attention_mask": mask} | self.encoder.make_type_ids(ids)
        return self._add_images(tokens, [distinct and distinct[number] for number in images], with_features)

    def _run_in_parts(self, run: Callable[[list[T]], list[R]], rows: list[T]) -> list[R]:
        """Return the results of `run` for all rows, for half as many together if the GPU's memory is too small.

        Images are of different sizes, so the rows that fit are not known before.
        """
        results: list[R] = []
        while rows:
            part = rows[: self._fitting_rows]
            try:
                results += run(part)
            except torch.OutOfMemoryError:
                halve = not (self._search and self._search.free())
                if halve and len(part) == 1:
                    raise
            else:
                rows = rows[len(part) :]
                continue
            torch.cuda.empty_cache()  # after the exception, which refers to the tensors
            if halve:
                self._fitting_rows = len(part) // 2
                note(f"GPU memory is too small for {len(part)} rows together; continuing with {self._fitting_rows}")
        return results

    @torch.inference_mode()
    def generate_candidates(
        self,
        images: Sequence[str | Path | BytesIO],
        question: str,
        template: str | dict,
        num_beams: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> Iterator[Candidates]:
        """Sum the log-likelihoods of tokens up to a caption's first stop token; later positions count nothing."""
        ends = build_stopping_criteria(self.encoder, self.stops, max_new_tokens)
        search = partial(self._search_beams, question=question, num_beams=num_beams, ends=ends)
        encoded = self._encode_images(images)
        for part in split_into_parts(images, batch_size):
            yield from self._run_in_parts(search, [next(encoded) for _ in part])

    def _search_beams(self, encoded: list[EncodedImage], question: str, num_beams: int, ends: dict) -> list[Candidates]:
        """Return the captions of each image by beam search, the best first, with their log-likelihoods."""
        inputs = self._make_prompts(encoded, [question] * len(encoded))
        output = self.model.generate(
            **inputs,
            **ends,
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            length_penalty=1.0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens = output.sequences[:, inputs["input_ids"].shape[1] :]
        # some stop tokens may not be special tokens
        texts = self._decode([cut_at_stop(caption, self.stops) for caption in tokens.tolist()])
        steps = self.model.compute_transition_scores(
            output.sequences, output.scores, getattr(output, "beam_indices", None), normalize_logits=num_beams == 1
        )
        is_end = torch.isin(tokens, torch.tensor(self.stops, device=tokens.device))
        is_after_end = is_end.cumsum(dim=1) > is_end  # positions after the first token that ends a caption
        values = steps.masked_fill(steps.isinf() | is_after_end[:, : steps.shape[1]], 0).sum(dim=1).tolist()
        candidates = []
        for start in range(0, len(texts), num_beams):
            captions: dict[str, float] = {}
            for text, value in zip(texts[start : start + num_beams], values[start : start + num_beams], strict=True):
                captions.setdefault(text, value)
            candidates.append(list(captions.items()))
        return candidates

    @torch.inference_mode()
    def compute_answer_log_likelihoods(
        self, images: Sequence[Image], answers: Sequence[GivenAnswer], template: str | dict
    ) -> list[list[float]]:
        """Return the log-likelihoods; `template` is ignored, because the processor has its own chat template."""
        check_control_tokens((answer.text for answer in answers), self.list_control_tokens(template))
        log_likelihoods: list[list[float]] = []
        at_once = self.choose_batch_size()
        encoded = [self._encode_blank()] if None in images else list(self._encode_images(images))
        for part in split_into_parts(answers, at_once):
            rows = [(answer, encoded[answer.about]) for answer in part]
            log_likelihoods += self._run_in_parts(self._measure_rows, rows)
        return log_likelihoods

    def _measure_rows(self, rows: list[tuple[GivenAnswer, EncodedImage | None]]) -> list[list[float]]:
        """Return the log-likelihoods of the tokens of each answer."""
        items = [self._make_text_item(answer, image) for answer, image in rows]
        batch = self.encoder.batch_tokens(items, max(len(item["input_ids"]) for item in items))
        labels, positions = batch.pop("labels"), batch.pop("answer_positions")
        log_probs = self._compute_log_probs(self._add_images(batch, [image for _, image in rows]), positions)
        targets = labels.flatten()[positions + 1].to(log_probs.device)
        values = iter(log_probs.gather(1, targets.unsqueeze(1)).squeeze(1).tolist())
        return [[next(values) for label in item["labels"][1:] if label != IGNORE_INDEX] for item in items]

    def _compute_log_probs(self, inputs: dict[str, torch.Tensor], positions: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities (n, V) at positions (n,) of the flattened batch.

        Logits are computed for columns with such a position only: those of all columns would take gigabytes.
        """
        width = inputs["input_ids"].shape[1]
        columns = torch.unique(positions % width) if self._selects_logits else torch.arange(width)
        selection = {"logits_to_keep": self._move(columns)} if self._selects_logits else {}
        logits = self.model(**inputs, **selection, use_cache=False).logits
        indices = positions // width, torch.searchsorted(columns, positions % width)
        return logits[indices].float().log_softmax(dim=-1)

    def _make_text_item(self, answer: GivenAnswer, image: EncodedImage | None) -> dict:
        if image is None:
            return self.encoder.encode_text(build_text_conversation(answer.question, answer.text))
        return self.encoder.encode_text(build_conversation("", "", answer.question, answer.text), image.replacement)

    def _make_prompts(self, images: list[EncodedImage] | list[None], questions: list[str]) -> dict:
        """Return the model's inputs for questions, padded on the left."""
        tokens = self.encoder.encode_prompts([image and image.replacement for image in images], questions)
        return self._add_images(tokens, images)

    def _add_images(
        self, tokens: dict[str, torch.Tensor], images: list[EncodedImage] | list[None], with_features: bool = True
    ) -> dict:
        """Return the model's inputs for tokens and the encoded image of each row, possibly its size only."""
        inputs = {name: self._move(values) for name, values in tokens.items()}
        if None in images:
            return inputs
        inputs |= _concatenate_fields([image.inputs for image in images])
        if not (self._takes_features and with_features):
            return inputs
        features = [part for image in images for part in image.features]
        layers = [image.deepstack for image in images]
        output = {"pooler_output": torch.stack(features) if self._stacked else features}
        output |= {DEEPSTACK: [list(chain(*layer)) for layer in zip(*layers, strict=True)]} if any(layers) else {}
        return inputs | {"mm_encoder_outputs": {"image": self._output(**output)}}

    def _encode_blank(self) -> EncodedImage | None:
        """Return a black image for a question without an image, or None if the model accepts text without an image."""
        if self.encoder.reads_text_alone:
            return None
        black = BytesIO()
        PIL.Image.new("RGB", BLANK_IMAGE_SIZE).save(black, "PNG")
        return self._encode([self._process(black)])[0]

    def _get_encoded(self, keys: list, new: dict[object, EncodedImage]) -> list[EncodedImage]:
        """Return the encoded image of each key; images at paths are cached, up to `CACHE_BYTES`, for further questions.

        `new` are the images that are not cached.
        """
        self._cache |= new
        encoded, cached_bytes = [self._cache[key] for key in keys], 0
        for key in reversed(list(self._cache)):
            cached_bytes += self._cache[key].nbytes
            is_path = isinstance(key, str)  # an open file is read once
            if cached_bytes > CACHE_BYTES or not self._takes_features or not is_path:
                del self._cache[key]
        return encoded

    def _encode_images(self, images: Sequence[Image]) -> Iterator[EncodedImage]:
        """Yield the encoded images; a GPU encodes a part while the next one is processed."""
        processed = self._process_in_order(images)
        for part in split_into_parts(images, ENCODED_AT_ONCE):
            yield from self._run_in_parts(self._encode, [next(processed) for _ in part])

    def _encode(self, images: list[ProcessedImage]) -> list[EncodedImage]:
        """Compute the features of images together; a model that takes no features gets each image's inputs instead."""
        parts = [{name: self._unpack(values) for name, values in image.inputs.items()} for image in images]
        texts = [image.replacement for image in images]
        if not self._takes_features:
            parts = [{name: self._move(values) for name, values in part.items()} for part in parts]
            return [EncodedImage(text, part, [], []) for text, part in zip(texts, parts, strict=True)]
        inputs = {name: self._move(values) for name, values in _concatenate_fields(parts).items()}
        output = self.model.base_model.get_image_features(**inputs, return_dict=True)
        self._output, self._stacked = type(output), isinstance(output.pooler_output, torch.Tensor)
        counts = [text.count(self._image_token) for text in texts]
        features = _split_by_image(output.pooler_output, counts)
        layers = [_split_by_image(layer, counts) for layer in output.get(DEEPSTACK) or ()]
        sizes = [{n: self._move(values) for n, values in part.items() if n not in PIXEL_FIELDS} for part in parts]
        layers_by_image = [[layer[n] for layer in layers] for n in range(len(texts))]
        return list(map(EncodedImage, texts, sizes, features, layers_by_image))

    def _process_in_order(self, images: Sequence[Image]) -> Iterator[ProcessedImage]:
        """Yield the processed images; for a GPU, other processes decode and resize them ahead."""
        cores = len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count())
        processes = min(MAX_DECODING_PROCESSES, max(2, cores - 1)) if self.model.device.type == "cuda" else 1
        return map_in_order(self._process, images, processes, IMAGES_AHEAD)

    def _process(self, image: Image) -> ProcessedImage:
        """Return an image as arrays; tensors would need shared memory between processes, which containers limit."""
        if self.model.device.type == "cuda":
            torch.set_num_threads(1)  # a forked process does not have OpenMP's threads
        inputs, replacement = self.encoder.process_image(load_image(image))
        arrays = {name: self._pack(values) for name, values in inputs.items() if name in self._input_names}
        return ProcessedImage(arrays, replacement)

    def _pack(self, values: torch.Tensor) -> np.ndarray:
        """Return values of the model's type as an array, whose bytes pass through a pipe between two processes."""
        if not values.is_floating_point():
            return values.numpy()
        values = values.to(self.model.dtype)
        return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()

    def _unpack(self, array: np.ndarray) -> torch.Tensor:
        values = torch.from_numpy(array)
        return values.view(torch.bfloat16) if values.dtype == torch.int16 else values

    def _move(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.model.device, self.model.dtype if values.is_floating_point() else None)

    def _decode(self, answers: list[list[int]]) -> list[str]:
        return [text.strip() for text in self.encoder.tokenizer.batch_decode(answers, skip_special_tokens=True)]


def _concatenate_fields(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: concatenate([part[name] for part in parts]) for name in parts[0]}


def _split_by_image(features: Sequence[torch.Tensor], counts: list[int]) -> list[list[torch.Tensor]]:
    """Group features of images or of their parts, (tokens, H) each, by image; `counts` are the image tokens of each."""
    remaining, by_image = iter(features), []
    for count in counts:
        parts = []
        while count > 0:
            parts.append(next(remaining))
            count -= len(parts[-1])
        by_image.append(parts)
    return by_image
