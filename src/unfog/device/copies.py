"""Copies between host and device for which neither waits: through pinned memory, where the device is CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BLOCK = 2**26  # bytes of pinned memory that are asked for at once
_ALIGNMENT = 64  # bytes


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; a tensor that is there already is returned unchanged."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    # CUDA's copies from pageable memory are staged by the driver, and the host waits for them.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor, keep: bool = False) -> Tensor:
    """Return a contiguous copy in host memory; of one that is there already, itself if `keep`.

    A copy from CUDA is complete only once its stream is synchronised.
    """
    import torch

    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=not keep).contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class HostCopies:
    """Copies of many tensors in host memory. Those from CUDA are complete only once their stream is synchronised.

    They share a few pinned blocks of one size. Torch rounds pinned memory up to a power of two, asks the driver for
    each, and keeps it for good: blocks are given out again once nobody holds the copies in them.

    Args:
        total: bytes of all tensors.
        most_pinned: bytes of host memory to pin at most; copies beyond them are pageable, for which the host waits.
    """

    def __init__(self, total: int, most_pinned: float):
        self._block_size = min(_BLOCK, 1 << max(total - 1, 0).bit_length())
        self._left_to_pin = most_pinned
        self._block: Tensor | None = None
        self._used = 0

    def add(self, tensor: Tensor, keep: bool = False) -> Tensor:
        """Return a contiguous copy of a tensor; of one that is in host memory already, itself if `keep`."""
        import torch

        if tensor.device.type != "cuda":
            return to_host(tensor, keep)
        if (room := self._pinned(tensor.nbytes)) is None:
            return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        return room.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)

    def _pinned(self, size: int) -> Tensor | None:
        """Return so many bytes of a pinned block; None if no more is to be pinned."""
        import torch

        if self._block is None or self._used + size > len(self._block):
            new = max(self._block_size, 1 << max(size - 1, 0).bit_length())
            if new > self._left_to_pin:
                return None
            self._left_to_pin -= new
            self._block, self._used = torch.empty(new, dtype=torch.uint8, pin_memory=True), 0
        first = self._used
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._block[first : first + size]
