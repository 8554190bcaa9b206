"""A drawing of the playground: what was asked for, its steps and its pictures; and drawings that outlive the server.

Those are in a folder of the cache, never in a run folder: a file for each, a line of JSON and packed pixels. The oldest
go first, and `unfog cache` lists and clears the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unfog.config.requests.sample import SampleRequest
from unfog.files.cache_folder import cache_folder
from unfog.files.safe_files import make_folder, read_file, remove, write_atomic
from unfog.reporting.image_grids import Pixels
from unfog.serve.playground.drawing_request import command_of, python_of, settings_of
from unfog.values.image_format import are_pictures

_MOST_FILES, _MOST_BYTES = 100, 2**25  # of a folder of runs
_LARGEST = 2**23  # bytes of pixels of a drawing that is kept
_SUFFIX = ".drawing"


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
        """Return the fields of its event."""
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
        edit = {"image": self.image_bytes > 0, "mask": len(self.body) > self.image_bytes}
        return {**self.progress(), "run_name": self.run_name, "settings": settings_of(self.request), "edit": edit}

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
            "copies": self.copies or None,
        }


class StoredDrawing(NamedTuple):
    """A drawing as it was stored."""

    number: int
    facts: dict[str, Any]
    pictures: Pixels


class History:
    """Drawings from the runs of one folder."""

    def __init__(self, runs: Path) -> None:
        name = hashlib.sha256(os.fsencode(runs.resolve())).hexdigest()[:32]
        self._folder = cache_folder() / f"drawings-{name}"

    def add(self, drawing: StoredDrawing) -> None:
        """Store a drawing, and remove the oldest of too many. Without effect where nothing can be written."""
        if drawing.pictures.nbytes > _LARGEST:
            return
        head = json.dumps({**drawing.facts, "shape": drawing.pictures.shape}).encode()
        data = head + b"\n" + zlib.compress(drawing.pictures.tobytes(), 1)
        with suppress(OSError):
            cache_folder().mkdir(parents=True, exist_ok=True)
            make_folder(self._folder, cache_folder())
            # What people draw is nobody else's business; and what a crash loses can be drawn again.
            path = self._folder / f"{drawing.number:08d}{_SUFFIX}"
            write_atomic(path, data, cache_folder(), private=True, shared=True, durable=False)
            self._forget_old()

    def read(self) -> Iterator[StoredDrawing]:
        """Yield the stored drawings, oldest first. What is damaged is left out."""
        for path in self._files():
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, zlib.error):
                head, _, packed = read_file(path, cache_folder(), 2 * _LARGEST).partition(b"\n")
                facts = json.loads(head)
                # With a bound: a few bytes may unpack to any size.
                pixels = zlib.decompressobj().decompress(packed, _LARGEST)
                pictures = np.frombuffer(pixels, np.uint8).reshape(facts.pop("shape"))
                if are_pictures(pictures):
                    yield StoredDrawing(int(path.stem), facts, pictures)

    def _files(self) -> list[Path]:
        with suppress(OSError):
            if not self._folder.is_symlink():
                found = [path for path in self._folder.iterdir() if path.suffix == _SUFFIX]
                return sorted(path for path in found if path.stem.isdecimal())
        return []

    def _forget_old(self) -> None:
        files = self._files()
        sizes = [path.lstat().st_size for path in files]
        while len(files) > _MOST_FILES or sum(sizes) > _MOST_BYTES:
            remove(files.pop(0), cache_folder())
            sizes.pop(0)
