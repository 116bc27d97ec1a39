"""Generated documents: config/config.yaml, JSON schemas for editors, pages and tables of docs/."""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from dj2mgm.documentation.generated_tables import (
    ARCHITECTURE_PAGE,
    MODELS_PAGE,
    build_architecture_page,
    build_models_page,
)
from dj2mgm.script_modules import import_feature_modules
from dj2mgm.settings.base import RETRAINS, SEARCH, Section, read_extra
from dj2mgm.settings.configuration import (
    ExperimentOnlyKeys,
    ModelOverridableKeys,
    SharedKeys,
    build_configuration_model,
)
from dj2mgm.settings.dataset_files import FilesDataset, ShapesDataset, SourcesDataset
from dj2mgm.settings.models import AssembledModel, MgmModel, TinyModel, TransformersModel
from dj2mgm.settings.presets import PresetFile
from dj2mgm.settings.schema import DIALECT, build_schema, describe_accepted_values
from dj2mgm.settings.training_stages import FinetuneSection, PretrainSection

WRITE_COMMAND = "python workflow_scripts/write_configuration.py"
WIDTH = 120
GROUPS = {
    ExperimentOnlyKeys: ("", "Keys of an experiment"),
    ModelOverridableKeys: ("", "Keys of an experiment, also of a model's `settings`"),
    SharedKeys: ("# Keys for several experiments; experiment files cannot set them.", "Keys for several experiments"),
}
PAGE_HEAD = f"""\
# yaml-language-server: $schema=schemas/config.schema.json
# Defaults of every experiment, as `{WRITE_COMMAND}` writes them. Later layers win: these
# defaults, the model's `settings` (config/models/), the experiment (config/experiments/), `--config key=value` on the
# command line. Unknown keys are refused. docs/configuration.md has the type and limits of every key.
"""
PAGE_TEXT = f"""\
# Configuration

All keys of `config/config.yaml`. `{WRITE_COMMAND}` writes this page, the defaults in `config/config.yaml` and
the JSON schemas for editors in `config/schemas/` from the types in `workflow_scripts/dj2mgm/settings/`.

Later layers win: the defaults, the model's `settings` (`config/models/`), the experiment (`config/experiments/`),
`--config key=value` on the command line. An unknown key is refused, with the nearest known one.
"""


def build_documents() -> dict[Path, str]:
    """Return the content of every generated file by its path in the repository."""
    kinds = {
        "config": [build_configuration_model()],
        "dataset": [FilesDataset, SourcesDataset, ShapesDataset],
        "model": [MgmModel, AssembledModel, TransformersModel, TinyModel],
        "preset": [PresetFile],
    }
    for module in import_feature_modules("config"):
        kinds |= module.SCHEMAS
    schemas = {Path(f"config/schemas/{name}.schema.json"): _dump_schema(models) for name, models in kinds.items()}
    pages = {
        Path("docs/configuration.md"): _build_page(),
        ARCHITECTURE_PAGE: build_architecture_page(),
        MODELS_PAGE: build_models_page(),
    }
    return {Path("config/config.yaml"): _write_defaults()} | pages | schemas


def _dump_schema(models: list[type[Section]]) -> str:
    """Return a JSON schema; if there are several models, a file must match one of them."""
    schemas = [build_schema(model) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return json.dumps({"$schema": DIALECT} | schema, indent=1, ensure_ascii=False) + "\n"


def _write_defaults() -> str:
    defaults = build_configuration_model()()
    blocks = []
    for group, (comment, _) in GROUPS.items():
        lines = "\n".join(_format_section(defaults, group.model_fields))
        blocks += [comment, lines] if comment else [lines]
    text = "\n\n".join([PAGE_HEAD, *blocks]) + "\n"
    return re.sub("\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _format_section(values: Section, keys: Any, indent: str = "") -> Iterator[str]:
    """Yield YAML lines with comments; a section of the first level is set off by an empty line."""
    fields, leaves = type(values).model_fields, []
    for key in keys:
        value, text = getattr(values, key), _build_comment(fields[key], build_schema(type(values))["properties"][key])
        if not isinstance(value, Section):
            leaves.append((f"{indent}{key}: {_format_scalar(value)}", text))
            continue
        yield from _align(leaves, indent)
        leaves = []
        if not indent:
            yield ""
        yield from _align([(f"{indent}{key}:", text)], indent)
        inner_keys = [name for name in type(value).model_fields if name in value.model_dump()]
        yield from _format_section(value, inner_keys, f"{indent}  ")
        if not indent:
            yield ""
    yield from _align(leaves, indent)


def _build_comment(field: FieldInfo, schema: dict) -> str:
    """Return the description of a key, preceded by its allowed words."""
    words = schema.get("enum") or schema.get("items", {}).get("enum") or []
    return "; ".join(filter(None, [" | ".join(words), field.description]))


def _align(leaves: list[tuple[str, str]], indent: str) -> Iterator[str]:
    """Yield keys with their comments: behind them in one column, or above them if a comment is long."""
    width = max((len(line) for line, text in leaves if text and len(line) < 40), default=0)
    for line, text in leaves:
        commented_line = f"{line:{width}}  # {text}" if text else line
        if len(commented_line) <= WIDTH:
            yield commented_line
        else:
            yield from textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            yield line


def _format_scalar(value: object) -> str:
    """Return a value in YAML, on one line."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        return f"{value:.1e}".replace("e-0", "e-")
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...").replace("'", '"')


def _build_page() -> str:
    model = build_configuration_model()
    parts = [PAGE_TEXT]
    for group, (_, title) in GROUPS.items():
        parts.append(f"## {title}\n")
        plain_keys = [key for key in group.model_fields if not _is_section(model.model_fields[key])]
        parts.append(_build_table(model, plain_keys))
        for key in group.model_fields:
            if key not in plain_keys:
                parts += _build_section(model.model_fields[key], key)
    return "\n".join(parts)


def _build_section(field: FieldInfo, name: str) -> Iterator[str]:
    """Yield the heading and table of a section, and of each section in it; no row of `pretrain` twice."""
    kind = _find_section(field)
    yield f"### `{name}`\n"
    if field.description:
        yield f"{field.description}\n"
    section_keys = [key for key, inner_field in kind.model_fields.items() if _is_section(inner_field)]
    plain_keys = [key for key in kind.model_fields if key not in section_keys]
    if kind is FinetuneSection:
        repeated_rows = {_build_row(PretrainSection, key) for key in PretrainSection.model_fields}
        plain_keys = [key for key in plain_keys if _build_row(kind, key) not in repeated_rows]
        yield "All other keys are those of `pretrain`, with the same defaults.\n"
    if plain_keys:
        yield _build_table(kind, plain_keys)
    if resumable := [f"`{key}`" for key in plain_keys if not read_extra(kind.model_fields[key], RETRAINS, True)]:
        yield f"A checkpoint may be resumed after a change of {', '.join(resumable)}.\n"
    for key in section_keys:
        yield from _build_section(kind.model_fields[key], f"{name}.{key}")


def _build_table(model: type[Section], keys: list[str]) -> str:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|", *(_build_row(model, key) for key in keys)]
    return "\n".join(rows) + "\n"


def _build_row(model: type[Section], key: str) -> str:
    field = model.model_fields[key]
    meaning = field.description or ""
    if search := read_extra(field, SEARCH):
        scale = " (log scale)" if search.log else ""
        meaning = "; ".join(filter(None, [meaning, f"search: {search.low:g} to {search.high:g}{scale}"]))
    values = describe_accepted_values(build_schema(model)["properties"][key])
    values = re.sub(r"\ban? (?=integer|number|list|name|path|string|address)", "", values)
    values = re.sub(r"(?<=integer) from (\d+) to (\d+)", r" \1–\2", values)
    default = "" if field.is_required() else f"`{_format_scalar(field.default)}`"
    cells = [f"`{key}`", values, default, meaning]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _is_section(field: FieldInfo) -> bool:
    return _find_section(field) is not None


def _find_section(field: FieldInfo) -> type[Section] | None:
    """Return the section that is the type of a field, or one of its types."""
    kinds = getattr(field.annotation, "__args__", None) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
