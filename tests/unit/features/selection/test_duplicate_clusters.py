"""Clusters of near-duplicates: one kept row each, near all others."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dj2mgm.features.selection.duplicate_clusters import find_near_duplicates, keep_best


@settings(deadline=None)
@given(
    pairs=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11)).filter(lambda pair: pair[0] < pair[1])),
    order=st.permutations(range(12)),
)
def test_every_duplicate_and_no_kept_row_is_near_a_kept_row(pairs, order):
    first, second = np.array(sorted(pairs), dtype=int).reshape(-1, 2).T
    rank = np.array(order)
    either = np.append(first, second), np.append(second, first)

    def near(positions):
        for query, position in enumerate(positions):  # in any order
            others = either[1][either[0] == position]
            yield np.full(len(others), query), others, others + position + 1.0

    center, compute_distance = keep_best(near, rank)
    kept_rows = set(np.flatnonzero(center == np.arange(12)))
    for item in range(12):
        if item not in kept_rows:
            pair = tuple(sorted((item, int(center[item]))))
            assert center[item] in kept_rows and pair in pairs and compute_distance[item] == sum(pair) + 1
            assert rank[center[item]] < rank[item]
    assert not any(set(pair) <= kept_rows for pair in pairs)


def test_not_all_pairs_of_large_clusters_are_computed(monkeypatch):
    """Use 5000 rows in two groups; while there are too many pairs, a quarter of the rows is taken first."""
    monkeypatch.setattr("dj2mgm.features.selection.duplicate_clusters.MAX_PAIRS_IN_MEMORY", 20_000)
    rank, pairs_of_query = np.random.default_rng(0).permutation(5000), []

    def near(positions):
        for query, position in enumerate(positions):
            others = np.arange(position % 2, 5000, 2)
            pairs_of_query.append(len(others))
            yield np.full(len(others), query), others, np.ones(len(others))

    center, _ = keep_best(near, rank)
    assert [np.unique(center[group::2]).tolist() for group in (0, 1)] == [
        [2 * rank[0::2].argmin()],
        [2 * rank[1::2].argmin() + 1],
    ]
    assert sum(pairs_of_query) < 10**6, "of 12.5 million"


def test_rows_with_equally_many_images_are_compared_in_order(tmp_path):
    a, b, c = b"aaaa", b"aaab", b"zzzz"
    rows = [(1, a, 0.0), (1, b, 1.0), (2, a + c, 0.0), (2, b + c, 0.0), (2, c + a, 0.0), (0, b"", 0.0), (0, b"", 0.0)]
    rows += [(1, b, 1.0), (2, a + c, -np.inf)]

    def candidates(signatures):
        return lambda positions: [tuple(np.indices((len(positions), len(signatures))).reshape(2, -1))]

    def compute_distance(left, right):
        differing = (left != right).sum(axis=1).astype(float)
        return np.where(differing < 2, differing, np.inf)

    copies = find_near_duplicates(rows, tmp_path, candidates, compute_distance)
    assert copies.copy_of.tolist() == [1, -1, -1, 2, -1, -1, -1, 1, 2]
    assert copies.distance.tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 0]
    assert copies.count_clusters() == {"3": 2}
    assert list(tmp_path.iterdir()) == []
