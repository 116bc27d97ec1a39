"""Choice of further seeds for an experiment."""

from collections.abc import Collection


def choose_unused_seeds(seeds: Collection[int], number: int) -> list[int]:
    """Return the numbers after the largest seed.

    Smaller numbers may have chosen the winner of a search, whose experiment begins with larger ones.
    """
    first = max(seeds, default=-1) + 1
    return list(range(first, first + number))
