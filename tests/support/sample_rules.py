"""Rules of the jsonl stage for samples, with defaults for the values that a test omits."""

from typing import Any

from dj2mgm.data.training_jsonl import SampleRules
from dj2mgm.settings.data import JsonlSection, JsonlSettings


def build_sample_rules(budget: int | None = None, leaked: frozenset[str] = frozenset(), **settings: Any) -> SampleRules:
    values = {"seed": 0, "sources": {}, "control_tokens": []} | settings
    return SampleRules(JsonlSettings.from_sections(JsonlSection(), **values), budget, leaked)
