"""A drawing of the playground: what was asked for, its steps, its pictures, and what the page is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unfog.config.run_requests import SampleRequest
from unfog.reporting.image_grids import Pixels
from unfog.serve.playground.requests import command_of, python_of, settings_of


@dataclass
class Step:
    """A step that is kept: tiles of the pictures that have made it, by number of the picture."""

    share: float
    """Share of noise of the state before the step."""
    noisy: dict[int, Pixels] = field(default_factory=dict)
    guess: dict[int, Pixels] = field(default_factory=dict)


@dataclass
class Job:
    """A drawing: what was asked for, and what there is of it."""

    id: int
    run: int
    run_name: str
    request: SampleRequest
    key: str
    body: bytes = b""
    """PNGs of the image and of the mask of an edit."""
    image_bytes: int = 0
    """How many bytes of them are the image."""
    newest: bool = False
    """True if no checkpoint was named, so that the newest one of a run that trains is drawn from."""
    state: str = "waiting"
    error: str = ""
    steps: dict[int, Step] = field(default_factory=dict)
    pictures: Pixels | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Steps, batches, seconds, network calls, device, and whether kept pixels are equal."""
    copies: dict[str, Any] = field(default_factory=dict)
    nearest: Pixels | None = None
    cancelled: bool = False
    done_steps: int = 0
    at: tuple[int, float] = (0, 1.0)
    """Number and share of noise of the newest step."""
    computed: float = 0.0
    """When that was computed, in seconds since 1970."""

    @property
    def pixels(self) -> int:
        """Bytes of pixels that it holds."""
        tiles = sum(
            tile.nbytes for step in self.steps.values() for tile in (*step.noisy.values(), *step.guess.values())
        )
        return tiles + sum(0 if of is None else of.nbytes for of in (self.pictures, self.nearest)) + len(self.body)

    def progress(self) -> dict[str, Any]:
        """Return what an event says of it."""
        total = self.facts.get("steps", 0) * self.facts.get("batches", 1)
        number, share = self.at
        return {
            "job": self.id,
            "run": self.run,
            "state": self.state,
            "error": self.error,
            "step": number,
            "share": round(share, 5),
            "done": self.done_steps,
            "of": total,
            "computed": self.computed,
        }

    def summary(self) -> dict[str, Any]:
        """Return its line in the history."""
        return {**self.progress(), "run_name": self.run_name, "settings": settings_of(self.request)}

    def detail(self) -> dict[str, Any]:
        """Return all about it but the pixels."""
        steps = [{"number": number, "share": round(step.share, 5)} for number, step in sorted(self.steps.items())]
        return {
            **self.summary(),
            **self.facts,
            "kept_steps": steps,
            "pictures": 0 if self.pictures is None else len(self.pictures),
            "command": command_of(self.request),
            "python": python_of(self.request),
            "edit": {"image": self.image_bytes > 0, "mask": len(self.body) > self.image_bytes},
            "copies": self.copies or None,
        }
