"""Address of the page: its sockets, a secret for each start, a proof for open pages, and the start of the browser.

After Ctrl-C anybody on this machine may listen at the port. An open page therefore sends no secret before the server
has proved that it has the key of the folder. The key is in no address: it stays in a private file and in open pages.

Everybody on this machine can read the arguments of a process. The browser therefore gets the name of a private file,
which leads to an address that works once.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from unfog.errors import RequestError
from unfog.files.safe_files import write_atomic
from unfog.files.seals import stored_key

LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY = ("0.0.0.0", "::")
BACKLOG = 64  # connections that wait until they are accepted; asyncio accepts as many in one go
_ATTEMPTS = 20  # to find a port that is free in both families
_NO_FAMILY = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_NONCE = re.compile(r"[0-9a-f]{32}")


class Address:
    """Port and secret of a server.

    Args:
        host: address that it listens on.
        port: the port, not 0.
        key: of the folder, as hexadecimal digits. An open page that has it finds the server again.

    Attributes:
        secret: first part of every path, 32 hexadecimal digits. It is new for each `Address`.
        key: for the page. "" if the traffic may leave this machine, as it is not encrypted.
    """

    def __init__(self, host: str, port: int, key: str) -> None:
        self._host, self.port = host, port
        self.key = key if host in LOOPBACK else ""
        self._start, self._token = secrets.token_hex(16), ""
        self.secret = _signed(key, f"address {self._start}")[:32]

    @property
    def text(self) -> str:
        """The address with its secret, to be opened in a browser."""
        return f"http://{_shown_host(self._host)}:{self.port}/{self.secret}/"

    @property
    def hosts(self) -> frozenset[str]:
        """Values of the Host header that this server answers to."""
        names = {"localhost", "127.0.0.1", "[::1]"}
        if self._host in _ANY:
            names.add(socket.gethostname())
        elif self._host not in LOOPBACK:
            names.add(_shown_host(self._host))
        with_port = frozenset(f"{name}:{self.port}" for name in names)
        # A browser leaves out the port of plain http.
        return with_port | names if self.port == 80 else with_port

    def prove(self, nonce: str) -> dict[str, str] | None:
        """Return the start and the proof that this server has the key; None without a key, or for no valid nonce.

        The port is part of the proof, so a program at another port cannot pass it on as its own. From key and start a
        page computes the secret.
        """
        if not self.key or _NONCE.fullmatch(nonce) is None:
            return None
        return {"start": self._start, "proof": _signed(self.key, f"proof {self.port} {nonce} {self._start}")}

    def one_time(self, used: Callable[[], None]) -> str:
        """Return an address without the secret that leads to the page once; `used` is called then."""
        self._token, self._used = secrets.token_hex(16), used
        return f"http://{_shown_host(self._host)}:{self.port}/open/{self._token}"

    def take(self, token: str) -> bool:
        """Return True for the token of `one_time`, and forget it."""
        known = bool(self._token) and hmac.compare_digest(token.encode("utf-8", "replace"), self._token.encode())
        if known:
            self._token = ""
            self._used()
        return known


def folder_key(folder: Path) -> str:
    """Return 256 bits as hexadecimal digits: the same each time for a folder of one person.

    Made from a key in the folder of settings, which only its owner can read; without one, it is another each time.
    """
    key = stored_key("serve-key")[0] or secrets.token_bytes(32)
    return hmac.digest(key, os.fsencode(folder.resolve()), "sha256").hex()


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at one port; 0 takes a free one. RequestError if the address cannot be used.

    `localhost` may mean 127.0.0.1 or ::1. Both are taken, or another user could listen at the other one.
    """
    name = "127.0.0.1" if host == "localhost" else host
    beside = {"127.0.0.1": "::1", "0.0.0.0": "::1", "::1": "127.0.0.1"}.get(name)
    for _ in range(1 if port else _ATTEMPTS):
        try:
            first = _listener(name, port)
        except OSError as error:
            remedy = "give another --port, or --port 0 for a free one" if port else "give another --host"
            raise RequestError(f"{host}, port {port} cannot be used: {error.strerror}; {remedy}") from None
        if beside is None:
            return [first]
        taken = first.getsockname()[1]
        try:
            return [first, _listener(beside, taken)]
        except OSError as error:
            if error.errno in _NO_FAMILY:
                return [first]
            first.close()
            reason = error.strerror
    raise RequestError(
        f"{beside}, port {taken} cannot be used: {reason}; give another --port, as localhost may mean that address too"
    )


def _listener(host: str, port: int) -> socket.socket:
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Or a restart within a minute would find its own port in use (TIME_WAIT).
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::1":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _shown_host(host: str) -> str:
    if host in _ANY:
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _signed(key: str, text: str) -> str:
    return hmac.digest(key.encode(), text.encode(), "sha256").hex()


def open_page(address: Address, runs: Path) -> Callable[[], None]:
    """Open the page in the browser, if there is one. Return a function that removes the file of it."""
    try:
        webbrowser.get()  # on a machine without a browser no file is written
    except webbrowser.Error:
        return lambda: None
    place = _private_folder(runs)
    if place is None:
        return lambda: None
    remove = partial(shutil.rmtree, place, ignore_errors=True)
    file = (place / "open.html").absolute()
    try:
        _write_redirect(file, address.one_time(remove))
    except OSError:  # a full disk; the address was printed
        return remove
    # In a thread, as some browsers are waited for until they end.
    threading.Thread(target=webbrowser.open, args=[file.as_uri()], daemon=True).start()
    return remove


def _write_redirect(file: Path, address: str) -> None:
    refresh = f'<meta http-equiv="refresh" content="0; url={address}">'
    text = f'<!doctype html><meta charset="utf-8">{refresh}<title>Unfog</title>\n'
    write_atomic(file, text.encode(), file.parent, private=True)


def _private_folder(runs: Path) -> Path | None:
    """Return a new folder that its owner alone can read; None if none can be made.

    It is in the folder of the runs if possible: a browser in a sandbox (snap, flatpak) reads files of the home folder,
    but no temporary ones.
    """
    for parent in (runs, None):
        with suppress(OSError):
            place = Path(tempfile.mkdtemp(prefix=".open-", dir=parent))
            if not place.stat().st_mode & 0o077:
                return place
            place.rmdir()  # the file system has no permissions
    return None
