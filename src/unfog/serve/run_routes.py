"""Routes of the server: runs, their pictures and columns of numbers, the stream of events, and the buttons.

Everything that a page sends is a number or a setting.
"""

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
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from unfog import __version__
from unfog.errors import RequestError
from unfog.process.console_log import read_tail
from unfog.reporting.channel_sheets import FOLDER as CHANNELS
from unfog.reporting.channel_sheets import read_channels
from unfog.reporting.page.bundle import shell_html
from unfog.serve import controls, run_detail
from unfog.serve.metric_columns import Floats, Thinner
from unfog.serve.runs import RunEntry, list_rows
from unfog.serve.server import Json, Server, json_body, run_of, whole_number
from unfog.text import sanitize

_SHOWN_BYTES = 2**16  # of a log, from its end
_MOST_NAMES, _MOST_POINTS = 256, 20_000  # of a request


def build_app(server: Server, more: list[Route]) -> Starlette:
    """Return the application behind the guard and the page's files. `more`: routes of other parts of the page."""
    return Starlette(
        routes=[*_run_routes(_Runs(server)), *_column_routes(server), *_button_routes(_Buttons(server)), *more],
        exception_handlers={
            RequestError: _bad_request,
            HTTPException: _http_error,
            KeyError: _missing,
            OSError: _failed,
            ValueError: _unforeseen,
            ArithmeticError: _unforeseen,
            RecursionError: _unforeseen,
        },
    )


def _run_routes(runs: _Runs) -> list[Route]:
    return [
        Route("/static/shell.html", runs.shell),
        Route("/api/state", runs.state),
        Route("/api/runs", runs.list),
        Route("/api/runs/{run:number}", runs.detail),
        Route("/api/runs/{run:number}/events", runs.events),
        Route("/api/runs/{run:number}/log", runs.log),
        Route("/api/runs/{run:number}/preview/{step:number}.webp", runs.preview),
        Route("/api/runs/{run:number}/preview/{step:number}.denoising.webp", runs.preview),
        Route("/api/runs/{run:number}/channels/{step:number}.json", runs.channels),
        Route("/api/runs/{run:number}/contact-sheet.webp", runs.contact_sheet),
        Route("/api/stream", runs.stream),
    ]


class _Runs:
    """Answers to the page about its runs: list, details, events and pictures."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def shell(self, _: Request) -> Response:
        """Answer the page as one file without data; "keep this view" puts data into it."""
        return Response(await asyncio.to_thread(shell_html), media_type="text/html")

    async def state(self, _: Request) -> Response:
        sources = await asyncio.to_thread(controls.SourceList(self._server).as_json)
        facts = {"folder": sanitize(str(self._server.folder)), "sources": sources, "consent": self._server.consent}
        return Json({"version": __version__, "train_here": True, **facts})

    async def list(self, _: Request) -> Response:
        def read() -> Any:
            self._server.look()
            return list_rows(self._server.runs)

        # In a thread, as reading a folder of runs takes time in which no other page would be answered.
        return Json(await asyncio.to_thread(read))

    async def detail(self, request: Request) -> Response:
        server, entry = self._server, run_of(self._server, request)

        def read() -> Any:
            server.look()
            sample = entry.sample()
            if sample is None:
                with entry.lock:
                    server.runs.read_columns(entry)
            detail = run_detail.run_detail(entry, server.newest_check(entry), sample)
            return {**detail, "output": server.output_of(entry)}

        return Json(await server.read(entry, read))

    async def events(self, request: Request) -> Response:
        start = whole_number(request, "from")
        return Json(await asyncio.to_thread(run_detail.new_events, run_of(self._server, request), start))

    async def log(self, request: Request) -> Response:
        data = await asyncio.to_thread(read_tail, run_of(self._server, request).path, _SHOWN_BYTES)
        return Json({"output": data.decode("utf-8", "replace")})

    async def preview(self, request: Request) -> Response:
        kind = "denoising" if request.url.path.endswith(".denoising.webp") else "samples"
        return await self._picture(request, Path(kind) / f"{request.path_params['step']:08d}.png")

    async def channels(self, request: Request) -> Response:
        run = run_of(self._server, request).path
        path = run / CHANNELS / f"{request.path_params['step']:08d}.png"
        found = await self._server.pictures.decode(lambda: read_channels(path, run))
        if found is None:
            raise HTTPException(404, "there are no channels of this step")
        return Json(found)

    async def contact_sheet(self, request: Request) -> Response:
        return await self._picture(request, Path("contact-sheet.png"))

    async def stream(self, request: Request) -> Response:
        after = request.query_params.get("after") or request.headers.get("last-event-id", "")
        events = self._server.hub.listen(after)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _picture(self, request: Request, name: Path) -> Response:
        run = run_of(self._server, request).path
        try:
            data, tag = await self._server.pictures.webp(run / name, run)
        except FileNotFoundError:
            raise HTTPException(404, "there is no such picture") from None
        # Asked for again each time: the picture of a step changes when a resume trains it once more.
        headers = {"etag": f'"{tag}"', "cache-control": "private, no-cache"}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type="image/webp", headers=headers)


def _button_routes(buttons: _Buttons) -> list[Route]:
    return [
        Route("/api/runs/{run:number}/ask", buttons.ask, methods=["POST"]),
        Route("/api/runs/{run:number}/resume", buttons.resume, methods=["POST"]),
        Route("/api/train", buttons.train, methods=["POST"]),
        Route("/api/doctor", buttons.doctor, methods=["POST"]),
        Route("/api/plan", buttons.plan, methods=["POST"]),
        Route("/api/settings", buttons.settings),
        Route("/api/tasks", buttons.tasks),
        Route("/api/tasks/{task:number}", buttons.task),
        Route("/api/tasks/{task:number}/stop", buttons.stop, methods=["POST"]),
    ]


class _Buttons:
    """Answers to the page's buttons: requests to a run, commands that are checked and started, and their output."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def ask(self, request: Request) -> Response:
        entry, body = run_of(self._server, request), await json_body(request)
        return Json(await asyncio.to_thread(controls.send_request, entry, body.get("what")))

    async def resume(self, request: Request) -> Response:
        entry, body = run_of(self._server, request), await json_body(request)
        if "finding" in body:  # its remedy, read on the server: the page names it only
            findings = run_detail.read_findings(entry.path, self._server.newest_check(entry)) or []
            remedy = next((one["remedy"] for one in findings if one["id"] == body["finding"]), "")
            body = {"settings": controls.remedy_settings(remedy) or {}}
        return await self._start(request, lambda: controls.resume_command(entry, body), entry)

    async def train(self, request: Request) -> Response:
        body = await json_body(request)
        return await self._start(request, lambda: controls.train_command(self._server, body))

    async def doctor(self, request: Request) -> Response:
        body = await json_body(request)
        entry = None
        if "run" in body:
            try:
                entry = self._server.runs[body["run"]]
            except (KeyError, TypeError):
                raise RequestError("the run must be the number of one in the list") from None
        return await self._start(request, lambda: controls.doctor_command(self._server, entry, body), entry)

    async def plan(self, request: Request) -> Response:
        body = await json_body(request)
        return await self._start(request, lambda: controls.plan_command(self._server, body))

    async def settings(self, request: Request) -> Response:
        command = request.query_params.get("command", "train")
        return Json(await asyncio.to_thread(controls.form_fields, command))

    async def tasks(self, _: Request) -> Response:
        return Json([task.summary() for task in self._server.tasks.list()])

    async def task(self, request: Request) -> Response:
        one = self._server.tasks[request.path_params["task"]]
        return Json({**one.summary(), "output": await asyncio.to_thread(one.text)})

    async def stop(self, request: Request) -> Response:
        one = self._server.tasks[request.path_params["task"]]
        one.stop()
        return Json(one.summary())

    async def _start(
        self, request: Request, command: Callable[[], controls.Command], entry: RunEntry | None = None
    ) -> Response:
        """Check a command, and start it unless the page only asks what it would be."""
        made = await asyncio.to_thread(command)
        if request.query_params.get("dry"):
            return Json({"command": made.text})
        subject = entry.id if entry is not None else made.new_run
        task = await asyncio.to_thread(self._server.tasks.start, made.words, made.trains, made.result, subject)
        return Json({"task": task.id, "command": task.command})


def _column_routes(server: Server) -> list[Route]:
    """Return the routes of the numbers for charts: new rows of a record, and blocks of many rows, as binary columns."""

    async def metrics(request: Request) -> Response:
        return await server.read(run := run_of(server, request), lambda: _metrics(server, run, request))

    async def thinned(request: Request) -> Response:
        return await server.read(run := run_of(server, request), lambda: _thinned(server, run, request))

    return [Route("/api/runs/{run:number}/metrics", metrics), Route("/api/runs/{run:number}/thinned", thinned)]


def _metrics(server: Server, entry: RunEntry, request: Request) -> Response:
    """Answer the rows after `from`. All of them, with `reset`, if the file is not the one that the page knows."""
    start, known = whole_number(request, "from"), request.query_params.get("identity")
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
    """Answer about `points` blocks of the rows with x from `low` to `high`.

    With `sample=1`, of a long record that has not been read yet lines at even distances are answered, marked `sampled`.
    """
    points = min(max(1, whole_number(request, "points", 1000)), _MOST_POINTS)
    low, high = _number(request, "low", -math.inf), _number(request, "high", math.inf)
    x = request.query_params.get("x", "step")
    if request.query_params.get("sample") and (sample := entry.sample()) is not None:
        columns = sample.columns
        found = Thinner(columns).thin(x, _names(request) or columns.names[:_MOST_NAMES], low, high, points)
        header = {"from": 0, "offset": 0, "identity": "", "reset": False, "sampled": True}
        return _columns_answer({**header, "block": found.block}, found.columns)
    with entry.lock:
        columns = server.runs.read_columns(entry)
        found = entry.thinner.thin(x, _names(request) or columns.names[:_MOST_NAMES], low, high, points)
        header = {"from": 0, "offset": columns.offset, "identity": columns.identity(columns.offset), "reset": False}
    return _columns_answer({**header, "block": found.block}, found.columns)


def _columns_answer(header: Mapping[str, Any], columns: Mapping[str, Floats]) -> Response:
    """Return columns as binary: length of a JSON header (uint32), the header, and float64 values, little-endian."""
    rows = len(next(iter(columns.values()), ()))
    head = json.dumps({"columns": list(columns), "rows": rows, **header}, allow_nan=False).encode()
    head = head.ljust(-(-(len(head) + 4) // 8) * 8 - 4)  # the values begin at a multiple of 8
    values = b"".join(np.ascontiguousarray(column, "<f8").tobytes() for column in columns.values())
    return Response(len(head).to_bytes(4, "little") + head + values, media_type="application/octet-stream")


def _names(request: Request) -> list[str]:
    names = [name for name in request.query_params.get("columns", "").split(",") if name]
    if len(names) > _MOST_NAMES:
        raise RequestError(f"at most {_MOST_NAMES} columns can be asked for at once")
    return names


def _number(request: Request, name: str, default: float) -> float:
    try:
        value = float(request.query_params.get(name) or default)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise RequestError(f"{name} must be a number")
    return value


async def _bad_request(_: Request, error: Exception) -> Response:
    return Json({"error": str(error)}, 400)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Json({"error": error.detail}, error.status_code)


async def _missing(_: Request, error: Exception) -> Response:
    return Json({"error": "nothing has this number"}, 404)


async def _unforeseen(_: Request, error: Exception) -> Response:
    """Answer where a file of a run holds what no reader of it has foreseen, such as a number that is not finite."""
    return Json({"error": f"a file holds what cannot be shown: {sanitize(str(error))[:200]}"}, 422)


async def _failed(_: Request, error: Exception) -> Response:
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    status = 404 if isinstance(error, FileNotFoundError) else 422  # the server is well; a file or disk is not
    return Json({"error": f"a file cannot be read or written: {reason}"}, status)
