"""Settings of the stages that prepare data: filter, synthesize and jsonl."""

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from dj2mgm.config.settings.base import Number, Section, section, setting
from dj2mgm.config.settings.strings import Address, FilePath, Name, Question, Variable

BatchSize = Annotated[int, Field(ge=1, le=65536)]
Tokens = Annotated[int, Field(ge=1, le=2**20)]
NonEmptyQuestion = Annotated[
    Question, Field(min_length=1), WithJsonSchema({"type": "string", "format": "question", "minLength": 1})
]
Processes = Annotated[int, Field(ge=1, le=4096)]


class FilterSection(Section):
    """The filter stage."""

    processes: Processes | None = setting(
        1, "processes of Data-Juicer; several pay off for operators with models only; null: one for each core"
    )


class MgmCaptioner(Section):
    """A model that this workflow has trained."""

    experiment: Name = setting("baseline", "experiment whose stage-1 model of the same seed writes the captions")
    num_beams: int = setting(4, "candidates for each image; captioner and CLIP together choose one", ge=1, le=1024)
    batch_size: BatchSize = setting(16, "images at a time")
    max_new_tokens: Tokens = setting(40, "maximum length of a caption")


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
        "seconds of silence, or for the head of an answer; a whole answer may take ten times as long",
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


class SynthesizeSection(Section):
    """The synthesize stage."""

    recipe: Name | None = setting(
        None, "file config/recipes/<name>.yaml; null: training uses the filtered data unchanged"
    )
    captioner: Literal["mgm", "blip2", "openai"] = setting(
        "mgm",
        "mgm: a model that this workflow trained; blip2: Data-Juicer's operator; openai: a server (docs/data.md)",
    )
    mgm: MgmCaptioner = section(MgmCaptioner, "captioner mgm")
    blip2: Blip2Captioner = section(Blip2Captioner, "captioner blip2: Data-Juicer's image_captioning_mapper")
    openai: OpenaiCaptioner = section(
        OpenaiCaptioner, "captioner openai: chat completions of OpenAI, vLLM, SGLang or `transformers serve` over HTTP"
    )


class JsonlSection(Section):
    """The jsonl stage."""

    on_bad_row: Literal["refuse", "drop"] = setting(
        "refuse", "refuse: stop and name the rows; drop: leave them out and count them"
    )
    max_samples: int = setting(
        200_000,
        "maximum, that of the challenge; more rows are sampled down to it. Every other experiment trains on as many "
        "samples as the baseline: with fewer rows it repeats some",
        ge=1,
        le=10**9,
    )
    leaks: Literal["drop", "keep"] = setting(
        "drop",
        "treatment of rows with a near-duplicate of an evaluated image or with a benchmark's question, which are "
        "counted",
    )
