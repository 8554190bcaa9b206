"""Pictures of the denoising while samples are drawn: a strip of x_t and predicted x0, and animations."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from unfog.data.sources.folder import XMP
from unfog.diffusion.noise import Path as NoisePath
from unfog.diffusion.noise import Schedule
from unfog.diffusion.steps import SamplingStep
from unfog.errors import RunError
from unfog.files.safe_files import write_atomic
from unfog.pipeline.latents import Show
from unfog.reporting.image_grids import Pixels, grid, labelled_strip
from unfog.text import MARK, format_bytes, sanitize

_STRIP_LEVELS = (1.0, 0.75, 0.5, 0.25, 0.1, 0.05, 0.0)  # of the schedule: t = 999, 750, …, 0 if it has 1000 steps


class _Column(NamedTuple):
    """One sampling step of the strip."""

    step: int
    caption: str
    x_t: Pixels
    x0: Pixels


class DenoisingStrip:
    """Observer of sampling that keeps x_t and predicted x0 of the first sample at the steps nearest to _STRIP_LEVELS.

    x_t is the state before the step, so that it belongs to the level in its caption.
    """

    def __init__(self, schedule: Schedule, show: Show):
        self.schedule, self.show = schedule, show
        self.nearest: dict[float, tuple[float, _Column]] = {}
        """Level -> (distance of the nearest step so far, that step)."""

    def __call__(self, seen: SamplingStep) -> None:
        step, logsnr, x_t, x0, first = seen
        if first > 0:
            return
        quantile = float(self.schedule.quantile(torch.tensor([logsnr], dtype=torch.float64)))
        far = {level: abs(quantile - level) for level in _STRIP_LEVELS}
        # A sampler may choose its own levels, so the nearest to each of ours is kept.
        nearer = [level for level in _STRIP_LEVELS if level not in self.nearest or far[level] < self.nearest[level][0]]
        if not nearer:
            return
        steps = self.schedule.steps
        caption = f"t = {quantile * steps:.0f}" if steps else f"log SNR {logsnr:.1f}"
        # Scaled into [-1, 1]: on the VE path x_t reaches far beyond.
        scaled = x_t[:1] / x_t[:1].abs().amax().clamp(min=1)
        column = _Column(step, caption, self.show(scaled)[0], self.show(x0[:1])[0])
        self.nearest.update({level: (far[level], column) for level in nearer})

    def columns(self) -> list[_Column]:
        """Return the kept steps, each once, in order."""
        return [column for _, column in sorted({c.step: c for _, c in self.nearest.values()}.items())]

    def image(self) -> Pixels:
        """Return the strip, uint8 [H, W, 3]."""
        columns = self.columns()
        rows = {"x_t": np.stack([c.x_t for c in columns]), "predicted x0": np.stack([c.x0 for c in columns])}
        return labelled_strip(rows, [c.caption for c in columns])


MOST_SAMPLES, MOST_FRAMES = 16, 120
_SECONDS = 3.0  # of all steps, as far as a frame then lasts from 30 to 200 ms
_LAST = 1500  # milliseconds for which the finished samples stay


class DenoisingAnimation:
    """Observer of sampling that keeps the first samples at each step, scaled to unit variance of image and noise.

    Args:
        path: the path of the run.
        steps: sampling steps; of very many, some are left out.
        show: maps what the network generates to pictures.
    """

    def __init__(self, path: NoisePath, steps: int, show: Show):
        self._path, self._show = path, show
        self._every = -(-steps // MOST_FRAMES)
        self._frames: list[Pixels] = []

    def __call__(self, seen: SamplingStep) -> None:
        step, logsnr, x_t, _, first = seen
        if step % self._every or first > 0:
            return
        alpha, sigma = self._path(torch.tensor(logsnr, dtype=torch.float64))
        # On the VE path x_t reaches 80, and every frame but the last would be clipped to black and white.
        scaled = x_t[:MOST_SAMPLES] / float((alpha**2 + sigma**2).sqrt())
        self._frames.append(self._show(scaled))

    def save(self, file: Path, samples: Pixels) -> None:
        """Write the animation; its last frame is the samples, uint8 [N, H, W, C]. Raises as `save_animation`."""
        save_animation(file, [*self._frames, samples[: len(self._frames[0])]])


def save_animation(file: Path, frames: Sequence[Pixels]) -> None:
    """Write an animation of frames, the samples uint8 [N, H, W, C] of each, in the format of the suffix of the file.

    RunError if there is no room for it, or the video cannot be encoded.
    """
    grids = [grid(frame) for frame in frames]
    each = round(1000 * min(0.2, max(0.03, _SECONDS / len(grids))))
    try:
        data = _mp4(grids, each) if file.suffix == ".mp4" else _by_pillow(grids, each, file.suffix[1:].upper())
        write_atomic(file, data, file.parent, shared=True)
    except OSError as error:
        reason = error.strerror or str(error).partition("\n")[0]
        raise RunError(
            f"the animation {sanitize(str(file))} cannot be written ({reason}); the samples are whole: free some "
            "space there, then repeat the command"
        ) from error


def _by_pillow(frames: list[Pixels], each: int, form: str) -> bytes:
    """Return a GIF or WebP of frames that last `each` milliseconds."""
    first, *others = (Image.fromarray(frame) for frame in frames)
    times, stream = [each] * len(others) + [_LAST], io.BytesIO()
    mark: dict[str, Any] = {"comment": MARK.encode()} if form == "GIF" else {"xmp": XMP}
    first.save(stream, form, save_all=True, append_images=others, duration=times, loop=0, **mark)
    return stream.getvalue()


def _mp4(frames: list[Pixels], each: int) -> bytes:
    """Return an MP4 of frames that last `each` milliseconds. RunError if it cannot be encoded in TMPDIR."""
    import imageio_ffmpeg

    # Its colours are stored for squares of two pixels, so that both sides must be even.
    height, width = (side + side % 2 for side in frames[0].shape[:2])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "denoising.mp4"
        writer = imageio_ffmpeg.write_frames(
            str(file), (width, height), fps=1000 / each, quality=8, macro_block_size=2, ffmpeg_log_level="quiet"
        )
        try:
            # The library's generator begins the file at its first send.
            writer.send(None)
            for frame in [*frames, *frames[-1:] * round(_LAST / each)]:
                padding = [(0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)]
                writer.send(np.ascontiguousarray(np.pad(frame, padding, mode="edge")))
            writer.close()
            # A full disk ends ffmpeg without an error here if it is met with the last frames.
            if imageio_ffmpeg.count_frames_and_secs(str(file))[0] < len(frames):
                raise OSError("the video is cut off")
            return file.read_bytes()
        except (OSError, RuntimeError) as error:
            free, reason = format_bytes(shutil.disk_usage(folder).free), str(error).partition("\n")[0][:60]
            raise RunError(
                f"the video cannot be encoded in {sanitize(tempfile.gettempdir())}, which has {free} free "
                f"({reason}); the samples are whole: free some space there, or set "
                "TMPDIR to another folder, then repeat the command"
            ) from error
