"""Training speed since the last log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Measures images per second. Time spent on previews, evaluation and checkpoints is not training time."""

    def __init__(self) -> None:
        self.data_wait = self.busy = 0.0
        self.images = 0
        self.mark = time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Return images per second, and the share of time spent waiting for data, since the last lap."""
        now = time.perf_counter()
        seconds = max(self.busy + now - self.mark, 1e-9)
        record = {"images_per_second": self.images / seconds, "data_wait": self.data_wait / seconds}
        self.data_wait = self.busy = 0.0
        self.images, self.mark = 0, now
        return record

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Do not count the time inside as training."""
        self.busy += time.perf_counter() - self.mark
        yield
        self.mark = time.perf_counter()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        started = time.perf_counter()
        yield
        self.data_wait += time.perf_counter() - started
