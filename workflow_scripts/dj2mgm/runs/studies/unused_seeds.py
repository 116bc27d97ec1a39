"""Choice of further seeds for an experiment."""

from collections.abc import Collection


def choose_unused_seeds(seeds: Collection[int], number: int) -> list[int]:
    """Return the numbers after the largest seed.

    The experiment of a search's winner has seeds after those that chose it, so no smaller number may follow them.
    """
    first = max(seeds, default=-1) + 1
    return list(range(first, first + number))
