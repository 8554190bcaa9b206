"""Images of the training stream on the device; on a GPU, those of the next step are read while it computes this one."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from unfog.device_copies import to_device
from unfog.training.hooks import Stream
from unfog.training.statistics import Stopwatch
from unfog.values.conditions import Conditions


class BatchReader:
    """Reads images at positions of a stream, uint8 [B, C, H, W] or latents, and their conditions."""

    def __init__(self, stream: Stream, device: torch.device, stopwatch: Stopwatch):
        self._stream, self._device, self._stopwatch = stream, device, stopwatch
        self._ahead: dict[tuple[int, int], tuple[Tensor, Conditions]] = {}  # by position and count; one at most

    def read(self, first: int, count: int) -> tuple[Tensor, Conditions]:
        """Return images and conditions at positions first … first + count - 1, on the device."""
        if (first, count) in self._ahead:
            return self._ahead.pop((first, count))
        with self._stopwatch.waiting_for_data():
            images = self._stream.batch(first, count)
        return to_device(images.pixels, self._device), images.conditions.to(self._device)

    def read_ahead(self, first: int, count: int) -> None:
        """Read and copy images of the next step on a GPU, before the host waits for this one."""
        self._ahead.clear()
        if self._device.type == "cuda":
            # What cannot be read is reported once it is needed: the run may end before.
            with suppress(Exception):
                self._ahead[first, count] = self.read(first, count)
