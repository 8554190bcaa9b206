"""Messages between server and worker: a JSON object and bytes, each with its length before it. Nothing is unpickled."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO, NamedTuple

_LENGTHS = struct.Struct("<II")
_MOST_JSON, _MOST_BYTES = 2**20, 2**28


class ProtocolError(Exception):
    """Bytes that are no message: the other side is broken, or something else has written into the pipe."""


class Message(NamedTuple):
    """A JSON object, and the bytes that go with it."""

    head: dict[str, Any]
    body: bytes = b""


def write_message(pipe: BinaryIO, head: dict[str, Any], body: bytes = b"") -> None:
    """Write a message and flush. OSError if the other side has gone; ProtocolError if it is too long."""
    text = json.dumps(head, allow_nan=False).encode()
    _check(len(text), len(body))
    pipe.write(_LENGTHS.pack(len(text), len(body)) + text)
    pipe.write(body)
    pipe.flush()


def read_message(pipe: BinaryIO) -> Message | None:
    """Read a message; None at the end of the pipe. ProtocolError if it is cut off, too long or no JSON object."""
    lengths = pipe.read(_LENGTHS.size)
    if not lengths:
        return None
    if len(lengths) < _LENGTHS.size:
        raise ProtocolError("a message is cut off")
    of_text, of_body = _LENGTHS.unpack(lengths)
    _check(of_text, of_body)
    text, body = pipe.read(of_text), pipe.read(of_body)
    if (len(text), len(body)) != (of_text, of_body):
        raise ProtocolError("a message is cut off")
    try:
        head = json.loads(text)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise ProtocolError("a message is no JSON object")
    return Message(head, body)


def _check(of_text: int, of_body: int) -> None:
    if of_text > _MOST_JSON or of_body > _MOST_BYTES:
        raise ProtocolError(f"a message of {of_text + of_body:,} bytes is too long")
