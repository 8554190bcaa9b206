"""`unfog serve`: print an address with a secret in it, and answer the page there until Ctrl-C."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from unfog.config.folder_requests import ServeRequest
from unfog.config.values import quote
from unfog.custom import names_code
from unfog.errors import RequestError
from unfog.reporting.progress import print_result, say
from unfog.safe_files import make_folder, read_file, write_atomic

if TYPE_CHECKING:
    from unfog.serve.server import Server

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY = ("0.0.0.0", "::")
_UVICORN: dict[str, Any] = {
    "http": "h11",
    "ws": "none",
    "lifespan": "on",
    "log_level": "warning",
    "access_log": False,  # its lines would hold the secret
    "server_header": False,
    "proxy_headers": False,
    "timeout_keep_alive": 30,
    "timeout_graceful_shutdown": 3,
}


def main(request: ServeRequest) -> int:
    """Serve the page until Ctrl-C, and return the exit status."""
    for package in ("orjson", "starlette", "uvicorn"):
        if find_spec(package) is None:
            raise RequestError(f"unfog serve needs {package}: pip install 'unfog[serve]'")
    _check_folder(request.runs)
    _check_sources(request.source)
    # Before anything is imported, so that a port in use is said at once and the address can be printed.
    listener = _listen(request.host, request.port)
    port = listener.getsockname()[1]
    secret = _address_secret(request.runs)
    address = f"http://{_shown_host(request.host)}:{port}/{secret}/"
    # Printed first: the address answers as soon as the modules below are imported.
    print_result(address)
    if request.host not in _LOOPBACK:
        say(
            f"  other machines can reach {request.host}, and whoever has the address can start runs here; nothing is "
            "encrypted. Over ssh, leave --host away and forward the port"
        )
    say("  Ctrl-C ends the page; runs that it has started go on")
    _serve(request, listener, secret, _accepted_hosts(request.host, port), address)
    return 0


def _check_folder(folder: Path) -> None:
    """Raise RequestError unless the folder exists: a page that stays empty would hide a misspelt name."""
    if folder.is_dir():
        return
    name = quote(str(folder))
    if folder.exists():
        raise RequestError(f"{name} is a file; give the folder that holds runs")
    raise RequestError(
        f"{name} does not exist; give the folder that holds your runs, or make an empty one to start your first run in"
    )


def _check_sources(sources: Sequence[str]) -> None:
    if sources:
        from unfog.config.validate import check_source  # imports the readers of all sources

        for source in sources:
            if not names_code(source):  # which is run, and checked, only where it is used
                check_source(source)


def _serve(request: ServeRequest, listener: socket.socket, secret: str, hosts: frozenset[str], address: str) -> None:
    # Imported only here, so that a wrong request is refused at once.
    import uvicorn

    from unfog.serve.guard import App, Guard
    from unfog.serve.page import Page

    def build() -> tuple[Server, App]:
        # Imported while the page itself is answered.
        from unfog.serve.playground.routes import playground_routes
        from unfog.serve.routes import build_app
        from unfog.serve.server import Server

        server = Server(request.runs, request.source)
        if not len(server.runs):
            say("  no runs there yet: start one on the page or in a terminal, and it appears by itself")
        return server, build_app(server, playground_routes(server))

    page = Page(build)

    class WebServer(uvicorn.Server):
        """Server that ends the streams of events as it stops, rather than to wait for them."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Stop on a signal, the streams of events first."""
            page.end_streams()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(Guard(page, secret, hosts), **_UVICORN)
    if request.browser:
        webbrowser.open(address)
    with suppress(KeyboardInterrupt):
        WebServer(config).run(sockets=[listener])


def _accepted_hosts(host: str, port: int) -> frozenset[str]:
    """Return the values of the Host header that this server answers to."""
    names = {"localhost", "127.0.0.1", "[::1]"}
    if host in _ANY:
        names.add(socket.gethostname())
    elif host not in _LOOPBACK:
        names.add(_shown_host(host))
    # A browser leaves out the port of plain http.
    return frozenset(f"{name}:{port}" for name in names) | (frozenset(names) if port == 80 else frozenset())


def _address_secret(folder: Path) -> str:
    """Return 128 bits for the address, as hexadecimal digits: the same each time for a folder of one person.

    So a page that is open finds the server again when it is restarted. Made from a key in the folder of settings, which
    only its owner can read; without one, the secret is another each time.
    """
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    file = home / "unfog" / "serve-key"
    key = b""
    with suppress(OSError, ValueError, RuntimeError):
        found = os.lstat(file) if file.exists() else None
        if found is None:
            make_folder(file.parent, file.parent.parent) if home.is_dir() else file.parent.mkdir(parents=True)
            write_atomic(file, secrets.token_hex(32).encode(), file.parent, private=True)
        elif found.st_mode & 0o077:  # others may have read it
            raise OSError
        key = read_file(file, file.parent, 1000)
    if len(key) < 64:
        key = secrets.token_bytes(32)
    return hmac.digest(key, os.fsencode(folder.resolve()), "sha256").hex()[:32]


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. RequestError if the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family[0], socket.SOCK_STREAM)
        # Or a restart within a minute would find its own port in use (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(family[4])
        listener.listen(128)
    except OSError as error:
        remedy = "give another --port, or --port 0 for a free one" if port else "give another --host"
        raise RequestError(f"{host}, port {port} cannot be used: {error.strerror}; {remedy}") from None
    return listener


def _shown_host(host: str) -> str:
    if host in _ANY:
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
