"""Studio of the worker: draw pictures, every step of which is sent as small pixels, and search for copies."""

from __future__ import annotations

import io
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from unfog.config.schema import Config
from unfog.data.buckets.joined_set import cropped_to
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import open_bytes
from unfog.diffusion.steps import SamplingStep
from unfog.errors import RequestError
from unfog.inference.loaded_run import load_run_images
from unfog.inference.memorization import COPY, FEWEST, UnseenImages, find_nearest_images
from unfog.inference.run import Run
from unfog.pipeline.condition_pictures import condition_pictures
from unfog.pipeline.edit_images import build_edit
from unfog.pipeline.generate import view_channels
from unfog.pipeline.given_images import read_pictures
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.image_grids import Pixels
from unfog.serve.playground.channel import MOST_BYTES, Channel, Message
from unfog.serve.playground.inputs import Inputs
from unfog.values.image_format import size_of

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
        if channel.is_cancelled(job):
            channel.send("done", job, stopped=True, images=[0], seconds=0.0, calls=0)
            return
        inputs, settings = Inputs.read(head, message.body), dict(head["settings"])
        image, mask = (_pixels(part) for part in (inputs.image, inputs.mask))
        run = run.at_size(0 if image is None else size_of(*image.shape[:2]))
        format = run.config.image_format
        count = settings.pop("n")
        words: dict[str, object] = run.config.conditions.read_words(settings.pop("given", ()))
        given, shown = _with_pictures(run, words, inputs)
        edit = build_edit(run.config, image, mask, settings.get("strength"), settings.get("repeats"))
        kind, steps, grid = (settings.get(name) for name in ("sampler", "steps", "grid"))
        sampler = run.sampler(kind, steps, grid, settings.get("levels", ()))
        # The adaptive sampler has a noise level for each image, so its steps are shown one image at a time.
        batch = 1 if sampler.kind == "adaptive" else max(1, min(count, _BATCH_PIXELS // format.pixels))
        total = edit.steps(sampler.steps) if edit else sampler.steps
        watch = _StepSender(channel, job, run, every=_every(total, count, run))
        parts, device = -(-count // batch), str(run.device)
        told = {"given": list(inputs.given), "given_shape": shown.shape} if len(shown) else {}
        channel.send("began", job, shown.tobytes(), steps=total, batches=parts, device=device, size=format.size, **told)
        began = time.monotonic()
        images = run.sample(count, given=given, image=image, mask=mask, observe=watch, batch=batch, **settings)
        facts: dict[str, Any] = {"seconds": round(time.monotonic() - began, 3), "calls": run.calls}
        if edit is not None and edit.unknown is not None and len(images):
            known = ~edit.unknown[0].numpy()
            kept = format.to_pictures(edit.image[None])[0][known]
            facts["kept"] = {"pixels": int(known.sum()), "equal": bool((np.asarray(images)[:, known] == kept).all())}
        stopped = len(images) < count
        pixels, more = _shown(run.config, images), b""
        if not format.is_picture and len(images):
            values, more = np.ascontiguousarray(images), view_channels(run.config, images, ())
            facts["channel_bytes"] = len(more)
            # Samples in the units of the source that are too many for a message are for `unfog sample`.
            if pixels.nbytes + len(more) + values.nbytes <= MOST_BYTES:
                facts["values"] = [str(values.dtype), *values.shape]
                more += values.tobytes()
        channel.send("done", job, pixels.tobytes() + more, images=pixels.shape, stopped=stopped, **facts)

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
        self._config = run.config

    def __call__(self, step: SamplingStep) -> bool:
        if self._channel.is_cancelled(self._job):
            return True
        if step.number % self._every == 0:
            alpha, sigma = (float(part) for part in self._path(torch.tensor(step.logsnr, dtype=torch.float64)))
            scaled = step.x_t / (alpha**2 + sigma**2) ** 0.5
            x, x0 = (_tiles(self._decode(images), self._config) for images in (scaled, step.x0))
            facts = {
                "number": step.number,
                "first": step.first,
                "share": sigma / (alpha + sigma),
                "tiles": x.shape,
                "time": time.time(),
            }
            self._channel.send("step", self._job, x.tobytes() + x0.tobytes(), **facts)
        return self._channel.is_cancelled(self._job)


def _tiles(images: Tensor, config: Config) -> Pixels:
    """Return images [N, C, H, W] as uint8 [N, h, w, C], at most 128 pixels wide; of arrays the view of the run."""
    side = max(images.shape[2:])
    if side > _TILE:
        small = [max(1, length * _TILE // side) for length in images.shape[2:]]
        images = adaptive_avg_pool2d(images.float(), (small[0], small[1]))
    return _shown(config, config.image_format.to_pictures(images))


def _shown(config: Config, images: NDArray[Any]) -> Pixels:
    """Return images [N, H, W, C] as uint8: pictures unchanged, and arrays in the view of the run."""
    return np.ascontiguousarray(images if config.image_format.is_picture else config.view(images))


def _every(steps: int, count: int, run: Run) -> int:
    """Return how many steps there are to one that is kept, so that all of a job fit the memory."""
    format = run.config.image_format
    channels = format.channels if format.is_picture else 3  # of a view
    of_step = 2 * count * math.prod(min(side, _TILE) for side in format.shape[1:]) * channels
    return max(1, -(-steps * of_step // _STEP_BYTES))


def _pixels(data: bytes) -> Pixels | None:
    """Return the pixels of a PNG that the server has encoded; None without data."""
    return np.asarray(Image.open(io.BytesIO(data), formats=["PNG"])) if data else None


def _with_pictures(run: Run, given: dict[str, object], inputs: Inputs) -> tuple[Mapping[str, object], Pixels]:
    """Return requested conditions with the uploaded pictures, and pictures uint8 [K, H, W, 3] of these, in order.

    RequestError if one cannot be decoded, or does not suit its condition.
    """
    config = run.config
    for name, data in inputs.given.items():
        try:
            given[name] = open_bytes(data, name)
        except ImageError as error:
            raise RequestError(f"{name}: the upload cannot be used: {error}") from None
    given = dict(read_pictures(config, given, 1))
    shown = condition_pictures(config, config.conditions.parse(given), [0])
    return given, np.concatenate([shown[name] for name in inputs.given] or [np.zeros((0, 1, 1, 3), np.uint8)])


def find_copies(channel: Channel, job: int, message: Message) -> None:
    """Find the nearest training images of the pictures in the message, uint8 [N, H, W, C], and send them.

    RequestError if the training images are not there any more, have changed, or are too few.
    """
    drawn = np.frombuffer(message.body, np.uint8).reshape(message.head["images"])
    dataset = load_run_images(RunFolder(Path(message.head["run"])).read_config(), StopSignals())
    # Those of other shapes are cropped to that of the pictures, as an upload was.
    dataset = cropped_to(dataset, size_of(*drawn.shape[1:3]))
    if len(dataset.train) < FEWEST:
        raise RequestError(f"of {len(dataset.train)} training images all are near; at least {FEWEST} are needed")
    near = find_nearest_images(drawn, dataset)
    shown = min(_SHOWN, near.found.image.shape[1])
    rows = near.found.image[:, :shown].numpy()
    pictures = [{"ratio": round(float(ratio), 4), "copy": bool(ratio < near.limit)} for ratio in near.found.ratio]
    facts = {
        "pictures": pictures,
        "limit": round(near.limit, 4),
        "usual": COPY,
        "searched": len(dataset.train),
        "unseen": {
            "what": near.what if UnseenImages(dataset).enough else "of your own images, each against the others,",
            "count": len(near.unseen.ratio),
            "ratio": round(float(np.median(near.unseen.ratio)), 4),
        },
    }
    nearest = dataset.train.pixels[rows.flatten()].transpose(0, 2, 3, 1)
    channel.send("copies", job, np.ascontiguousarray(nearest).tobytes(), images=nearest.shape, shown=shown, **facts)
