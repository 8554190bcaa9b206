"""Requests of the commands that show runs: `unfog runs`, `watch`, `serve` and `report`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from unfog.errors import RequestError
from unfog.settings import argument, setting


@dataclass(frozen=True)
class RunsRequest:
    """List the runs in FOLDER, and in the folders in it: state, step, best metric, disk space and age.

    Age is the time since the run last wrote. Checkpoints that were set aside as broken are listed below their run.
    """

    folder: Path = field(default=Path("runs"), metadata=argument("FOLDER"))
    """Folder that holds runs, or one run."""
    json: bool = False
    """Print JSON instead of a table."""
    prometheus: bool = False
    """Print gauges in the text format of Prometheus, for a file that node_exporter collects."""
    remove_broken: bool = False
    """Delete the checkpoints that were set aside as broken. They are never read again."""
    finished: bool = False
    """Exit with status 3 unless all of them are finished, for job managers. Exports count as finished, as no training
    is left. torchrun ends a saved stop with 0."""

    def __post_init__(self) -> None:
        if self.json and self.prometheus:
            raise RequestError("--json and --prometheus are two forms of the same list; give one of them")


@dataclass(frozen=True)
class WatchRequest:
    """Show RUN in the terminal while it trains: state, time left, and charts. q or Ctrl-C ends it, and not the run.

    The charts are text, so they work over ssh. Where there is no terminal, one frame is printed.
    """

    run: Path = field(metadata=argument("RUN"))
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

    The address that it prints holds a secret: anybody who has it can do on the page what you can. Only this machine is
    served. From another one, forward the port: ssh -L 8642:127.0.0.1:8642 MACHINE
    """

    runs: Path = field(default=Path("runs"), metadata=argument("RUNS"))
    """Folder that holds runs, or one run."""
    port: int = 8642
    """Port of the page. 0: a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Another than this machine's own makes the page reachable from outside, unencrypted."""
    source: tuple[str, ...] = setting((), metavar="SOURCE …")
    """Images that runs may be started on, beside the built-in ones and those of the runs."""
    browser: bool = True
    """Open the page in the browser."""

    def __post_init__(self) -> None:
        _check_port(self.port)


@dataclass(frozen=True)
class ReportRequest:
    """Write report.html of RUN: one file with settings, curves and samples that opens anywhere."""

    run: Path = field(metadata=argument("RUN"))
    """Folder of the run."""


@dataclass(frozen=True)
class DocsRequest:
    """Show the documentation of this version in the browser.

      unfog docs               the first page
      unfog docs conditions    a page

    It is served on this machine alone and needs no network. Ctrl-C ends it.
    """

    page: str = field(default="", metadata=argument("PAGE"))
    """Page to open, such as sampling or reference/settings."""
    port: int = 0
    """Port of the server on this machine. 0: any that is free."""
    browser: bool = True
    """Open the page in the browser. The address is printed in any case."""

    def __post_init__(self) -> None:
        _check_port(self.port)


def _check_port(port: int) -> None:
    if not 0 <= port <= 65535:
        raise RequestError(f"port = {port} must be from 0 to 65535")
