"""Functions between the layers of a network, compiled for a GPU where the network is: many launches become a few."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled_with(network: Any, device: torch.device, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function of tensors on `device`, compiled if that is a GPU and `network` is compiled in place."""
    return _compiled(function) if device.type == "cuda" and is_compiled(network) else function


def is_compiled(network: Any) -> bool:
    """Return True if `network.compile` was called, so that its forward pass is compiled."""
    return getattr(network, "_compiled_call_impl", None) is not None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
