"""A mapper that answers questions again if their answer does not depend on the image, for `rows: instructions`.

    rows: instructions
    process:
      - answer_repair_mapper: {min_gain: 0.0}
      - likelihood_gain_filter: {min_gain: 0.0}

An answer with a likelihood gain below the limit is replaced by an answer of the captioner's model, which may be on a
server.
Later filters decide whether the new answer is good enough, and keep the row if it passes. The trace (dropped.jsonl) and
the explorer show both answers.
"""

from collections import Counter

from data_juicer.ops import load_ops
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE, Mapper
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens
from data_juicer.utils.model_utils import get_model

from dj2mgm.control_tokens import find_control_token
from dj2mgm.data.formats import build_dj_text
from dj2mgm.errors import InputError
from dj2mgm.recipes.recipe_step import REPAIR_OPERATOR as NAME

from .declarations import merge_reports
from .likelihood_gain_filter import NAME as GAIN_FILTER
from .likelihood_gain_filter import STAT as GAIN
from .mgm_captioning_mapper import NAME as TRAINED
from .mgm_captioning_mapper import complete_arguments, make_model_key
from .openai_captioning_mapper import NAME as SERVER
from .text_generation.captioner import Captioner
from .text_generation.stored_captions import StoredAnswersOperator, StoredCaptioner, check_answerer, warn_of_unusable
from .text_generation.text_problems import CONTROL_TOKEN, find_text_problem

ORIGINAL_GAIN = "original_likelihood_gain"
PROMPT = "Answer the question about the image with as few words as possible, and nothing else.\nQuestion: {question}"


@OPERATORS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class AnswerRepairMapper(StoredAnswersOperator, Mapper):
    """A mapper that replaces answers whose likelihood gain under a trained model is below a limit.

    The stat `original_likelihood_gain` is the gain of the original answer. A later `likelihood_gain_filter` measures
    the gain of the answer in use. An answer is kept if it has no gain, or if the new answer is equal or not usable.
    """

    _accelerator = "cuda"
    _batched_op = True
    report_key = "repairs"

    def __init__(
        self,
        captioner: dict | None = None,
        base_model: str | None = None,
        stage: str | None = None,
        template: str | dict | None = None,
        min_gain: float = 0.0,
        other_images: int = 8,
        max_tokens: int = 32,
        max_answer_length: int = 300,
        captions_folder: str | None = None,
        writer: str = "captions",
        *args,
        **kwargs,
    ):
        """Initialize the operator.

        Args:
            captioner: the operator whose model answers, as in a recipe: {operator: {argument: value}}.
            base_model: folder of the assembled model that measures the gain (None: the captioner's model; the same
                holds for `stage` and `template`).
            stage: output folder of `finetune`.
            template: chat template of the stage, as a name in config/chat_templates or the content of such a file.
            min_gain: answers with a lower gain, in nats per token, are replaced.
            other_images: the argument of `likelihood_gain_filter`.
            max_tokens: number of tokens at which a new answer is cut.
            max_answer_length: longest new answer in characters.
            captions_folder: folder in which a server's answers are kept for other runs (None: they are not kept).
            writer: name of this run's file in that folder. Runs at the same time need different names.
        """
        super().__init__(*args, **{"batch_size": DEFAULT_BATCH_SIZE} | kwargs)
        check_answerer(captioner, (SERVER, TRAINED))
        captioner_arguments = complete_arguments(captioner[TRAINED]) if TRAINED in captioner else {}
        model_arguments = {"base_model": base_model, "stage": stage, "template": template}
        model = {name: value or captioner_arguments.get(name) for name, value in model_arguments.items()}
        if missing := ", ".join(name for name, value in model.items() if value is None):
            raise ValueError(f"{missing}: name the model that measures answers, since the captioner is on a server")
        self.captioner = captioner
        self.min_gain = min_gain
        self.max_tokens = max_tokens
        self.max_answer_length = max_answer_length
        gain_arguments = model | {"other_images": other_images, "accelerator": self.accelerator}
        [self._gain] = load_ops([{GAIN_FILTER: gain_arguments}])
        self.report: dict = {}
        if SERVER in captioner:
            spec = {SERVER: (captioner[SERVER] or {}) | {"question": PROMPT, "max_tokens": max_tokens}}
            self._stored_captioner = StoredCaptioner(Captioner(spec, seed=0), captions_folder, writer, "answers")

    def process_batched(self, samples: dict, rank: int | None = None) -> dict:
        """Replace the answers below the limit that have a usable new answer; `report` counts them."""
        if "question" not in samples:
            raise InputError(f"{NAME} repairs instructions. Add `rows: instructions` to the recipe")
        samples = dict(samples)
        samples[self.text_key] = list(samples[self.text_key])
        measured = self._gain.compute_stats(samples | {Fields.stats: [{} for _ in samples[self.text_key]]}, rank=rank)
        gains = [stats[GAIN] for stats in measured[Fields.stats]]
        for stats, gain in zip(samples[Fields.stats], gains, strict=True):
            stats[ORIGINAL_GAIN] = gain
        low = [row for row, gain in enumerate(gains) if len(gain) and gain[0] < self.min_gain]
        images = [samples[self.image_key][row][0] for row in low]
        questions = [samples["question"][row] for row in low]
        counts: Counter[str] = Counter(below=len(low))
        unusable: Counter[str] = Counter()
        for row, (answer, problem) in zip(low, self._answer(images, questions, rank), strict=True):
            problem = problem or find_text_problem(answer, self.max_answer_length)
            if problem:
                unusable[problem] += 1
            elif _normalize_spelling(answer) == _normalize_spelling(remove_special_tokens(samples[self.text_key][row])):
                counts["same answer"] += 1
            else:
                counts["repaired"] += 1
                samples[self.text_key][row] = build_dj_text(answer)
        self._count(dict(counts), dict(unusable))
        return samples

    def finish_report(self, report: dict) -> dict:
        counts = {key: report.get(key, 0) for key in ("below", "repaired", "same answer")}
        server = {key: report[key] for key in ("server",) if key in report}
        unusable = report.get("unusable", {})
        consequence = "these rows keep their answer"
        warn_of_unusable(f"new answers of {NAME} cannot be used", unusable, counts["below"], consequence)
        return counts | {"unusable": unusable} | server

    def _count(self, counts: dict, unusable: dict) -> None:
        self.report = merge_reports(self.report, counts | self._take_server_counts() | {"unusable": unusable})

    def _answer(self, images: list[str], questions: list[str], rank: int | None) -> list[tuple[str, str | None]]:
        """Return an answer to each question about an image, and its problem if the captioner reports one."""
        if self._stored_captioner:
            captions = self._stored_captioner.ask(images, [PROMPT.format(question=question) for question in questions])
            return [(caption.candidates[0].strip(), caption.problem) for caption in captions]
        arguments = complete_arguments(self.captioner[TRAINED])
        generator = get_model(make_model_key(arguments["base_model"], arguments["stage"]), rank, self.use_cuda())
        template = arguments["template"]
        control = generator.list_control_tokens(template)  # of this model; the model that measures may have others
        allowed = [index for index, question in enumerate(questions) if not find_control_token(question, control)]
        allowed_images, allowed_questions = ([column[index] for index in allowed] for column in (images, questions))
        answers = generator.answer(
            allowed_images, allowed_questions, template, self.max_tokens, arguments["batch_size"]
        )
        answers_by_index = {index: (answer.strip(), None) for index, answer in zip(allowed, answers, strict=True)}
        return [answers_by_index.get(index, ("", CONTROL_TOKEN)) for index in range(len(questions))]


def _normalize_spelling(answer: str) -> str:
    """Return an answer in lower case without a final full stop; signs stay, since −5 is not 5."""
    return " ".join(answer.casefold().split()).removesuffix(".")
