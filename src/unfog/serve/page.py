"""The page's own files, answered at once: the routes, whose modules take longer to import, are loaded meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from unfog.serve.guard import App, Receive, Scope, Send

if TYPE_CHECKING:
    from unfog.serve.server import Server

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
_STATIC = "/static/"


class Page:
    """ASGI application that answers the page's files, and passes other requests on to the routes.

    Args:
        build: returns the state of the server and the routes. It is called in a thread as the server starts.
    """

    def __init__(self, build: Callable[[], tuple[Server, App]]) -> None:
        self._build = build
        self._files = _read_files()
        self._packed: dict[str, bytes] = {}
        self._server: Server | None = None
        self._loading: asyncio.Task[App] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; start and end the watcher of files with the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif (name := _file_name(scope["path"])) in self._files and scope["method"] in ("GET", "HEAD"):
            await self._send_file(name, scope, send)
        else:
            assert self._loading is not None  # the server has started
            routes = await asyncio.shield(self._loading)
            await routes(scope, receive, send)

    def end_streams(self) -> None:
        """End the streams of events, for which the server would wait as it stops."""
        if self._server is not None:
            self._server.hub.close()

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._loading = asyncio.create_task(self._load())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        with contextlib.suppress(Exception):  # it was said when a request met it
            await self._loading
        if self._server is not None:
            self._watching.cancel()
            await asyncio.to_thread(self._server.close)
        await send({"type": "lifespan.shutdown.complete"})

    async def _load(self) -> App:
        server, routes = await asyncio.to_thread(self._build)
        self._server, self._watching = server, asyncio.create_task(server.watch())
        return routes

    async def _send_file(self, name: str, scope: Scope, send: Send) -> None:
        content, kind = self._files[name]
        tag = f'W/"{hashlib.sha256(content).hexdigest()[:24]}"'.encode()
        known = (b"if-none-match", tag) in scope["headers"]
        headers = [(b"etag", tag), (b"cache-control", b"private, no-cache"), (b"vary", b"accept-encoding")]
        # 40% of the bytes, which is felt through an ssh tunnel.
        if b"gzip" in dict(scope["headers"]).get(b"accept-encoding", b""):
            if name not in self._packed:
                self._packed[name] = gzip.compress(content, mtime=0)
            content, headers = self._packed[name], [*headers, (b"content-encoding", b"gzip")]
        body = b"" if known or scope["method"] == "HEAD" else content
        if not known:
            headers += [(b"content-type", kind.encode()), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 304 if known else 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _file_name(path: str) -> str:
    return "index.html" if path == "/" else path.removeprefix(_STATIC) if path.startswith(_STATIC) else ""


def _read_files() -> dict[str, tuple[bytes, str]]:
    """Return name -> (content, type) of the page's files: a table, so that no name is ever looked up on disk."""
    folder, table = files("unfog.reporting") / "page", dict[str, tuple[bytes, str]]()
    for part, above in ((folder, ""), (folder / "vendor", "vendor/")):
        for path in part.iterdir() if part.is_dir() else ():
            if (kind := _TYPES.get(Path(path.name).suffix)) and path.is_file():
                table[above + path.name] = path.read_bytes(), f"{kind}; charset=utf-8"
    return table
