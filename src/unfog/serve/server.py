"""State of the server that all routes share: runs, files that change, the stream of events, and parts of answers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from unfog.errors import RequestError
from unfog.process.console_log import LOG_FILE
from unfog.reporting.records import json_values
from unfog.serve.child_processes import ChildProcesses
from unfog.serve.run_files import PictureCache, stat_of
from unfog.serve.runs import RunEntry, RunList

T = TypeVar("T")

_TICK_SECONDS = 0.8
_MOST_READERS = 4  # threads that read records of runs
_SAME_SECONDS = 2.0  # in which a message reaches both the output of a command and the log
_HEARTBEAT_SECONDS = 15.0
_MOST_CLIENTS = 16  # further ones end the oldest
_REMEMBERED = 1000  # things that the last event about is known, for browsers that come back


class Server:
    """Runs, sources, events, child processes and pictures of one server.

    Attributes:
        given_sources: SOURCE texts of the command line.
        on_close: called when the server ends.
    """

    def __init__(self, folder: Path, given_sources: tuple[str, ...] = ()) -> None:
        self.folder, self.given_sources = folder, given_sources
        self.runs = RunList(folder)
        self.hub = Hub()
        self.hub.greet = self._greeting
        self.tasks = ChildProcesses(lambda task: self.hub.publish("task", task, f"task {task['id']}"))
        self.pictures = PictureCache()
        self.on_close: list[Callable[[], None]] = [self.tasks.close]
        self._looked = -math.inf
        self._readers = ThreadPoolExecutor(_MOST_READERS, "records")
        self.runs.scan()

    @property
    def consent(self) -> bool:
        """True if code that a run names was trusted when the server was started."""
        return bool(os.environ.get("UNFOG_TRUST"))

    def newest_check(self, run: RunEntry) -> Path | None:
        """Return the folder of the doctor's newest check of a run that the page has started."""
        checks = [task.result for task in self.tasks.list() if task.subject == run.id and task.words[0] == "doctor"]
        return checks[-1] if checks else None

    def output_of(self, run: RunEntry) -> str | None:
        """Return the address of what a run has printed: by the command of this page that trains it, or by its log.

        A command may print what no log has, such as how a library ends the process; after it, a terminal may go on.
        """
        logged = stat_of(run.path / LOG_FILE)
        task = next((one for one in reversed(self.tasks.list()) if one.subject == run.id and one.outlives), None)
        if task is not None and (logged is None or task.written > logged[0] / 1e9 - _SAME_SECONDS):
            return f"api/tasks/{task.id}"
        return f"api/runs/{run.id}/log" if logged is not None else None

    async def read(self, run: RunEntry, work: Callable[[], T]) -> T:
        """Call `work` in a thread that may read the record of a run.

        These threads are apart, as a long record takes seconds in which the list and the buttons are to answer. What
        waits for a run that is being read takes no thread.
        """
        async with run.turn:
            return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def watch(self) -> None:
        """Look at the files for ever, and publish what has changed; nothing is looked at while no browser listens."""
        self.hub.start()
        while True:
            if self.hub.listened_to:
                await asyncio.to_thread(self.tick)
            await asyncio.sleep(_TICK_SECONDS)

    def look(self) -> None:
        """Look at all files now if nobody has watched them: for a page that polls."""
        # A page that polls has no stream, so that no watcher looks for it; one look serves all of its requests.
        if not self.hub.listened_to and time.monotonic() - self._looked > _TICK_SECONDS:
            self.tick(everything=True)

    def tick(self, everything: bool = False) -> None:
        """Look at the files once, and publish what has changed; `everything`: also at runs that do not run."""
        self._looked = time.monotonic()
        if self.runs.scan(seldom=not everything):
            self.hub.publish("runs", {"count": len(self.runs)})
        for run in self.runs.tick(everything):
            self.hub.publish("run", _run_event(run), f"run {run.id}")
        self.tasks.tick()

    def close(self) -> None:
        """End the streams and the child processes that do not train."""
        self.hub.close()
        for end in self.on_close:
            end()

    def _greeting(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        yield "runs", {"count": len(self.runs)}, "runs"
        for run in self.runs:
            # The others come with the list of runs, which every page asks for when it opens.
            if run.running:
                yield "run", _run_event(run), f"run {run.id}"


def _run_event(run: RunEntry) -> dict[str, Any]:
    """Return the event of a run that has changed: its row of the list, and the number of its previews."""
    return {**run.as_json(), "previews": len(run.previews)}


class _Client:
    def __init__(self) -> None:
        self.pending: dict[str, tuple[int, str]] = {}
        self.wake = asyncio.Event()
        self.closed = False


class Hub:
    """Passes events on to all browsers that listen.

    An event replaces an earlier one about the same thing that a browser has not got yet, so a slow browser costs no
    memory.
    """

    def __init__(self) -> None:
        self._clients: list[_Client] = []
        self._last: dict[str, tuple[int, str]] = {}  # key -> the last event about it
        self._number, self._session = 0, secrets.token_hex(4)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.greet: Callable[[], Iterable[tuple[str, dict[str, Any], str]]] = tuple
        """Events for a browser that is new, or has been away for long."""

    @property
    def listened_to(self) -> bool:
        return bool(self._clients)

    def start(self) -> None:
        """Note the event loop. Call it there, before `publish`."""
        self._loop = asyncio.get_running_loop()

    def publish(self, event: str, data: dict[str, Any], key: str = "") -> None:
        """Send an event to all browsers, from any thread. One with the same `key` that still waits is replaced."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._publish, event, data, key or event)

    def _publish(self, event: str, data: dict[str, Any], key: str) -> None:
        self._number += 1
        item = (self._number, self._format(self._number, event, data))
        self._last.pop(key, None)
        self._last[key] = item
        while len(self._last) > _REMEMBERED:
            del self._last[next(iter(self._last))]
        for client in self._clients:
            client.pending.pop(key, None)
            client.pending[key] = item
            client.wake.set()

    def _format(self, number: int, event: str, data: dict[str, Any]) -> str:
        # A line break inside would end the data; JSON escapes it.
        text = json.dumps(data, ensure_ascii=True, allow_nan=False)
        return f"id: {self._session}-{number}\nevent: {event}\ndata: {text}\n\n"

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        for client in self._clients:
            client.closed = True
            client.wake.set()

    async def listen(self, last_id: str = "") -> AsyncIterator[bytes]:
        """Yield the events for one browser, beginning with those after `last_id`, until it goes."""
        client = _Client()
        session, _, number = last_id.partition("-")
        if session == self._session and number.isdecimal():
            client.pending = {key: item for key, item in self._last.items() if item[0] > int(number)}
        else:
            for event, data, key in self.greet():
                client.pending[key] = (self._number, self._format(self._number, event, data))
        self._clients.append(client)
        for oldest in self._clients[:-_MOST_CLIENTS]:
            oldest.closed = True
            oldest.wake.set()
        try:
            yield b"retry: 2000\n\n"
            while not client.closed:
                items, client.pending = client.pending, {}
                client.wake.clear()
                for _, text in sorted(items.values(), key=lambda item: item[0]):
                    yield text.encode()
                try:
                    await asyncio.wait_for(client.wake.wait(), _HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self._clients.remove(client)


class Json(JSONResponse):
    """JSON of anything that a run may hold: every answer in JSON is one.

    It is in ASCII, as UTF-8 has no bytes for half of a surrogate pair. Numbers that are not finite become null.
    """

    def render(self, content: Any) -> bytes:
        """Return the bytes of the answer."""
        try:
            return _dump(content)
        except ValueError:
            return _dump(json_values(content))


def _dump(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class _Number(Convertor[int]):
    """Part of an address that is a whole number of at most 15 digits."""

    regex = "[0-9]{1,15}"

    def convert(self, value: str) -> int:
        """Return the number that a part of an address is."""
        return int(value)

    def to_string(self, value: int) -> str:
        """Return the part of an address for a number."""
        return str(value)


register_url_convertor("number", _Number())


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
