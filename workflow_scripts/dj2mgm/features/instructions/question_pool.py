"""Questions of a dataset, as questions about other images whose caption names the same things, and held-out questions.

Questions with the same first two words have a common form. Words that most questions of a form have (what, color, is,
the) are its frame. The other words, such as "red circle", are the subject, and a question fits a caption that contains
them. A question without a subject ("How many objects are there?") fits every caption. Rare forms have no
frame, so the pool suits datasets whose questions have few forms.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import groupby

from dj2mgm.data.texts import MIN_WORDS, normalize_lines, normalize_words

YES, NO = "yes", "no"
NUMBERS = {*"zero one two three four five six seven eight nine ten none".split(), *map(str, range(101))}
ABOUT_TEXT = {"text", "say", "says", "written", "word", "words", "read", "reads"}
MAX_SUBJECT_WORDS = 8
MAX_DRAWS = 20  # draws of a question that does not fit a caption
FRAME_SHARE = 0.5  # share of a form's questions that have a word of its frame
MIN_ASKED = 20  # questions of a form with a frame


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
