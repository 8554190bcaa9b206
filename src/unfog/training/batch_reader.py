"""Images of the training stream on the device; on a GPU, those of the next step are read while it computes this one."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from unfog.device.copies import to_device
from unfog.errors import Interrupted
from unfog.training.hooks import Stream
from unfog.training.statistics import Stopwatch
from unfog.values.conditions import Conditions


class BatchReader:
    """Reads images at positions of a stream, uint8 [B, C, H, W] or latents, and their conditions."""

    def __init__(self, stream: Stream, device: torch.device, stopwatch: Stopwatch):
        self._stream, self._device, self._stopwatch = stream, device, stopwatch
        self._ahead: dict[tuple[int, int], tuple[Tensor, Conditions]] = {}  # by position and count; one at most
        self._read: tuple[Tensor, Conditions] | None = None  # the last images, for their format
        self.abandoned = False
        """True once the images of a batch were abandoned: see `abandon`."""

    def read(self, first: int, count: int) -> tuple[Tensor, Conditions]:
        """Return images and conditions at positions from `first` on, on the device; zeros once `abandoned`."""
        if self.abandoned and self._read is not None:
            pixels, conditions = self._read
            return _zeros(pixels, count), conditions.apply(lambda each: _zeros(each, count))
        if (first, count) in self._ahead:
            return self._ahead.pop((first, count))
        with self._stopwatch.waiting_for_data():
            images = self._stream.batch(first, count)
        self._read = to_device(images.pixels, self._device), images.conditions.to(self._device)
        return self._read

    def abandon(self, first: int, count: int) -> tuple[Tensor, Conditions]:
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


def _zeros(tensor: Tensor, count: int) -> Tensor:
    """Return zeros in the format of a batch, of so many images."""
    return tensor.new_zeros(count, *tensor.shape[1:])
