"""Table of the known models of the hub in docs/models.md, from config/models."""

from collections.abc import Iterator
from pathlib import Path

from dj2mgm.documentation.page_tables import renew_tables
from dj2mgm.script_modules import SCRIPTS
from dj2mgm.settings.config_files import read_config
from dj2mgm.settings.models import PublishedScores, TransformersModel, detect_model_kind
from dj2mgm.settings.schema import build_schema
from dj2mgm.settings.validation import validate_settings

PAGE = Path("docs/models.md")
HUB = "https://huggingface.co"
SCORES = {"textvqa": "TextVQA", "mmbench": "MMBench", "mmmu": "MMMU"}


def build_models_page() -> str:
    """Return docs/models.md with its table of models renewed."""
    return renew_tables(
        PAGE, ["| `model=` | hub id | license | GB | published scores |", "|---|---|---|---|---|", *_read_rows()]
    )


def _read_rows() -> Iterator[str]:
    for path in sorted((SCRIPTS.parent / "config/models").glob("*.yaml")):
        if detect_model_kind(read_config(path)) is not TransformersModel:
            continue
        values = read_config(path, build_schema(TransformersModel))
        model = validate_settings(TransformersModel, values, str(path))
        license = f"{model.license}, gated" if model.gated else model.license
        link = f"[{model.transformers}]({HUB}/{model.transformers})"
        yield f"| `{path.stem}` | {link} | {license} | {model.size_gb} | {_describe_scores(model.scores)} |"


def _describe_scores(scores: PublishedScores | None) -> str:
    if scores is None:
        return ""
    texts = [f"{title} {value}" for key, title in SCORES.items() if (value := getattr(scores, key)) is not None]
    return f"{', '.join(texts)} ([source]({scores.source}))"
