"""Waiting of tests for what another process or thread does."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], seconds: float = 120.0, every: float = 0.01) -> Found:
    """Return the first true value of `condition`; the limit is generous, as the machine may be busy."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not happen within {seconds:g} s"
        time.sleep(every)
    return found
