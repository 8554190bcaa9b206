"""`unfog serve`: print an address with a secret in it, and answer the page there until Ctrl-C."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from unfog.config.requests.runs import ServeRequest
from unfog.config.spec_strings import quote
from unfog.custom import consent
from unfog.errors import RequestError, install_command
from unfog.reporting.progress import print_result, say
from unfog.serve.address import LOOPBACK, Address, folder_key, listen, open_page

if TYPE_CHECKING:
    from unfog.serve.server import Server


def main(request: ServeRequest) -> int:
    """Serve the page until Ctrl-C, and return the exit status."""
    for package in ("orjson", "starlette", "uvicorn"):
        if find_spec(package) is None:
            raise RequestError(f"unfog serve needs {package}: {install_command('serve')}")
    _check_sources(request.source)
    _check_folder(request.runs, starts=bool(request.source) or request.runs == ServeRequest().runs)
    # Before anything is imported, so that a port in use is said at once and the address can be printed.
    sockets = listen(request.host, request.port)
    address = Address(request.host, sockets[0].getsockname()[1], folder_key(request.runs))
    # Printed first: the address answers as soon as the modules below are imported.
    print_result(address.text)
    if request.host not in LOOPBACK:
        say(
            f"  other machines can reach {request.host}, and anybody who has the address can start runs here; "
            "nothing is encrypted. Over ssh, leave --host away and forward the port"
        )
    say("  Ctrl-C ends the page; runs that it has started go on")
    _serve(request, sockets, address)
    return 0


def _check_folder(folder: Path, starts: bool) -> None:
    """Make the folder of a person who `starts` with the first run. RequestError unless it exists or can be made.

    Of anybody else it has to exist, as a page that stays empty would hide a misspelt name.
    """
    if folder.is_dir():
        return
    name = quote(str(folder))
    if starts and not os.path.lexists(folder):
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise RequestError(f"the folder {name} cannot be made: {error.strerror or error}; give another") from None
        say(f"  made the folder {name}, for your first run")
        return
    if folder.exists():
        raise RequestError(f"{name} is a file; give the folder that holds runs")
    raise RequestError(
        f"{name} does not exist; give the folder that holds your runs, or make an empty one to start your first run in"
    )


def _check_sources(sources: Sequence[str]) -> None:
    if sources:
        from unfog.config.validate import check_source  # imports the readers of all sources

        for source in sources:
            if path := consent.source_path(source):  # code, which is run only where it is used
                consent.give_to_source(source)
                consent.check(path, "the source")  # stores the consent, for the commands of the page
            else:
                check_source(source)


def _serve(request: ServeRequest, sockets: list[socket.socket], address: Address) -> None:
    # Imported only here, so that a wrong request is refused at once.
    from unfog.serve.connections import web_server
    from unfog.serve.guard import App, Guard
    from unfog.serve.page import Page

    def build() -> tuple[Server, App]:
        # Imported while the page itself is answered.
        from unfog.serve.playground.drawing_routes import playground_routes
        from unfog.serve.run_routes import build_app
        from unfog.serve.server import Server

        server = Server(request.runs, request.source)
        if not len(server.runs):
            say("  no runs there yet: start one on the page or in a terminal, and it appears by itself")
        return server, build_app(server, playground_routes(server))

    page = Page(build)
    remove_file = open_page(address, request.runs) if request.browser else None

    def end() -> None:
        page.end_streams()
        if remove_file is not None:
            remove_file()

    with suppress(KeyboardInterrupt):
        web_server(Guard(page, address), end).run(sockets=sockets)
