"""The server's side of the worker: start it, send it a job, pass on what it answers, and end it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO, cast

from unfog.errors import RunError
from unfog.serve.playground.protocol import Message, ProtocolError, read_message, write_message

_ERROR_BYTES = 2**13  # of what the worker prints, from its end


class Worker:
    """The worker process, started when it is needed. Safe to use from several threads.

    Args:
        command: words that start it.
    """

    def __init__(self, command: tuple[str, ...] = (sys.executable, "-m", "unfog.serve.playground.worker")) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        # Writing has a lock of its own: a worker that reads no more is to be killed all the same.
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._printed = b""
        self.nice = 0

    @property
    def pid(self) -> int | None:
        """Number of the process; None while there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def work(self, head: dict[str, Any], body: bytes, last: tuple[str, ...]) -> Iterator[Message]:
        """Send a job, and yield what the worker says of it, up to an event of a name in `last`.

        Raises:
            RunError: the worker has ended meanwhile; the next job starts another.
        """
        process = self._start(head.get("nice", 0))
        try:
            self._send(process, head, body)
            while (message := read_message(cast(BinaryIO, process.stdout))) is not None:
                if message.head.get("job") != head["job"]:
                    continue
                yield message
                if message.head.get("event") in last:
                    return
        except (OSError, ProtocolError) as error:
            self.kill()
            raise RunError(f"the worker has failed: {error}") from None
        process.wait()
        raise RunError(
            f"the worker has ended {_how(process.returncode)}{self._last_words()}; the next drawing starts another"
        )

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
                environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
                self._process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    process_group=0,  # so that Ctrl-C reaches the server alone, which then ends the worker
                )
                self._printed = b""
                threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()
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
        lines = self._printed.decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""


def _how(status: int) -> str:
    return f"by signal {-status}" if status < 0 else f"with status {status}"
