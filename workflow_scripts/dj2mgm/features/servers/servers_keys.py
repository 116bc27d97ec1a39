"""Keys of the configuration for `serve_check`."""

from typing import Annotated

from pydantic import Field

from dj2mgm.settings.base import Number, Section, section, setting
from dj2mgm.settings.string_formats import Address, Variable

TARGETS_BY_KEY = dict.fromkeys(("experiment", "endpoint", "serve_check"), ("serve_check",))


class ServeCheckSection(Section):
    """`snakemake serve_check`."""

    model: str | None = setting(None, "name of the model on the server; null: the only one that it lists")
    key_variable: Variable | None = setting(None, "environment variable with the server's key, never the key itself")
    connections: int = setting(8, "requests at the same time", ge=1, le=256)
    timeout_s: Annotated[Number, Field(gt=0, le=86400)] = setting(
        120, "seconds of silence after which a request failed"
    )


class ServersKeys(Section):
    """Keys for several experiments."""

    endpoint: Address | None = setting(
        None,
        "server with OpenAI's chat completions that `snakemake serve_check` asks, such as http://localhost:8000/v1",
    )
    serve_check: ServeCheckSection = section(
        ServeCheckSection, "`snakemake serve_check`: a server's answers compared with those of `experiment`"
    )


KEYS = ServersKeys
