"""Key of the configuration for `fetch`."""

from typing import Annotated

from pydantic import Field

from dj2mgm.settings.base import Section, UniqueItems, section, setting
from dj2mgm.settings.string_formats import Name

TARGETS_BY_KEY = {"fetch": ("fetch",)}


class FetchSection(Section):
    """`snakemake fetch`: data of the hub that config/hub describes."""

    rows: Annotated[int, Field(ge=1, le=10**8)] | None = setting(
        5000, "rows of a dataset of config/hub, such as dataset=llava-pretrain; null: all"
    )
    benchmarks: Annotated[list[Name], UniqueItems()] = setting([], "benchmarks to fetch: textvqa, mmbench")


class FetchKeys(Section):
    """Keys for several experiments."""

    fetch: FetchSection = section(FetchSection, "`snakemake fetch`: data of config/hub")


KEYS = FetchKeys
