"""Images of the training stream on the device; on a GPU, those of the next step are read while it computes this one."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from unfog.device_copies import to_device
from unfog.errors import Interrupted
from unfog.training.hooks import Stream
from unfog.training.statistics import Stopwatch


class BatchReader:
    """Reads images at positions of a stream, uint8 [B, C, H, W] or latents, and labels, int64 [B] or None."""

    def __init__(self, stream: Stream, device: torch.device, stopwatch: Stopwatch):
        self._stream, self._device, self._stopwatch = stream, device, stopwatch
        self._ahead: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}  # by position and count; one at most
        self._read: tuple[Tensor, Tensor | None] | None = None  # the last images, for their format
        self.abandoned = False
        """True once the images of a batch were abandoned: see `abandon`."""

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Return images and labels at positions first … first + count - 1, on the device; zeros once `abandoned`."""
        if self.abandoned and self._read is not None:
            pixels, label = self._read
            return pixels.new_zeros(count, *pixels.shape[1:]), None if label is None else label.new_zeros(count)
        if (first, count) in self._ahead:
            return self._ahead.pop((first, count))
        with self._stopwatch.waiting_for_data():
            images = self._stream.batch(first, count)
        label = None if images.label is None else to_device(images.label, self._device)
        self._read = to_device(images.pixels, self._device), label
        return self._read

    def abandon(self, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Return zeros in place of images that are not waited for any longer, here and from now on.

        The other ranks wait for this one in the step, which none of them takes then. Interrupted before the first
        images, whose format is not known: nothing is trained by then.
        """
        if self._read is None:
            raise Interrupted
        self.abandoned = True
        return self.read(first, count)

    def read_ahead(self, first: int, count: int) -> None:
        """Read and copy images of the next step on a GPU, before the host waits for this one."""
        self._ahead.clear()
        if self._device.type == "cuda":
            # What cannot be read is reported once it is needed: the run may end before.
            with suppress(Exception, Interrupted):
                self._ahead[first, count] = self.read(first, count)
