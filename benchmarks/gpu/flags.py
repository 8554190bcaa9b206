"""What a way of training changes for itself: flags of torch, constants of Unfog, and how networks are built."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from unfog.pipeline import build

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


@contextmanager
def constant(owner: Any, name: str, value: object) -> Iterator[None]:
    """Inside, a constant of a module has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def built_once() -> Iterator[None]:
    """Inside, networks of the same settings are copies of one: random weights take 5 times as long as a copy."""
    real, made = build.build_network, dict[Any, Any]()

    def copied(config: Any) -> Any:
        if config.network not in made:
            made[config.network] = real(config)
        return copy.deepcopy(made[config.network])

    with constant(build, "build_network", copied):
        yield
