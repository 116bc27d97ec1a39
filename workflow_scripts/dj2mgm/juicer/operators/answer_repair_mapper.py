"""A mapper that answers questions again if their answer does not depend on the image, for `rows: instructions`.

    rows: instructions
    process:
      - answer_repair_mapper: {min_gain: 0.0}
      - likelihood_gain_filter: {min_gain: 0.0}

Answers with a likelihood gain below the limit are replaced by those of the captioner's model, which may be on a server.
Later filters decide whether the new answer is good enough, and keep the row if it passes. The trace (dropped.jsonl) and
the explorer show both answers.
"""

from collections import Counter

from data_juicer.ops import load_ops
from data_juicer.ops.base_op import DEFAULT_BATCH_SIZE, OPERATORS, UNFORKABLE, Mapper
from data_juicer.utils.constant import Fields
from data_juicer.utils.mm_utils import remove_special_tokens
from data_juicer.utils.model_utils import get_model

from dj2mgm.control_tokens import find_control
from dj2mgm.data.formats import build_dj_text
from dj2mgm.errors import InputError
from dj2mgm.recipes.recipe_step import REPAIR as NAME

from .declarations import merge_reports
from .likelihood_gain_filter import NAME as GAIN_FILTER
from .likelihood_gain_filter import STAT as GAIN
from .mgm_captioning_mapper import NAME as TRAINED
from .mgm_captioning_mapper import complete_arguments, model_key
from .models.captioner import Captioner
from .models.stored_captions import AnswersKept, StoredCaptioner, check_answerer, warn_of_unusable
from .models.text_problems import CONTROL_TOKEN, find_text_problem
from .openai_captioning_mapper import NAME as SERVER

ORIGINAL_GAIN = "original_likelihood_gain"
PROMPT = "Answer the question about the image with as few words as possible, and nothing else.\nQuestion: {question}"


@OPERATORS.register_module(NAME)
@UNFORKABLE.register_module(NAME)
class AnswerRepairMapper(AnswersKept, Mapper):
    """A mapper that replaces answers whose likelihood gain under a trained model is below a limit.

    The stat `original_likelihood_gain` is the gain of the original answer. A later `likelihood_gain_filter` measures
    that of the answer in use. An answer is kept if it has no gain, or if its new answer is the same or cannot be used.
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
            template: chat format of the stage, as a name in config/chat_templates or the content of such a file.
            min_gain: answers with a lower gain, in nats per token, are replaced.
            other_images: the argument of `likelihood_gain_filter`.
            max_tokens: number of tokens at which a new answer is cut.
            max_answer_length: longest new answer in characters.
            captions_folder: folder in which a server's answers are kept for other runs (None: they are not kept).
            writer: name of this run's file in that folder. Runs at the same time need different names.
        """
        super().__init__(*args, **{"batch_size": DEFAULT_BATCH_SIZE} | kwargs)
        check_answerer(captioner, (SERVER, TRAINED))
        own = complete_arguments(captioner[TRAINED]) if TRAINED in captioner else {}
        given = {"base_model": base_model, "stage": stage, "template": template}
        model = {name: value or own.get(name) for name, value in given.items()}
        if missing := ", ".join(name for name, value in model.items() if value is None):
            raise ValueError(f"{missing}: name the model that measures answers, since the captioner is on a server")
        self.captioner = captioner
        self.min_gain = min_gain
        self.max_tokens = max_tokens
        self.max_answer_length = max_answer_length
        measuring = model | {"other_images": other_images, "accelerator": self.accelerator}
        [self._gain] = load_ops([{GAIN_FILTER: measuring}])
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
            elif _spell(answer) == _spell(remove_special_tokens(samples[self.text_key][row])):
                counts["same answer"] += 1
            else:
                counts["repaired"] += 1
                samples[self.text_key][row] = build_dj_text(answer)
        self._count(dict(counts), dict(unusable))
        return samples

    def judge_report(self, report: dict) -> dict:
        counts = {key: report.get(key, 0) for key in ("below", "repaired", "same answer")}
        server = {key: report[key] for key in ("server",) if key in report}
        unusable = report.get("unusable", {})
        kept = "these rows keep their answer"
        warn_of_unusable(f"new answers of {NAME} cannot be used", unusable, counts["below"], kept)
        return counts | {"unusable": unusable} | server

    def _count(self, counts: dict, unusable: dict) -> None:
        self.report = merge_reports(self.report, counts | self._take_server_counts() | {"unusable": unusable})

    def _answer(self, images: list[str], questions: list[str], rank: int | None) -> list[tuple[str, str | None]]:
        """Return an answer to each question about an image, and why it cannot be used, if its source says so."""
        if self._stored_captioner:
            asked = self._stored_captioner.ask(images, [PROMPT.format(question=question) for question in questions])
            return [(each.candidates[0].strip(), each.problem) for each in asked]
        arguments = complete_arguments(self.captioner[TRAINED])
        generator = get_model(model_key(arguments["base_model"], arguments["stage"]), rank, self.use_cuda())
        template = arguments["template"]
        control = generator.control_tokens(template)  # of this model; the one that measures may have others
        allowed = [place for place, question in enumerate(questions) if not find_control(question, control)]
        shown, asked = ([column[place] for place in allowed] for column in (images, questions))
        answers = generator.answer(shown, asked, template, self.max_tokens, arguments["batch_size"])
        found = {place: (answer.strip(), None) for place, answer in zip(allowed, answers, strict=True)}
        return [found.get(place, ("", CONTROL_TOKEN)) for place in range(len(questions))]


def _spell(answer: str) -> str:
    """Return an answer in lower case without a final full stop; signs stay, since −5 is not 5."""
    return " ".join(answer.casefold().split()).removesuffix(".")
