"""Web server that limits number and time of connections whose sender has not shown the secret.

Anybody on the machine can connect. Such connections must not use up the files that the process may open, and write no
log that grows.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from contextlib import suppress
from socket import socket
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from unfog.reporting.progress import warn
from unfog.serve.address import BACKLOG
from unfog.serve.guard import KNOWN, App, Scope

_MOST_CONNECTIONS = 256
_HEAD_BYTES = 2**14
_FIRST_SECONDS = 10.0  # from the connection to the end of the head of its first request
_NEXT_SECONDS = 30  # from an answer to the end of the head of the next request
_SAID_SECONDS = 60.0  # between two messages on the same trouble
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def web_server(app: App, ending: Callable[[], None]) -> uvicorn.Server:
    """Return a server of an application; `ending` is called on the signal that stops it, before it waits."""
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="on",
        log_level="error",  # a line for each malformed request would let anybody fill the disk
        access_log=False,  # its lines would hold the secret
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=_HEAD_BYTES,
        timeout_keep_alive=_NEXT_SECONDS,
        timeout_graceful_shutdown=3,
    )
    return _Server(config, ending)


class _Server(uvicorn.Server):
    """Server that ends the streams of events as it stops, rather than to wait for them."""

    def __init__(self, config: uvicorn.Config, ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ending = ending

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on a signal, the streams of events first."""
        self._ending()
        super().handle_exit(sig, frame)

    async def serve(self, sockets: list[socket] | None = None) -> None:
        """Answer requests to these sockets until a signal comes."""
        asyncio.get_running_loop().set_exception_handler(_Troubles())
        await super().serve(sockets)


class _Troubles:
    """Handler of a loop's errors that says once a minute that no connection can be accepted.

    asyncio tries again each second. By itself it writes a traceback for every attempt.
    """

    def __init__(self) -> None:
        self._said = -_SAID_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_RESOURCES):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._said >= _SAID_SECONDS:
            self._said = time.monotonic()
            warn(f"the page accepts no connection at present: {error.strerror}; runs are not affected")


class _Connection(H11Protocol):
    """Connection that ends if the head of a request takes too long, or if another needs its place.

    Where all places are taken, a new connection gets that of the oldest one whose sender has not shown the secret.
    """

    _known = False
    _timer: asyncio.TimerHandle | None = None

    @property
    def known(self) -> bool:
        """True once a request of this connection had the secret."""
        scope: Scope | None = getattr(self, "scope", None)  # None before the first request, against its type
        self._known = self._known or (scope is not None and KNOWN in scope)
        return self._known

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, and wait for the head of a request."""
        super().connection_made(transport)
        self.began = self.loop.time()
        self._wait(_FIRST_SECONDS)
        open_ones = [one for one in self.connections if not one.transport.is_closing()]
        if len(open_ones) > _most_connections():
            unknown = [one for one in open_ones if isinstance(one, _Connection) and not one.known]
            min(unknown, key=lambda one: one.began).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and free the place of the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has arrived. The time of an answer is a matter of the application."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the head of the next request; what arrives meanwhile gives it no more time."""
        self._known = self.known
        self._wait(_NEXT_SECONDS)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, without an answer where one has begun."""
        with suppress(h11.LocalProtocolError):
            super().send_400_response(msg)
        self._end()

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._end)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        # What the other side does not read would keep a connection that is only closed.
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.transport.abort()


def _most_connections() -> int:
    """Return the number of connections, at most half of the files that this process may open."""
    with suppress(ImportError):  # Windows has no such limit
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY:
            return min(_MOST_CONNECTIONS, limit // 2)
    return _MOST_CONNECTIONS
