"""What any vision-language model of transformers says about images, by its own `generate`."""

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel

from dj2mgm.data.formats import conversation
from dj2mgm.data.images import load_image
from dj2mgm.questions import Answerer, Batch, Candidates, Image, parts_of
from dj2mgm.vision_language import IGNORED
from dj2mgm.vlm.encoder import ProcessorEncoder

ON_CPU, ON_GPU = 16, 32  # questions that are answered together where that is "auto"


class Generator(Answerer):
    """
    Args:
        model: whole, on the device where it is to run.
    """

    def __init__(self, model: PreTrainedModel, encoder: ProcessorEncoder):
        self.model, self.encoder = model.eval(), encoder
        ends = model.generation_config.eos_token_id
        known = ends if isinstance(ends, list) else [ends]
        stops = {encoder.tokenizer.eos_token_id, encoder.end_of_turn, *known}
        self.stops = sorted(stops - {None})
        model.generation_config = GenerationConfig()  # answers are greedy, whatever the folder's own says

    def close(self) -> None:
        del self.model

    def batch_size(self, max_new_tokens: int) -> int:
        return ON_GPU if self.model.device.type == "cuda" else ON_CPU

    @torch.inference_mode()
    def answer_batches(self, batches: list[Batch], template: str | dict, max_new_tokens: int) -> Iterator[list[str]]:
        """`template` is not looked at: the processor has its own."""
        for batch in batches:
            images = [load_image(image) for image in batch.images]
            inputs = self._prompts([images[number] for number in batch.about], batch.questions)
            found = self.model.generate(**inputs, **self._limits(max_new_tokens), do_sample=False, num_beams=1)
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
        for part in parts_of(images, batch_size):
            inputs = self._prompts([load_image(image) for image in part], [question] * len(part))
            found = self.model.generate(
                **inputs,
                **self._limits(max_new_tokens),
                do_sample=False,
                num_beams=num_beams,
                num_return_sequences=num_beams,
                length_penalty=1.0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            texts = self._texts(found.sequences[:, inputs["input_ids"].shape[1] :])
            steps = self.model.compute_transition_scores(
                found.sequences, found.scores, getattr(found, "beam_indices", None), normalize_logits=num_beams == 1
            )
            values = steps.masked_fill(steps.isinf(), 0).sum(dim=1).tolist()
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
        """An image is encoded for each answer: models differ in where they put it. `template` is not looked at."""
        found: list[list[float]] = []
        for part in parts_of(answers, ON_GPU if self.model.device.type == "cuda" else ON_CPU):
            rows = [conversation("", str(images[image]), question, answer) for image, answer in part]
            items = [self.encoder.item(row) for row in rows]
            batch = self.encoder.batch(items, max(len(item["input_ids"]) for item in items))
            labels, places = batch.pop("labels"), batch.pop("answer_positions")
            logits = self.model(
                **{name: self._placed(values) for name, values in batch.items()}, use_cache=False
            ).logits
            chosen = logits.flatten(0, 1)[places.to(logits.device)].float().log_softmax(dim=-1)
            targets = labels.flatten()[places + 1].to(logits.device)
            values = iter(chosen.gather(1, targets.unsqueeze(1)).squeeze(1).tolist())
            found += [[next(values) for label in item["labels"][1:] if label != IGNORED] for item in items]
        return found

    def _prompts(self, images: list, questions: list[str]) -> dict[str, torch.Tensor]:
        """Padded on the left, as the model reads them."""
        inputs = self.encoder.prompts(images, questions)
        return {name: self._placed(values) for name, values in inputs.items()}

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.model.device, self.model.dtype if values.is_floating_point() else None)

    def _limits(self, max_new_tokens: int) -> dict:
        pad = self.encoder.tokenizer.pad_token_id
        return {
            "max_new_tokens": max_new_tokens,
            "eos_token_id": self.stops,
            "pad_token_id": self.stops[0] if pad is None else pad,
        }

    def _texts(self, tokens: torch.Tensor) -> list[str]:
        return [text.strip() for text in self.encoder.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
