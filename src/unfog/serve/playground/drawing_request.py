"""From what the page sends to the request of `unfog sample`, checked by the same rules; its command, and its Python."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from unfog.config.requests.sample import SampleRequest, SamplingRequest
from unfog.config.toml import update
from unfog.diffusion.noise import Grid
from unfog.diffusion.sampler import Kind
from unfog.errors import RequestError
from unfog.files.safe_files import read_file
from unfog.serve.run_files import checkpoint_steps

SAMPLERS, GRIDS = get_args(Kind), get_args(Grid)
MOST_IMAGES, _MOST_STEPS, _MOST_REPEATS = 64, 1000, 50
_SETTINGS = tuple(f.name for f in fields(SamplingRequest) if f.name not in ("batch", "precision"))
_OF_RUN = ("label", "weights", "ema", "checkpoint", "guide")
_GUIDES = ("auto", "none")  # not another run: the page opens no others
_MANIFEST_BYTES = 2**24


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
    limits = {"n": MOST_IMAGES, "steps": _MOST_STEPS, "repeats": _MOST_REPEATS}
    for name, most in limits.items():
        if (getattr(request, name) or 0) > most:
            raise RequestError(f"{name} = {getattr(request, name)} is too large for the page: at most {most}")
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


def command_of(request: SampleRequest) -> str:
    """Return the command that draws the same pictures."""
    words = ["unfog", "sample", str(request.run)]
    for name, value in (settings_of(request) | _files(request)).items():
        values = value if isinstance(value, list) else [value]
        words += ["-n" if name == "n" else f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)


def python_of(request: SampleRequest) -> str:
    """Return Python that draws the same pictures."""
    settings = settings_of(request) | _files(request)
    names = {"weights": "weights", "ema": "ema", "checkpoint": "step"}
    load = [f"{names[name]}={settings.pop(name)!r}" for name in names if name in settings]
    count = settings.pop("n")
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
