"""The worker's side of the pipes to the server."""

from __future__ import annotations

import queue
import threading
import traceback
from typing import Any, BinaryIO

from unfog.serve.playground.protocol import Message, ProtocolError, read_message, write_message


class Channel:
    """The worker's side of the pipes. A thread of its own reads, so a cancellation arrives while a job is drawn."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target
        self._waiting: queue.Queue[Message | None] = queue.Queue()
        self._cancelled: set[int] = set()
        self.closed = False
        threading.Thread(target=self._read, daemon=True).start()

    def next_job(self) -> Message | None:
        """Wait for a job; None once the server has gone."""
        return self._waiting.get()

    def is_cancelled(self, job: int) -> bool:
        """Return True once the server does not want a job any more."""
        return self.closed or job in self._cancelled

    def send(self, event: str, job: int, body: bytes = b"", **facts: Any) -> None:
        """Say something about a job. A server that has gone is not told."""
        try:
            write_message(self._target, {"event": event, "job": job, **facts}, body)
        except OSError:
            self.closed = True

    def _read(self) -> None:
        try:
            while (message := read_message(self._source)) is not None:
                if message.head.get("op") == "cancel":
                    self._cancelled.add(int(message.head["job"]))
                else:
                    self._waiting.put(message)
        except (ProtocolError, OSError, KeyError, TypeError, ValueError):
            traceback.print_exc()
        self.closed = True
        self._waiting.put(None)
