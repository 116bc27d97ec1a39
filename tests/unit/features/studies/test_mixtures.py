"""Mixtures: shares of sources sum to their total and are uniform over all mixtures."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, kstest

from dj2mgm.features.studies.axes import MixtureSpace, compute_shares, list_quantile_keys


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.01, 1))
def test_shares_sum_to_their_total(quantiles, total):
    mixture = MixtureSpace(sources=[f"source {number}" for number in range(len(quantiles) + 1)], total=total)
    shares = compute_shares(mixture, dict(zip(list_quantile_keys(mixture), quantiles, strict=True)))
    assert list(shares) == [f"shares.{source}" for source in mixture.sources]
    assert min(shares.values()) >= 0 and sum(shares.values()) == pytest.approx(total, abs=5e-4)


def test_uniform_numbers_give_uniform_mixtures():
    """Each share of a uniform mixture of k sources is distributed as Beta(1, k - 1)."""
    mixture, generator = MixtureSpace(sources=["a", "b", "c", "d"]), np.random.default_rng(0)
    drawn = np.array(
        [
            list(compute_shares(mixture, dict(zip(list_quantile_keys(mixture), quantiles, strict=True))).values())
            for quantiles in generator.random((2000, 3))
        ]
    )
    for shares in drawn.T:
        assert kstest(shares, beta(1, 3).cdf).pvalue > 0.001
