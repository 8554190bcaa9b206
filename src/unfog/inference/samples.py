"""Array of samples with `pil()` and a notebook preview."""

from __future__ import annotations

from typing import Any

import numpy as np

from unfog.errors import RequestError
from unfog.reporting.notebook import figure
from unfog.values.image_format import are_pictures, to_pillow


class Samples(np.ndarray[tuple[int, ...], np.dtype[np.uint8]]):
    """Images, uint8 [n, H, W, C]: an array of NumPy, with `pil()`, and shown as a grid in notebooks.

    A part of it, such as `samples[:4]`, is the same; what is computed from it is an array like any other.
    """

    caption: str
    """How the images were generated: run, step, weights, sampler, seed."""

    @classmethod
    def of(cls, images: Any, caption: str) -> Samples:
        """Return the same memory as samples."""
        samples: Samples = np.asarray(images).view(cls)
        samples.caption = caption
        return samples

    def __array_finalize__(self, other: Any) -> None:
        self.caption = getattr(other, "caption", "")

    @property
    def _are_images(self) -> bool:
        return are_pictures(self) and self.size > 0

    def pil(self) -> Any:
        """Return a list of PIL images, of mode RGB or L; of a single image [H, W, C] that image.

        Raises RequestError if this is no longer an array of images.
        """
        single = self.ndim == 3
        images = self[None].view(Samples) if single else self
        if not images._are_images:
            shape = "x".join(map(str, self.shape))
            raise RequestError(
                f"{self.dtype} of shape {shape} is not an array of images; use pil() of uint8 [n, H, W, 1 or 3]; "
                "run.view(samples) makes such of other values"
            )
        plain = np.asarray(images)
        made = [to_pillow(one) for one in plain]
        return made[0] if single else made

    def _title(self) -> str:
        n, height, width, _ = self.shape
        count = "1 image" if n == 1 else f"{n:,} images"
        return f"{count} of {width}x{height} pixels{f', {self.caption}' * bool(self.caption)}"

    def __repr__(self) -> str:
        if not self._are_images:
            return repr(np.asarray(self))
        return f"<samples: {self._title()}; uint8 {[*self.shape]}>"

    def _repr_html_(self) -> str | None:
        return figure(np.asarray(self), self._title()) if self._are_images else None
