"""Files of images: read those of edits; the strip and the animation of the denoising."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from unfog.config.schema import Config
from unfog.config.toml import of_type
from unfog.config.values import quote
from unfog.data.bit_depth import DeepImage, Ranges
from unfog.data.decode import ImageInfo, Opener, decode, parse_colour, spread_two_values
from unfog.data.prepare import silence_pillow
from unfog.data.sources.base import ImageError
from unfog.data.sources.folder import XMP
from unfog.data.sources.image_files import open_image
from unfog.diffusion.editing import Edit
from unfog.diffusion.noise import Path as NoisePath
from unfog.diffusion.noise import Schedule
from unfog.diffusion.steps import SamplingStep
from unfog.errors import RequestError, RunError
from unfog.files.safe_files import write_atomic
from unfog.pipeline.latents import Show
from unfog.reporting.image_grids import Pixels, grid, labelled_strip
from unfog.settings import is_auto
from unfog.text import MARK, format_bytes, sanitize
from unfog.values.image_format import CHANNELS, ImageFormat, to_pillow

ImageInput = str | PathLike[str] | np.typing.NDArray[Any]
_DEFAULT_STRENGTH = 0.6
_WHITE = 128  # of 255


def build_edit(
    config: Config, image: ImageInput | None, mask: ImageInput | None, strength: float | None, repeats: int | None
) -> Edit | None:
    """Return the edit of an image, with an optional mask, at the size of a run; None without an image.

    RequestError if one cannot be read, their sizes differ, or an argument lacks the one that it needs.
    """
    if image is None:
        needy = {"mask": mask, "strength": strength, "repeats": repeats}
        if given := [name for name, value in needy.items() if value is not None]:
            raise RequestError(f"{given[0]} needs an image to edit; give --image FILE, or image=… in Python")
        return None
    if mask is None and repeats is not None:
        raise RequestError(f"repeats = {repeats} is for inpainting with a mask; give a mask, or omit repeats")
    data = config.data
    # Of the set that the run was trained on, so that the image is as bright as its images.
    ranges = None if is_auto(data, "range") else Ranges.of_setting(data.range, data.clip)
    pixels, facts = _read_image(image, "image", config.image_format, data.background, ranges)
    unknown = None
    if mask is not None:
        unknown, its = _read_mask(mask, config.image_format.as_mask)
        if (its.width, its.height) != (facts.width, facts.height):
            raise RequestError(
                f"the mask has {its.width} x {its.height} pixels and the image {facts.width} x "
                f"{facts.height}; the mask must have the size of the image, and be white where it is to be "
                "painted"
            )
    # A mask discards the old pixels behind it; without a mask, full strength discards the whole image.
    usual = _DEFAULT_STRENGTH if mask is None else 1.0
    return Edit(
        config.image_format.to_model(torch.from_numpy(pixels.copy())),
        unknown,
        usual if strength is None else of_type(float, strength, "strength"),
        Edit.repeats if repeats is None else of_type(int, repeats, "repeats"),
    )


def _read_mask(given: ImageInput, format: ImageFormat) -> tuple[torch.Tensor, ImageInfo]:
    """Return (bool [1, H, W]: True for pixels to paint anew; properties of the mask).

    Of a mask of two values, such as 0 and 1, the larger one is white, unless both are bright. Of another one, white is
    what reaches half of the range of its type.
    """
    # Black behind a transparent mask: what is not drawn is kept.
    read = partial(_read_image, given, "mask", format, "black")
    try:
        white, facts = read(through=spread_two_values)
    except RequestError:
        white, facts = read()
    unknown = torch.from_numpy(white >= _WHITE)  # resizing leaves greys at the edges of the white
    if not unknown.any():
        raise RequestError(
            "the mask is black everywhere, so there is nothing to paint; make those areas white: half of what the type "
            "of its values holds, 128 in 8 bits, 32768 in 16"
        )
    return unknown, facts


def _read_image(
    given: ImageInput,
    what: str,
    format: ImageFormat,
    background: str,
    ranges: Ranges | None = None,
    through: Callable[[Opener], Image.Image | DeepImage] = lambda opener: opener(),
) -> tuple[Pixels, ImageInfo]:
    """Return an image of this format, decoded as training images are: upright and centre-cropped.

    Without `ranges`, values deeper than 8 bits are scaled by those of the image. `through` opens the image.
    """

    def opener() -> Image.Image | DeepImage:
        if path:
            return open_image(path)
        return to_pillow(values) if values.dtype == np.uint8 else DeepImage(values)

    path = Path(given) if isinstance(given, str | PathLike) else None
    values = np.asarray(None if path else given)
    if path is None:
        values = values.astype(np.uint8) * 255 if values.dtype == bool else values
        shaped = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (*CHANNELS, 4))
        if values.dtype.kind not in "uif" or not shaped or not values.size:
            raise RequestError(
                f"{what} is {values.dtype} {list(values.shape)}; give a file, or an array [H, W], [H, W, 3] or "
                "[H, W, 4]"
            )
    try:
        with silence_pillow():
            return decode(partial(through, opener), format, parse_colour(background), ranges)
    except ImageError as error:
        named = quote(str(path)) if path else "the array"
        reason = "there is no such file" if path and not path.exists() else error
        raise RequestError(f"{what} = {named} cannot be used: {reason}; give an image such as a PNG or JPEG") from None


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


MOST_SAMPLES, _MOST_FRAMES = 16, 120
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
        self._every = -(-steps // _MOST_FRAMES)
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
        """Write the animation in the format of the suffix; its last frame is the samples, uint8 [N, H, W, C].

        RunError if there is no room for it, or the video cannot be encoded.
        """
        frames = [grid(frame) for frame in [*self._frames, samples[: len(self._frames[0])]]]
        each = round(1000 * min(0.2, max(0.03, _SECONDS / len(frames))))
        try:
            data = _mp4(frames, each) if file.suffix == ".mp4" else _by_pillow(frames, each, file.suffix[1:].upper())
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
