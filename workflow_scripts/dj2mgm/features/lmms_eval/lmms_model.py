r"""This workflow's models in lmms-eval: MGM with or without a trained stage, and models of transformers.

    PYTHONPATH=workflow_scripts:.lmms_eval python -m lmms_eval --model dj2mgm --batch_size auto --tasks pope \
        --model_args model=results/models/tiny/mgm,finetuned=results/shapes/tiny/baseline/finetune,template=gemma

lmms-eval finds the class by the entry point in workflow_scripts/dj2mgm-1.dist-info.
"""

from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms

from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.features.lmms_eval.exchange import cut_answer, find_stop_texts, save_once
from dj2mgm.models.generators import load_generator
from dj2mgm.settings.models import OF_THE_TOKENIZER


class LmmsModel(lmms):
    """Model of this workflow as lmms-eval's class.

    Args:
        model: folder of a whole model.
        finetuned: folder that a training stage wrote for it; None for the model without a stage.
        template: chat template for MGM, by default the tokenizer's own.
        max_new_tokens: length at which an answer is cut if the task does not set one.
        blind: whether to ask without the images.
        batch_size: number of questions in a batch.
        max_batch_size: ignored; lmms-eval passes it.
    """

    def __init__(
        self,
        model: str,
        finetuned: str | None = None,
        template: str = OF_THE_TOKENIZER,
        max_new_tokens: int = 64,
        blind: bool = False,
        batch_size: int | str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__()
        self.generator = load_generator(Path(model), Path(finetuned) if finetuned else None, device)
        self.folder = Path(model)
        self.template, self.max_new_tokens, self.blind = template, max_new_tokens, blind
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else "auto"

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return answers cut where lmms-eval's own class cuts them; decoding is always greedy."""
        answers: list[str] = []
        for limit, group in groupby(requests, key=lambda request: request.args[1].get("max_new_tokens")):
            answers += self._answer(list(group), limit or self.max_new_tokens)
        return answers

    def _answer(self, requests: list[Instance], max_new_tokens: int) -> list[str]:
        """Answer in the order of the requests; each answer ends before the first of its request's stop texts."""
        with TemporaryDirectory() as folder:
            images = [self._save_image(request, Path(folder)) for request in requests]
            prompts = [request.args[0].replace(IMAGE_TOKEN, " ").strip() for request in requests]
            texts: dict[int, str] = {}
            for has_image in (True, False):  # questions without an image need a separate call
                numbers = [number for number, image in enumerate(images) if (image is not None) == has_image]
                answers = self.generator.answer(
                    [images[number] for number in numbers],
                    [prompts[number] for number in numbers],
                    self.template,
                    max_new_tokens=max_new_tokens,
                    batch_size=self.batch_size,
                )
                texts |= zip(numbers, answers, strict=True)
        return [
            cut_answer(texts[number], find_stop_texts(self.folder, request.args[1].get("until")))
            for number, request in enumerate(requests)
        ]

    def _save_image(self, request: Instance, folder: Path) -> Path | None:
        if self.blind:
            return None
        _, _, doc_to_visual, doc_id, task, split = request.args
        visuals = doc_to_visual(self.task_dict[task][split][doc_id]) or []
        if len(visuals) > 1:
            raise NotImplementedError(f"{task}: a question has {len(visuals)} images, but dj2mgm takes one")
        return save_once(visuals[0], folder) if visuals else None

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("dj2mgm supports only tasks of the type generate_until; choose such a task")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("dj2mgm supports only tasks with one question per image; choose such a task")
