"""Training images that are kept on the device, so that a step copies none: sets in memory that are small beside it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from unfog.data.dataset import ImageSet
from unfog.data.lazy import LazyPixels
from unfog.data.stream import Batch, ImageStream
from unfog.device_copies import to_device

# Of the memory of a GPU. The choice of a micro-batch leaves three times as much.
_SHARE = 0.05
_WINDOW = 2**16  # positions whose rows are copied together, 512 kB
_CHUNK = 2**28  # bytes of images that are copied together, through pinned memory


def nbytes(images: ImageSet) -> int:
    """Return the bytes of all pixels, or latents, of a set."""
    return math.prod(images.pixels.shape) * getattr(images.pixels, "dtype", np.dtype(np.uint8)).itemsize


def fits_device(size: int, memory: int) -> bool:
    """Return whether decoded images of so many bytes are kept on a GPU with so much memory."""
    return size <= _SHARE * memory


class DeviceStream:
    """The batches of an `ImageStream`, indexed on the device that holds all of its images; to the bit the same.

    RequestError if a label is not an index into the classes.
    """

    def __init__(self, stream: ImageStream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        images = stream.images
        rows = max(1, _CHUNK * len(images) // max(1, nbytes(images)))
        some = torch.from_numpy(np.ascontiguousarray(images.pixels[:1]))
        self._pixels = torch.empty((len(images), *some.shape[1:]), dtype=some.dtype, device=device)
        for first in range(0, len(images), rows):
            part = np.ascontiguousarray(images.pixels[first : first + rows])
            self._pixels[first : first + rows] = to_device(torch.from_numpy(part), device)
        labels = images.labels_of(np.arange(len(images)))
        self._labels = None if labels is None else to_device(torch.from_numpy(labels), device)
        self._window: tuple[int, Tensor, Tensor] = (-1, torch.zeros(0), torch.zeros(0))

    def batch(self, first: int, size: int) -> Batch:
        """Return the images at positions first … first + size - 1, on the device; their rows on the host."""
        begin, here, there = self._window
        if not 0 <= begin <= first <= first + size <= begin + len(here):
            # Many at once, as each copy is a launch and an allocation of pinned memory.
            begin, here = first, torch.from_numpy(self._stream.index(first, max(size, _WINDOW)))
            self._window = begin, here, (there := to_device(here, self._device))
        rows = there[first - begin : first - begin + size]
        label = None if self._labels is None else self._labels[rows]
        return Batch(first, self._pixels[rows], label, here[first - begin : first - begin + size])


def open_device_stream(stream: ImageStream, device: torch.device, memory: int) -> ImageStream | DeviceStream:
    """Return the stream on a CUDA device of so many bytes, if its images fit there; else the stream as it is."""
    decoded = not isinstance(stream.images.pixels, LazyPixels)
    fits = device.type == "cuda" and decoded and fits_device(nbytes(stream.images), memory)
    return DeviceStream(stream, device) if fits else stream
