"""Settings of the stages that prepare data (filter, synthesize and jsonl), and prompts of the generate stage.

A section holds keys of config.yaml. `…Settings` add values of the run: a stage receives them as its config.yaml.
Training reads the prompts, too, so that its checkpoints answer the same questions.
"""

from typing import Annotated, ClassVar, Literal, Union

from pydantic import ConfigDict, Field, WithJsonSchema

from dj2mgm.settings.base import (
    ImageRootSettings,
    Number,
    Processes,
    Section,
    SeedSettings,
    StageSettings,
    Template,
    section,
    setting,
)
from dj2mgm.settings.string_formats import Address, FilePath, Name, Question, QuestionPrompt, Variable

# default question for a caption, also in training data of stage 2 whose captions have no question
CAPTION_QUESTION = "Describe the image."


class PromptKeys(Section):
    """Keys of `evaluate` in config.yaml that contain prompts."""

    question_prompt: QuestionPrompt = setting("{question}", "prompt of a VQA question")


class CaptionPrompt(StageSettings):
    """The prompt for a caption."""

    template: Template = setting()
    question: str = setting()


class PromptSettings(PromptKeys, ImageRootSettings):
    """The part of the generate stage's config.yaml that training reads."""

    model_config = ConfigDict(extra="ignore")

    captions: dict[str, CaptionPrompt] = setting(
        ..., "by stage: `pretrain` and `finetune`; without stage 1, `base` replaces `pretrain`"
    )


BatchSize = Annotated[int, Field(ge=1, le=65536)]
Tokens = Annotated[int, Field(ge=1, le=2**20)]
NonEmptyQuestion = Annotated[
    Question, Field(min_length=1), WithJsonSchema({"type": "string", "format": "question", "minLength": 1})
]


class FilterSection(Section):
    """Keys of every stage that runs a recipe."""

    processes: Processes | None = setting(
        1, "processes of Data-Juicer; several pay off for operators with models only; null: one for each core"
    )


class CaptionsBy(Section):
    """The experiment that trains a captioner."""

    experiment: Name = setting(
        "baseline",
        "experiment whose model of the same seed is used: of stage 1 for captions, of stage 2 for instructions",
    )


class CaptionSearch(Section):
    """The search for captions by a trained model."""

    num_beams: int = setting(4, "candidates for each image; captioner and CLIP together choose one", ge=1, le=1024)
    batch_size: BatchSize = setting(16, "images at a time")
    max_new_tokens: Tokens = setting(40, "maximum length of a caption")


class MgmCaptioner(CaptionSearch, CaptionsBy):
    """A model that this workflow has trained."""


class Blip2Captioner(Section):
    """Data-Juicer's image_captioning_mapper."""

    model: FilePath = setting("Salesforce/blip2-opt-2.7b", "folder or hub id, with safetensors weights")
    batch_size: BatchSize = setting(8, "images at a time")


class OpenaiCaptioner(Section):
    """A server with OpenAI's chat completions."""

    base_url: Address = setting("http://localhost:8000/v1", "the server")
    model: Annotated[str, Field(min_length=1)] | None = setting(
        None, "name of the model, as <base_url>/models lists it"
    )
    key_variable: Variable | None = setting(
        "OPENAI_API_KEY", "environment variable that holds the key, if the server needs one; null: none is sent"
    )
    question: NonEmptyQuestion = setting("Describe the image in one sentence.", "sent with each image")
    max_tokens: Tokens = setting(128, "maximum length of an answer; the server cuts longer ones, which are not used")
    temperature: Number = setting(0.0, "of sampling", ge=0)
    longest_side: int = setting(768, "pixels; larger images are scaled down before they are sent", ge=16, le=8192)
    concurrency: int = setting(32, "requests in flight", ge=1, le=1024)
    timeout_s: Number = setting(
        60,
        "seconds without a byte, or before an answer begins; a whole answer may take ten times as long",
        gt=0,
        le=86400,
    )
    retries: int = setting(5, "attempts after a failed request, at growing intervals", ge=0, le=1000)
    max_requests: Annotated[int, Field(ge=1, le=10**9)] | None = setting(
        None, "budget of this model with this question over all runs, at which the stage stops; null: none"
    )
    max_total_tokens: Annotated[int, Field(ge=1, le=10**12)] | None = setting(
        None, "the same in tokens, as the server counts them: of image, question and answer"
    )


class CaptionerSettings(StageSettings):
    """The captioner of a run.

    Attributes:
        tells_likelihood: whether it returns the likelihood of a caption.
        answers_questions: whether it answers a question about an image.
        folder: folder of its model, if the model is neither trained here nor behind a server.
    """

    name: str
    tells_likelihood: ClassVar[bool] = False
    answers_questions: ClassVar[bool] = True

    @property
    def folder(self) -> str | None:
        return None

    def as_operator(self, **folders: str) -> dict:
        """Return the captioner as an operator of a recipe; `folders` are those of a model that was trained here."""
        raise NotImplementedError


class TrainedCaptionerSettings(CaptionSearch, CaptionerSettings):
    """The captioner `mgm`. The rules pass the folders of its model."""

    name: Literal["mgm"] = "mgm"
    template: Template = setting()
    question: str = setting()
    tells_likelihood: ClassVar[bool] = True

    def as_operator(self, **folders: str) -> dict:
        return {"mgm_captioning_mapper": folders | self.model_dump(exclude={"name"})}


class DataJuicerCaptionerSettings(Blip2Captioner, CaptionerSettings):
    """The captioner `blip2`."""

    name: Literal["blip2"] = "blip2"
    answers_questions: ClassVar[bool] = False

    @property
    def folder(self) -> str:
        return self.model

    def as_operator(self, **folders: str) -> dict:
        arguments = {"hf_img2seq": self.model, "keep_original_sample": False}
        return {
            "image_captioning_mapper": arguments | {"gpu_batch_size": self.batch_size, "batch_size": self.batch_size}
        }


class ServerCaptionerSettings(OpenaiCaptioner, CaptionerSettings):
    """The captioner `openai`."""

    name: Literal["openai"] = "openai"
    model: Annotated[str, Field(min_length=1)] = setting(..., "name of the model, as <base_url>/models lists it")

    def as_operator(self, **folders: str) -> dict:
        return {"openai_captioning_mapper": self.model_dump(exclude={"name"})}


# by name; `SynthesizeSection` has a section for each
CAPTIONERS = {"mgm": TrainedCaptionerSettings, "blip2": DataJuicerCaptionerSettings, "openai": ServerCaptionerSettings}


class SynthesizeSection(Section):
    """The synthesize stage."""

    recipe: Name | None = setting(
        None, "file config/recipes/<name>.yaml; null: training uses the filtered data unchanged"
    )
    captioner: Literal[*CAPTIONERS] = setting(
        "mgm",
        "mgm: a model that this workflow trained; blip2: Data-Juicer's operator; openai: a server (docs/data.md)",
    )
    mgm: MgmCaptioner = section(MgmCaptioner, "captioner mgm")
    blip2: Blip2Captioner = section(Blip2Captioner, "captioner blip2: Data-Juicer's image_captioning_mapper")
    openai: OpenaiCaptioner = section(
        OpenaiCaptioner, "captioner openai: chat completions of OpenAI, vLLM, SGLang or `transformers serve` over HTTP"
    )


class RecipeStageSettings(FilterSection, ImageRootSettings):
    """Settings of every stage that runs a recipe."""

    recipe: dict = setting(..., "content of a recipe, which the stage checks again")
    trusted_recipes: bool = setting(False, "as in config.yaml; left out if the recipe needs no trust")


class FilterSettings(RecipeStageSettings):
    """The filter stage."""

    clip: str | None = setting(None, "folder or hub id of the CLIP that operators use; left out if none does")


class SynthesizeSettings(RecipeStageSettings, SeedSettings):
    """The synthesize stage."""

    gpus: int = setting(ge=1)
    clip: str = setting(..., "folder or hub id of the CLIP that operators use")
    captioner: Annotated[Union[*CAPTIONERS.values()], Field(discriminator="name")] | None
    captions: str = setting(..., "folder of the captioners' answers, shared by all experiments")
    writer: str = setting("", "name of this run's file of answers; by default from the name of the output folder")
    evaluation_images: str | None = setting(None, "folder of held-out images; left out if no instructions are written")


class JsonlKeys(Section):
    """Keys that the jsonl stage receives."""

    on_bad_row: Literal["refuse", "drop"] = setting(
        "refuse", "refuse: stop and name the rows; drop: leave them out and count them"
    )
    max_samples: int = setting(
        200_000,
        "maximum number of samples; a larger dataset is sampled down to it. Every other experiment trains on as many "
        "samples as the baseline: with fewer rows it repeats some",
        ge=1,
        le=10**9,
    )
    leaks: Literal["drop", "keep"] = setting(
        "drop",
        "treatment of rows with a near-duplicate of an evaluated image or with a benchmark's question, which are "
        "counted",
    )


Fraction = Annotated[Number, Field(gt=0, le=1)]
Shares = dict[str, Annotated[Number, Field(ge=0, le=1)]]


class JsonlSection(JsonlKeys):
    """The jsonl stage."""

    fraction: Fraction | dict[str, Fraction] = setting(
        1.0,
        "share of the rows and samples, for a shorter training on a part of the data; or the share of each source. A "
        "smaller share is a part of a larger one",
    )

    same_size_as: Name | None = setting(
        None,
        "draw as many different rows at random as the named experiment has; `controls` sets it; null: use all rows",
    )


class ImageFolders(StageSettings):
    """Folders that the image paths of each split are relative to."""

    pretrain_images: str = setting()
    finetune_images: str = setting()
    evaluation_images: str = setting()


class JsonlSettings(SeedSettings, JsonlKeys, ImageFolders):
    """The jsonl stage."""

    sources: dict[str, Number] = setting(..., "amount of each source")
    shares: Shares = setting({}, "shares of a stage's samples, instead of amounts")
    used_fraction: Fraction | dict[str, Fraction] = setting(1.0, "as `fraction` in config.yaml")
    question: str = setting(..., "for pairs without a question of their own")
    one_stage: bool = setting(False, "whether the model has no stage 1")
    one_question: bool = setting(False, "whether the model takes one question about one image only")
    several_images: bool = setting(False, "whether the model takes several images in a conversation")
    control_tokens: list[str] = setting(..., "of the model; no row may contain one")
