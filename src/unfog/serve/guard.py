"""Guard of the server: one check of every request before any route, and the headers of every answer.

The page has full power over runs, so no other page may reach it. A secret in the path keeps strangers out. Host is
compared with a list, against DNS rebinding. Sec-Fetch-Site and Origin keep other sites out. Bodies have a limit, and no
type that a plain form could send. Two requests need no secret: one asks for a proof of the folder's key, and one has a
token that leads to the page once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from unfog.serve.address import Address

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_Answer = tuple[int, bytes, list[tuple[bytes, bytes]]]  # status, body, headers

KNOWN = "unfog.known"  # set in the scope of a request that has the secret

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_METHODS = ("GET", "HEAD", "POST")
_LIMITS = {"application/json": 2**20, "image/png": 2**24}  # bytes of a body; no other type is accepted
_MOST_DISCARDED, _DISCARD_SECONDS = 2**25, 3.0  # bytes of a refused body, and time for them
_BODY_SECONDS = 30.0  # for a body to arrive; a slow sender holds a connection no longer


class _Refused(Exception):
    """A request that is not answered, with the status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Guard:
    """ASGI application that passes on what a page of this server sends, and refuses everything else.

    Args:
        app: the application behind it. Its paths begin after the secret.
        address: of the server, with the secret and the accepted values of the Host header.
    """

    def __init__(self, app: App, address: Address) -> None:
        self._app, self._address, self._secret = app, address, address.secret.encode()
        self._hosts = frozenset(host.lower() for host in address.hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, then pass it on or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket would need an Origin check of its own, and does not exist
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _Headers(scope["headers"])
        try:
            self._check_host(headers)
            if scope["path"].startswith("/open/"):
                await _answer(self._open(scope, headers), send)
                return
            self._check_sender(scope, headers)
            if scope["path"] == "/hello":
                await _answer(self._proof(scope), send)
                return
            path = self._path_after_secret(scope["path"])
            scope[KNOWN] = True
            if path == "/api/key":
                await _answer(_json({"key": self._address.key or None}), send)
                return
            inner = {**scope, "path": path, "root_path": ""}
            body = await _read_body(headers, receive) if scope["method"] == "POST" else b""
        except _Refused as error:
            await _discard_body(receive)
            await _refuse(error, send)
            return
        await self._app(inner, _replay(body, receive), _with_headers(send))

    def _check_host(self, headers: _Headers) -> None:
        # With DNS rebinding the browser gives a foreign page this origin; only the Host header shows the difference.
        if headers.only("host").lower() not in self._hosts:
            raise _Refused(403, "this host name is not accepted; open the address that unfog serve has printed")

    def _check_sender(self, scope: Scope, headers: _Headers) -> None:
        host = headers.only("host").lower()
        if scope["method"] not in _METHODS:
            raise _Refused(405, "this method is not accepted")
        site = headers.only("sec-fetch-site", "none")
        # "none" is the address bar. Old browsers send no such header, and for them Origin and the secret remain.
        if site not in ("same-origin", "none"):
            raise _Refused(403, "other pages may not link here; paste the address into the address bar")
        origin = headers.only("origin", f"http://{host}")
        if origin.lower() != f"http://{host}":  # "null" of sandboxed frames is refused here too
            raise _Refused(403, "other sites may not send requests here")

    def _open(self, scope: Scope, headers: _Headers) -> _Answer:
        """Lead a browser to the page, if it comes from the private file with the token."""
        # A file is another site to the browser. An image, a frame or a script of another site opens no page.
        top = headers.only("sec-fetch-mode", "navigate") == "navigate"
        top = top and headers.only("sec-fetch-dest", "document") == "document" and scope["method"] == "GET"
        if not (top and self._address.take(scope["path"].removeprefix("/open/"))):
            raise _Refused(404, "this address opens the page once; open the one that unfog serve has printed")
        # With a redirect by its status the browser would still name the other site.
        page = f"/{self._address.secret}/"
        link = f'<!doctype html><title>Unfog</title><a href="{page}">The page</a>'
        return 200, link.encode(), [(b"content-type", b"text/html"), (b"refresh", f"0; url={page}".encode())]

    def _proof(self, scope: Scope) -> _Answer:
        """Answer an open page that asks whether this is its server, or one that was started in its place."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("nonce", [""])
        found = self._address.prove(given[0])
        if found is None:
            raise _Refused(404, "nothing is proved here")
        return _json(found)

    def _path_after_secret(self, path: str) -> str:
        first, slash, rest = path.removeprefix("/").partition("/")
        # In constant time, so that the secret cannot be guessed digit by digit.
        if not (slash and hmac.compare_digest(first.encode("utf-8", "replace"), self._secret)):
            raise _Refused(404, "nothing is here; open the whole address that unfog serve has printed")
        return "/" + rest


def _json(content: object) -> _Answer:
    return 200, json.dumps(content).encode(), [(b"content-type", b"application/json")]


class _Headers:
    """Headers of a request. One that is sent twice is refused: server and guard might read different ones."""

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            self._values.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))

    def only(self, name: str, default: str = "") -> str:
        """Return the value of a header. _Refused if it is sent more than once."""
        values = self._values.get(name, [default])
        if len(values) > 1:
            raise _Refused(400, f"the header {name} is sent {len(values)} times")
        return values[0].strip()


async def _read_body(headers: _Headers, receive: Receive) -> bytes:
    """Return the whole body of a POST. _Refused if its type is not accepted, or if it is too large or too slow."""
    kind = headers.only("content-type").partition(";")[0].strip().lower()
    if kind not in _LIMITS:
        raise _Refused(415, f"the body must be {' or '.join(_LIMITS)}")
    limit, length = _LIMITS[kind], headers.only("content-length", "0")
    # Before it is read: Python refuses to read a number of thousands of digits, with an error of its own.
    if not length.isdecimal() or len(length) > 12 or int(length) > limit:
        raise _Refused(413, f"the body is over {limit:,} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise _Refused(400, "the sender has gone")
                body += message.get("body", b"")
                if len(body) > limit:  # chunked bodies announce no length
                    raise _Refused(413, f"the body is over {limit:,} bytes")
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise _Refused(408, f"the body took over {_BODY_SECONDS:.0f} seconds") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was read, and then what the connection says."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            # Runs change all the time, and a browser must not cache them.
            if not any(name.lower() == b"cache-control" for name, _ in headers):
                headers.append((b"cache-control", b"no-store"))
            message = {**message, "headers": [*headers, *_HEADERS]}
        await send(message)

    return send_with_headers


async def _discard_body(receive: Receive) -> None:
    """Read what a refused sender still sends, up to a limit: it reads no answer before it has sent all."""
    read = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while read <= _MOST_DISCARDED:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                read += len(message.get("body", b""))


async def _refuse(error: _Refused, send: Send) -> None:
    _, body, headers = _json({"error": str(error)})
    # More of the body may come, so the connection is not used again.
    await _answer((error.status, body, [*headers, (b"connection", b"close")]), send)


async def _answer(given: _Answer, send: Send) -> None:
    status, body, headers = given
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    answer = _with_headers(send)
    await answer({"type": "http.response.start", "status": status, "headers": headers})
    await answer({"type": "http.response.body", "body": body})
