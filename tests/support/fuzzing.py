"""Number of examples of the fuzzers: all in slow runs, a third of them in `make test`."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

thorough = False  # tests/conftest.py sets it before tests are imported


def fuzzed(examples: int) -> Callable:
    """Return a decorator for a test with Hypothesis's `given`; slow runs select the test, too."""
    number = examples if thorough else max(1, examples // 3)

    def decorate(test: Callable) -> Callable:
        limited = settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))
        return pytest.mark.fuzz(limited(test))

    return decorate
