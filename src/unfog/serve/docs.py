"""`unfog docs`: the pages of the documentation, served on this machine."""

from __future__ import annotations

import difflib
import webbrowser
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import unfog
from unfog.config.requests.runs import DocsRequest
from unfog.errors import RequestError
from unfog.reporting.progress import print_result, say
from unfog.text import manual


class _Handler(SimpleHTTPRequestHandler):
    """Sends the files of the site, and writes no line for each."""

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing; the terminal keeps the one line with the address."""


def main(request: DocsRequest) -> int:
    """Serve the pages until Ctrl-C, and return the exit status."""
    site = Path(unfog.__file__).parent / "site"
    if not (site / "index.html").is_file():
        page = manual(f"docs/{_name(request.page) or 'guide'}.md")
        read = page if Path(page).is_absolute() else manual("docs/guide.md")  # there is no such page
        raise RequestError(f"the site is not built here; run `make docs`, or read {read}")
    path = _path(site, request.page)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", request.port), partial(_Handler, directory=str(site)))
    except OSError as error:
        raise RequestError(f"port = {request.port} cannot be used ({error.strerror}); omit --port") from error
    with server:
        address = f"http://127.0.0.1:{server.server_port}/{path}"
        say("  the documentation of this version; Ctrl-C ends")
        print_result(address)
        if request.browser:
            with suppress(webbrowser.Error):
                webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _path(site: Path, page: str) -> str:
    """Return the path of a page in an address. RequestError if there is no such page."""
    pages = {file.parent.relative_to(site).as_posix(): file for file in site.rglob("index.html")}
    wanted = _name(page) or "."
    by_last = {name.rpartition("/")[2]: name for name in pages}
    found = wanted if wanted in pages else by_last.get(wanted)
    if found is None:
        near = difflib.get_close_matches(wanted, [*pages, *by_last], n=1)
        hint = f"did you mean {near[0]}?" if near else "`unfog docs` opens the first page, which leads to all"
        raise RequestError(f"{page} is not a page of the documentation; {hint}")
    return "" if found == "." else f"{found}/"


def _name(page: str) -> str:
    """Return the name of a page, such as `extending/loss`, of that name or of a path such as docs/extending/loss.md."""
    return page.strip("/").removeprefix("docs/").removesuffix(".md")
