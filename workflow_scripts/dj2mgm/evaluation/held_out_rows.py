"""Questions to a model about held-out images, and the likelihoods of the reference answers."""

from collections.abc import Iterator
from pathlib import Path

from dj2mgm.cli.messages import Progress
from dj2mgm.errors import InputError
from dj2mgm.evaluation.groups import assign_image_ids, draw_control_paths, locate_row_images
from dj2mgm.evaluation.vqa import ANSWER, CAPTION, build_likelihood_row
from dj2mgm.models.vision_language import Generator
from dj2mgm.score_groups import NO_IMAGE, OWN, SHUFFLED
from dj2mgm.settings.data import CaptionPrompt
from dj2mgm.settings.evaluation import GenerateSettings
from dj2mgm.storage.files import read_jsonl


class HeldOutRows:
    """Held-out rows, each with its own image and, as a control, with the image of another row."""

    def __init__(self, file: Path, settings: GenerateSettings):
        self.settings = settings
        self.rows = list(read_jsonl(file))
        paths = locate_row_images(settings.image_root, self.rows)
        if len(set(paths)) < 2:
            raise InputError(
                f"{file} has {len(set(paths))} different images; at least 2 are needed for the shuffled control"
            )
        self.images = {OWN: paths, SHUFFLED: draw_control_paths(paths, settings.seed)}
        ids = zip(self.rows, assign_image_ids(self.rows, paths), strict=True)
        self.ids = [{"id": row["id"], "image_id": image} for row, image in ids]
        # own and other images are in one call, so that each image is encoded once and its caption is used for both
        self.inputs = [(images, index) for images in self.images for index in range(len(self.rows))]
        self.questions = [
            (images, index, question) for images, index in self.inputs for question in self.rows[index]["questions"]
        ]

    def measure_answers(self, generator: Generator) -> Iterator[float]:
        """Yield the log-likelihood of each reference answer, in nats, with the question's own image."""
        own = [(index, question) for images, index, question in self.questions if images == OWN]
        files = [self.images[OWN][index] for index, _ in own]
        prompts = [self._format_prompt(question) for _, question in own]
        answers = [question["answer"] for _, question in own]
        likelihoods = generator.compute_log_likelihoods(files, prompts, answers, self.settings.template)
        return (sum(values) for values in likelihoods if values)

    def measure_likelihoods(self, generator: Generator, model: str, prompt: CaptionPrompt) -> Iterator[dict]:
        """Yield the rows of likelihoods.jsonl of one model: of reference answers, also without image, and captions."""
        answers = [
            (images, index, ANSWER, self._format_prompt(question), question["answer"])
            for images, index, question in self.questions
        ]
        blind = [(NO_IMAGE, *answer[1:]) for answer in answers if answer[0] == OWN]
        captions = [
            (images, index, CAPTION, prompt.question, caption)
            for images, index in self.inputs
            for caption in self.rows[index]["captions"]
        ]
        chat = self.settings.template
        for template, references in ((chat, answers), (chat, blind), (prompt.template, captions)):
            files = [self.images[images][index] if images != NO_IMAGE else None for images, index, *_ in references]
            prompts, texts = [row[3] for row in references], [row[4] for row in references]
            likelihoods = generator.compute_log_likelihoods(files, prompts, texts, template)
            likelihoods = Progress(f"likelihoods, {model}", len(files)).follow(likelihoods)
            for (images, index, *reference), values in zip(references, likelihoods, strict=True):
                if values:
                    yield (
                        self.ids[index] | {"model": model, "images": images} | build_likelihood_row(*reference, values)
                    )

    def caption_images(self, generator: Generator, model: str, prompt: CaptionPrompt) -> Iterator[dict]:
        """Yield the rows of captions.jsonl of one model."""
        files = [self.images[images][index] for images, index in self.inputs]
        questions = [prompt.question] * len(files)
        texts = generator.answer(files, questions, prompt.template, **dict(self.settings.decoding))
        texts = Progress(f"captions, {model}", len(files)).follow(texts)
        for (images, index), text in zip(self.inputs, texts, strict=True):
            image = self.rows[index]["image"]
            yield self.ids[index] | {"image": image, "model": model, "images": images, "caption": text}

    def answer_questions(self, generator: Generator, model: str) -> Iterator[dict]:
        """Yield the rows of answers.jsonl of one model."""
        files = [self.images[images][index] for images, index, _ in self.questions]
        prompts = [self._format_prompt(question) for *_, question in self.questions]
        texts = generator.answer(files, prompts, self.settings.template, **dict(self.settings.decoding))
        texts = Progress(f"answers, {model}", len(files)).follow(texts)
        for (images, index, question), text in zip(self.questions, texts, strict=True):
            yield self.ids[index] | {"model": model, "images": images, **question, "prediction": text}

    def _format_prompt(self, question: dict) -> str:
        return self.settings.question_prompt.replace("{question}", question["question"])
