"""Queue of the playground: a bounded list of drawings, what was drawn so far, and a thread that feeds the worker."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from unfog.config.requests.sample import SampleRequest
from unfog.errors import RequestError, RunError
from unfog.serve.playground.channel import Message, Worker
from unfog.serve.playground.drawing import Drawing, DrawingStep, job_of, key_of, newest_checkpoint
from unfog.serve.playground.inputs import NO_INPUTS, Inputs
from unfog.text import sanitize

MOST_WAITING = 32
_MOST_JOBS = 300  # in the history
_KEPT_BYTES = 2**28  # of pixels; the oldest jobs are forgotten first
_NICE = 10  # of the worker beside a run that trains here
_PATIENCE = 20.0  # seconds for a job to end after it was cancelled; then the worker is killed
_RETRIES = 5
_IDLE_SECONDS = 300.0  # without a drawing; then the worker ends, and the memory of the device is free for others
_ENDED = ("done", "cancelled", "failed")
_OF_WORKER = 0  # number of no drawing, published when the worker was ended, so that pages read the list anew


class DrawingQueue:
    """All drawings, newest last; each is a job of the worker. Safe to use from several threads.

    Args:
        publish: called with the progress of a job that has changed, and with a job 0 when the worker was ended.
        training: returns True while a run trains on this machine.
        worker: draws them.
        restore: returns the drawings of an earlier server, done and oldest first.
        keep: called with each drawing that is done, so that it can be restored.
    """

    def __init__(
        self,
        publish: Callable[[dict[str, Any]], None],
        training: Callable[[], bool],
        worker: Worker | None = None,
        restore: Callable[[], Iterable[Drawing]] = tuple,
        keep: Callable[[Drawing], None] = lambda _: None,
    ) -> None:
        self._publish, self._training, self.worker = publish, training, worker or Worker()
        self._restore, self._keep = restore, keep
        self._known: dict[int, Drawing] | None = None
        self._waiting: deque[tuple[str, Drawing]] = deque()
        self._numbers = itertools.count(1)
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        self._closed = False
        self.current: Drawing | None = None
        self.busy_seconds = 0.0

    @property
    def _jobs(self) -> dict[int, Drawing]:
        """Jobs by number, with those of an earlier server, which are read when somebody first asks."""
        with self._changed:
            if self._known is None:
                self._known = {job.id: job for job in self._restore()}
                self._numbers = itertools.count(max(self._known, default=0) + 1)
            return self._known

    def __getitem__(self, number: int) -> Drawing:
        """Return a job by its number. KeyError if it is unknown, or was removed."""
        return self._jobs[number]

    def list(self) -> list[Drawing]:
        with self._changed:
            return [*self._jobs.values()]

    def submit(
        self, run: int, name: str, request: SampleRequest, inputs: Inputs = NO_INPUTS, newest: bool = False
    ) -> Drawing:
        """Queue a drawing and return its job; an earlier one with the same weights and settings if there is one.

        With `newest` a checkpoint that the run deletes meanwhile is replaced by its newest one. RequestError if too
        many wait already.
        """
        key = key_of(request, inputs.key)
        with self._changed:
            for job in self._jobs.values():
                if job.key == key and job.state not in ("cancelled", "failed") and not job.cancelled:
                    return job
            self._make_room()
            job = Drawing(next(self._numbers), run, name, request, key, inputs, newest)
            self._jobs[job.id] = job
            self._enqueue("draw", job)
        self._publish(job.progress())
        return job

    def find_copies(self, number: int) -> Drawing:
        """Queue the search for the training images nearest to the pictures of a job that is done."""
        with self._changed:
            job = self._jobs[number]
            if job.pictures is None or not len(job.pictures):
                raise RequestError("there is no picture yet; wait until they are drawn")
            if not job.copies and ("copies", job) not in self._waiting:
                self._make_room()
                job.copies = {"state": "waiting"}
                self._enqueue("copies", job)
        return job

    def cancel(self, number: int) -> Drawing:
        """End a job: at once if it waits, within a step if it is drawn."""
        with self._changed:
            job = self._jobs[number]
            if job.state in _ENDED:
                return job
            job.cancelled = True
            if ("draw", job) in self._waiting:
                self._waiting.remove(("draw", job))
                job.state = "cancelled"
        if job.state == "cancelled":
            self._publish(job.progress())
        else:
            self.worker.cancel(number)
            timer = threading.Timer(_PATIENCE, self._kill_if_stuck, (job,))
            timer.daemon = True
            timer.start()
        return job

    def end_worker(self) -> None:
        """End the worker and free its memory, also that of a GPU. The next drawing starts another."""
        if self.worker.pid is not None:
            self.worker.kill()
            self._publish({"job": _OF_WORKER})

    def close(self) -> None:
        """End the worker, and forget what waits for it."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self.worker.kill()

    def _kill_if_stuck(self, job: Drawing) -> None:
        if self.current is job and job.state not in _ENDED:
            self.worker.kill()

    def _make_room(self) -> None:
        if len(self._waiting) >= MOST_WAITING:
            raise RequestError(f"{len(self._waiting)} drawings wait already; cancel some, or wait until one is done")

    def _enqueue(self, what: str, job: Drawing) -> None:
        self._waiting.append((what, job))
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _feed(self) -> None:
        """Give the worker one job after another."""
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    if not self._changed.wait(_IDLE_SECONDS):
                        self.end_worker()
                if self._closed:
                    return
                what, job = self._waiting.popleft()
                self.current = job
            began = time.monotonic()
            try:
                self._draw(job) if what == "draw" else self._search(job)
            except (RunError, RequestError, ValueError, KeyError, TypeError) as error:
                self._fail(what, job, str(error))
            self.busy_seconds += time.monotonic() - began
            if what == "draw" and job.state == "done":
                self._keep(job)
            with self._changed:
                self.current = None
                self._forget_old()
            self._publish(job.progress())

    def _head(self, op: str, job: Drawing) -> dict[str, Any]:
        return {"op": op, "job": job.id, "nice": _NICE if self._training() else 0}

    def _draw(self, job: Drawing) -> None:
        error = None
        for _ in range(_RETRIES):
            error = self._try_to_draw(job)
            newest = newest_checkpoint(job.request.run)
            # A run that trains deletes old checkpoints, maybe between the choice of one and its reading.
            if error is None or job.cancelled or not job.newest or newest in (None, job.request.checkpoint):
                break
            job.request = replace(job.request, checkpoint=newest)
            job.key = key_of(job.request, job.inputs.key)
        if error is not None:  # only now, so that nobody sees a failure that another try mends
            self._fail("draw", job, error)

    def _try_to_draw(self, job: Drawing) -> str | None:
        """Draw; returns why the worker could not, or None."""
        job.state = "drawing"
        self._publish(job.progress())
        head = {**self._head("draw", job), **job_of(job.request), **job.inputs.head}
        error = None
        for message in self.worker.work(head, job.inputs.body, ("done", "failed")):
            if message.head["event"] == "failed":
                error = str(message.head["error"])
            self._take(job, message)
            if job.cancelled:  # it may have been cancelled before the worker knew of it
                self.worker.cancel(job.id)
            self._publish(job.progress())
        return error

    def _take(self, job: Drawing, message: Message) -> None:
        """Take what the worker says of a drawing."""
        facts = message.head
        match facts["event"]:
            case "began":
                names = ("steps", "batches", "device", "size", "given", "given_shape")
                job.facts = {name: facts[name] for name in names if name in facts}
                if "given" in facts:
                    job.given = np.frombuffer(message.body, np.uint8).reshape(facts["given_shape"])
            case "step":
                tiles = np.frombuffer(message.body, np.uint8).reshape(2, *facts["tiles"])
                step = job.steps.setdefault(facts["number"], DrawingStep(facts["share"]))
                for i, (noisy, guess) in enumerate(zip(*tiles, strict=True)):
                    step.noisy[facts["first"] + i], step.guess[facts["first"] + i] = noisy, guess
                job.computed = facts.get("time", 0.0)
                job.at, job.done_steps = (facts["number"], facts["share"]), job.done_steps + 1
            case "done":
                pixels, length = message.body, math.prod(facts["images"])
                if facts["images"][0]:
                    job.pictures = np.frombuffer(pixels[:length], np.uint8).reshape(facts["images"])
                end = length + facts.get("channel_bytes", 0)
                job.channels, job.values = pixels[length:end], pixels[end:]
                job.facts |= {name: facts[name] for name in ("seconds", "calls", "kept", "values") if name in facts}
                job.state = "cancelled" if facts["stopped"] else "done"

    def _search(self, job: Drawing) -> None:
        assert job.pictures is not None
        head = {**self._head("copies", job), "run": str(job.request.run), "images": job.pictures.shape}
        for message in self.worker.work(head, job.pictures.tobytes(), ("copies", "failed")):
            facts = message.head
            if facts["event"] == "failed":
                self._fail("copies", job, facts["error"])
            else:
                job.nearest = np.frombuffer(message.body, np.uint8).reshape(facts["images"])
                names = ("pictures", "limit", "usual", "searched", "unseen", "shown")
                job.copies = {"state": "done", **{name: facts[name] for name in names}}

    def _fail(self, what: str, job: Drawing, error: str) -> None:
        """Note why a job has no result. One that was cancelled is not a failure, whatever the worker made of it."""
        if what == "copies":
            job.copies = {"state": "failed", "error": sanitize(error)}
        elif job.cancelled:
            job.state = "cancelled"
        else:
            job.error = sanitize(error)
            job.state = "failed"  # last, as other threads read it

    def _forget_old(self) -> None:
        """Forget the oldest jobs while there are too many, or too many pixels."""
        total = sum(job.pixels for job in self._jobs.values())
        for job in [*self._jobs.values()]:
            if total <= _KEPT_BYTES and len(self._jobs) <= _MOST_JOBS:
                return
            if job.state in _ENDED and job is not next(reversed(self._jobs.values())):
                total -= job.pixels
                with suppress(KeyError):
                    del self._jobs[job.id]
