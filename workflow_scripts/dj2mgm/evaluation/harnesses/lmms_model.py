"""This workflow's models in lmms-eval: MGM with a trained stage or without, merged, and what transformers loads.

    PYTHONPATH=workflow_scripts:.lmms_eval python -m lmms_eval --model dj2mgm --batch_size auto --tasks pope \\
        --model_args model=results/models/tiny/mgm,finetuned=results/baseline/finetune,template=gemma

lmms-eval finds it by the entry point in workflow_scripts/dj2mgm-1.dist-info.
"""

from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms

from dj2mgm.config.chat_templates import OF_THE_TOKENIZER
from dj2mgm.data.formats import IMAGE_TOKEN
from dj2mgm.evaluation.harnesses.exchange import cut, save_once, texts_that_end
from dj2mgm.generation import load_generator


class Dj2mgm(lmms):
    """
    Args:
        model: folder of a whole model.
        finetuned: what a training stage wrote for it; None: the model as it is.
        template: chat format, for MGM; by default the tokenizer's own.
        max_new_tokens: of an answer, where a task leaves it open.
        blind: whether it is asked without the images.
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
        """Greedy answers, whatever else a task asks for, cut where lmms-eval's own class of the model cuts them."""
        answers: list[str] = []
        for limit, asked in groupby(requests, key=lambda request: request.args[1].get("max_new_tokens")):
            answers += self._answers(list(asked), limit or self.max_new_tokens)
        return answers

    def _answers(self, requests: list[Instance], max_new_tokens: int) -> list[str]:
        with TemporaryDirectory() as folder:
            images = [self._image(request, Path(folder)) for request in requests]
            prompts = [request.args[0].replace(IMAGE_TOKEN, " ").strip() for request in requests]
            texts: dict[int, str] = {}
            for shows in (True, False):  # questions without an image are asked apart
                numbers = [number for number, image in enumerate(images) if (image is not None) == shows]
                said = self.generator.answer(
                    [images[number] for number in numbers],
                    [prompts[number] for number in numbers],
                    self.template,
                    max_new_tokens=max_new_tokens,
                    batch_size=self.batch_size,
                )
                texts |= zip(numbers, said, strict=True)
        return [
            cut(texts[number], texts_that_end(self.folder, request.args[1].get("until")))
            for number, request in enumerate(requests)
        ]

    def _image(self, request: Instance, folder: Path) -> Path | None:
        if self.blind:
            return None
        _, _, doc_to_visual, doc_id, task, split = request.args
        visuals = doc_to_visual(self.task_dict[task][split][doc_id]) or []
        if len(visuals) > 1:
            raise NotImplementedError(f"{task}: a question about {len(visuals)} images; dj2mgm takes one")
        return save_once(visuals[0], folder) if visuals else None

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("dj2mgm answers tasks of the type generate_until; choose such a task")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("dj2mgm answers tasks with one question; choose such a task")
