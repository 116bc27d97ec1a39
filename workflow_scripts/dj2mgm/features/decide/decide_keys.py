"""Keys of the configuration for `decide`."""

from typing import Annotated

from dj2mgm.settings.base import Section, UniqueItems, section, setting
from dj2mgm.settings.string_formats import Name
from dj2mgm.settings.targets import DecisionBudget

TARGETS_BY_KEY = {"experiment": ("decide",), "decide": ("decide",)}


class DecideSection(DecisionBudget):
    """`snakemake decide`: its opponents, and the budget for each of them."""

    against: Annotated[list[Name], UniqueItems()] = setting(
        ["baseline"],
        "experiments that `experiment` is compared with, each with this budget; also its own control, such as "
        "dj_synth-random",
        min_length=1,
    )


class DecideKeys(Section):
    """Keys for several experiments."""

    decide: DecideSection = section(
        DecideSection, "`snakemake decide`: more seeds until the headline's verdict is decided, or the budget is spent"
    )


KEYS = DecideKeys
