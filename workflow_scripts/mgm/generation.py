"""What a trained model says about images, many at a time: greedy answers, and captions with their log-likelihoods."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import torch
from peft import PeftModel
from safetensors import SafetensorError

from compute import default_device
from errors import InputError
from files import read_json, readable
from formats.images import load_image
from formats.prompts import prompt_of, stop_tokens
from mgm import MGMForConditionalGeneration, MGMProcessor
from mgm.beam_search import beam_search
from mgm.language_weights import FILE as LANGUAGE_MODEL
from mgm.language_weights import load_language_model
from mgm.projector_weights import load_projector

Candidates = list[tuple[str, float]]  # captions of one image, with their log-likelihoods in nats


def load_trained(base: Path, stage: Path | None, dtype: torch.dtype | str) -> MGMForConditionalGeneration:
    """A whole model: base folder, and a stage's projector with, where there is one, its LoRA adapter or language model.

    Args:
        base: folder of an assembled, converted or merged model.
        stage: output folder of `pretrain` or `finetune`; None: the base as it is.
        dtype: of the weights; "auto": the base's own.

    Raises:
        InputError: a folder is not what it should be, or a file in it is damaged.
    """
    for folder, file in ((base, "config.json"), (stage, "projector.safetensors")):
        if folder is not None and not (folder / file).is_file():
            kind = "model" if folder == base else "training stage"
            raise InputError(f"{folder} holds no {file}, so it is no folder of a {kind}; name another one")
    remedy = "make or download its folder again"
    read_json(base / "config.json", remedy=remedy)
    with readable(base, SafetensorError, OSError, remedy=remedy):
        model = MGMForConditionalGeneration.from_pretrained(
            base, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    if stage is not None:
        load_projector(model, stage / "projector.safetensors")
        if (stage / "adapter").is_dir():
            with readable(stage / "adapter", SafetensorError, OSError, KeyError):
                read_json(stage / "adapter/adapter_config.json")
                model = PeftModel.from_pretrained(model, stage / "adapter")
            model = model.merge_and_unload()
        elif (stage / LANGUAGE_MODEL).is_file():
            load_language_model(model, stage / LANGUAGE_MODEL)
    return model.eval()


class Generator:
    """A trained MGM that answers; `base` and `stage` are those of `load_trained`.

    Args:
        device: where it runs, in bf16 on a GPU and in float32 elsewhere; None: the GPU if there is one.
    """

    def __init__(self, base: Path, stage: Path | None, device: str | torch.device | None = None):
        self.device = torch.device(device or default_device())
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = load_trained(base, stage, dtype).to(self.device)
        self.processor = MGMProcessor.from_pretrained(base)

    @torch.inference_mode()
    def answer(
        self,
        images: Sequence[str | Path | BinaryIO],
        questions: list[str],
        template: str,
        max_new_tokens: int,
        batch_size: int,
    ) -> Iterator[str]:
        """One answer for each (image, question); an empty question asks for a plain caption."""
        tokenizer = self.processor.tokenizer
        pairs = iter(zip(images, questions, strict=True))
        while batch := list(islice(pairs, batch_size)):
            paths, asked = zip(*batch, strict=True)
            inputs = self._inputs(paths, [prompt_of(template, question) for question in asked])
            output = self.model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=self._stops(template),
                pad_token_id=tokenizer.pad_token_id,
            )
            answers = output[:, inputs["input_ids"].shape[1] :]
            yield from (text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True))

    def candidates(
        self,
        images: Sequence[str | Path],
        question: str,
        template: str,
        num_beams: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> Iterator[Candidates]:
        """For each image up to `num_beams` different captions, best first by beam search's own score.

        That score is the log-likelihood per token; what is yielded with a caption is the log-likelihood as a whole, of
        its tokens and of the one that ends it.
        """
        images = iter(images)
        while batch := list(islice(images, batch_size)):
            inputs = self._inputs(batch, [prompt_of(template, question)] * len(batch))
            found = beam_search(
                self.model,
                inputs["input_ids"],
                inputs["pixel_values"],
                num_beams,
                self._stops(template),
                max_new_tokens,
            )
            yield from map(self._captions, found)

    def _captions(self, found: list[tuple[list[int], float]]) -> Candidates:
        texts = self.processor.tokenizer.batch_decode([tokens for tokens, _ in found], skip_special_tokens=True)
        captions: dict[str, float] = {}
        for text, (_, log_likelihood) in zip(texts, found, strict=True):
            captions.setdefault(text.strip(), log_likelihood)
        return list(captions.items())

    def _inputs(self, images: Sequence[str | Path | BinaryIO], prompts: list[str]) -> dict[str, torch.Tensor]:
        inputs = self.processor.prompts(prompts)
        inputs["pixel_values"] = self.processor.pixels([load_image(image) for image in images])
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}

    def _stops(self, template: str) -> list[int]:
        tokenizer = self.processor.tokenizer
        stops = [tokenizer.eos_token_id]
        for token in stop_tokens(template):
            ids = tokenizer(token, add_special_tokens=False).input_ids
            if len(ids) != 1:
                raise InputError(
                    f"template {template}: the model's tokenizer has no token {token}; name its own template"
                )
            stops += ids
        return stops
