"""Filters that check answers, in recipes with `rows: instructions`.

    process:
      - caption_agreement_filter:
      - yes_no_balance_filter:
      - blind_answer_filter: {max_likelihood: 0.9}
      - round_trip_filter: {min_agreement: 0.5}

- Caption: a new answer must agree with the caption of the image, which the model that wrote it has not seen.
- Balance: of the questions that are answered by yes or no, equally many have each answer, so that a model cannot guess.

The others ask a model that this workflow has trained:

- Blind: an answer that the model gives to a gray image too teaches nothing about images (Chen et al., Are we on the
  right way for evaluating large vision-language models?, 2024, arXiv:2403.20330).
- Round trip: another question, whose answer follows from the row's answer, must get that answer (Changpinyo et al., All
  you may need for VQA are image captions, 2022, arXiv:2205.01883).

Questions of a dataset are also asked about other images whose caption names the same things. Questions with the same
first two words have a common form. Words that most questions of a form have (what, color, is, the) are its frame. The
other words, such as "red circle", are the subject, and a question fits a caption that contains them. A question without
a subject ("How many objects are there?") fits every caption. Rare forms have no frame, so the pool suits datasets whose
questions have few forms.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from io import BytesIO
from itertools import groupby
from math import exp

import numpy as np
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens
from PIL import Image

from dj2mgm.data.texts import MIN_WORDS, normalize_lines, normalize_words
from dj2mgm.juicer.operators.declarations import NO_GROUP, BalanceFilter, Rows, ValueFilter, argument
from dj2mgm.juicer.operators.trained_model_operators import TrainedModelOperator, compute_log_likelihoods
from dj2mgm.models.questions import split_into_parts
from dj2mgm.recipes.argument_kinds import Rewrite

YES, NO = "yes", "no"
NUMBERS = {*"zero one two three four five six seven eight nine ten none".split(), *map(str, range(101))}
ABOUT_TEXT = {"text", "say", "says", "written", "word", "words", "read", "reads"}
MAX_SUBJECT_WORDS = 8
MAX_DRAWS = 20  # draws of a question that does not fit a caption
FRAME_SHARE = 0.5  # share of a form's questions that have a word of its frame
MIN_ASKED = 20  # questions of a form with a frame
BALANCE, BALANCE_STAT = "yes_no_balance_filter", "yes_no"
CAPTION, CAPTION_STAT = "caption_agreement_filter", "caption_agreement"
BLIND, ROUND_TRIP = "blind_answer_filter", "round_trip_filter"
GRAY, SIDE = (128, 128, 128), 224
YES_NO_SPELLINGS = ("yes", "Yes", "no", "No")  # answers to `VERIFICATION_QUESTION`; models prefer different spellings
VERIFICATION_QUESTION = 'Is "{answer}" the right answer to the question "{question}"? Answer with yes or no.'


def find_kind(question: str, answers: Mapping[str, int]) -> str:
    """Return the kind of a normalized English question. `answers` counts its normalized answers."""
    words = question.split()
    if _are_mostly(answers, {YES, NO}):
        return "yes_no"
    if _are_mostly(answers, NUMBERS):
        return "count"
    if ABOUT_TEXT & set(words):
        return "text"
    if words[:1] == ["where"]:
        return "position"
    return "reasoning" if words and words[0] in ("why", "how") else "recognition"


def _are_mostly(answers: Mapping[str, int], expected: Collection[str]) -> bool:
    """Return whether most answers are in `expected`; single answers to a question may be wrong."""
    return 2 * sum(count for answer, count in answers.items() if answer in expected) > sum(answers.values())


class QuestionPool:
    """The different questions of a dataset, by kind and subject.

    Questions with the same words count as one, with the spelling of the first.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]):
        """Read pairs of question and answer."""
        answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
        spellings: dict[str, str] = {}  # by words
        for question, answer in pairs:
            answers[spellings.setdefault(normalize_words(question), question)][normalize_words(answer)] += 1
        self._words = {question: words for words, question in spellings.items()}
        times = {question: counts.total() for question, counts in answers.items()}
        self.kinds: defaultdict[str, list[str]] = defaultdict(list)
        for question, counts in answers.items():
            self.kinds[find_kind(self._words[question], counts)].append(question)
        self._kind_of = {question: kind for kind, questions in self.kinds.items() for question in questions}
        self._subjects: dict[str, list[str]] = {}
        self._by_subject: defaultdict[tuple[str, str], list[str]] = defaultdict(list)  # by kind and first subject
        forms: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        for question in answers:
            forms[tuple(self._words[question].split()[:2])].append(question)
        for questions in forms.values():
            self._index(questions, times)

    def _index(self, questions: list[str], times: Mapping[str, int]) -> None:
        words_by_question = {question: self._words[question].split() for question in questions}
        total = sum(times[question] for question in questions)
        counts: Counter[str] = Counter()
        for question, words in words_by_question.items():
            counts.update(dict.fromkeys(words, times[question]))
        limit = FRAME_SHARE * total if total >= MIN_ASKED else total
        frame = {word for word, count in counts.items() if count > limit}
        for question, words in words_by_question.items():
            runs = [" ".join(run) for in_frame, run in groupby(words, key=frame.__contains__) if not in_frame]
            self._subjects[question] = runs
            self._by_subject[self._kind_of[question], runs[0] if runs else ""].append(question)

    def find_kind(self, question: str) -> str:
        return self._kind_of[question]

    def fits(self, question: str, caption: str) -> bool:
        """Return whether a normalized caption names the subjects of a question."""
        return all(f" {subject} " in f" {caption} " for subject in self._subjects[question])

    def choose(
        self, caption: str, kinds: list[str], used_questions: Collection[str], draw: Callable[[str], float]
    ) -> str | None:
        """Return a question of the first of `kinds` that has one, or None.

        Half of the yes/no questions have subjects that the caption does not name.

        Args:
            caption: caption of the image.
            kinds: kinds of questions, the preferred one first.
            used_questions: normalized questions that are not chosen again.
            draw: function from a name to a number in (0, 1].
        """
        caption = normalize_words(caption)
        words = caption.split()
        phrases = {" ".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, i + 1 + MAX_SUBJECT_WORDS)} | {
            ""
        }
        for kind in kinds:
            if kind == "yes_no" and draw("absent") <= 0.5:
                question = self._draw_absent(caption, used_questions, draw)
            else:
                candidates = [
                    question for subject in sorted(phrases) for question in self._by_subject.get((kind, subject), ())
                ]
                fitting = [
                    question
                    for question in candidates
                    if self._words[question] not in used_questions and self.fits(question, caption)
                ]
                question = _pick(fitting, draw(kind)) if fitting else None
            if question:
                return question
        return None

    def _draw_absent(self, caption: str, used_questions: Collection[str], draw: Callable[[str], float]) -> str | None:
        questions = self.kinds.get("yes_no")
        for number in range(MAX_DRAWS if questions else 0):
            question = _pick(questions, draw(f"absent {number}"))
            if self._words[question] not in used_questions and not self.fits(question, caption):
                return question
        return None


def _pick(questions: list[str], share: float) -> str:
    """Return one of the questions, by a number in (0, 1]."""
    return questions[min(int(share * len(questions)), len(questions) - 1)]


class EvaluationQuestions:
    """Questions of an evaluation file with their answers; general questions are left out.

    A question is general if it has fewer than `MIN_WORDS` words, or if the file asks it about several images.
    """

    def __init__(self, rows: Iterable[dict] = ()):
        """Read the rows of `read_evaluation`."""
        images: dict[str, set[str]] = {}
        self._pairs: set[tuple[str, str]] = set()
        for row in rows:
            for item in row["questions"]:
                question, answer = normalize_words(item["question"]), normalize_words(item["answer"])
                if len(question.split()) >= MIN_WORDS:
                    images.setdefault(question, set()).add(row["image"])
                    self._pairs |= {(question, answer)} if answer else set()
        self._pairs = {(question, answer) for question, answer in self._pairs if len(images[question]) == 1}

    def has(self, question: str, answer: str) -> bool:
        """Return whether the file has this question, or a line of it, with this answer in any spelling."""
        words = normalize_words(answer)
        return any((line, words) in self._pairs for line in normalize_lines(question))


@OPERATORS.register_module(CAPTION)
class CaptionAgreementFilter(ValueFilter):
    """A filter that drops new instructions whose answer contradicts the caption of their image.

    The stat `caption_agreement` is 1 or 0. It is empty for rows of the dataset and for rows to which no rule applies,
    which are kept.
    """

    _batched_op = True
    stat = CAPTION_STAT
    bounds = ("min_agreement", None)

    min_agreement: float = argument(1.0, "lowest agreement to keep. With 0, the filter only measures")
    # 'question = answer => caption = phrase' or '… caption != phrase', with names in braces; None: every answer except
    # yes, no and numbers must be in the caption
    rules: list[str] | None = argument(None, "phrases that captions contain or do not contain")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._rules = [Rewrite(rule) for rule in self.rules or ()]

    def compute_stats_batched(self, samples: dict) -> dict:
        columns = (samples.get(name) or [""] * len(samples[self.text_key]) for name in ("question", "caption"))
        rows = zip(*columns, samples[self.text_key], samples[Fields.stats], strict=True)
        for question, caption, text, stats in rows:
            agreement = self._measure_agreement(question, remove_special_tokens(text), f" {normalize_words(caption)} ")
            stats[CAPTION_STAT] = np.array([agreement] if caption and agreement is not None else [], dtype=np.float64)
        return samples

    def _measure_agreement(self, question: str, answer: str, caption: str) -> float | None:
        """Return whether all rules that apply hold for a normalized caption with a blank at both ends."""
        if self.rules is None:
            answer = normalize_words(answer)
            return None if answer in {YES, NO} | NUMBERS else float(f" {answer} " in caption)
        expectations = [rule.apply(question, answer) for rule in self._rules]
        agreements = [
            (f" {normalize_words(expectation.answer)} " in caption) == expectation.expected
            for expectation in expectations
            if expectation
        ]
        return float(all(agreements)) if agreements else None


@OPERATORS.register_module(BALANCE)
class YesNoBalanceFilter(BalanceFilter):
    """A filter that keeps as many rows with the answer yes as with the answer no, and all rows with other answers.

    The stat `yes_no` is 1 for yes, 0 for no and −1 for other answers. Rows of the dataset and new rows are
    balanced together. If no row has one of both answers, all rows are kept.
    """

    stat = BALANCE_STAT
    keep_fraction, keep_rows = 1.0, None
    positive: str = argument("yes", "the answer yes in the language of the answers")
    negative: str = argument("no", "the answer no")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._codes = {normalize_words(self.positive): 1, normalize_words(self.negative): 0}
        if len(self._codes) < 2:
            raise ValueError(
                f"positive and negative must be different answers, found {self.positive!r} and {self.negative!r}"
            )
        self._rows_per_answer = 0  # rows to keep with each answer

    def assign_groups(self, rows: Rows) -> np.ndarray:
        answers = (normalize_words(remove_special_tokens(row[self.text_key])) for row in rows)
        groups = np.fromiter((self._codes.get(answer, NO_GROUP) for answer in answers), dtype=np.int64, count=len(rows))
        counts = Counter(groups[groups != NO_GROUP].tolist())
        self._rows_per_answer = min(counts.values()) if len(counts) > 1 else counts.total()
        return groups

    def count_rows_to_keep(self, rows: int) -> int:
        return min(rows, 2 * self._rows_per_answer)


class AnswerCheck(TrainedModelOperator, ValueFilter):
    """A filter that decides by the probabilities of answers under a trained model.

    Its stat is empty for a row that has no question, has a control token, or does not have exactly one image. With
    `new_only`, it is also empty for rows of the dataset. Rows without the stat are kept.
    """

    new_only: bool = argument(False, "whether only new instructions are measured")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"batch_size": DEFAULT_BATCH_SIZE} | kwargs)

    def ask(self, questions: Sequence[tuple[object, str, str]], rank: int | None) -> list[float | None]:
        return compute_log_likelihoods(self._load_model(rank), self.template, questions)

    def find_unmeasured_rows(self, samples: dict) -> dict[int, tuple[str, str, str]]:
        """Return (image, question, answer) of the rows without the stat that have one image and a question, by row."""
        questions = samples.get("question") or [""] * len(samples[self.text_key])
        slots = samples.get("slot") if self.new_only else None
        return {
            row: (samples[self.image_key][row][0], question, remove_special_tokens(samples[self.text_key][row]))
            for row, (question, stats) in enumerate(zip(questions, samples[Fields.stats], strict=True))
            if question
            and self.stat not in stats
            and len(samples[self.image_key][row] or ()) == 1
            and (slots is None or slots[row])
        }


@OPERATORS.register_module(BLIND)
@UNFORKABLE.register_module(BLIND)
class BlindAnswerFilter(AnswerCheck):
    """A filter that drops rows whose answer is likely for the model although it sees a gray image only.

    The stat `blind_likelihood` is the probability of the complete answer given the question and a gray image.
    """

    stat = "blind_likelihood"
    bounds = (None, "max_likelihood")

    max_likelihood: float = argument(0.9, "highest probability to keep")

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        unmeasured, gray = self.find_unmeasured_rows(samples), BytesIO()
        Image.new("RGB", (SIDE, SIDE), GRAY).save(gray, "PNG")
        log_likelihoods = self.ask([(gray, question, answer) for _, question, answer in unmeasured.values()], rank)
        probabilities = {
            row: exp(value) for row, value in zip(unmeasured, log_likelihoods, strict=True) if value is not None
        }
        return self.fill(samples, probabilities)


@OPERATORS.register_module(ROUND_TRIP)
@UNFORKABLE.register_module(ROUND_TRIP)
class RoundTripFilter(AnswerCheck):
    """A filter that drops rows whose answer does not agree with the model's answers to other questions.

    With `rewrites`, the stat `round_trip_agreement` is the lowest probability, over all other questions, of the answer
    that follows from the row's answer. It is empty for a row to which no rule applies, which is kept. Without
    `rewrites`, the other question is whether the answer is right, and the stat is the probability of yes given that
    the model answers yes or no, each in lower case or with a capital.
    """

    stat = "round_trip_agreement"
    bounds = ("min_agreement", None)

    min_agreement: float = argument(0.5, "lowest probability to keep")
    # 'question = answer => question = answer' with names in braces; None: the model is asked whether the answer is
    # right
    rewrites: list[str] | None = argument(None, "rules that make other questions")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._rules = [Rewrite(rule) for rule in self.rewrites or ()]

    def compute_stats_batched(self, samples: dict, rank: int | None = None) -> dict:
        unmeasured = self.find_unmeasured_rows(samples)
        return self.fill(
            samples, self._verify(unmeasured, rank) if self.rewrites is None else self._ask(unmeasured, rank)
        )

    def _verify(self, unmeasured: dict[int, tuple[str, str, str]], rank: int | None) -> dict[int, float]:
        """Return the probability of yes, by row, if the model is asked whether the answer is right."""
        questions = [
            (image, VERIFICATION_QUESTION.format(question=question, answer=answer), spelling)
            for image, question, answer in unmeasured.values()
            for spelling in YES_NO_SPELLINGS
        ]
        parts = split_into_parts(self.ask(questions, rank), len(YES_NO_SPELLINGS))
        agreement = {}
        for row, values in zip(unmeasured, parts, strict=True):
            if None not in values:
                yes = np.logaddexp(*values[:2])
                agreement[row] = float(np.exp(yes - np.logaddexp(yes, np.logaddexp(*values[2:]))))
        return agreement

    def _ask(self, unmeasured: dict[int, tuple[str, str, str]], rank: int | None) -> dict[int, float]:
        """Return the lowest probability, by row, of the answers that follow from the row's answer."""
        checks = [
            (row, image, other)
            for row, (image, question, answer) in unmeasured.items()
            for other in (rule.apply(question, answer) for rule in self._rules)
            if other
        ]
        log_likelihoods = self.ask([(image, other.question, other.answer) for _, image, other in checks], rank)
        agreement: dict[int, float] = {}
        for (row, _, other), value in zip(checks, log_likelihoods, strict=True):
            if value is not None:
                agreement[row] = min(agreement.get(row, 1.0), exp(value) if other.expected else 1 - exp(value))
        return agreement
