"""Studio of the worker: draw pictures, every step of which is sent as small pixels, and search for copies."""

from __future__ import annotations

import io
import math
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from unfog.diffusion.steps import SamplingStep
from unfog.errors import RequestError
from unfog.inference.loaded_run import load_run_images
from unfog.inference.memorization import FEWEST, find_nearest_images
from unfog.inference.run import Run
from unfog.pipeline.edit_images import build_edit
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.image_grids import Pixels
from unfog.serve.playground.channel import Channel, Message
from unfog.values.image_format import ImageFormat

_TILE = 128  # longest side of a kept step, in pixels
_STEP_BYTES = 2**26  # of all kept steps of a job; beyond that, only every second or third step is kept
_BATCH_PIXELS = 2**18  # of the images of a batch
_LOADED = 2  # networks in memory: two checkpoints are compared
_SHOWN = 3  # nearest training images of a picture


class Studio:
    """The loaded networks, and what is drawn with them."""

    def __init__(self) -> None:
        self._loaded: OrderedDict[tuple[object, ...], Run] = OrderedDict()

    def forget(self) -> None:
        """Free the networks, as after an error of memory."""
        self._loaded.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def draw(self, channel: Channel, job: int, message: Message) -> None:
        """Draw a job, and send its steps and its pictures. One that is cancelled ends within a step."""
        head = message.head
        run = self._load(head["run"], **head["weights"])
        if not (format := run.config.image_format).is_picture:
            raise RequestError(
                f"the playground draws pictures of 8 bits, and this run has {format}; use `unfog sample`"
            )
        if channel.is_cancelled(job):
            channel.send("done", job, stopped=True, images=[0], seconds=0.0, calls=0)
            return
        image, mask = _inputs(message)
        settings = dict(head["settings"])
        count, given = settings.pop("n"), run.config.conditions.read_words(settings.pop("given", ()))
        edit = build_edit(run.config, image, mask, settings.get("strength"), settings.get("repeats"))
        kind, steps, grid = (settings.get(name) for name in ("sampler", "steps", "grid"))
        sampler = run.sampler(kind, steps, grid, settings.get("levels", ()))
        # The adaptive sampler has a noise level for each image, so its steps are shown one image at a time.
        batch = 1 if sampler.kind == "adaptive" else max(1, min(count, _BATCH_PIXELS // format.pixels))
        total = edit.steps(sampler.steps) if edit else sampler.steps
        watch = _StepSender(channel, job, run, every=_every(total, count, run))
        parts, device = -(-count // batch), str(run.device)
        channel.send("began", job, steps=total, batches=parts, device=device, size=format.size)
        began = time.monotonic()
        images = run.sample(count, given=given, image=image, mask=mask, observe=watch, batch=batch, **settings)
        facts: dict[str, Any] = {"seconds": round(time.monotonic() - began, 3), "calls": run.calls}
        if edit is not None and edit.unknown is not None and len(images):
            known = ~edit.unknown[0].numpy()
            kept = format.to_pictures(edit.image[None])[0][known]
            facts["kept"] = {"pixels": int(known.sum()), "equal": bool((np.asarray(images)[:, known] == kept).all())}
        stopped = len(images) < count
        channel.send("done", job, np.ascontiguousarray(images).tobytes(), images=images.shape, stopped=stopped, **facts)

    def _load(self, path: str, **weights: Any) -> Run:
        key = (path, *sorted(weights.items()))
        if key not in self._loaded:
            while len(self._loaded) >= _LOADED:
                self._loaded.popitem(last=False)
            self._loaded[key] = Run(Path(path), **weights)
        self._loaded.move_to_end(key)
        return self._loaded[key]


class _StepSender:
    """Observer that sends every step: the noisy images, scaled to unit variance, and the guesses of the clean ones."""

    def __init__(self, channel: Channel, job: int, run: Run, every: int) -> None:
        self._channel, self._job, self._every = channel, job, every
        self._path, self._decode = run.config.diffusion.path, run.decode
        self._format = run.config.image_format

    def __call__(self, step: SamplingStep) -> bool:
        if self._channel.is_cancelled(self._job):
            return True
        if step.number % self._every == 0:
            alpha, sigma = (float(part) for part in self._path(torch.tensor(step.logsnr, dtype=torch.float64)))
            scaled = step.x_t / (alpha**2 + sigma**2) ** 0.5
            x, x0 = (_tiles(self._decode(images), self._format) for images in (scaled, step.x0))
            facts = {
                "number": step.number,
                "first": step.first,
                "share": sigma / (alpha + sigma),
                "tiles": x.shape,
                "time": time.time(),
            }
            self._channel.send("step", self._job, x.tobytes() + x0.tobytes(), **facts)
        return self._channel.is_cancelled(self._job)


def _tiles(images: Tensor, format: ImageFormat) -> Pixels:
    """Return images [N, C, H, W] as uint8 [N, h, w, C], at most 128 pixels wide."""
    side = max(images.shape[2:])
    if side > _TILE:
        small = [max(1, length * _TILE // side) for length in images.shape[2:]]
        images = adaptive_avg_pool2d(images.float(), (small[0], small[1]))
    return np.ascontiguousarray(format.to_pictures(images))


def _every(steps: int, count: int, run: Run) -> int:
    """Return how many steps there are to one that is kept, so that all of a job fit the memory."""
    channels, *sides = run.config.image_format.shape
    of_step = 2 * count * math.prod(min(side, _TILE) for side in sides) * channels
    return max(1, -(-steps * of_step // _STEP_BYTES))


def _inputs(message: Message) -> tuple[Pixels | None, Pixels | None]:
    """Return the image and the mask of an edit from PNGs that the server has encoded; None if it is not given."""
    first = message.head.get("image_bytes", 0)
    parts = (message.body[:first], message.body[first:])
    image, mask = (np.asarray(Image.open(io.BytesIO(part), formats=["PNG"])) if part else None for part in parts)
    return image, mask


def find_copies(channel: Channel, job: int, message: Message) -> None:
    """Find the nearest training images of the pictures in the message, uint8 [N, H, W, C], and send them.

    RequestError if the training images are not there any more, have changed, or are too few.
    """
    drawn = np.frombuffer(message.body, np.uint8).reshape(message.head["images"])
    dataset = load_run_images(RunFolder(Path(message.head["run"])).read_config(), StopSignals()).of_one_size
    if len(dataset.train) < FEWEST:
        raise RequestError(f"of {len(dataset.train)} training images all are near; at least {FEWEST} are needed")
    near = find_nearest_images(drawn, dataset)
    shown = min(_SHOWN, near.found.image.shape[1])
    rows = near.found.image[:, :shown].numpy()
    ratios, usual = near.found.ratio, np.sort(near.unseen.ratio)
    pictures = [
        {
            "ratio": round(float(ratios[i]), 4),
            "copy": bool(ratios[i] < near.limit),
            "distances": [round(float(one), 2) for one in near.found.distance[i, :shown]],
            "nearer_than": round(1 - float(np.searchsorted(usual, ratios[i], "right")) / len(usual), 4),
        }
        for i in range(len(drawn))
    ]
    unseen = near.unseen.distance[:, 0].numpy()
    facts = {
        "pictures": pictures,
        "limit": round(near.limit, 4),
        "searched": len(dataset.train),
        "unseen": {
            "what": near.what,
            "count": len(usual),
            "distances": [round(float(one), 2) for one in np.quantile(unseen, [0.05, 0.5, 0.95])],
            "ratios": [round(float(one), 4) for one in np.quantile(usual, [0.05, 0.5, 0.95])],
        },
    }
    nearest = dataset.train.pixels[rows.flatten()].transpose(0, 2, 3, 1)
    channel.send("copies", job, np.ascontiguousarray(nearest).tobytes(), images=nearest.shape, shown=shown, **facts)
