"""Score of a model in training on held-out questions, computed without generating answers.

One forward pass over a question with its reference answer gives the answer's likelihood and tells whether greedy search
would give this answer. It does if, at each token of the answer up to its end token, no token is likelier than
the reference's. Rounding may differ from answers that are generated token by token.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset

from dj2mgm.cli.messages import note
from dj2mgm.data.formats import build_conversation, find_control_problem, find_image_problem
from dj2mgm.data.images import BadImageError, locate_image
from dj2mgm.errors import InputError
from dj2mgm.models.loss import LanguageModelHead, recording_likelihoods
from dj2mgm.models.tuning import Tuning
from dj2mgm.models.vision_language import Encoder
from dj2mgm.settings.data import CAPTION_QUESTION, PromptSettings
from dj2mgm.settings.training_stages import find_steps
from dj2mgm.settings.validation import load_settings
from dj2mgm.storage.files import read_jsonl
from dj2mgm.training.settings import TrainingSettings
from dj2mgm.training.training_data import Collator, compute_padded_width


@dataclass(frozen=True)
class HeldOutQuestions(Dataset):
    """Conversations of one question and one answer each, in an order that does not depend on their number.

    Items are the encoder's.
    """

    kind: str  # `questions`, or `captions` in stage 1 and if there are no questions
    rows: list[dict]
    lengths: list[int]  # (N,) tokens of each conversation
    encoder: Encoder  # makes the items
    digest: str  # digest of the conversations; an earlier start may have scored other conversations

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.encoder.encode_row(self.rows[index])

    def describe_rows(self, correct: str) -> Iterator[dict]:
        """Yield readable rows of the first conversations, with the flags of `HeldOutScore.correct` for questions."""
        for row, hit in zip(self.rows, correct, strict=False):
            question = {key: row[key] for key in ("type", "question", "answer") if key in row}
            yield {"id": row["of"]} | question | ({"correct": hit == "1"} if question else {})


FORWARD_PASSES = 3  # FLOPs of a training sample in forward passes; the backward pass takes about two


def count_scored_questions(settings: TrainingSettings, rows: int) -> int:
    """Return the number of questions at each checkpoint of a training on a number of rows, at least 1.

    It depends on settings only, so that scores can be repeated, and compared between machines.
    """
    scores, steps = settings.score_while_training, min(settings.save_steps, find_steps(settings, rows))
    return max(1, min(scores.questions, int(FORWARD_PASSES * scores.share * steps * settings.global_batch_size)))


def read_held_out_questions(
    evaluation: Path, generate_config: Path, tuning: Tuning, encoder: Encoder, count: int
) -> HeldOutQuestions | None:
    """Read at most `count` questions of the evaluation split; None if there are none for the stage.

    Args:
        evaluation: the held-out split.
        generate_config: settings of the stage `generate`, with the image folder and the prompts.
        tuning: tuning of the stage (models/tuning.py).
        encoder: encoder of the conversations. Conversations of its maximum length are left out.
        count: maximum number of questions.
    """
    settings = load_settings(PromptSettings, generate_config)
    kind, rows = "questions", []
    if tuning != "stage1":
        rows = _select_first(_read_questions(evaluation, settings.question_prompt), count)
    if not rows:
        prompt = settings.captions["pretrain" if tuning == "stage1" else "finetune"]
        question = prompt.question if tuning == "stage1" else prompt.question or CAPTION_QUESTION
        kind, rows = "captions", _select_first(_read_captions(evaluation, question), count)
    for row in rows:
        try:
            row["image"] = str(locate_image(settings.image_root, row["image"]))
        except BadImageError as error:
            raise InputError(f"{evaluation}, row {row['of']}: {error}; restore the image or delete the row") from None
    lengths = [_measure_length(row, encoder) for row in rows]
    scored_rows = [(row, length) for row, length in zip(rows, lengths, strict=True) if 0 < length < encoder.max_length]
    if len(scored_rows) < len(rows):
        left_out = f"{len(rows) - len(scored_rows)} of {len(rows)} held-out {kind}"
        note(f"{left_out} are not scored in training: too long or damaged")
    if not scored_rows:
        return None
    rows, lengths = map(list, zip(*scored_rows, strict=True))
    conversations = [(row["id"], row["conversations"]) for row in rows]
    return HeldOutQuestions(kind, rows, lengths, encoder, sha256(repr(conversations).encode()).hexdigest()[:12])


def _read_questions(evaluation: Path, prompt: str) -> Iterator[dict]:
    for row in read_jsonl(evaluation):
        for number, item in enumerate(row["questions"]):
            question = prompt.replace("{question}", item["question"])
            yield build_conversation(f"{row['id']}/{number}", row["image"], question, item["answer"]) | {
                "of": row["id"],
                **item,
            }


def _read_captions(evaluation: Path, question: str) -> Iterator[dict]:
    for row in read_jsonl(evaluation):
        yield build_conversation(row["id"], row["image"], question, row["captions"][0]) | {"of": row["id"]}


def _select_first(rows: Iterator[dict], count: int) -> list[dict]:
    """Return the first rows in a random order that depends on their ids only."""
    return heapq.nsmallest(count, rows, key=lambda row: sha256(row["id"].encode()).digest())


def _measure_length(row: dict, encoder: Encoder) -> int:
    """Return the tokens of a conversation, 0 if it cannot be scored."""
    if find_image_problem(row) or find_control_problem(row, encoder.control_tokens):
        return 0
    try:
        length, answers = encoder.count_tokens(row)
    except (InputError, OSError):
        return 0
    return length if answers else 0


@dataclass(frozen=True)
class HeldOutScore:
    """Score of a model on held-out questions."""

    loss: float  # mean over all tokens with loss, in nats
    correct: str  # "1" for each question whose reference answer greedy search would give, else "0"
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.correct.count("1") / len(self.correct)


Answered = tuple[float, int, bool]  # log-likelihood in nats, tokens, whether greedy search gives the answer


class Scorer:
    """Scorer of the engine in training on held-out questions, on all processes together and without gradients.

    Micro batches have at most as many samples and tokens as in training. Compiled layers run uncompiled, because
    they would have to be compiled again.

    Args:
        held_out: the questions.
        head: head of the language model.
        prepare_inputs: the argument of `StageTrainer`.
        micro_batch_size: samples of training's micro batches.
        longest: tokens of training's longest sample.
        workers: processes that decode images.
        dtype: dtype of the model's weights.
    """

    def __init__(
        self,
        held_out: HeldOutQuestions,
        head: LanguageModelHead,
        prepare_inputs: Callable[[dict[str, torch.Tensor], torch.device], dict[str, torch.Tensor]],
        micro_batch_size: int,
        longest: int,
        workers: int,
        dtype: torch.dtype,
    ):
        self.held_out, self.head, self.prepare_inputs = held_out, head, prepare_inputs
        self.samples, self.tokens = micro_batch_size, micro_batch_size * longest
        self.longest = max(longest, *held_out.lengths)
        self.workers, self.dtype = workers, dtype
        self.stops = torch.tensor(sorted(held_out.encoder.stops))

    def score(self, engine: nn.Module, device: torch.device) -> HeldOutScore:
        """Score all questions."""
        start = time.monotonic()
        process, processes = 0, 1
        if distributed.is_initialized():
            process, processes = distributed.get_rank(), distributed.get_world_size()
        batches = self._make_batches()
        # Each process has the same number of batches, because all gather ZeRO-3's layers together. Repeated questions
        # count once.
        indices = range(process, process + len(batches), processes)
        own_batches = [batches[min(index, len(batches) - 1)] for index in indices]
        answers_by_number: dict[int, Answered] = {}
        with _restoring_state(engine), recording_likelihoods(self.head) as recorded:
            for batch, numbers in zip(self._make_loader(own_batches), own_batches, strict=True):
                engine(**self.prepare_inputs(dict(batch), device))
                answers_by_number |= zip(numbers, self._score_rows(batch, *recorded.pop()), strict=True)
        if processes > 1:
            parts: list[dict[int, Answered] | None] = [None] * processes
            distributed.all_gather_object(parts, answers_by_number)
            answers_by_number = {number: answer for part in parts for number, answer in part.items()}
        values = [answers_by_number[number] for number in range(len(self.held_out))]
        loss = -sum(value for value, _, _ in values) / sum(tokens for _, tokens, _ in values)
        correct = "".join("01"[hit] for *_, hit in values)
        return HeldOutScore(loss, correct, time.monotonic() - start)

    def _make_batches(self) -> list[list[int]]:
        """Return the questions' numbers by micro batch, in their order."""
        batches: list[list[int]] = [[]]
        for number in range(len(self.held_out)):
            widest = max(
                compute_padded_width(self.held_out.lengths[index], self.longest) for index in (*batches[-1], number)
            )
            size = len(batches[-1]) + 1
            if batches[-1] and (size > self.samples or size * widest > self.tokens):
                batches.append([])
            batches[-1].append(number)
        return batches

    def _make_loader(self, batches: Sequence[list[int]]) -> DataLoader:
        return DataLoader(
            self.held_out,
            batch_sampler=batches,
            collate_fn=Collator(self.held_out.encoder, self.longest, self.dtype),
            num_workers=min(self.workers, len(batches)),
            prefetch_factor=1 if self.workers else None,
            generator=torch.Generator().manual_seed(0),  # the default would draw from training's random numbers
        )

    def _score_rows(
        self, batch: dict[str, torch.Tensor], values: torch.Tensor, hits: torch.Tensor
    ) -> Iterator[Answered]:
        """Yield the result of each row of a micro batch, from (n,) log-likelihoods and hits at all answers' tokens."""
        values, hits = values.cpu(), hits.cpu()
        positions, labels = batch["answer_positions"], batch["labels"]
        rows = positions // labels.shape[1]
        ends = torch.isin(labels.flatten()[positions + 1], self.stops)
        for row in range(len(labels)):
            in_row = rows == row
            # up to and including the first end token
            until_end = ends[in_row].long().cumsum(0) - ends[in_row].long() == 0
            yield values[in_row].sum().item(), int(in_row.sum()), bool(hits[in_row][until_end].all())


@contextmanager
def _restoring_state(engine: nn.Module) -> Iterator[None]:
    """Restore mode and random state afterwards, as if nothing had been computed."""
    training = engine.training
    engine.eval()
    try:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        engine.train(training)
