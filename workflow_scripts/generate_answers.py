r"""Generate captions and answers about the held-out images after each stage, and about other images as a control.

    python workflow_scripts/generate_answers.py --config results/baseline/generate/config.yaml \
        --model results/models/tiny/mgm --evaluation results/datasets/shapes/evaluation.jsonl \
        --pretrained results/baseline/pretrain --finetuned results/baseline/finetune \
        --output-dir results/baseline/generate

Without --pretrained, the base model takes the place of stage 1. Writes captions.jsonl (of both), answers.jsonl (not of
stage 1), and likelihoods.jsonl, the log-likelihoods of reference answers and captions (of both, and of the base model).
Each row states whether its own image was used or another one (`shuffled`), and rows with the same image have the same
`image_id`. The likelihoods of answers are also computed without an image (`none`).
"""

from collections.abc import Iterator
from pathlib import Path

from dj2mgm.cli.command_line import command_line, parse_paths
from dj2mgm.torch_environment import torch_imports

with torch_imports():
    from dj2mgm.cli.messages import Progress
    from dj2mgm.compute import set_seed, use_cpu_threads
    from dj2mgm.data.formats import read_evaluation
    from dj2mgm.errors import InputError
    from dj2mgm.evaluation.groups import NO_IMAGE, control_paths, image_ids, image_paths
    from dj2mgm.evaluation.reference_likelihoods import ANSWER, CAPTION, likelihood_row
    from dj2mgm.models.generators import open_generators
    from dj2mgm.models.questions import Generator
    from dj2mgm.settings.evaluation import GenerateSettings
    from dj2mgm.settings.generation_prompts import CaptionPrompt
    from dj2mgm.settings.validation import load_settings
    from dj2mgm.storage.files import write_jsonl


@command_line
def main() -> None:
    required = ("--config", "--model", "--evaluation", "--finetuned", "--output-dir")
    args = parse_paths(__doc__, *required, optional=("--pretrained",))
    settings = load_settings(GenerateSettings, args.config)
    use_cpu_threads(settings.cpu_threads)
    set_seed(settings.seed)

    held_out = HeldOutRows(args.evaluation, settings)
    captions, answers, likelihoods = [], [], []
    with open_generators(args.model, settings.gpus) as load:
        for stage in dict.fromkeys((None, args.pretrained, args.finetuned)):
            name = stage.name if stage else "base"
            prompt = settings.captions.get(name, settings.captions.get("pretrain"))
            generator = load(stage)
            likelihoods += held_out.measure_likelihoods(generator, name, prompt)
            if name not in settings.captions:  # the base model before stage 1
                continue
            captions += held_out.write_captions(generator, name, prompt)
            if stage is None or stage != args.pretrained:  # stage 1 does not train answers
                answers += held_out.answer_questions(generator, name)
    write_jsonl(args.output_dir / "likelihoods.jsonl", likelihoods)
    write_jsonl(args.output_dir / "answers.jsonl", answers)
    write_jsonl(args.output_dir / "captions.jsonl", captions)


class HeldOutRows:
    """Held-out rows, each with its own image and, as a control, with that of another row."""

    def __init__(self, file: Path, settings: GenerateSettings):
        self.settings = settings
        self.rows = list(read_evaluation(file))
        paths = image_paths(settings.image_root, self.rows)
        if len(set(paths)) < 2:
            raise InputError(
                f"{file} has {len(set(paths))} different images; at least 2 are needed for the shuffled control"
            )
        self.images = {"own": paths, "shuffled": control_paths(paths, settings.seed)}
        ids = zip(self.rows, image_ids(self.rows, paths), strict=True)
        self.ids = [{"id": row["id"], "image_id": image} for row, image in ids]
        # own and other images in one call, so that each image is encoded once and its caption is used for both
        self.shown = [(images, index) for images in self.images for index in range(len(self.rows))]
        self.questions = [
            (images, index, question) for images, index in self.shown for question in self.rows[index]["questions"]
        ]

    def measure_likelihoods(self, generator: Generator, model: str, prompt: CaptionPrompt) -> Iterator[dict]:
        """Yield the rows of likelihoods.jsonl of one model: of reference answers, also without image, and captions."""
        answers = [
            (images, index, ANSWER, self._prompt(question), question["answer"])
            for images, index, question in self.questions
        ]
        blind = [(NO_IMAGE, *answer[1:]) for answer in answers if answer[0] == "own"]
        captions = [
            (*shown, CAPTION, prompt.question, caption)
            for shown in self.shown
            for caption in self.rows[shown[1]]["captions"]
        ]
        template = self.settings.template
        for form, references in ((template, answers), (template, blind), (prompt.template, captions)):
            files = [self.images[images][index] if images != NO_IMAGE else None for images, index, *_ in references]
            found = generator.likelihoods(files, [row[3] for row in references], [row[4] for row in references], form)
            found = Progress(f"likelihoods, {model}", len(files)).follow(found)
            for (images, index, *reference), values in zip(references, found, strict=True):
                if values:
                    yield self.ids[index] | {"model": model, "images": images} | likelihood_row(*reference, values)

    def write_captions(self, generator: Generator, model: str, prompt: CaptionPrompt) -> Iterator[dict]:
        """Yield the rows of captions.jsonl of one model."""
        files = [self.images[images][index] for images, index in self.shown]
        questions = [prompt.question] * len(files)
        texts = generator.answer(files, questions, prompt.template, **dict(self.settings.decoding))
        texts = Progress(f"captions, {model}", len(files)).follow(texts)
        for (images, index), text in zip(self.shown, texts, strict=True):
            image = self.rows[index]["image"]
            yield self.ids[index] | {"image": image, "model": model, "images": images, "caption": text}

    def answer_questions(self, generator: Generator, model: str) -> Iterator[dict]:
        """Yield the rows of answers.jsonl of one model."""
        files = [self.images[images][index] for images, index, _ in self.questions]
        prompts = [self._prompt(question) for *_, question in self.questions]
        texts = generator.answer(files, prompts, self.settings.template, **dict(self.settings.decoding))
        texts = Progress(f"answers, {model}", len(files)).follow(texts)
        for (images, index, question), text in zip(self.questions, texts, strict=True):
            yield self.ids[index] | {"model": model, "images": images, **question, "prediction": text}

    def _prompt(self, question: dict) -> str:
        return self.settings.question_prompt.replace("{question}", question["question"])


if __name__ == "__main__":
    main()
