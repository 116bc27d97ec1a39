"""What a trained model says about images, many at a time, on one GPU or several: greedy answers, and captions with
their log-likelihoods."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from math import ceil
from multiprocessing import connection
from pathlib import Path
from typing import BinaryIO

import torch
from peft import PeftModel
from safetensors import SafetensorError

from dj2mgm.compute import default_device, use_cpu_threads
from dj2mgm.data.images import load_image
from dj2mgm.data.prompts import ChatTemplate
from dj2mgm.errors import InputError
from dj2mgm.files import read_json, readable
from dj2mgm.mgm import MGMForConditionalGeneration, MGMProcessor
from dj2mgm.mgm.beam_search import beam_search
from dj2mgm.mgm.weights import LANGUAGE_MODEL_FILE as LANGUAGE_MODEL
from dj2mgm.mgm.weights import load_language_model, load_projector

SORTED = 16  # batches whose prompts are sorted by length
AHEAD = 2  # batches whose images are decoded meanwhile
VISUAL_BYTES = 2**31  # of host memory for visual tokens: 900 images at MGM-2B's shape
Batch = tuple[list, list[str]]  # images and their questions
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
        self._kept: dict[str, torch.Tensor] = {}  # visual tokens, by path

    def answer(
        self,
        images: Sequence[str | Path | BinaryIO],
        questions: list[str],
        template: str | dict,
        max_new_tokens: int,
        batch_size: int,
    ) -> Iterator[str]:
        """One answer for each (image, question); an empty question asks for a plain caption.

        Args:
            template: the name of a chat format, or its content (config/chat_templates.py).
        """
        numbers, batches = batches_of(images, questions, batch_size)
        yield from in_order(numbers, self.answer_batches(batches, template, max_new_tokens))

    @torch.inference_mode()
    def answer_batches(self, batches: list[Batch], template: str | dict, max_new_tokens: int) -> Iterator[list[str]]:
        """The answers of each batch of images and questions."""
        chat = ChatTemplate.of(template, self.processor.tokenizer)
        shown = [images for images, _ in batches]
        for (images, questions), new in zip(batches, self._decoded(shown, self._is_kept), strict=True):
            visual_tokens = self._visual_tokens(list(map(_key, images)), new)
            yield self._answers(visual_tokens, questions, chat, max_new_tokens)

    def _answers(
        self, visual_tokens: torch.Tensor, questions: list[str], chat: ChatTemplate, max_new_tokens: int
    ) -> list[str]:
        tokenizer = self.processor.tokenizer
        inputs = self.processor.prompts([chat.prompt(question) for question in questions]).items()
        inputs = {name: tensor.to(self.device) for name, tensor in inputs}
        output = self.model.generate(
            **inputs,
            visual_tokens=visual_tokens,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=self._stops(chat),
            pad_token_id=tokenizer.pad_token_id,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in texts]

    @torch.inference_mode()
    def candidates(
        self,
        images: Sequence[str | Path],
        question: str,
        template: str | dict,
        num_beams: int,
        max_new_tokens: int,
        batch_size: int,
    ) -> Iterator[Candidates]:
        """For each image up to `num_beams` different captions, best first by beam search's own score.

        That score is the log-likelihood per token; what is yielded with a caption is the log-likelihood as a whole, of
        its tokens and of the one that ends it.
        """
        chat = ChatTemplate.of(template, self.processor.tokenizer)
        batches = [images[start : start + batch_size] for start in range(0, len(images), batch_size)]
        for batch, decoded in zip(batches, self._decoded(batches, lambda key: False), strict=True):
            input_ids = self.processor.prompts([chat.prompt(question)] * len(batch))["input_ids"].to(self.device)
            # as many as are given, also where one repeats: a batch's size moves the last bits
            visual_tokens = self._encoded([decoded[_key(image)] for image in batch])
            found = beam_search(self.model, input_ids, visual_tokens, num_beams, self._stops(chat), max_new_tokens)
            yield from map(self._captions, found)

    def _captions(self, found: list[tuple[list[int], float]]) -> Candidates:
        texts = self.processor.tokenizer.batch_decode([tokens for tokens, _ in found], skip_special_tokens=True)
        captions: dict[str, float] = {}
        for text, (_, log_likelihood) in zip(texts, found, strict=True):
            captions.setdefault(text.strip(), log_likelihood)
        return list(captions.items())

    def _decoded(
        self, batches: Sequence[Sequence[str | Path | BinaryIO]], is_known: Callable[[object], bool]
    ) -> Iterator[dict[object, torch.Tensor]]:
        """For each batch, (3, S', S') uint8 by key of those images that are not known. While one batch is in use,
        threads decode the next ones."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            waiting: dict[object, Future] = {}
            for number, batch in enumerate(batches):
                for image in chain(*batches[number : number + 1 + AHEAD]):
                    key = _key(image)
                    if key not in waiting and not is_known(key):
                        waiting[key] = threads.submit(self._decode, image)
                yield {key: waiting.pop(key).result() for key in dict.fromkeys(map(_key, batch)) if key in waiting}

    def _decode(self, image: str | Path | BinaryIO) -> torch.Tensor:
        return self.processor.resized([load_image(image)])[0]

    def _encoded(self, pixels: list[torch.Tensor]) -> torch.Tensor:
        """[(3, S', S') uint8] → (B, N, H)"""
        return self.model.model.get_image_features(self.processor.normalized(torch.stack(pixels).to(self.device)))

    def _is_kept(self, key: object) -> bool:
        return key in self._kept

    def _visual_tokens(self, keys: list, new: dict[object, torch.Tensor]) -> torch.Tensor:
        """(B, N, H). Those of images at paths are kept for more questions, on the host, as far as `VISUAL_BYTES` go."""
        known = dict(self._kept)
        if new:
            known |= zip(new, self._encoded(list(new.values())).cpu(), strict=True)
        tokens = torch.stack([known[key] for key in keys])
        paths = [key for key in known if isinstance(key, str)]  # an open file is read once
        self._kept = {path: known[path] for path in paths[-max(1, VISUAL_BYTES // tokens[0].nbytes) :]}
        return tokens.to(self.device)

    def _stops(self, chat: ChatTemplate) -> list[int]:
        tokenizer = self.processor.tokenizer
        stops = [tokenizer.eos_token_id]
        for token in chat.stop_tokens:
            ids = tokenizer(token, add_special_tokens=False).input_ids
            if len(ids) != 1:
                raise InputError(
                    f"template {chat.name}: the model's tokenizer has no token {token}; name its own template"
                )
            stops += ids
        return stops


def _key(image: str | Path | BinaryIO) -> object:
    return str(image) if isinstance(image, str | Path) else id(image)


def batches_of(images: Sequence, questions: list[str], size: int) -> tuple[list[list[int]], list[Batch]]:
    """What is answered together, questions of about one length within `SORTED` batches: their numbers, and they."""
    pairs, window = list(zip(images, questions, strict=True)), SORTED * size
    windows = [range(start, min(start + window, len(pairs))) for start in range(0, len(pairs), window)]
    ordered = [number for part in windows for number in sorted(part, key=lambda number: len(questions[number]))]
    numbers = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    return numbers, [tuple(map(list, zip(*(pairs[number] for number in batch), strict=True))) for batch in numbers]


def in_order(batches: list[list[int]], answers: Iterable[list[str]]) -> Iterator[str]:
    """Each answer as soon as it and all before it are there."""
    waiting: dict[int, str] = {}
    number = 0
    for batch, texts in zip(batches, answers, strict=True):
        waiting |= zip(batch, texts, strict=True)
        while number in waiting:
            yield waiting.pop(number)
            number += 1


@contextmanager
def generators(base: Path, stage: Path, processes: int) -> Iterator["Generator | _Pool"]:
    """One generator in this process, or several processes with one each, which together say what one would."""
    if processes == 1:
        yield Generator(base, stage)
        return
    spawn = multiprocessing.get_context("spawn")
    ranks = spawn.Queue()
    for rank in range(processes):
        ranks.put(rank)
    with ProcessPoolExecutor(processes, spawn, initializer=_start, initargs=(base, stage, processes, ranks)) as pool:
        yield _Pool(pool, processes)


class _Pool:
    """Answers as `Generator` does. Work is divided at whole batches: each is padded to its longest prompt, which may
    move the last bits."""

    def __init__(self, pool: ProcessPoolExecutor, processes: int):
        self.pool = pool
        self.processes = processes

    def answer(self, images, questions, template, max_new_tokens, batch_size) -> Iterator[str]:
        numbers, batches = batches_of(images, questions, batch_size)
        share = max(1, ceil(len(batches) / self.processes))
        shares = [batches[start : start + share] for start in range(0, len(batches), share)]
        jobs = [self.pool.submit(_answer, each, template, max_new_tokens) for each in shares]
        yield from in_order(numbers, (texts for job in jobs for texts in job.result()))


def _start(base: Path, stage: Path, processes: int, ranks: multiprocessing.Queue) -> None:
    """In a new process: its generator, on a GPU of its own, or with its share of the cores."""
    global _generator
    threading.Thread(target=_end_with_parent, daemon=True).start()
    rank = ranks.get()
    if torch.cuda.is_available():
        _generator = Generator(base, stage, f"cuda:{rank % torch.cuda.device_count()}")
    else:
        use_cpu_threads(max(1, len(os.sched_getaffinity(0)) // processes))
        _generator = Generator(base, stage)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its processes, and each holds a model on a GPU."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _answer(*arguments) -> list[list[str]]:
    return list(_generator.answer_batches(*arguments))
