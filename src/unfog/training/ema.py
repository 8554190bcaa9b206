"""Exponential moving average of a network's weights, and the average of tensors that the device may leave out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from unfog.training.settings import EmaSchedule, PowerEma
from unfog.training.sharded_tensors import to_local


class Ema:
    """Average of a network's parameters, with copies of its buffers, on the network's device.

    Starts as a copy of the network, whose parameters and buffers must stay the same objects from then on.
    """

    def __init__(self, model: nn.Module, schedule: EmaSchedule):
        self.schedule = schedule
        # Kept, because looking them up again would take half as long as an update.
        self._of: tuple[list[Tensor], list[Tensor]] = list(model.parameters()), list(model.buffers())
        self.parameters, self.buffers = ([tensor.detach().clone() for tensor in part] for part in self._of)
        self._weight = torch.zeros((), device=self._of[0][0].device)  # of the network in the next `update_unless`

    @property
    def width(self) -> float:
        """Width of the schedule, which must be a `PowerEma`."""
        assert isinstance(self.schedule, PowerEma)
        return self.schedule.width

    @torch.no_grad()
    def update(self, update: int) -> None:
        """Average in the network's weights after optimiser update number `update` (1, 2, …)."""
        # One fused call for all tensors; torch's own optimisers use the same family of functions.
        parameters, buffers = self._of
        mine, theirs = list(map(to_local, self.parameters)), list(map(to_local, parameters))
        torch._foreach_lerp_(mine, theirs, 1 - self.schedule.decay(update))
        # Copied: running statistics are averages already, and an average of constants is of no use.
        for kept, buffer in zip(self.buffers, buffers):
            kept.copy_(buffer)

    def prepare(self, update: int) -> None:
        """Set the weight that `update_unless` gives the network: that of optimiser update number `update`."""
        self._weight.fill_(1 - self.schedule.decay(update))

    @torch.no_grad()
    def update_unless(self, skip: Tensor) -> None:
        """Average in the weights of a network without buffers, unless `skip`, 0-d on the device, is 1."""
        lerp_unless(skip, self.parameters, self._of[0], self._weight)

    def swap(self, model: nn.Module) -> None:
        """Exchange the average and the network's weights; a second call restores them. See `swapped_into`."""
        for mine, theirs in ((self.parameters, model.parameters()), (self.buffers, model.buffers())):
            for i, tensor in enumerate(theirs):
                # The parameters stay the same objects, which the optimiser and a compiled network refer to.
                tensor.data, mine[i] = mine[i], tensor.data

    @contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """Let the network hold the average in a context. Nothing is copied, so its weights return bit for bit."""
        self.swap(model)
        try:
            yield
        finally:
            self.swap(model)

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the average under the network's own names, so that it loads into a network of the same kind."""
        found = self._named(model)
        return {name: found[name] for name in model.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `state_dict`; buffers that no checkpoint holds stay unchanged."""
        for name, mine in self._named(model).items():
            if name in tensors:
                mine.copy_(tensors[name])

    def with_tensors(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> Ema:
        """Return an EMA with the same schedule for another network of the same kind, holding `tensors` itself."""
        other = copy.copy(self)
        other._of = list(model.parameters()), list(model.buffers())
        other.parameters = [tensors[name] for name, _ in model.named_parameters()]
        other.buffers = [tensors.get(name, buffer) for name, buffer in model.named_buffers()]
        return other

    def _named(self, model: nn.Module) -> dict[str, Tensor]:
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        return dict(zip(names, (*self.parameters, *self.buffers), strict=True))


def lerp_unless(skip: Tensor, tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float | Tensor) -> None:
    """Move `tensors` towards `ends` by a share `weight` of the way, in place; change no bit if `skip` is 1.

    As `torch._foreach_lerp_`, up to rounding. `skip` is float32, 0 or 1, and so is a `weight` on the device, both 0-d.
    """
    # Gradient ascent whose gradient is `ends` less `tensors`, by weight decay. It is torch's only fused kernel for
    # this that takes both its weight and its mask from the device; a product with 0 would let NaN through.
    torch._fused_sgd_(
        list(tensors),
        list(ends),
        [],
        weight_decay=1.0,
        momentum=0.0,
        lr=weight,
        dampening=0.0,
        nesterov=False,
        maximize=True,
        is_first_step=False,
        found_inf=skip,
    )
