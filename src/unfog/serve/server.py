"""State of the server that all routes share, and the watcher of files."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from unfog.serve.image_responses import PictureCache
from unfog.serve.runs import RunEntry, RunList
from unfog.serve.steering.tasks import TaskList
from unfog.serve.stream import Hub

_TICK_SECONDS = 0.8


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
        self.tasks = TaskList(lambda task: self.hub.publish("task", task, f"task {task['id']}"))
        self.pictures = PictureCache()
        self.on_close: list[Callable[[], None]] = [self.tasks.close]
        self._looked = -math.inf
        self.runs.scan()

    @property
    def consent(self) -> bool:
        """True if code that a run names was trusted when the server was started."""
        return bool(os.environ.get("UNFOG_TRUST"))

    def newest_check(self, run: RunEntry) -> Path | None:
        """Return the folder of the doctor's newest check of a run that the page has started."""
        checks = [task.result for task in self.tasks.list() if task.subject == run.id and task.words[0] == "doctor"]
        return checks[-1] if checks else None

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
    """Return the event of a run that has changed: its row of the list, and how far its files reach."""
    row = run.as_json()
    ends = {"metrics": run.sizes.get("metrics.jsonl", 0), "events": run.sizes.get("events.jsonl", 0)}
    return {**row, **ends, "previews": len(run.previews)}
