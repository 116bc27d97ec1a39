"""Key of the configuration for `challenge`, and the settings of its stages."""

from typing import Literal, Self

from pydantic import create_model, model_validator
from pydantic_core import PydanticCustomError

from dj2mgm.settings.base import Number, Processes, Section, StageSettings, Template, section, setting
from dj2mgm.settings.evaluation import BenchmarkSection, Decoding, change_type, read_declarations

TARGETS_BY_KEY = {"challenge": ("challenge",)}


class ChallengeScore(Section):
    """The reference model's score in a benchmark."""

    score: Number = setting(..., "percent", gt=0, le=100)
    variant: str = setting(..., "form of the prompts")


class ChallengeSection(Section):
    """`snakemake challenge`."""

    reference: str = setting(
        "MGM-2B",
        "model whose published scores, in percent, are below; the challenge itself divides by the score of its "
        "organizers' baseline",
    )
    scores: dict[str, ChallengeScore] = setting(
        {"textvqa": {"score": 56.2, "variant": "ocr_tokens"}, "mmbench": {"score": 59.8, "variant": "circular"}}
    )


class ChallengeKeys(Section):
    """Keys for several experiments."""

    challenge: ChallengeSection = section(
        ChallengeSection,
        "`snakemake challenge`: the scores of report.experiments relative to those of a reference model",
    )


class _Scores(BenchmarkSection):
    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if not self.model_fields_set:
            raise PydanticCustomError("empty", "no entry")
        return self


KEYS = ChallengeKeys


def build_benchmark_fields() -> dict[str, tuple]:
    """Return the field `challenge` with the prompt variants of each benchmark that the project declares."""
    scores, declared = {}, read_declarations()
    for name in dict.fromkeys([*ChallengeSection.model_fields["scores"].default, *declared]):
        variant = setting(..., ChallengeScore.model_fields["variant"].description)
        scores[name] = (
            create_model(name, __base__=ChallengeScore, variant=(Literal[declared[name].variants], variant)),
            None,
        )
    scores_model = create_model("Scores", __base__=_Scores, **scores)
    challenge = create_model(
        "Challenge", __base__=ChallengeSection, scores=change_type(ChallengeSection, "scores", scores_model)
    )
    return {"challenge": (challenge, section(challenge, ChallengeKeys.model_fields["challenge"].description))}


class BenchmarkSettings(StageSettings):
    """The answers to a benchmark's questions."""

    benchmark: str = setting()
    files: dict[str, str] = setting(..., "paths by key of `benchmarks.<name>`")
    template: Template = setting()
    decoding: Decoding = setting()
    gpus: int = setting(ge=1)
    cpu_threads: Processes | None = setting(..., "null: one for each core of this process")


class ChallengeRun(Section):
    """A run in the challenge's table."""

    experiment: str = setting()
    seed: int | None = setting(..., "null: a model before training")
    benchmarks: dict[str, str] = setting(..., "folder of each benchmark")


class ChallengeSettings(ChallengeSection, StageSettings):
    """Settings of the challenge's table."""

    runs: list[ChallengeRun] = setting()
