"""Animation of the denoising: a grid of samples at each sampling step, as GIF, WebP or MP4."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from unfog.diffusion.noise import Path as NoisePath
from unfog.diffusion.steps import SamplingStep
from unfog.pipeline.generate import to_pixels
from unfog.pipeline.latents import Decode
from unfog.reporting.image_grids import Pixels, grid
from unfog.safe_files import write_atomic

MOST_SAMPLES, _MOST_FRAMES = 16, 120
_SECONDS = 3.0  # of all steps, as far as a frame then lasts from 30 to 200 ms
_LAST = 1500  # milliseconds for which the finished samples stay


class DenoisingAnimation:
    """Observer of sampling that keeps the first samples at each step, scaled to unit variance of image and noise.

    Args:
        path: the path of the run.
        steps: sampling steps; of very many, some are left out.
        decode: maps what the network generates to images.
    """

    def __init__(self, path: NoisePath, steps: int, decode: Decode = lambda x: x):
        self._path, self._decode = path, decode
        self._every = -(-steps // _MOST_FRAMES)
        self._frames: list[Pixels] = []

    def __call__(self, seen: SamplingStep) -> None:
        step, logsnr, x_t, _, first = seen
        if step % self._every or first > 0:
            return
        alpha, sigma = self._path(torch.tensor(logsnr, dtype=torch.float64))
        # On the VE path x_t reaches 80, and every frame but the last would be clipped to black and white.
        scaled = x_t[:MOST_SAMPLES] / float((alpha**2 + sigma**2).sqrt())
        self._frames.append(to_pixels(self._decode(scaled)).permute(0, 2, 3, 1).cpu().numpy())

    def save(self, file: Path, samples: Pixels) -> None:
        """Write the animation in the format of the suffix; its last frame is the samples, uint8 [N, H, W, C]."""
        frames = [grid(frame) for frame in [*self._frames, samples[: len(self._frames[0])]]]
        each = round(1000 * min(0.2, max(0.03, _SECONDS / len(frames))))
        data = _mp4(frames, each) if file.suffix == ".mp4" else _by_pillow(frames, each, file.suffix[1:].upper())
        write_atomic(file, data)


def _by_pillow(frames: list[Pixels], each: int, form: str) -> bytes:
    """Return a GIF or WebP of frames that last `each` milliseconds."""
    first, *others = (Image.fromarray(frame) for frame in frames)
    times, stream = [each] * len(others) + [_LAST], io.BytesIO()
    first.save(stream, form, save_all=True, append_images=others, duration=times, loop=0)
    return stream.getvalue()


def _mp4(frames: list[Pixels], each: int) -> bytes:
    """Return an MP4 of frames that last `each` milliseconds."""
    import imageio_ffmpeg

    # Its colours are stored for squares of two pixels, so that both sides must be even.
    height, width = (side + side % 2 for side in frames[0].shape[:2])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "denoising.mp4"
        writer = imageio_ffmpeg.write_frames(
            str(file), (width, height), fps=1000 / each, quality=8, macro_block_size=2, ffmpeg_log_level="error"
        )
        # The library's generator begins the file at its first send.
        writer.send(None)
        for frame in [*frames, *frames[-1:] * round(_LAST / each)]:
            padding = [(0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)]
            writer.send(np.ascontiguousarray(np.pad(frame, padding, mode="edge")))
        writer.close()
        return file.read_bytes()
