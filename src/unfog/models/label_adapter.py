"""An adapter for networks called as `forward(x, c_noise, label)`, so that `network(x, c_noise, conditions)` works."""

from __future__ import annotations

import inspect
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from unfog.errors import RequestError
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import Conditions


def take_conditions(network: nn.Module, format: ConditionFormat) -> None:
    """Let a network be called with `Conditions` as its third argument, whatever its `forward` takes.

    A `forward` whose third parameter is not named `conditions` gets the label, int64 [B] or None, in which the number
    of classes stands for a hidden class; and the augmentation as a fourth argument, if there is one.
    RequestError if there are other conditions, which it would not see.
    """
    # By name and not by type: somebody's own network need not import anything of this package.
    if next(islice(inspect.signature(network.forward).parameters, 2, None), "") != "conditions":
        if format.columns:
            names = ", ".join(one.name for one in format.columns)
            raise RequestError(
                f"{type(network).__name__}.forward takes a label alone, and the images have {names}: name its third "
                "parameter `conditions`, and read them from it; or train without these columns"
            )
        # A hook rather than a module around it, which would change the names of the weights. It is not compiled, as it
        # would be a graph of its own: torch compiles no call around hooks as one.
        network.register_forward_pre_hook(partial(torch.compiler.disable(_unpack), len(format.classes)))  # type: ignore[no-untyped-call]


def _unpack(classes: int, network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor | None, ...] | None:
    if len(inputs) < 3 or not isinstance(inputs[2], Conditions):
        return None  # called with a label
    conditions = inputs[2]
    augment = () if conditions.augment is None else (conditions.augment,)
    return *inputs[:2], conditions.label_or(classes), *augment
