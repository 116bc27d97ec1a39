"""A mapper that writes questions about images, and their answers, in recipes with `rows: instructions`.

    rows: instructions
    process:
      - instruction_synthesis_mapper: {per_image: 3, kinds: [count, position, yes_no]}

The stage adds `per_image` empty rows for each image of the pairs, and sets `captioner` to
`synthesize.captioner`. The column `slot` of a row is 0 for a row of the dataset, and k for the k-th new row about an
image. With `questions: model`, the captioner's model, which may be on a server, writes questions and answers as JSON.
With `questions: dataset`, questions are taken from the dataset if they fit the caption, and the workflow's own model
answers them.

The model's answers are untrusted input. A row without a usable question and answer is dropped; the reason is counted.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE, Mapper
from data_juicer.utils.constant import Fields
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dj2mgm.data.formats import build_dj_text
from dj2mgm.data.instruction_rows import is_single_question, read_question
from dj2mgm.data.texts import normalize_words
from dj2mgm.errors import InputError
from dj2mgm.features.instructions.operators.instruction_checks import NO, YES, EvaluationQuestions, QuestionPool
from dj2mgm.juicer.operators.captioners import (
    CONTROL_TOKEN,
    ENOUGH_TO_JUDGE,
    WRONG_SCHEMA,
    Captioner,
    StoredAnswersOperator,
    cut_object,
    find_text_problem,
    format_reasons,
    warn_of_unusable,
)
from dj2mgm.juicer.operators.declarations import Captions, argument, draw, merge_reports
from dj2mgm.juicer.operators.trained_model_operators import TRAINED_CAPTIONER, complete_arguments, load_model
from dj2mgm.recipes.catalogue import INSTRUCTION_OPERATOR as NAME
from dj2mgm.recipes.catalogue import SERVER_CAPTIONER
from dj2mgm.settings.string_formats import find_control_token
from dj2mgm.storage.files import read_jsonl
from dj2mgm.storage.streaming import read_json_list

STAT = "instruction"
GIVEN, WRITTEN = "given", "written"
MODEL, DATASET = "model", "dataset"
LENGTH_ARGUMENTS = {SERVER_CAPTIONER: "max_tokens", TRAINED_CAPTIONER: "max_new_tokens"}
QUESTION_KINDS = {
    "recognition": "what something is, or its color, shape or material",
    "count": "how many things of one kind there are",
    "position": "where something is",
    "text": "the text that can be read in the image, only if there is any",
    "reasoning": "a conclusion from several things in the image",
    "yes_no": "answered by yes or no, where yes and no are equally frequent",
}
MAX_ITEMS = 100  # instructions in an answer
NO_QUESTION = "no question"
PROMPT = """Write {count} different questions about this image and their answers, in {language}.
Each question has exactly one right answer, which can be seen in the image and cannot be guessed without it.
An answer has as few words as possible. Use these kinds of questions:
{kinds}
Reply with JSON only, in this form: {{"instructions": [{{"kind": "{example}", "question": "…", "answer": "…"}}]}}"""


class Instruction(BaseModel):
    """A question about an image with its answer."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, str_strip_whitespace=True)

    kind: str
    question: str
    answer: str


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    instructions: Annotated[list[object], Field(max_length=MAX_ITEMS)]


INSTRUCTION_ADAPTER = TypeAdapter(Instruction)


def build_prompt(count: int, kinds: list[str], language: str) -> str:
    """Return the message for a model."""
    kind_lines = "\n".join(f"- {kind}: {QUESTION_KINDS[kind]}" for kind in kinds)
    return PROMPT.format(count=count, language=language, kinds=kind_lines, example=kinds[0])


def parse_instructions(answer: str, kinds: Collection[str]) -> list[Instruction | None] | None:
    """Return the instructions in a model's answer, with None for each item of another schema; None for no list."""
    try:
        items = _Answer.model_validate_json(cut_object(answer)).instructions
    except ValidationError:
        return None
    return [_parse_item(item, kinds) for item in items]


def _parse_item(item: object, kinds: Collection[str]) -> Instruction | None:
    try:
        instruction = INSTRUCTION_ADAPTER.validate_python(item)
    except ValidationError:
        return None
    return instruction if instruction.kind in kinds else None


@OPERATORS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class InstructionSynthesisMapper(StoredAnswersOperator, Mapper):
    """A mapper that fills empty rows with a question about their image and its answer, or drops them for a reason.

    The stat `instruction` is `given` for a row of the dataset, `written` for a new one, and otherwise the reason why
    the row was dropped.
    """

    _accelerator = "cuda"
    _batched_op = True
    report_key = "instructions"

    # its argument `question` is replaced by this operator's prompt
    captioner: dict | None = argument(None, "the operator whose model writes, {operator: {argument: value}}")
    questions: str = argument(MODEL, "`model` (it writes questions, too) or `dataset` (it answers the dataset's)")
    kinds: list[str] | None = argument(None, "kinds of questions, from `QUESTION_KINDS` (None: all)")
    per_image: int = argument(2, "number of questions about each image")
    language: str = argument("English", "language of questions and answers that the model writes")
    max_tokens: int = argument(512, "number of tokens at which the model's answer about an image is cut")
    max_question_length: int = argument(300, "longest question in characters")
    max_answer_length: int = argument(300, "longest answer in characters")
    seed: int = argument(0, "seed of the draws of the dataset's questions")
    question_file: str | None = argument(None, "the dataset's instructions, in LLaVA's format")
    held_out_file: str | None = argument(None, "evaluation file, whose questions are not used")

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"batch_size": DEFAULT_BATCH_SIZE} | kwargs)
        if not isinstance(self.captioner, dict) or len(self.captioner) != 1:
            raise ValueError(f"captioner must be one operator, {{name: {{argument: value}}}}; found {self.captioner!r}")
        [(name, arguments)] = self.captioner.items()
        if name not in LENGTH_ARGUMENTS or self.questions == DATASET and name != TRAINED_CAPTIONER:
            expected = TRAINED_CAPTIONER if self.questions == DATASET else " or ".join(LENGTH_ARGUMENTS)
            raise ValueError(f"with questions: {self.questions}, captioner must be {expected}; found {name}")
        self.kinds = list(dict.fromkeys(self.kinds or QUESTION_KINDS))
        if self.questions == MODEL:
            question = build_prompt(self.per_image, self.kinds, self.language)
            spec = {name: (arguments or {}) | {"question": question, LENGTH_ARGUMENTS[name]: self.max_tokens}}
            self._captioner = Captioner(spec, self.seed, self.captions_folder, self.writer, "instructions")

    def finish_report(self, report: dict) -> dict:
        """Return the complete counts of all rows.

        Raises:
            InputError: no empty row could be filled.
        """
        counts = {key: report.get(key, 0) for key in (GIVEN, WRITTEN)} | {"dropped": report.get("dropped", {})}
        counts |= {key: report[key] for key in ("answers", "server") if key in report}
        dropped = sum(counts["dropped"].values())
        if not counts[WRITTEN] and dropped >= ENOUGH_TO_JUDGE:
            raise InputError(
                f"{NAME}: none of {dropped} rows got an instruction ({format_reasons(counts['dropped'])}). Check that "
                "the model takes images and answers with JSON (questions: model), or that captions name the same "
                "things as the dataset's questions (questions: dataset)"
            )
        if self.questions == MODEL:
            total, consequence = counts[WRITTEN] + dropped, "they are dropped"
            warn_of_unusable(f"new rows got no instruction by {NAME}", counts["dropped"], total, consequence)
        return counts

    def process_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Fill the empty rows, and return the samples without rows that cannot be filled."""
        if "slot" not in samples:
            raise InputError(f"{NAME} writes instructions. Add `rows: instructions` to the recipe")
        empty = [row for row, slot in enumerate(samples["slot"]) if slot]
        write = self._write if self.questions == MODEL else self._answer
        results = dict(zip(empty, write(samples, empty, rank), strict=True)) if empty else {}
        for row, stats in enumerate(samples[Fields.stats]):
            result = results.get(row, GIVEN)
            stats[STAT] = result if isinstance(result, str) else WRITTEN
            if isinstance(result, Instruction):
                samples["question"][row] = result.question
                samples[self.text_key][row] = build_dj_text(result.answer)
        self._count(list(results.values()), len(samples["slot"]) - len(empty))
        remaining_rows = [row for row in range(len(samples["slot"])) if not isinstance(results.get(row), str)]
        return {key: [values[row] for row in remaining_rows] for key, values in samples.items()}

    def _count(self, results: list[Instruction | str], dataset_rows: int) -> None:
        instructions = [item for item in results if isinstance(item, Instruction)]
        answers = Counter(normalize_words(item.answer) for item in instructions)
        counts = {GIVEN: dataset_rows, WRITTEN: len(instructions), "answers": {key: answers[key] for key in (YES, NO)}}
        counts["dropped"] = dict(Counter(item for item in results if isinstance(item, str)))
        self.report = merge_reports(self.report, counts | self._take_server_counts())

    def _write(self, samples: dict, rows: list[int], rank: int | None) -> list[Instruction | str]:
        """Return the instruction of each row, or why it has none, from one answer of the model about each image."""
        images = list(dict.fromkeys(samples[self.image_key][row][0] for row in rows))
        answers, _ = self._captioner.caption(images)
        by_image = dict(zip(images, answers, strict=True))
        results = []
        for row in rows:
            outcomes = self._read_answer(by_image[samples[self.image_key][row][0]], samples["asked"][row])
            index = samples["slot"][row] - 1  # the k-th new row about an image gets the k-th outcome
            results.append(outcomes[index] if index < len(outcomes) else NO_QUESTION)
        return results

    def _read_answer(self, answer: Captions, dataset_questions: list[str]) -> list[Instruction | str]:
        """Return the usable instructions in a model's answer, followed by the problems of the others."""
        items = parse_instructions(answer.candidates[0], self.kinds)
        if answer.problem or items is None:
            return [answer.problem or WRONG_SCHEMA] * self.per_image
        used_questions = set(dataset_questions)
        usable, problems = [], []
        for item in items:
            problem = self._find_problem(item, used_questions) if item else WRONG_SCHEMA
            if problem:
                problems.append(problem)
            else:
                used_questions.add(normalize_words(item.question))
                usable.append(item)
        return usable + problems

    def _find_problem(self, item: Instruction, used_questions: set[str]) -> str | None:
        problem = find_text_problem(item.question, self.max_question_length)
        problem = problem or find_text_problem(item.answer, self.max_answer_length)
        if problem:
            return problem
        words = normalize_words(item.question)
        if not words or words in used_questions:
            return "duplicate" if words else "empty"
        return "held-out question" if self._held_out.has(item.question, item.answer) else None

    def _answer(self, samples: dict, rows: list[int], rank: int | None) -> list[Instruction | str]:
        """Choose a dataset question for each row, let the model answer it, and return the row's instruction."""
        results: dict[int, Instruction | str] = dict.fromkeys(rows, NO_QUESTION)
        arguments = complete_arguments(self.captioner[TRAINED_CAPTIONER])
        generator = load_model(self, arguments["base_model"], arguments["stage"], rank)
        template = arguments["template"]
        control = generator.list_control_tokens(template)
        questions = {}
        for row, question in ((row, self._choose_question(samples, row)) for row in rows):
            if question and find_control_token(question, control):
                results[row] = CONTROL_TOKEN
            elif question:
                questions[row] = question
        images = [samples[self.image_key][row][0] for row in questions]
        answers = generator.answer(images, list(questions.values()), template, self.max_tokens, arguments["batch_size"])
        for (row, question), answer in zip(questions.items(), answers, strict=True):
            item = Instruction(kind=self._pool.find_kind(question), question=question, answer=answer.strip())
            results[row] = self._find_problem(item, set()) or item
        return list(results.values())

    def _choose_question(self, samples: dict, row: int) -> str | None:
        """Return the question of an empty row.

        The draws of lower slots are repeated first, so that no image gets a question twice.
        """
        pair = samples["id"][row].rpartition("+")[0]
        used_questions, question = set(samples["asked"][row]), None
        for slot in range(1, samples["slot"][row] + 1):
            first = int(draw(self.seed, NAME, pair) * len(self.kinds)) + slot
            kinds = [self.kinds[(first + offset) % len(self.kinds)] for offset in range(len(self.kinds))]
            draw_for_slot = partial(draw, self.seed, NAME, pair, str(slot))
            question = self._pool.choose(samples["caption"][row], kinds, used_questions, draw_for_slot)
            if question is None:
                return None
            used_questions.add(normalize_words(question))
        return question

    @cached_property
    def _held_out(self) -> EvaluationQuestions:
        return EvaluationQuestions(read_jsonl(self.held_out_file) if self.held_out_file else ())

    @cached_property
    def _pool(self) -> QuestionPool:
        if self.question_file is None:
            raise InputError(f"{NAME}: questions: {DATASET} needs question_file, the dataset's instructions")
        return QuestionPool(_read_question_pairs(Path(self.question_file)))


def _read_question_pairs(file: Path) -> Iterator[tuple[str, str]]:
    for row in filter(is_single_question, read_json_list(file)):
        yield read_question(row), row["conversations"][1]["value"]
