"""Copies between host and device for which neither waits: through pinned memory, where the device is CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device; one that is there already is returned as it is."""
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
