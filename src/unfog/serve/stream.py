"""Server-sent events: one watcher for all browsers, which looks at sizes of files and says which have grown.

An event replaces an earlier one about the same thing that a browser has not got yet, so a slow browser costs no memory.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

_HEARTBEAT_SECONDS = 15.0
_MOST_CLIENTS = 16  # further ones end the oldest
_REMEMBERED = 1000  # things that the last event about is known, for browsers that come back


class _Client:
    def __init__(self) -> None:
        self.pending: dict[str, tuple[int, str]] = {}
        self.wake = asyncio.Event()
        self.closed = False


class Hub:
    """Passes events on to all browsers that listen."""

    def __init__(self) -> None:
        self._clients: list[_Client] = []
        self._last: dict[str, tuple[int, str]] = {}  # key -> the last event about it
        self._number, self._session = 0, secrets.token_hex(4)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.greet: Callable[[], Iterable[tuple[str, dict[str, Any], str]]] = tuple
        """Events for a browser that is new, or has been away for long."""

    @property
    def listened_to(self) -> bool:
        return bool(self._clients)

    def start(self) -> None:
        """Note the event loop. Call it there, before `publish`."""
        self._loop = asyncio.get_running_loop()

    def publish(self, event: str, data: dict[str, Any], key: str = "") -> None:
        """Send an event to all browsers, from any thread. One with the same `key` that still waits is replaced."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._publish, event, data, key or event)

    def _publish(self, event: str, data: dict[str, Any], key: str) -> None:
        self._number += 1
        item = (self._number, self._format(self._number, event, data))
        self._last.pop(key, None)
        self._last[key] = item
        while len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]
        for client in self._clients:
            client.pending.pop(key, None)
            client.pending[key] = item
            client.wake.set()

    def _format(self, number: int, event: str, data: dict[str, Any]) -> str:
        # A line break inside would end the data; JSON escapes it.
        text = json.dumps(data, ensure_ascii=True, allow_nan=False)
        return f"id: {self._session}-{number}\nevent: {event}\ndata: {text}\n\n"

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        for client in self._clients:
            client.closed = True
            client.wake.set()

    async def listen(self, last_id: str = "") -> AsyncIterator[bytes]:
        """Yield the events for one browser, beginning with those after `last_id`, until it goes."""
        client = _Client()
        session, _, number = last_id.partition("-")
        if session == self._session and number.isdecimal():
            client.pending = {key: item for key, item in self._last.items() if item[0] > int(number)}
        else:
            for event, data, key in self.greet():
                client.pending[key] = (self._number, self._format(self._number, event, data))
        self._clients.append(client)
        for oldest in self._clients[:-_MOST_CLIENTS]:
            oldest.closed = True
            oldest.wake.set()
        try:
            yield b"retry: 2000\n\n"
            while not client.closed:
                items, client.pending = client.pending, {}
                client.wake.clear()
                for _, text in sorted(items.values(), key=lambda item: item[0]):
                    yield text.encode()
                try:
                    await asyncio.wait_for(client.wake.wait(), _HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._clients.remove(client)
