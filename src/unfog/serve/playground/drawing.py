"""A drawing of the playground: its request, checked by the rules of `unfog sample`, its steps and pictures, its file.

Drawings that outlive the server are in a folder of the cache, never in a run folder: a file for each, with a line of
JSON and packed pixels. The oldest go first, and `unfog cache` lists and clears the folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from unfog.config.requests.sample import SampleRequest, SamplingRequest
from unfog.config.toml import update
from unfog.diffusion.noise import Grid
from unfog.diffusion.sampler import Kind
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder
from unfog.files.safe_files import make_folder, read_file, remove, write_atomic
from unfog.reporting.image_grids import Pixels
from unfog.serve.playground.inputs import Inputs
from unfog.serve.run_files import checkpoint_steps, conditions_of, read_settings
from unfog.values.image_format import are_pictures
from unfog.values.kinds.image_kinds import image_columns

_MOST_FILES, _MOST_BYTES = 100, 2**25  # of a folder of runs
_LARGEST = 2**23  # bytes of pixels of a drawing that is kept
_SUFFIX = ".drawing"
SAMPLERS, GRIDS = get_args(Kind), get_args(Grid)
MOST_IMAGES, _MOST_STEPS, _MOST_REPEATS = 64, 1000, 50
_SETTINGS = tuple(f.name for f in fields(SamplingRequest) if f.name not in ("batch", "precision"))
_OF_RUN = ("label", "given", "weights", "ema", "checkpoint", "guide")
_GUIDES = ("auto", "none")  # not another run: the page opens no others
_MANIFEST_BYTES = 2**24


@dataclass
class DrawingStep:
    """A step that is kept: tiles of the pictures that have made it, by number of the picture."""

    share: float
    """Share of noise of the state before the step."""
    noisy: dict[int, Pixels] = field(default_factory=dict)
    guess: dict[int, Pixels] = field(default_factory=dict)


@dataclass
class Drawing:
    """A drawing: what was asked for, and what there is of it."""

    id: int
    run: int
    run_name: str
    request: SampleRequest
    key: str
    inputs: Inputs = field(default_factory=Inputs)
    newest: bool = False
    """True if no checkpoint was named, so that the newest one of a run that trains is drawn from."""
    state: str = "waiting"
    error: str = ""
    steps: dict[int, DrawingStep] = field(default_factory=dict)
    pictures: Pixels | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Steps, batches, seconds, network calls, device, and whether kept pixels are equal."""
    copies: dict[str, Any] = field(default_factory=dict)
    nearest: Pixels | None = None
    given: Pixels | None = None
    """Pictures of the conditions that are images, in the order of `facts["given"]`."""
    values: bytes = b""
    """Samples in the units of the source, of a run on arrays; `facts["values"]` has type and shape."""
    channels: bytes = b""
    """PNG of all channels of these: see `reporting.channel_sheets`."""
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
        whole = sum(0 if of is None else of.nbytes for of in (self.pictures, self.nearest, self.given))
        return tiles + whole + self.inputs.nbytes + len(self.values) + len(self.channels)

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
        edit = {"image": self.request.image is not None, "mask": self.request.mask is not None}
        told = {"settings": settings_of(self.request), "given_pictures": list(self.inputs.given)}
        return {**self.progress(), "run_name": self.run_name, **told, "edit": edit}

    def detail(self) -> dict[str, Any]:
        """Return all about it but the pixels."""
        steps = [{"number": number, "share": round(step.share, 5)} for number, step in sorted(self.steps.items())]
        return {
            **self.summary(),
            **self.facts,
            "kept_steps": steps,
            "pictures": 0 if self.pictures is None else len(self.pictures),
            "command": command_of(self.request, self.inputs.given),
            "python": python_of(self.request, self.inputs.given),
            "has_channels": bool(self.channels),
            "copies": self.copies or None,
        }


class StoredDrawing(NamedTuple):
    """A drawing as it was stored."""

    number: int
    facts: dict[str, Any]
    pictures: Pixels
    rest: bytes = b""
    """Further bytes, such as inputs; `facts` says what they are."""


class History:
    """Drawings from the runs of one folder."""

    def __init__(self, runs: Path) -> None:
        name = hashlib.sha256(os.fsencode(runs.resolve())).hexdigest()[:32]
        self._folder = cache_folder() / f"drawings-{name}"

    def add(self, drawing: StoredDrawing) -> None:
        """Store a drawing, and remove the oldest of too many. Without effect where nothing can be written."""
        if drawing.pictures.nbytes + len(drawing.rest) > _LARGEST:
            return
        head = json.dumps({**drawing.facts, "shape": drawing.pictures.shape}).encode()
        data = head + b"\n" + zlib.compress(drawing.pictures.tobytes() + drawing.rest, 1)
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
                shape = [int(length) for length in facts.pop("shape")]
                pictures = np.frombuffer(pixels[: math.prod(shape)], np.uint8).reshape(shape)
                if are_pictures(pictures):
                    yield StoredDrawing(int(path.stem), facts, pictures, pixels[pictures.nbytes :])

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


def read_request(run: Path, settings: Mapping[str, Any], edits: bool, masked: bool) -> SampleRequest:
    """Return the request for the settings that the page sends; none of these can name a file or code.

    Settings are fields of `SampleRequest` by name. Without a checkpoint it is the newest whole one. `edits`: there is
    an image to start from; `masked`: a mask as well. RequestError if a setting is unknown, or its value is not valid.
    """
    if unknown := set(settings) - {*_SETTINGS, *_OF_RUN}:
        raise RequestError(
            f"{min(unknown)!r} is not a setting of a drawing; these are: {', '.join((*_SETTINGS, *_OF_RUN))}"
        )
    given = {name: value for name, value in settings.items() if value not in (None, "", [])}
    # A text with a colon would be imported, and the page may name no code.
    for name, known in (("sampler", SAMPLERS), ("grid", GRIDS), ("guide", _GUIDES)):
        if given.get(name, known[0]) not in known:
            raise RequestError(f"{name} = {given[name]!r} must be one of {', '.join(known)}")
    if "ema" not in given and given.get("checkpoint") is None:
        given["checkpoint"] = newest_checkpoint(run)
        if given["checkpoint"] is None:
            raise RequestError("this run has no whole checkpoint yet; wait for the first, or press Save now")
    image, mask = Path("image.png") if edits else None, Path("mask.png") if masked else None
    request = update(SampleRequest(run=run, image=image, mask=mask), given, "")
    if isinstance(request.guidance, tuple):
        raise RequestError("guidance of a drawing is one number; weights by name are for unfog sample")
    limits = {"n": MOST_IMAGES, "steps": _MOST_STEPS, "repeats": _MOST_REPEATS}
    for name, most in limits.items():
        if (getattr(request, name) or 0) > most:
            raise RequestError(f"{name} = {getattr(request, name)} is too large for the page: at most {most}")
    if request.given or request.negative:
        conditions = conditions_of(run)
        told = conditions.read_words(request.given)
        # Its words would be the name of a file, or of a source.
        if pictures := [one.name for one in image_columns(conditions.columns) if one.name in told]:
            raise RequestError(f"given {pictures[0]!r} is an image, and the page reads no files; upload it")
        conditions.parse(told)
        if request.negative:
            conditions.read_negative(request.negative)
    if not edits and (request.strength, request.repeats) != (None, None):
        raise RequestError("strength and repeats need an image to edit")
    return request


def newest_checkpoint(run: Path) -> int | None:
    """Return the step of the newest whole checkpoint; None without one."""
    return max(checkpoint_steps(run), default=None)


def settings_of(request: SampleRequest) -> dict[str, Any]:
    """Return the settings that differ from the defaults, as `read_request` takes them."""
    usual = {f.name: f.default for f in fields(SampleRequest)}
    names = (*_SETTINGS, *_OF_RUN)
    values = {name: getattr(request, name) for name in names if name == "n" or getattr(request, name) != usual[name]}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def job_of(request: SampleRequest) -> dict[str, Any]:
    """Return the part of a request that the worker needs: weights to load, and arguments of `Run.sample`."""
    settings = settings_of(request)
    weights = {"weights": request.weights, "step": request.checkpoint, "ema": request.ema, "device": request.device}
    for name in ("weights", "ema", "checkpoint"):
        settings.pop(name, None)
    return {"run": str(request.run), "weights": weights, "settings": settings}


def command_of(request: SampleRequest, pictures: Iterable[str] = ()) -> str:
    """Return the command that draws the same pictures, with files for the conditions that are images."""
    words, settings = ["unfog", "sample", str(request.run)], settings_of(request) | _files(request)
    stored = read_settings(request.run)
    if stored.get("buckets") and not request.image:  # the page draws the largest size only
        settings["size"] = str(stored.get("data.size"))
    if files := [f"{name}={name}.png" for name in pictures]:
        settings["given"] = [*settings.get("given", []), *files]
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        words += ["-n" if name == "n" else f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def python_of(request: SampleRequest, pictures: Iterable[str] = ()) -> str:
    """Return Python that draws the same pictures, with files for the conditions that are images."""
    settings = settings_of(request) | _files(request)
    names = {"weights": "weights", "ema": "ema", "checkpoint": "step"}
    load = [f"{names[name]}={settings.pop(name)!r}" for name in names if name in settings]
    count = settings.pop("n")
    if "given" in settings:
        settings["given"] = conditions_of(request.run).read_words(settings["given"])
    if files := {name: f"{name}.png" for name in pictures}:
        settings["given"] = settings.get("given", {}) | files
    sample = [f"{name}={tuple(value) if isinstance(value, list) else value!r}" for name, value in settings.items()]
    loaded = ", ".join([repr(str(request.run)), *load])
    return f"import unfog\n\nrun = unfog.load({loaded})\nimages = run.sample({', '.join([str(count), *sample])})\n"


def key_of(request: SampleRequest, body: bytes) -> str:
    """Return a hash of weights, settings and inputs: what was drawn with the same one is not drawn again."""
    run = request.run
    parts = [json.dumps(job_of(request), sort_keys=True).encode(), body]
    if request.checkpoint is not None:
        manifest = run / "checkpoints" / f"{request.checkpoint:08d}" / "manifest.json"
        parts.append(_content(manifest, run))
    parts += [_content(run / "config.toml", run), _content(run / "ema-sweep.json", run)]
    if request.ema is not None:
        parts.append(repr(_snapshots(run / "averages")).encode())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _files(request: SampleRequest) -> dict[str, str]:
    return {name: str(getattr(request, name)) for name in ("image", "mask") if getattr(request, name) is not None}


def _content(path: Path, run: Path) -> bytes:
    try:
        return read_file(path, run, _MANIFEST_BYTES)
    except (OSError, ValueError):
        return b""


def _snapshots(folder: Path) -> list[tuple[str, int, int]]:
    try:
        return sorted((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in os.scandir(folder))
    except OSError:
        return []
