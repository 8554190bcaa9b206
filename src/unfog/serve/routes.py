"""Routes of the server: data for the page, and its buttons. Everything that a page sends is a number or a setting."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from unfog import __version__
from unfog.errors import RequestError
from unfog.reporting.page.bundle import shell_html
from unfog.serve import forms, run_detail, steer
from unfog.serve.metric_columns import Floats
from unfog.serve.runs import RunEntry
from unfog.serve.server import Server
from unfog.text import sanitize

_MOST_NAMES, _MOST_POINTS = 256, 20_000  # of a request for columns


class _Json(JSONResponse):
    """JSON in ASCII: what a run holds may be half of a surrogate pair, which UTF-8 has no bytes for."""

    def render(self, content: Any) -> bytes:
        """Return the bytes of the answer."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def build_app(server: Server, more: list[Route]) -> Starlette:
    """Return the application behind the guard and the page's files. `more`: routes of other parts of the page."""
    return Starlette(
        routes=[*_page_routes(), *_run_routes(server), *_steer_routes(server), *more],
        exception_handlers={
            RequestError: _bad_request,
            HTTPException: _http_error,
            KeyError: _missing,
            OSError: _failed,
        },
    )


async def json_body(request: Request) -> dict[str, Any]:
    """Return the object that a POST sends. RequestError if it sends something else."""
    try:
        body = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _columns_answer(header: Mapping[str, Any], columns: Mapping[str, Floats]) -> Response:
    """Return columns as binary: length of a JSON header (uint32), the header, and float64 values, little-endian."""
    rows = len(next(iter(columns.values()), ()))
    head = json.dumps({"columns": list(columns), "rows": rows, **header}, allow_nan=False).encode()
    head = head.ljust(-(-(len(head) + 4) // 8) * 8 - 4)  # the values begin at a multiple of 8
    values = b"".join(np.ascontiguousarray(column, "<f8").tobytes() for column in columns.values())
    return Response(len(head).to_bytes(4, "little") + head + values, media_type="application/octet-stream")


def _run_of(server: Server, request: Request) -> RunEntry:
    """Return the run that the address names by number."""
    try:
        return server.runs[request.path_params["run"]]
    except KeyError:
        raise HTTPException(404, "there is no such run any more; reload the list") from None


def _page_routes() -> list[Route]:
    async def shell(_: Request) -> Response:
        """Answer the page as one file without data; "keep this view" puts data into it."""
        return Response(await asyncio.to_thread(shell_html), media_type="text/html")

    return [Route("/static/shell.html", shell)]


def _run_routes(server: Server) -> list[Route]:
    async def state(_: Request) -> Response:
        sources = await asyncio.to_thread(steer.SourceList(server).as_json)
        facts = {"folder": sanitize(str(server.folder)), "sources": sources, "consent": server.consent}
        return _Json({"version": __version__, "train_here": True, **facts})

    async def runs(_: Request) -> Response:
        return _Json(await asyncio.to_thread(_list, server))

    async def run(request: Request) -> Response:
        entry = _run_of(server, request)
        return _Json(await asyncio.to_thread(_detail, server, entry))

    async def metrics(request: Request) -> Response:
        return await asyncio.to_thread(_metrics, server, _run_of(server, request), request)

    async def thinned(request: Request) -> Response:
        return await asyncio.to_thread(_thinned, server, _run_of(server, request), request)

    async def events(request: Request) -> Response:
        start = _whole(request, "from")
        return _Json(await asyncio.to_thread(run_detail.new_events, _run_of(server, request), start))

    async def preview(request: Request) -> Response:
        entry = _run_of(server, request)
        kind = "denoising" if request.url.path.endswith(".denoising.webp") else "samples"
        return await _picture(server, request, entry, entry.path / kind / f"{request.path_params['step']:08d}.png")

    async def contact_sheet(request: Request) -> Response:
        entry = _run_of(server, request)
        return await _picture(server, request, entry, entry.path / "contact-sheet.png")

    async def stream(request: Request) -> Response:
        events = server.hub.listen(request.headers.get("last-event-id", ""))
        return StreamingResponse(events, media_type="text/event-stream")

    return [
        Route("/api/state", state),
        Route("/api/runs", runs),
        Route("/api/runs/{run:int}", run),
        Route("/api/runs/{run:int}/metrics", metrics),
        Route("/api/runs/{run:int}/thinned", thinned),
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
    with entry.lock:
        server.runs.read_columns(entry)
    return run_detail.run_detail(entry, _newest_check(server, entry))


def _newest_check(server: Server, entry: RunEntry) -> Path | None:
    """Return the folder of the newest check of a run that the page has started."""
    checks = [task.result for task in server.tasks.list() if task.subject == entry.id and task.words[0] == "doctor"]
    return checks[-1] if checks else None


def _metrics(server: Server, entry: RunEntry, request: Request) -> Response:
    """Answer the rows after `from`. All of them, with `reset`, if the file is not the one that the page knows."""
    start, known = _whole(request, "from"), request.query_params.get("identity")
    with entry.lock:
        columns = server.runs.read_columns(entry)
        reset = start > columns.offset or (start > 0 and known is not None and known != columns.identity(start))
        first = 0 if reset else columns.row_after(start)
        wanted = _names(request) or columns.names[:_MOST_NAMES]
        found = {name: columns.column(name)[first : columns.rows] for name in wanted}
        end = columns.offset
        identity = columns.identity(end)
    return _columns_answer({"from": start, "offset": end, "identity": identity, "reset": reset}, found)


def _thinned(server: Server, entry: RunEntry, request: Request) -> Response:
    """Answer about `points` blocks of the rows with x from `low` to `high`."""
    points = min(max(1, _whole(request, "points", 1000)), _MOST_POINTS)
    low, high = _number(request, "low", -math.inf), _number(request, "high", math.inf)
    x = request.query_params.get("x", "step")
    with entry.lock:
        columns = server.runs.read_columns(entry)
        found = entry.thinner.thin(x, _names(request) or columns.names[:_MOST_NAMES], low, high, points)
        header = {"from": 0, "offset": columns.offset, "identity": columns.identity(columns.offset), "reset": False}
    return _columns_answer({**header, "block": found.block}, found.columns)


async def _picture(server: Server, request: Request, entry: RunEntry, path: Path) -> Response:
    try:
        data, tag = await asyncio.to_thread(server.pictures.webp, path, entry.path)
    except FileNotFoundError:
        raise HTTPException(404, "there is no such picture") from None
    headers = {"etag": f'"{tag}"', "cache-control": "private, no-cache"}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="image/webp", headers=headers)


def _steer_routes(server: Server) -> list[Route]:
    async def ask(request: Request) -> Response:
        entry, body = _run_of(server, request), await json_body(request)
        return _Json(await asyncio.to_thread(steer.send_request, entry, body.get("what")))

    async def resume(request: Request) -> Response:
        entry, body = _run_of(server, request), await json_body(request)
        if "finding" in body:  # its remedy, read on the server: the page names it only
            findings = run_detail.read_findings(entry.path, _newest_check(server, entry)) or []
            remedy = next((one["remedy"] for one in findings if one["id"] == body["finding"]), "")
            body = {"settings": steer.remedy_settings(remedy) or {}}
        return await _start(server, request, lambda: steer.resume_command(entry, body), entry)

    async def train(request: Request) -> Response:
        body = await json_body(request)
        return await _start(server, request, lambda: steer.train_command(server, body))

    async def doctor(request: Request) -> Response:
        body = await json_body(request)
        entry = None
        if "run" in body:
            try:
                entry = server.runs[body["run"]]
            except (KeyError, TypeError):
                raise RequestError("the run must be the number of one in the list") from None
        return await _start(server, request, lambda: steer.doctor_command(server, entry, body), entry)

    async def plan(request: Request) -> Response:
        body = await json_body(request)
        return await _start(server, request, lambda: steer.plan_command(server, body))

    async def settings(request: Request) -> Response:
        command = request.query_params.get("command", "train")
        return _Json(await asyncio.to_thread(forms.form_fields, command))

    async def tasks(_: Request) -> Response:
        return _Json([task.summary() for task in server.tasks.list()])

    async def task(request: Request) -> Response:
        one = server.tasks[request.path_params["task"]]
        return _Json({**one.summary(), "output": await asyncio.to_thread(one.text)})

    async def stop(request: Request) -> Response:
        one = server.tasks[request.path_params["task"]]
        one.stop()
        return _Json(one.summary())

    return [
        Route("/api/runs/{run:int}/ask", ask, methods=["POST"]),
        Route("/api/runs/{run:int}/resume", resume, methods=["POST"]),
        Route("/api/train", train, methods=["POST"]),
        Route("/api/doctor", doctor, methods=["POST"]),
        Route("/api/plan", plan, methods=["POST"]),
        Route("/api/settings", settings),
        Route("/api/tasks", tasks),
        Route("/api/tasks/{task:int}", task),
        Route("/api/tasks/{task:int}/stop", stop, methods=["POST"]),
    ]


async def _start(
    server: Server, request: Request, command: Callable[[], steer.Command], entry: RunEntry | None = None
) -> Response:
    """Check a command, and start it unless the page only asks what it would be."""
    made = await asyncio.to_thread(command)
    if request.query_params.get("dry"):
        return _Json({"command": made.text})
    subject = None if entry is None else entry.id
    task = await asyncio.to_thread(server.tasks.start, made.words, made.trains, made.result, subject)
    return _Json({"task": task.id, "command": task.command})


def _names(request: Request) -> list[str]:
    names = [name for name in request.query_params.get("columns", "").split(",") if name]
    if len(names) > _MOST_NAMES:
        raise RequestError(f"at most {_MOST_NAMES} columns can be asked for at once")
    return names


def _whole(request: Request, name: str, default: int = 0) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise RequestError(f"{name} must be a whole number")
    return int(text)


def _number(request: Request, name: str, default: float) -> float:
    try:
        value = float(request.query_params.get(name) or default)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise RequestError(f"{name} must be a number")
    return value


async def _bad_request(_: Request, error: Exception) -> Response:
    return _Json({"error": str(error)}, 400)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _Json({"error": error.detail}, error.status_code)


async def _missing(_: Request, error: Exception) -> Response:
    return _Json({"error": "there is nothing of this number"}, 404)


async def _failed(_: Request, error: Exception) -> Response:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return _Json({"error": f"a file cannot be read or written: {reason}"}, 500)
