"""Samples as an array of NumPy, with `pil()`, a grid and a preview in notebooks."""

from __future__ import annotations

from typing import Any

import numpy as np

from unfog.errors import RequestError
from unfog.reporting.image_grids import Pixels, captioned_grid
from unfog.reporting.image_grids import grid as image_grid
from unfog.reporting.notebook import figure, picture
from unfog.text import plural
from unfog.values.condition_requests import CellNames
from unfog.values.image_format import are_pictures, to_pillow


class Samples(np.ndarray[tuple[int, ...], np.dtype[np.uint8]]):
    """Images [n, H, W, C]: an array of NumPy. Pictures, which are uint8, have `pil()` and are a grid in notebooks.

    A part of it, such as `samples[:4]`, is the same; what is computed from it is an array like any other. Samples of a
    run that keeps the values of its arrays have the type of these.
    """

    caption: str
    """How the images were generated: run, step, weights, sampler, seed."""

    cells: CellNames | None = None
    """Captions of the columns and rows of a grid of conditions, whose cells all the samples are; None otherwise."""

    @classmethod
    def of(cls, images: Any, caption: str, cells: CellNames | None = None) -> Samples:
        """Return the same memory as samples."""
        samples: Samples = np.asarray(images).view(cls)
        samples.caption, samples.cells = caption, cells
        return samples

    def __array_finalize__(self, other: Any) -> None:
        self.caption = getattr(other, "caption", "")

    def grid(self) -> Pixels:
        """Return one picture of all images, uint8 [H, W, 3]; the cells of a grid of conditions have captions.

        Raises RequestError if this is no longer an array of images.
        """
        if not self._are_images:
            raise RequestError("only uint8 [n, H, W, 1 or 3] is a grid; run.view(samples) makes such of other values")
        plain, cells = np.asarray(self), self.cells
        return image_grid(plain) if cells is None else captioned_grid(plain, cells.across, cells.down)

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
        return f"{plural(n)} of {width}x{height} pixels{f', {self.caption}' * bool(self.caption)}"

    def __repr__(self) -> str:
        if not self._are_images:
            return repr(np.asarray(self))
        return f"<samples: {self._title()}; uint8 {[*self.shape]}>"

    def _repr_html_(self) -> str | None:
        if not self._are_images:
            return None
        if self.cells is None:
            return figure(np.asarray(self), self._title())
        return picture(self.grid(), self._title())  # at its own size: made smaller, its captions could not be read
