"""torch's flags for speed and determinism, which each way of training sets for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_flags(deterministic: bool, benchmark: bool) -> Iterator[None]:
    """Inside, what is built and run has these flags; after it, those from before.

    `benchmark` lets cuDNN time its kernels. Unfog's own steps set their flags themselves when they are built.
    """
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    set_flags(deterministic, deterministic, benchmark)
    try:
        yield
    finally:
        set_flags(*before)


def set_flags(deterministic: bool, cudnn_deterministic: bool, benchmark: bool) -> None:
    """Set the flags of this process."""
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn_deterministic, benchmark
