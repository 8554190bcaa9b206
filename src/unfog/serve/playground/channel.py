"""Channel between the server and the worker of the playground: messages, and both sides of the pipes.

A message is a JSON object and bytes, each with its length before it. Nothing is unpickled.
"""

from __future__ import annotations

import io
import json
import queue
import struct
import subprocess
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple, cast

from unfog.custom.consent import STARTED_BY
from unfog.errors import RunError
from unfog.process.child import child_environment, python_command

_LENGTHS = struct.Struct("<II")
_MOST_JSON = 2**20
MOST_BYTES = 2**28
"""Largest number of bytes that go with a message."""
_ERROR_BYTES = 2**13  # of what the worker prints, from its end
_LAST_WORDS_SECONDS = 5.0  # a child of the worker that still lives keeps the pipe open


class ProtocolError(Exception):
    """Bytes that are not a message: the other side is broken, or something else has written into the pipe."""


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
        raise ProtocolError("a message is not a JSON object")
    return Message(head, body)


def _check(of_text: int, of_body: int) -> None:
    if of_text > _MOST_JSON or of_body > MOST_BYTES:
        raise ProtocolError(f"a message of {of_text + of_body:,} bytes is too long")


class Channel:
    """The worker's side of the pipes. A thread of its own reads, so a cancellation arrives while a job is drawn."""

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target
        self._waiting: queue.Queue[Message | None] = queue.Queue()
        self._cancelled: set[int] = set()
        self.closed = False
        threading.Thread(target=self._read, daemon=True).start()

    def next_job(self) -> Message | None:
        """Wait for a job; None once the server has gone."""
        return self._waiting.get()

    def is_cancelled(self, job: int) -> bool:
        """Return True once the server does not want a job any more."""
        return self.closed or job in self._cancelled

    def send(self, event: str, job: int, body: bytes = b"", **facts: Any) -> None:
        """Send a message about a job; does nothing if the server has gone."""
        try:
            write_message(self._target, {"event": event, "job": job, **facts}, body)
        except OSError:
            self.closed = True

    def _read(self) -> None:
        try:
            while (message := read_message(self._source)) is not None:
                if message.head.get("op") == "cancel":
                    self._cancelled.add(int(message.head["job"]))
                else:
                    self._waiting.put(message)
        except (ProtocolError, OSError, KeyError, TypeError, ValueError):
            traceback.print_exc()
        self.closed = True
        self._waiting.put(None)


class Worker:
    """The worker process, started by `command` when it is needed. Safe to use from several threads."""

    def __init__(self, command: Sequence[str] = python_command("unfog.serve.playground.worker_process")) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        # Writing has a lock of its own: a worker that reads no more is to be killed all the same.
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._printed, self._listener = b"", threading.Thread()
        self.nice = 0

    @property
    def pid(self) -> int | None:
        """Number of the process; None before it starts."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def work(self, head: dict[str, Any], body: bytes, last: tuple[str, ...]) -> Iterator[Message]:
        """Send a job, and yield what the worker says of it, up to an event of a name in `last`.

        RunError if the worker has ended meanwhile; the next job starts another.
        """
        process = self._start(head.get("nice", 0))
        try:
            self._send(process, head, body)
            while (message := read_message(cast(BinaryIO, process.stdout))) is not None:
                if message.head.get("job") != head["job"]:
                    continue
                if message.head.get("ends"):  # after an error of the GPU; it may take a while to leave
                    self.kill()
                yield message
                if message.head.get("event") in last:
                    return
        except (OSError, ProtocolError) as error:
            self.kill()
            raise RunError(f"the worker has failed: {error}{self._last_words()}") from None
        status = process.wait()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        raise RunError(f"the worker has ended {how}{self._last_words()}; the next drawing starts another")

    def cancel(self, job: int) -> None:
        """Ask the worker to end a job within a step."""
        if (process := self._process) is not None:
            with suppress(OSError, ProtocolError, ValueError):
                self._send(process, {"op": "cancel", "job": job})

    def kill(self) -> None:
        """End the process at once; the next job starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _start(self, nice: int) -> subprocess.Popen[bytes]:
        with self._lock:
            # One that was slowed down beside a run stays slow, so another takes its place once no run trains.
            if self._process is not None and nice < self.nice and self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            if self._process is None or self._process.poll() is not None:
                environment = child_environment(**{STARTED_BY: "page", "OPENBLAS_NUM_THREADS": "1"})
                self._process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    process_group=0,  # so that Ctrl-C reaches the server alone, which then ends the worker
                )
                self._printed = b""
                self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True)
                self._listener.start()
            self.nice = nice
            return self._process

    def _send(self, process: subprocess.Popen[bytes], head: dict[str, Any], body: bytes = b"") -> None:
        with self._writing:
            write_message(cast(BinaryIO, process.stdin), head, body)

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Keep the end of what the worker prints."""
        pipe = cast(io.BufferedReader, process.stderr)
        while printed := pipe.read1(_ERROR_BYTES):
            self._printed = (self._printed + printed)[-_ERROR_BYTES:]

    def _last_words(self) -> str:
        self._listener.join(_LAST_WORDS_SECONDS)  # what it printed last may still be in the pipe
        lines = self._printed.decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""
