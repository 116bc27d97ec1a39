"""Arrays that other processes fill."""

import random
import time

import numpy as np
import pytest

from dj2mgm.models.mgm.shared_arrays import fill_in_order


@pytest.mark.parametrize("processes", [1, 3])
def test_arrays_are_filled_in_order(processes):
    def fill(number: int, array: np.ndarray) -> None:
        time.sleep(random.random() / 1000)
        array[:] = number

    arrays = fill_in_order(fill, range(50), processes, np.zeros((2, 3), np.uint8))
    assert [array.tolist() for array in arrays] == [[[number] * 3] * 2 for number in range(50)]
