"""Stopping on request: the first SIGINT or SIGTERM lets the step at hand end and be saved, the second leaves."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """A context in which a signal only raises a flag; `stop = StopSignals()`, then `stop()` tells whether one came."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether a stop was requested."""
        return self.received is not None

    def leave_if_requested(self) -> None:
        """End here if a stop was requested: for work that leaves nothing to save."""
        if self.received is not None:
            raise KeyboardInterrupt

    def __enter__(self) -> StopSignals:
        # Python delivers signals to the main thread only, and refuses handlers set elsewhere.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
        # Not through `sys.stderr`: the signal may have come in the middle of a write there.
        os.write(2, f"{self.received}: ending this step and saving; once more to leave at once\n".encode())
