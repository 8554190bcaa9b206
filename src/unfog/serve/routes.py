"""Routes of the server: list and details of runs, their pictures, and the stream of events. Others have a module each.

Everything that a page sends is a number or a setting.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from unfog import __version__
from unfog.errors import RequestError
from unfog.reporting.page.bundle import shell_html
from unfog.serve import run_detail
from unfog.serve.answers import Json, run_of, whole_number
from unfog.serve.columns.routes import column_routes
from unfog.serve.runs import RunEntry
from unfog.serve.server import Server
from unfog.serve.steering.commands import SourceList
from unfog.serve.steering.routes import steer_routes
from unfog.text import sanitize


def build_app(server: Server, more: list[Route]) -> Starlette:
    """Return the application behind the guard and the page's files. `more`: routes of other parts of the page."""
    return Starlette(
        routes=[*_page_routes(), *_run_routes(server), *column_routes(server), *steer_routes(server), *more],
        exception_handlers={
            RequestError: _bad_request,
            HTTPException: _http_error,
            KeyError: _missing,
            OSError: _failed,
        },
    )


def _page_routes() -> list[Route]:
    async def shell(_: Request) -> Response:
        """Answer the page as one file without data; "keep this view" puts data into it."""
        return Response(await asyncio.to_thread(shell_html), media_type="text/html")

    return [Route("/static/shell.html", shell)]


def _run_routes(server: Server) -> list[Route]:
    async def state(_: Request) -> Response:
        sources = await asyncio.to_thread(SourceList(server).as_json)
        facts = {"folder": sanitize(str(server.folder)), "sources": sources, "consent": server.consent}
        return Json({"version": __version__, "train_here": True, **facts})

    async def runs(_: Request) -> Response:
        # In a thread, as reading a folder of runs takes time in which no other page would be answered.
        return Json(await asyncio.to_thread(_list, server))

    async def run(request: Request) -> Response:
        entry = run_of(server, request)
        return Json(await asyncio.to_thread(_detail, server, entry))

    async def events(request: Request) -> Response:
        start = whole_number(request, "from")
        return Json(await asyncio.to_thread(run_detail.new_events, run_of(server, request), start))

    async def preview(request: Request) -> Response:
        entry = run_of(server, request)
        kind = "denoising" if request.url.path.endswith(".denoising.webp") else "samples"
        return await _picture(server, request, entry, entry.path / kind / f"{request.path_params['step']:08d}.png")

    async def contact_sheet(request: Request) -> Response:
        entry = run_of(server, request)
        return await _picture(server, request, entry, entry.path / "contact-sheet.png")

    async def stream(request: Request) -> Response:
        events = server.hub.listen(request.headers.get("last-event-id", ""))
        return StreamingResponse(events, media_type="text/event-stream")

    return [
        Route("/api/state", state),
        Route("/api/runs", runs),
        Route("/api/runs/{run:int}", run),
        Route("/api/runs/{run:int}/events", events),
        Route("/api/runs/{run:int}/preview/{step:int}.webp", preview),
        Route("/api/runs/{run:int}/preview/{step:int}.denoising.webp", preview),
        Route("/api/runs/{run:int}/contact-sheet.webp", contact_sheet),
        Route("/api/stream", stream),
    ]


def _list(server: Server) -> list[dict[str, Any]]:
    server.look()
    return [run.as_json() for run in server.runs]


def _detail(server: Server, entry: RunEntry) -> dict[str, Any]:
    server.look()
    sample = entry.sample()
    if sample is None:
        with entry.lock:
            server.runs.read_columns(entry)
    return run_detail.run_detail(entry, server.newest_check(entry), sample)


async def _picture(server: Server, request: Request, entry: RunEntry, path: Path) -> Response:
    try:
        data, tag = await asyncio.to_thread(server.pictures.webp, path, entry.path)
    except FileNotFoundError:
        raise HTTPException(404, "there is no such picture") from None
    # Asked for again each time: the picture of a step changes when a resume trains it once more.
    headers = {"etag": f'"{tag}"', "cache-control": "private, no-cache"}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="image/webp", headers=headers)


async def _bad_request(_: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, 400)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json({"error": error.detail}, error.status_code)


async def _missing(_: Request, error: Exception) -> Response:
    return Json({"error": "there is nothing of this number"}, 404)


async def _failed(_: Request, error: Exception) -> Response:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return Json({"error": f"a file cannot be read or written: {reason}"}, 500)
