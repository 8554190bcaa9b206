"""Settings of logging, and the trackers that a run is copied to: TensorBoard and Weights & Biases.

The record on disk is authoritative. A tracker may raise any exception; the Recorder then drops it. Only the standard
library is imported at once, so that `--help` stays fast.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unfog.errors import RequestError, install_command
from unfog.safe_files import make_folder, read_file, write_atomic
from unfog.text import without_secrets

if TYPE_CHECKING:
    from unfog.reporting.image_grids import Pixels

# sink -> the package that it needs, and the extra that brings it
_PACKAGES = {"tensorboard": ("tensorboard", "tb"), "wandb": ("wandb", "wandb")}


@dataclass(frozen=True)
class Log:
    """Settings of logging: its interval, and the trackers that get a copy."""

    every: int = 0
    """Steps between two lines of metrics.jsonl. 0: twenty lines or more in the run, at most 50 steps apart."""

    sinks: tuple[str, ...] = ()
    """Trackers to copy to: tensorboard, wandb (offline unless WANDB_MODE says otherwise)."""

    def __post_init__(self) -> None:
        """RequestError for a negative interval and for a sink of another name."""
        if self.every < 0:
            raise RequestError(f"log.every = {self.every} must be at least 1 step, or 0 to choose it; try 50")
        for name in self.sinks:
            if name not in _PACKAGES:
                raise RequestError(f"log.sinks names {name!r}, which is not one of {', '.join(_PACKAGES)}")


def check_installed(sinks: Sequence[str]) -> None:
    """Check that the package of each sink is installed; RequestError naming the extra where one is not."""
    for sink in sinks:
        package, extra = _PACKAGES[sink]
        if importlib.util.find_spec(package) is None:
            raise RequestError(f"log.sinks names {sink!r}, which needs the package {package}: {install_command(extra)}")


class _TensorBoard:
    """Event files in RUN/tensorboard, written without TensorFlow and without torch."""

    name = "tensorboard"

    def __init__(self, run_dir: Path, start: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        make_folder(run_dir / "tensorboard", run_dir)  # TensorBoard writes new files into it, by name
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        if start:
            # What torch calls purge_step: TensorBoard forgets what it read from this step on.
            log = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=start + 1, session_log=log))

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])

    def log_image(self, step: int, name: str, pixels: Pixels) -> None:
        from unfog.reporting.image_grids import encode_png

        height, width, _ = pixels.shape
        image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode_png(pixels))
        self._add(step, [self._summary.Value(tag=name, image=image)])

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, values: list[object]) -> None:
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()  # a kill loses nothing that a resume would not write again


class _WandB:
    """A W&B run in RUN/wandb, under one id for the life of the run.

    Offline unless WANDB_MODE says otherwise. A resume offline begins another folder with the same id, which
    `wandb sync --append` joins; online, W&B itself goes on, and passes over the steps that it has already.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, config: Mapping[str, object]) -> None:
        offline = "WANDB_MODE" not in os.environ
        if offline:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # or it would call home when it fails
        import wandb

        self._image = wandb.Image
        with _arguments_without_secrets():
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "unfog"),
                name=run_dir.resolve().name,
                id=_stored_id(run_dir / "wandb" / "id"),
                dir=run_dir,
                mode="offline" if offline else None,
                resume="allow",
                config=dict(config),
                # The URL of a git repository may have a token in it.
                settings=wandb.Settings(console="off", silent=True, disable_git=True),
            )

    def log_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_image(self, step: int, name: str, pixels: Pixels) -> None:
        import numpy as np

        self._run.log({name: self._image(np.ascontiguousarray(pixels))}, step=step)

    def close(self) -> None:
        self._run.finish()


@contextmanager
def _arguments_without_secrets() -> Iterator[None]:
    """Remove credentials from the arguments of this process, which W&B stores, and has no setting to leave out."""
    words = sys.argv
    sys.argv = [without_secrets(word) for word in words]
    try:
        yield
    finally:
        sys.argv = words


Tracker = _TensorBoard | _WandB
"""`step` never decreases. Any method may raise any Exception."""


def open_tracker(name: str, run_dir: Path, start: int, config: Mapping[str, object]) -> Tracker:
    """Open the sink called `name` for a run that goes on after `start` steps. May raise any Exception."""
    if name == "tensorboard":
        return _TensorBoard(run_dir, start)
    return _WandB(run_dir, config)


def _stored_id(path: Path) -> str:
    """The id in the file, or a new one, stored there."""
    run_dir = path.parent.parent
    make_folder(path.parent, run_dir)  # W&B writes into it by name
    if not os.path.lexists(path):
        write_atomic(path, uuid.uuid4().hex[:12].encode(), run_dir)
    return read_file(path, root=run_dir).decode()
