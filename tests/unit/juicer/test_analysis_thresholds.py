"""Thresholds are suggested only in a gap or a valley of a distribution."""

import numpy as np
import pytest

from dj2mgm.juicer.suggestions import Tail, choose_gap_limit, find_separated_tail, find_valley

ROWS = 4000
ONE_HUMP = {
    "normal": lambda rng: rng.normal(0.3, 0.05, ROWS),
    "uniform": lambda rng: rng.uniform(0, 1, ROWS),
    "left-skewed": lambda rng: 0.4 - rng.gamma(2, 0.03, ROWS),
    "lengths": lambda rng: rng.lognormal(4, 0.4, ROWS).round(),
    "file sizes": lambda rng: rng.lognormal(10, 1.2, ROWS).round(),
    "words": lambda rng: rng.poisson(12, ROWS) + 1.0,
    "mostly one value": lambda rng: np.where(rng.random(ROWS) < 0.7, 336.0, rng.integers(337, 600, ROWS)),
    "mostly zero": lambda rng: np.where(rng.random(ROWS) < 0.95, 0.0, rng.uniform(0.07, 0.3, ROWS)),
    "constant": lambda rng: np.full(ROWS, 128.0),
}
one_hump = pytest.mark.parametrize("draw", ONE_HUMP.values(), ids=ONE_HUMP)


@one_hump
@pytest.mark.parametrize("seed", range(3))
def test_a_distribution_without_a_gap_gets_no_limit(draw, seed):
    values = draw(np.random.default_rng(seed))
    assert find_separated_tail(values, upper=False) is None
    assert find_separated_tail(values, upper=True) is None


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_tail_is_cut_off_exactly(upper, seed):
    rng = np.random.default_rng(seed)
    values = rng.lognormal(4, 0.3, ROWS)
    planted = rng.uniform(900, 2000, 60) if upper else rng.uniform(1, 6, 60)
    tail = find_separated_tail(np.concatenate([planted, values]), upper)
    limit = choose_gap_limit(tail, whole=False)
    assert tail.rows == 60
    assert values.max() <= limit < planted.min() if upper else planted.max() < limit <= values.min()


def test_both_ends_of_a_distribution_are_treated_the_same():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0.5, 0.02, ROWS), rng.normal(0.9, 0.01, 40)])
    upper, lower = find_separated_tail(values, upper=True), find_separated_tail(1 - values, upper=False)
    assert upper.rows == lower.rows == 40
    assert [upper.innermost, upper.rest] == pytest.approx([1 - lower.innermost, 1 - lower.rest])
    assert find_separated_tail(values, upper=False) is None


@pytest.mark.parametrize(("rows", "expected"), [(9, None), (10, 10), (50, 50), (53, None)])
def test_few_or_very_many_rows_are_not_a_tail(rows, expected):
    values = np.concatenate([np.full(rows, 6.0), np.random.default_rng(0).integers(100, 140, 1000)])
    tail = find_separated_tail(values, upper=False)
    assert (tail and tail.rows) == expected


def test_stray_rows_do_not_hide_a_tail():
    rng = np.random.default_rng(0)
    tail, strays, rest = rng.uniform(0.5, 0.51, 60), [0.534, 0.537], rng.uniform(0.56, 0.66, ROWS)
    separated = find_separated_tail(np.concatenate([tail, strays, rest]), upper=False)
    assert (separated.rows, separated.rest) == (60, 0.534), "the limit is in the wider part of the gap"
    assert find_separated_tail(np.concatenate([tail[:20], strays * 3, rest]), upper=False) is None, "too many strays"


def test_zero_sizes_are_a_lower_tail():
    values = np.concatenate([np.zeros(20), np.random.default_rng(0).integers(100, 140, 1000)])
    assert find_separated_tail(values, upper=False).rows == 20


@pytest.mark.parametrize("seed", range(20))
def test_a_limit_drops_the_tail_and_keeps_the_rest(seed):
    rng = np.random.default_rng(seed)
    low, high = np.sort(rng.choice([rng.normal(0, 1, 2), rng.lognormal(3, 2, 2), rng.integers(-5, 2000, 2)]))
    high += low == high
    whole = bool(low == int(low) and high == int(high))
    lower = choose_gap_limit(Tail(9, low - 1, low, high), whole)
    upper = choose_gap_limit(Tail(9, high + 1, high, low), whole)
    assert low < lower <= high and low <= upper < high
    assert not whole or (lower == int(lower) and upper == int(upper))


@pytest.mark.parametrize(
    ("innermost", "rest", "whole", "limit"),
    [
        (36, 54, True, 40),
        (4, 9, True, 6),
        (3, 4, True, 4),
        (4, 3, True, 3),
        (0.556, 0.593, False, 0.57),
        (0, 7, True, 4),
    ],
)
def test_a_limit_has_as_few_digits_as_possible(innermost, rest, whole, limit):
    assert choose_gap_limit(Tail(9, innermost, innermost, rest), whole) == limit


@one_hump
@pytest.mark.parametrize("seed", range(3))
def test_one_mode_has_no_valley(draw, seed):
    values = draw(np.random.default_rng(seed))
    if draw not in (ONE_HUMP["mostly one value"], ONE_HUMP["mostly zero"]):  # these have two modes
        assert find_valley(values) is None


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
@pytest.mark.parametrize(("width", "apart"), [(0.05, 0.3), (0.01, 0.3)])
def test_the_valley_separates_two_modes_nearly_optimally(share, width, apart):
    rng = np.random.default_rng(1)
    low = rng.normal(0, 0.05, int(share * ROWS))
    high = rng.normal(apart, width, ROWS - len(low))
    valley = find_valley(np.concatenate([low, high]))
    limits = np.linspace(0, apart, 2000)
    wrong = [np.sum(low >= limit) + np.sum(high < limit) for limit in limits]
    assert np.sum(low >= valley.at) + np.sum(high < valley.at) <= min(wrong) + 0.005 * ROWS
    assert valley.humps == pytest.approx((0, apart), abs=0.02)
    assert valley.share == pytest.approx(share, abs=0.02)


def test_the_valley_moves_with_the_scale():
    rng = np.random.default_rng(2)
    values = np.concatenate([rng.normal(0, 1, ROWS), rng.normal(6, 0.5, ROWS)])
    assert find_valley(0.1 * values - 3).at == pytest.approx(0.1 * find_valley(values).at - 3, abs=0.005)
