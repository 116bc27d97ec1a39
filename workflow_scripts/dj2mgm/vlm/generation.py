"""What any vision-language model of transformers says about images, by its own `generate`."""

import inspect
import os
from collections.abc import Collection, Iterator, Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image as Pictures
from transformers import GenerationConfig, PreTrainedModel

from dj2mgm.data.formats import conversation
from dj2mgm.data.images import load_image
from dj2mgm.messages import note
from dj2mgm.questions import Answerer, Batch, Candidates, Image, key_of, parts_of, refuse_control, with_new_images
from dj2mgm.streaming import map_in_order
from dj2mgm.vision_language import IGNORED
from dj2mgm.vlm.encoder import BLANK, ProcessorEncoder, joined

ON_CPU, ON_GPU = 16, 32  # questions that are answered together where that is "auto"
PROCESSES = 8  # that look at images for a GPU
KEPT_BYTES = 2**31  # of features, for more questions about their images
DEEPSTACK = "deepstack_features"
PIXELS = ("pixel_values", "pixel_attention_mask")


class Looked(NamedTuple):
    """An image as the processor gives it: arrays for the model, and what stands in its place in a text."""

    inputs: dict[str, np.ndarray]
    replacement: str


class Seen(NamedTuple):
    """What is known of an image once the towers have seen it.

    Attributes:
        inputs: what else the model asks of it, such as its size in patches.
        features: for the language model, (tokens, H) of each of its parts.
        deepstack: of each layer that takes more of them, the same.
    """

    replacement: str
    inputs: dict[str, torch.Tensor]
    features: list[torch.Tensor]
    deepstack: list[list[torch.Tensor]]

    def nbytes(self) -> int:
        return sum(part.nbytes for part in chain(self.features, *self.deepstack))


def stop_tokens(model: PreTrainedModel, encoder: ProcessorEncoder) -> list[int]:
    """What ends an answer: for the tokenizer, for the chat format, and for the model's folder."""
    ends = model.generation_config.eos_token_id
    known = ends if isinstance(ends, list) else [ends]
    return sorted(encoder.stops | {*known} - {None})


def limits(encoder: ProcessorEncoder, stops: list[int], max_new_tokens: int) -> dict:
    pad = encoder.tokenizer.pad_token_id
    return {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": stops,
        "pad_token_id": stops[0] if pad is None else pad,
    }


class Generator(Answerer):
    """
    Args:
        model: whole, on the device where it is to run.
    """

    def __init__(self, model: PreTrainedModel, encoder: ProcessorEncoder):
        self.model, self.encoder = model.eval(), encoder
        self.stops = stop_tokens(model, encoder)
        model.generation_config = GenerationConfig()  # answers are greedy, whatever the folder's own says
        self._kept: dict[object, Seen] = {}  # by path
        self._output, self._stacked = dict, False  # what the towers return, and whether features are one tensor in it
        self._ahead = model._supports_mm_encoder_outputs() and hasattr(model.base_model, "get_image_features")
        if not self._ahead:
            note(f"models of type {model.config.model_type} take no features: images are encoded for each question")
        reader = model.base_model.get_image_features if self._ahead else model.forward
        self._read = inspect.signature(reader).parameters.keys()  # what is asked of an image

    def close(self) -> None:
        del self.model
        self._kept.clear()

    def control_tokens(self, template: str | dict) -> Collection[str]:
        return self.encoder.control_tokens

    def batch_size(self, max_new_tokens: int = 0) -> int:
        return ON_GPU if self.model.device.type == "cuda" else ON_CPU

    @torch.inference_mode()
    def answer_batches(self, batches: list[Batch], template: str | dict, max_new_tokens: int) -> Iterator[list[str]]:
        """`template` is not looked at: the processor has its own."""
        for batch, new in with_new_images(batches, self._kept, self._looked_at):
            seen = self._seen(list(map(key_of, batch.images)), new) if batch.images != [None] else [self._nothing()]
            inputs = self._prompts([seen[number] for number in batch.about], batch.questions)
            ends = limits(self.encoder, self.stops, max_new_tokens)
            found = self.model.generate(**inputs, **ends, do_sample=False, num_beams=1)
            yield self._texts(found[:, inputs["input_ids"].shape[1] :])

    @torch.inference_mode()
    def candidates(
        self,
        images: Sequence[str | Path | BytesIO],
        question: str,
        template: str | dict,
        num_beams: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> Iterator[Candidates]:
        for seen in self._seen_in_parts(images, batch_size):
            inputs = self._prompts(seen, [question] * len(seen))
            found = self.model.generate(
                **inputs,
                **limits(self.encoder, self.stops, max_new_tokens),
                do_sample=False,
                num_beams=num_beams,
                num_return_sequences=num_beams,
                length_penalty=1.0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            tokens = found.sequences[:, inputs["input_ids"].shape[1] :]
            texts = self._texts(tokens)
            steps = self.model.compute_transition_scores(
                found.sequences, found.scores, getattr(found, "beam_indices", None), normalize_logits=num_beams == 1
            )
            ends = torch.isin(tokens, torch.tensor(self.stops, device=tokens.device))
            filled = ends.cumsum(dim=1) > ends  # what follows the first token that ends a caption
            values = steps.masked_fill(steps.isinf() | filled[:, : steps.shape[1]], 0).sum(dim=1).tolist()
            for start in range(0, len(texts), num_beams):
                captions: dict[str, float] = {}
                for text, value in zip(
                    texts[start : start + num_beams], values[start : start + num_beams], strict=True
                ):
                    captions.setdefault(text, value)
                yield list(captions.items())

    @torch.inference_mode()
    def log_likelihoods(
        self, images: Sequence[Image], answers: Sequence[tuple[int, str]], question: str, template: str | dict
    ) -> list[list[float]]:
        """`template` is not looked at: the processor has its own."""
        refuse_control((answer for _, answer in answers), self.control_tokens(template))
        found: list[list[float]] = []
        at_once = self.batch_size()
        seen = list(chain.from_iterable(self._seen_in_parts(images, at_once)))
        for part in parts_of(answers, at_once):
            about = [seen[image] for image, _ in part]
            rows = [conversation("", "", question, answer) for _, answer in part]
            items = [self.encoder.text_item(row, each.replacement) for row, each in zip(rows, about, strict=True)]
            batch = self.encoder.text_batch(items, max(len(item["input_ids"]) for item in items))
            labels, places = batch.pop("labels"), batch.pop("answer_positions")
            logits = self.model(**self._with_images(batch, about), use_cache=False).logits
            chosen = logits.flatten(0, 1)[places.to(logits.device)].float().log_softmax(dim=-1)
            targets = labels.flatten()[places + 1].to(logits.device)
            values = iter(chosen.gather(1, targets.unsqueeze(1)).squeeze(1).tolist())
            found += [[next(values) for label in item["labels"][1:] if label != IGNORED] for item in items]
        return found

    def _prompts(self, seen: list[Seen] | list[None], questions: list[str]) -> dict:
        """Padded on the left."""
        return self._with_images(self.encoder.prompts([each and each.replacement for each in seen], questions), seen)

    def _with_images(self, tokens: dict[str, torch.Tensor], seen: list[Seen] | list[None]) -> dict:
        """As the model reads them, with what its towers have seen of each row's image."""
        inputs = {name: self._placed(values) for name, values in tokens.items()}
        if None in seen:
            return inputs
        inputs |= _together([each.inputs for each in seen])
        if not self._ahead:
            return inputs
        features = [part for each in seen for part in each.features]
        layers = [each.deepstack for each in seen]
        output = {"pooler_output": torch.stack(features) if self._stacked else features}
        output |= {DEEPSTACK: [list(chain(*layer)) for layer in zip(*layers, strict=True)]} if any(layers) else {}
        return inputs | {"mm_encoder_outputs": {"image": self._output(**output)}}

    def _nothing(self) -> Seen | None:
        """In the place of an image, for a question without one: a black image, if the model reads no text alone."""
        if self.encoder.reads_text_alone:
            return None
        black = BytesIO()
        Pictures.new("RGB", BLANK).save(black, "PNG")
        return self._seen([BLANK], {BLANK: self._look(black)})[0]

    def _seen(self, keys: list, new: dict[object, Looked]) -> list[Seen]:
        """Of each key. What is seen at paths is kept for more questions, as far as `KEPT_BYTES` go."""
        self._kept |= self._encoded(new) if new else {}
        seen, taken = [self._kept[key] for key in keys], 0
        for key in reversed(list(self._kept)):
            taken += self._kept[key].nbytes()
            if taken > KEPT_BYTES or not self._ahead or not isinstance(key, str):  # an open file is read once
                del self._kept[key]
        return seen

    def _seen_in_parts(self, images: Sequence[Image], size: int) -> Iterator[list[Seen]]:
        """Of so many images at a time, of which nothing is kept."""
        looked_at = self._looked_at(images)
        for part in parts_of(images, size):
            keys = list(range(len(part)))
            yield self._seen(keys, {key: next(looked_at) for key in keys})

    def _encoded(self, images: dict[object, Looked]) -> dict[object, Seen]:
        parts = [{name: torch.from_numpy(values) for name, values in each.inputs.items()} for each in images.values()]
        texts = [each.replacement for each in images.values()]
        if not self._ahead:
            given = [{name: self._placed(values) for name, values in part.items()} for part in parts]
            return {key: Seen(text, part, [], []) for key, text, part in zip(images, texts, given, strict=True)}
        given = {name: self._placed(values) for name, values in _together(parts).items()}
        output = self.model.base_model.get_image_features(**given, return_dict=True)
        self._output, self._stacked = type(output), isinstance(output.pooler_output, torch.Tensor)
        tokens = self.encoder.tokenizer(texts, add_special_tokens=False)["input_ids"]
        counts = [ids.count(self.encoder.image_token_id) for ids in tokens]
        features = _divided(output.pooler_output, counts)
        layers = [_divided(layer, counts) for layer in output.get(DEEPSTACK) or ()]
        sizes = [{n: self._placed(values) for n, values in part.items() if n not in PIXELS} for part in parts]
        return {
            key: Seen(text, size, *rest)
            for key, text, size, *rest in zip(
                images, texts, sizes, features, [[layer[n] for layer in layers] for n in range(len(texts))], strict=True
            )
        }

    def _looked_at(self, images: Sequence[Image]) -> Iterator[Looked]:
        """A GPU has images decoded and resized ahead by other processes."""
        cores = len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count())
        processes = min(PROCESSES, max(2, cores - 1)) if self.model.device.type == "cuda" else 1
        return map_in_order(self._look, images, processes)

    def _look(self, image: Image) -> Looked:
        """As arrays: tensors would come from other processes through shared memory, of which containers have little."""
        if self.model.device.type == "cuda":
            torch.set_num_threads(1)  # OpenMP's threads are not there in a forked process
        inputs, replacement = self.encoder.look(load_image(image))
        return Looked({name: values.numpy() for name, values in inputs.items() if name in self._read}, replacement)

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.model.device, self.model.dtype if values.is_floating_point() else None)

    def _texts(self, tokens: torch.Tensor) -> list[str]:
        return [text.strip() for text in self.encoder.tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def _together(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: joined([part[name] for part in parts]) for name in parts[0]}


def _divided(features: Sequence[torch.Tensor], counts: list[int]) -> list[list[torch.Tensor]]:
    """Features of images or their parts, (tokens, H) each, by image, of which each has as many tokens as its text."""
    coming, divided = iter(features), []
    for count in counts:
        parts = []
        while count > 0:
            parts.append(next(coming))
            count -= len(parts[-1])
        divided.append(parts)
    return divided
