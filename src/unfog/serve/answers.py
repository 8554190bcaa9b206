"""Parts that all routes share: JSON answers, the object of a POST, and the run that an address names."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from unfog.errors import RequestError
from unfog.serve.runs import RunEntry
from unfog.serve.server import Server


class Json(JSONResponse):
    """JSON in ASCII: what a run holds may be half of a surrogate pair, which UTF-8 has no bytes for."""

    def render(self, content: Any) -> bytes:
        """Return the bytes of the answer."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


async def json_body(request: Request) -> dict[str, Any]:
    """Return the object that a POST sends. RequestError if it sends something else."""
    try:
        body = json.loads(await request.body() or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def run_of(server: Server, request: Request) -> RunEntry:
    """Return the run that the address names by number."""
    try:
        return server.runs[request.path_params["run"]]
    except KeyError:
        raise HTTPException(404, "there is no run of this number, or not yet") from None


def whole_number(request: Request, name: str, default: int = 0) -> int:
    """Return a number of the query, at most 15 digits. RequestError if it is something else."""
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise RequestError(f"{name} must be a whole number")
    return int(text)
