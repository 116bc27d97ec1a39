"""Choice of further seeds for an experiment."""

from collections.abc import Collection
from itertools import count, islice


def choose_unused_seeds(seeds: Collection[int], number: int) -> list[int]:
    """Return the smallest numbers that are not among the seeds."""
    return list(islice((seed for seed in count() if seed not in seeds), number))
