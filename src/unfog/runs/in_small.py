"""What a rehearsal is made of: a run in small, a pulse that watches it, and the words for how its parts went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unfog.config.tree import Config
from unfog.errors import RequestError
from unfog.reporting.findings import Finding
from unfog.reporting.settings import Log
from unfog.runs.pulse import Pulse
from unfog.runs.signals import StopSignals

PARTS = {"preview": "preview", "drawing": "preview", "evaluation": "evaluation", "saving": "checkpoint"}
"""What the heartbeat says, and the part of the rehearsal that it is."""


class Watch(Pulse):
    """A pulse that also notes how long everything took, and what was being done when something failed."""

    def __init__(self, folder: Path, stop: StopSignals):
        super().__init__(folder, stop)
        self.spent: dict[str, list[float]] = {}
        self.failed = ""

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """What the heartbeat says meanwhile."""
        started = time.perf_counter()
        try:
            with super().during(what):
                yield
        except Exception:
            self.failed = self.failed or what
            raise
        finally:
            self.spent.setdefault(what, []).append(time.perf_counter() - started)


class PartError(Exception):
    """A part went wrong; which one ("": the one that was begun), and why."""

    def __init__(self, part: str, reason: Exception):
        super().__init__(str(reason))
        self.part, self.reason = part or "training", reason


def in_small(config: Config, steps: int) -> Config:
    """The same run in so many steps, with everything that happens now and then happening in it; without trackers."""
    training = config.training
    at_once = training.microbatch or training.batch
    return replace(
        config,
        training=replace(training, images=steps * training.batch, steps=0, budget=""),
        log=Log(every=1),
        preview=replace(config.preview, every=-1, images=min(config.preview.images, at_once)),
        evaluate=replace(config.evaluate, every=steps if config.evaluate.every > 0 else -1),
        checkpoint=replace(config.checkpoint, every=1, milestones=0),
    )


def well(part: str, said: str, **facts: Any) -> Finding:
    """A part that went well."""
    return Finding(f"rehearsal.{part}", "fine", said, facts=facts)


def failed(part: str, error: Exception, told: str) -> Finding:
    """What went wrong, in its own words, and what to do where that is known."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    kind = "" if isinstance(error, RequestError) else f"{type(error).__name__}: "
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in first.lower()
    remedy = "a smaller --microbatch, --network or --size" if short else "it would have failed later in the run as well"
    facts = {"error": type(error).__name__, "said": told[-2000:]}
    return Finding(f"rehearsal.{part}", "fatal", f"{part} failed: {kind}{first}", remedy, facts)
