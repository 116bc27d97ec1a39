"""Choice of further seeds for an experiment."""

from collections.abc import Collection
from itertools import count, islice


def choose_unused_seeds(seeds: Collection[int], number: int) -> list[int]:
    """Return the `number` smallest seeds that are not in `seeds`."""
    return list(islice((seed for seed in count() if seed not in seeds), number))
