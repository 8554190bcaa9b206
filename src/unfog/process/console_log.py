"""RUN/console.log: the printed messages of a run, without its progress line."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from unfog.files.positions import pread
from unfog.files.safe_files import open_file, write_atomic
from unfog.reporting.progress import overheard
from unfog.text import without_secrets

if TYPE_CHECKING:  # the page's server only reads the log
    from unfog.process.run_folder import RunFolder

LOG_FILE = "console.log"
_MOST_BYTES = 2**20  # of a longer file the older half goes
_MOST_WAITING = 1000  # messages


@contextmanager
def console_log(folder: RunFolder) -> Iterator[None]:
    """Append the messages inside the `with` to the log of a run, and the error that ends it.

    They wait while the folder is not a run yet, or the disk refuses them. Nothing that happens here stops a run.
    """
    began = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, process {os.getpid()} on {socket.gethostname()}"
    waiting = deque([f"-- {began}"], _MOST_WAITING)

    def note(text: str) -> None:
        waiting.append(without_secrets(text))
        with suppress(OSError):
            # A start that fails before that leaves no folder behind, and so no log in it.
            if folder.config_file.is_file():
                size = _append(folder.path, "\n".join(waiting).encode("utf-8", "replace") + b"\n")
                waiting.clear()  # before more can fail
                if size > _MOST_BYTES:
                    newer = read_tail(folder.path, _MOST_BYTES // 2)
                    write_atomic(folder.path / LOG_FILE, newer.partition(b"\n")[2], folder.path, durable=False)

    with overheard(note):
        try:
            yield
        except BaseException as error:
            note(f"unfog: {str(error) or type(error).__name__}")
            raise


def read_tail(run: Path, limit: int) -> bytes:
    """Return the end of the log, of so many bytes at most. OSError if it is missing, or no regular file."""
    with open_file(run / LOG_FILE, "rb", run) as file:
        return pread(file.fileno(), limit, max(0, os.fstat(file.fileno()).st_size - limit))


def _append(run: Path, data: bytes) -> int:
    """Write at the end of the log. Returns its size."""
    with open_file(run / LOG_FILE, "ab", run) as file:
        file.write(data)
        return file.tell()
