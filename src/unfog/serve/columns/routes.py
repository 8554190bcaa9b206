"""Routes of the numbers for charts: new rows of a record, and blocks of many rows, as binary columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from unfog.errors import RequestError
from unfog.serve.columns.metric_columns import Floats
from unfog.serve.columns.thinning import Thinner
from unfog.serve.runs import RunEntry
from unfog.serve.server import Server, run_of, whole_number

_MOST_NAMES, _MOST_POINTS = 256, 20_000  # of a request


def column_routes(server: Server) -> list[Route]:
    """Return the routes of rows and of blocks of rows."""

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
