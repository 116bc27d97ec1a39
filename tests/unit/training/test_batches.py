"""Samples of each process at each step, and their micro batches."""

import random
from itertools import combinations

import pytest
from accelerate.data_loader import SeedableRandomSampler
from hypothesis import given
from hypothesis import strategies as st

from dj2mgm.training import training_data
from dj2mgm.training.training_data import MAX_CROWDING, MAX_WIDTHS, StepBatches, compute_padded_width
from fuzzing import fuzzed

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)
SHAPES = st.integers(1, 5), st.integers(1, 20), st.integers(0, 3), st.integers(1, 5), st.integers(0, 2)


def collect_batches(
    lengths: list[int], rows: int, global_batch: int, seed: int, processes: int, epoch: int
) -> list[list[list[list[int | None]]]]:
    """Return the micro batches by step and process."""
    steps = []
    for process in range(processes):
        batches = StepBatches(lengths, rows, global_batch, seed, processes, process)
        batches.epoch = epoch
        mine = [batches.step(epoch, number) for number in range(len(batches))]
        assert list(batches) == [batch for step in mine for batch in step]
        steps.append(mine)
    return [list(step) for step in zip(*steps, strict=True)]


def select_samples(step: list[list[list[int | None]]]) -> list[int]:
    return [sample for mine in step for batch in mine for sample in batch if sample is not None]


@fuzzed(1000)
@given(LENGTHS, *SHAPES)
def test_samples_of_a_step_do_not_depend_on_processes(lengths, rows, global_batch, seed, processes, epoch):
    steps = collect_batches(lengths, rows, global_batch, seed, processes, epoch)
    order = collect_batches(lengths, len(lengths), global_batch, seed, 1, epoch)
    assert [sorted(select_samples(step)) for step in steps] == [sorted(select_samples(step)) for step in order]
    assert sorted(sample for step in steps for sample in select_samples(step)) == list(range(len(lengths)))
    assert all(len(select_samples(step)) == global_batch for step in steps[:-1])


@fuzzed(1000)
@given(LENGTHS, *SHAPES)
def test_micro_batches_keep_the_budget_on_all_processes(lengths, rows, global_batch, seed, processes, epoch):
    budget = rows * max(lengths)
    for step in collect_batches(lengths, rows, global_batch, seed, processes, epoch):
        assert len({len(mine) for mine in step}) == 1
        for batch in (batch for mine in step for batch in mine):
            if batch != [None]:
                widths = [compute_padded_width(lengths[sample], max(lengths)) for sample in batch]
                assert batch and max(widths) * len(batch) <= budget and len(batch) <= MAX_CROWDING * rows


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_processes_have_equal_tokens_in_full_micro_batches(processes):
    words = random.Random(0)
    lengths = [min(1024, 620 + int(words.lognormvariate(4.3, 1))) for _ in range(10 * 128)]
    [alone, *steps] = (collect_batches(lengths, 12, 128, 0, count, 0) for count in (1, processes))

    def count_tokens(mine: list[list[int]]) -> int:
        widths = [[compute_padded_width(lengths[row], 1024) for row in batch] for batch in mine]
        return sum(max(batch) * len(batch) for batch in widths)

    longest_loads = sum(max(map(count_tokens, step)) for step in steps[0])
    assert longest_loads * processes <= 1.02 * sum(count_tokens(step[0]) for step in alone)


@fuzzed(200)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 3))
def test_micro_batches_are_few_with_the_least_padding(lengths, rows):
    batches = StepBatches(lengths, rows, len(lengths), seed=0).step(0, 0)
    ordered, budget = sorted(lengths, reverse=True), rows * max(lengths)

    def tokens(parts: list[list[int]]) -> int:
        return sum(max(part) * max(2, len(part)) for part in parts)  # a single sample counts as two

    cuts = (cut for count in range(len(ordered)) for cut in combinations(range(1, len(ordered)), count))
    every = [pieces(ordered, cut) for cut in cuts]

    def fits(part: list[int]) -> bool:
        return max(part) * len(part) <= budget and len(part) <= MAX_CROWDING * rows

    possible = [parts for parts in every if all(map(fits, parts))]
    fewest = min(len(parts) for parts in possible)
    least = min(tokens(parts) for parts in possible if len(parts) == fewest)
    assert len(batches) == fewest
    assert tokens([[lengths[sample] for sample in batch] for batch in batches]) == least


def pieces(values: list[int], cuts: tuple[int, ...]) -> list[list[int]]:
    return [values[begin:end] for begin, end in zip((0, *cuts), (*cuts, len(values)), strict=True)]


@fuzzed(300)
@given(st.integers(1, 5000))
def test_widths_are_few_and_at_least_the_length(longest):
    widths = [compute_padded_width(length, longest) for length in range(1, longest + 1)]
    assert len(set(widths)) <= MAX_WIDTHS and widths[-1] == longest
    assert all(width >= length for length, width in enumerate(widths, start=1))


@pytest.mark.parametrize("longest", [5, 250, 1101, 2048])
def test_widths_on_a_gpu_are_multiples_of_eight(longest, monkeypatch):
    monkeypatch.setattr(training_data, "_has_gpu", lambda: True)
    widths = [compute_padded_width(length, longest) for length in range(1, longest + 1)]
    assert not any(width % 8 for width in widths) and len(set(widths)) <= MAX_WIDTHS
    assert all(width >= length for length, width in enumerate(widths, start=1)) and widths[-1] < longest + 8
    steps = StepBatches([1, longest], 2, 2, seed=0)
    assert sorted(sample for micro_batch in steps.step(0, 0) for sample in micro_batch) == [0, 1]


@fuzzed(200)
@given(st.integers(1, 100), st.integers(0, 5))
def test_the_first_epoch_has_the_order_of_accelerate(samples, seed):
    sampler = SeedableRandomSampler(range(samples), data_seed=seed)
    taken = collect_batches([1] * samples, 1, 1, seed, 1, 0)
    assert [select_samples(step) for step in taken] == [[sample] for sample in sampler]


def test_a_resumed_epoch_begins_at_its_step():
    batches = StepBatches(list(range(1, 31)), 2, 8, seed=0)
    every = list(batches)
    batches.first_step = 2
    assert list(batches) == every[len(batches.step(0, 0)) + len(batches.step(0, 1)) :]


def test_samples_are_counted_step_by_step():
    batches, seen = StepBatches([1] * 30, 2, 8, seed=0), 0
    for step in range(10):
        assert batches.count_samples(step) == seen
        seen += sum(len(samples) for samples in batches.step(step // 4, step % 4))


def test_every_seed_and_epoch_has_its_own_order():
    orders = {
        tuple(sample for step in collect_batches([1] * 30, 1, 1, seed, 1, epoch) for sample in select_samples(step))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25
