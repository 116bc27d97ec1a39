"""How samples are dealt out to processes."""

from accelerate.data_loader import SeedableRandomSampler
from hypothesis import given, settings
from hypothesis import strategies as st

from dj2mgm.training.datasets import EpochBatches

COUNTS = st.integers(1, 60), st.integers(1, 5), st.integers(0, 3), st.integers(1, 5), st.integers(0, 2)


def dealt(samples: int, size: int, seed: int, processes: int, epoch: int) -> list[list[list[int | None]]]:
    """By process, its micro batches."""
    all_batches = [EpochBatches(samples, size, seed, processes, process) for process in range(processes)]
    for batches in all_batches:
        batches.epoch = epoch
    assert all(len(list(batches)) == len(batches) for batches in all_batches)
    return [list(batches) for batches in all_batches]


@settings(max_examples=2000, deadline=None)
@given(*COUNTS)
def test_every_sample_comes_once_an_epoch_and_every_process_takes_as_many_turns(samples, size, seed, processes, epoch):
    batches = dealt(samples, size, seed, processes, epoch)
    taken = [index for mine in batches for batch in mine for index in batch if index is not None]
    assert sorted(taken) == list(range(samples))
    assert len({len(mine) for mine in batches}) == 1
    assert all(batch == [None] or (None not in batch and 1 <= len(batch) <= size) for mine in batches for batch in mine)


@settings(max_examples=2000, deadline=None)
@given(*COUNTS)
def test_turn_by_turn_processes_take_what_one_process_takes(samples, size, seed, processes, epoch):
    batches = dealt(samples, size, seed, processes, epoch)
    together = [batch for turn in zip(*batches, strict=True) for batch in turn]
    [alone] = dealt(samples, size, seed, 1, epoch)
    assert together[: len(alone)] == alone
    assert all(batch == [None] for batch in together[len(alone) :])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 100), st.integers(0, 5))
def test_the_first_epochs_order_is_that_of_accelerates_sampler(samples, seed):
    sampler = SeedableRandomSampler(range(samples), data_seed=seed)
    [[order]] = dealt(samples, samples, seed, 1, 0)
    assert order == list(sampler)


def test_every_seed_and_epoch_has_an_order_of_its_own():
    orders = {tuple(dealt(30, 30, seed, 1, epoch)[0][0]) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
