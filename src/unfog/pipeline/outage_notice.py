"""Say once that the images of a source cannot be reached, and honour a request to stop while they are waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from unfog.process.signals import StopSignals
from unfog.reporting.progress import format_duration, say, warn
from unfog.training.distributed.watchdog import AWAITING_IMAGES


class _Activity(Protocol):
    """Holder of the activity that monitoring shows."""

    activity: str


class OutageNotice:
    """Called by `Outage.result` with the reason while images are waited for, and with "" afterwards.

    Args:
        stop: ends the wait with Interrupted once a stop is requested.
        patience: seconds that the wait may take, for the message.
        warn: prints the warning.
        heartbeat: shows `AWAITING_IMAGES` as activity meanwhile.
        set_phase: notes `AWAITING_IMAGES` for the watchdog of several ranks.
        stopped_elsewhere: says whether another rank is asked to stop, which then ends the wait as well.
    """

    def __init__(
        self,
        stop: StopSignals,
        patience: float,
        warn: Callable[[str], None] = warn,
        heartbeat: _Activity | None = None,
        set_phase: Callable[[str], None] = lambda phase: None,
        stopped_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stop, self._patience, self._warn, self._heartbeat = stop, patience, warn, heartbeat
        self._set_phase, self._stopped_elsewhere = set_phase, stopped_elsewhere
        self._began: float | None = None
        self._activity = ""

    def __call__(self, reason: str) -> None:
        """Print the begin or the end of an outage. Raises Interrupted after a stop."""
        if not reason:
            self._over()
            return
        if self._began is None:
            self._began = time.monotonic()
            self._set_phase(AWAITING_IMAGES)
            if self._heartbeat is not None:
                self._activity, self._heartbeat.activity = self._heartbeat.activity, AWAITING_IMAGES
            patience = format_duration(self._patience)
            self._warn(f"the images cannot be reached: {reason}; they are waited for, {patience} at most")
        if self._stopped_elsewhere():
            self._stop.request("another rank is asked to stop")
        self._stop.leave_if_requested()

    def _over(self) -> None:
        if self._began is None:
            return
        if self._heartbeat is not None and self._heartbeat.activity == AWAITING_IMAGES:
            self._heartbeat.activity = self._activity
        say(f"  the images can be read again, after {format_duration(time.monotonic() - self._began)}")
        self._began = None
