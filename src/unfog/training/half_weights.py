"""16-bit copies of weights, made once a step: autocast would cast each weight at each use, in hundreds of launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.device.compilation import compiled_with, is_compiled
from unfog.training.precision import DTYPES, Precision


class HalfWeights:
    """Copies of the weights of linear layers and convolutions, which these compute with while `in_use`.

    Gradients are the same as those of autocast to the bit, as long as a layer is called once in a forward pass: with
    more calls, autocast adds their gradients in float32.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype):
        self._active = False
        # Compiled code chooses formats of its own, which torch's copy of many tensors would convert one by one.
        self._copy = compiled_with(network, next(network.parameters()).device, _copy)
        is_last = is_compiled(network) and getattr(network, "channels_last", False)
        self._format = torch.channels_last if is_last else torch.preserve_format
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []
        for layer in network.modules():
            # Not subclasses with a forward of their own, which may do anything with their weights.
            if type(layer).forward in (nn.Linear.forward, nn.Conv2d.forward):
                self._wrap(cast("nn.Linear | nn.Conv2d", layer), dtype)

    @classmethod
    def of(cls, network: nn.Module, precision: Precision) -> HalfWeights | None:
        """Return copies for a network on a GPU; None if they gain nothing, or would change gradients."""
        dtype = DTYPES.get(precision.name) if precision.device.type == "cuda" else None
        if dtype is None or not getattr(network, "calls_layers_once", False):
            return None
        return cls(network, dtype)

    def _wrap(self, layer: nn.Linear | nn.Conv2d, dtype: torch.dtype) -> None:
        own = [parameter for parameter in (layer.weight, layer.bias) if parameter is not None]
        copies = [self._empty_copy(parameter, dtype) for parameter in own]
        self._weights += own
        self._copies += copies
        weight, bias, usual = copies[0], copies[1] if len(copies) > 1 else None, layer.forward

        def forward(x: Tensor) -> Tensor:
            if not self._active:
                return usual(x)
            if isinstance(layer, nn.Linear):
                return F.linear(x, weight, bias)
            return cast(Tensor, cast(Any, layer)._conv_forward(x, weight, bias))

        # The parameters stay where they are: an interrupt at any place leaves the network as it was.
        cast(Any, layer).forward = forward

    def _empty_copy(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        form = self._format if parameter.dim() == 4 else torch.preserve_format
        return torch.empty_like(parameter, dtype=dtype, requires_grad=parameter.requires_grad, memory_format=form)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Copy the weights, and let the layers compute with the copies inside, also where they are recomputed."""
        with torch.no_grad():
            self._copy(self._copies, self._weights)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            for copy in self._copies:
                copy.grad = None

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the gradients of the copies to those of the weights, in float32."""
        pairs = [(weight, copy) for weight, copy in zip(self._weights, self._copies) if copy.grad is not None]
        if not pairs:
            return
        wide = [torch.empty_like(weight) for weight, _ in pairs]
        self._copy(wide, [cast(Tensor, copy.grad) for _, copy in pairs])
        if summed := [weight.grad for weight, _ in pairs if weight.grad is not None]:
            torch._foreach_add_(summed, [w for w, (weight, _) in zip(wide, pairs) if weight.grad is not None])
        for (weight, copy), gradient in zip(pairs, wide):
            weight.grad = gradient if weight.grad is None else weight.grad
            copy.grad = None


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)
