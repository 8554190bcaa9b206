"""Callbacks of a run: the events that `unfog.train(..., callbacks=[...])` passes on, and how they are called.

A callback is any object with one or more of the methods of `Callback`, which need not be its base class. It runs in the
process and thread that trains, between two steps, so training waits for it. The run is the same to the bit with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from unfog.errors import Interrupted, RequestError, RunError


@dataclass(frozen=True)
class _Event:
    step: int
    """Steps so far."""
    seconds: float
    """Seconds of training so far, over all resumes."""


@dataclass(frozen=True)
class LogEvent(_Event):
    """A line of metrics.jsonl, after it was written."""

    images: int
    """Images trained on so far."""
    loss: float | None = None
    """Mean loss since the last log; None in a line of the evaluation alone."""
    held_out_loss: float | None = None
    """Loss on held-out images, where this step was evaluated."""
    lr: float | None = None
    """Learning rate of the last step."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """All values of the line by name, lists included."""


@dataclass(frozen=True, eq=False)
class SampleEvent(_Event):
    """A grid of samples was drawn: a preview, or the picture at the end."""

    name: str
    """Folder of the image in the run: samples, for previews."""
    path: Path
    grid: Any
    """The image, a NumPy array uint8 [H, W, 3]."""


@dataclass(frozen=True)
class CheckpointEvent(_Event):
    """A checkpoint is whole on the disk."""

    path: Path
    """Its folder."""


@dataclass(frozen=True)
class EndEvent(_Event):
    """The run ended in this process."""

    path: Path
    """The run folder."""
    finished: bool
    """False after a stop or an error: `unfog.resume` continues."""
    error: str = ""
    """What it failed with."""


class Callback(Protocol):
    """All methods that a callback may have. A subclass overrides those that it needs."""

    def on_log(self, event: LogEvent) -> None: ...

    def on_sample(self, event: SampleEvent) -> None: ...

    def on_checkpoint(self, event: CheckpointEvent) -> None: ...

    def on_end(self, event: EndEvent) -> None: ...


_METHODS = {LogEvent: "on_log", SampleEvent: "on_sample", CheckpointEvent: "on_checkpoint", EndEvent: "on_end"}


def check_callbacks(callbacks: Sequence[object]) -> tuple[object, ...]:
    """Return the callbacks as a tuple. RequestError if one lacks every method."""
    if not isinstance(callbacks, list | tuple):
        callbacks = [callbacks]
    for i, one in enumerate(callbacks):
        # A class has the methods too, and would fail at the first event with a missing `self`.
        if isinstance(one, type):
            raise RequestError(f"callbacks[{i}] is the class {one.__name__}; give an object of it: {one.__name__}()")
        if not any(callable(getattr(one, name, None)) for name in _METHODS.values()):
            others = [name for name in dir(one) if name.startswith("on_")]
            has = f"it has {', '.join(others[:4])}" if others else "it has no such method"
            raise RequestError(
                f"callbacks[{i}] is of type {type(one).__name__} and is never called: {has}; "
                f"there is {', '.join(_METHODS.values())}"
            )
    return tuple(callbacks)


class Callbacks:
    """Calls the callbacks of a run. One that raises ends the run, once it is saved.

    `stop` requests a stop of the run, with a reason; `stopping` returns True if one was requested.
    """

    def __init__(
        self,
        callbacks: Sequence[object] = (),
        stop: Callable[[str], None] = lambda reason: None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._callbacks, self._stop, self._stopping = list(callbacks), stop, stopping
        self._error: tuple[str, Exception] | None = None

    def __call__(self, event: _Event) -> None:
        """Pass an event to all callbacks that take it. An error is kept for `raise_error`."""
        method = _METHODS[type(event)]
        # A copy, as one that fails is removed on the way.
        for one in list(self._callbacks):
            take = getattr(one, method, None)
            if take is None:
                continue
            name = f"{type(one).__name__}.{method}"
            try:
                take(event)
            except Interrupted:
                raise
            except KeyboardInterrupt:
                if self._stopping():  # a second Ctrl-C, which wants to leave at once
                    raise
                self._stop(f"KeyboardInterrupt of {name}")
            except Exception as error:
                # One that failed would fail at every event until the run is saved, and hide the first error.
                self._callbacks.remove(one)
                self._error = self._error or (name, error)
                self._stop(f"{name} raised {type(error).__name__}")

    def raise_error(self) -> None:
        """Raise RunError, with the traceback of the callback above it, if one has raised an error."""
        if self._error is not None:
            name, error = self._error
            raise RunError(
                f"the callback {name} raised {type(error).__name__}: {error}; the run is saved, and resume continues it"
            ) from error
