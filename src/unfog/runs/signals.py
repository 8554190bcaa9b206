"""Stopping on request: the first SIGINT, SIGTERM or SIGHUP lets the run save itself, the second ends it."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


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
        with suppress(OSError):  # the terminal may be what has gone
            os.write(2, f"{self.received}: ending here and saving; once more to leave at once\n".encode())
