"""Requests of the commands that list, show or clear folders: report, cache, runs, watch and serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from unfog.errors import RequestError


@dataclass(frozen=True)
class ReportRequest:
    """Write report.html of RUN: one file with settings, curves and samples that opens anywhere."""

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""


@dataclass(frozen=True)
class CacheRequest:
    """List what the cache folder holds, or make room in it. UNFOG_CACHE names the folder.

    UNFOG_CACHE_LIMIT limits it, in GB (default 50). When it is full, the least recently used entries go first. No
    command removes an entry that a process uses.

    Keep the 20 GB that were used last: unfog cache --limit 20
    """

    clear: bool = False
    """Remove all entries that are not in use, also Hugging Face sets; images from Python only if no run has them."""
    limit: float | None = None
    """Remove the least recently used entries until at most so many GB are left."""

    def __post_init__(self) -> None:
        # `not`, rather than below 0: a NaN, of which no comparison is true, is refused too.
        if self.limit is not None and not self.limit >= 0:
            raise RequestError(f"limit = {self.limit} must be at least 0 GB")
        if self.clear and self.limit is not None:
            raise RequestError(f"--clear removes everything, so it cannot be combined with --limit {self.limit:g}")


@dataclass(frozen=True)
class RunsRequest:
    """List the runs in FOLDER, and in the folders in it: state, step, best metric, disk space and age.

    Age is the time since the run last wrote. Checkpoints that were set aside as broken are listed below their run.
    """

    folder: Annotated[Positional[Path], tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """Folder that holds runs, or one run."""
    json: bool = False
    """Print JSON instead of a table."""
    remove_broken: bool = False
    """Delete the checkpoints that were set aside as broken. They are never read again."""


@dataclass(frozen=True)
class WatchRequest:
    """Show RUN in the terminal while it trains: state, time left, and charts. q or Ctrl-C ends it, and not the run.

    The charts are text, so they work over ssh. Where there is no terminal, one frame is printed.
    """

    run: Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    once: bool = False
    """Print one frame and exit."""
    interval: float = 2.0
    """Seconds between two refreshes."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.interval <= 3600:
            raise RequestError(f"interval = {self.interval:g} must be from 0.1 to 3600 seconds")


@dataclass(frozen=True)
class ServeRequest:
    """Show the runs in RUNS on a page in the browser: live curves, samples, and buttons to stop, resume and start runs.

      unfog serve                          the runs in runs/
      unfog serve runs --source photos/    also to start runs on photos/

    The address that it prints holds a secret: whoever has it can do on the page what you can. Only this machine is
    served. From another one, forward the port: ssh -L 8642:localhost:8642 MACHINE
    """

    runs: Annotated[Positional[Path], tyro.conf.arg(metavar="RUNS")] = Path("runs")
    """Folder that holds runs, or one run."""
    port: int = 8642
    """Port of the page. 0: a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Another than this machine's own makes the page reachable from outside, unencrypted."""
    source: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SOURCE …")] = ()
    """Images that runs may be started on, beside the built-in ones and those of the runs."""
    browser: bool = True
    """Open the page in the browser."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise RequestError(f"port = {self.port} must be from 0 to 65535")
