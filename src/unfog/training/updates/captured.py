"""A whole step as one CUDA graph: the host copies a batch, sets three numbers, and launches once."""

from __future__ import annotations

import torch
from torch import Tensor

from unfog.diffusion.objective import Loss
from unfog.training.gradient import Gradient, GradientComputer
from unfog.training.hooks import TrainingHooks
from unfog.training.updates.obstacles import why_not_captured
from unfog.training.updates.updater import Updater
from unfog.values.conditions import Conditions

_WARM_UP = 3  # steps before a capture, in which kernels are compiled and the optimiser allocates its state


class CapturedStep:
    """Captures the step of a run, and replays it for as long as it is the same step.

    A graph is a list of kernels with their addresses. Whatever the host decides or computes in a step would be frozen
    in it, so a step is captured only if nothing is: see `why_not_captured`. The hooks are told once what becomes of it.
    """

    def __init__(self, computer: GradientComputer, updater: Updater, hooks: TrainingHooks):
        self._computer, self._updater, self._hooks = computer, updater, hooks
        self._left = _WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None
        self._pixels = torch.empty(0)
        self._conditions = Conditions()
        self._result: tuple[Gradient, Tensor]
        self._addresses: tuple[object, ...] = ()
        self._is_off = self._was_said = False

    def gradient(self) -> Gradient | None:
        """Return the gradient of the next batch, which its `replay` computes; None if it must be computed without."""
        if self._is_off:
            return None
        if reason := why_not_captured(self._computer, self._updater.why_at_once):
            self._give_up(reason)
            return None
        # At first, and after a roll-back, which loads an optimiser with new tensors.
        state = self._computer.state
        addresses = (state.optimizer.param_groups[0]["lr"], state.ema, state.second_ema)
        if any(old is not new for old, new in zip(self._addresses or (None,), addresses)):
            self._graph, self._addresses, self._left = None, addresses, _WARM_UP
        if self._left:
            self._left -= 1
            return None
        pixels, conditions = self._computer.read_whole_batch()
        if self._graph is None and (failure := self._capture(pixels, conditions)):
            self._give_up(failure)
            return None
        self._pixels.copy_(pixels)
        self._conditions.copy_(conditions)
        return self._result[0]._replace(replay=self._replay)

    def _give_up(self, reason: str) -> None:
        self._is_off, self._graph = True, None
        self._hooks.on_capture(f"steps are not captured in a CUDA graph: {reason}")

    def _capture(self, pixels: Tensor, conditions: Conditions) -> str:
        """Capture a step on images and conditions like these, without running it. Returns why that failed, or ""."""
        self._pixels, self._conditions = pixels.clone(), conditions.apply(Tensor.clone)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads write checkpoints and copy images meanwhile, which is none of this capture's business.
            with self._hooks.defer_interrupts(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                gradient = self._computer.compute_whole_batch(self._pixels, self._conditions)
                self._result = gradient, self._updater.update_on_device(gradient)[1]
        except RuntimeError as error:
            self._computer.state.optimizer.zero_grad(set_to_none=True)
            return " ".join(str(error).split())[:200]
        self._graph = graph
        if not self._was_said:
            self._was_said = True
            self._hooks.on_capture("each step is one CUDA graph from here on")
        return ""

    def _replay(self) -> tuple[list[Loss], Tensor]:
        """Take the step on the batch that was read last; as `Updater.update_on_device`."""
        assert self._graph is not None
        self._graph.replay()
        seen, batch = self._computer.state.seen, self._computer.settings.batch
        self._computer.reader.read_ahead(seen + batch, batch)
        gradient, numbers = self._result
        # Copies, because the next replay writes to the same places before the host has read these.
        losses = [Loss(*(None if part is None else part.clone() for part in loss)) for loss in gradient.losses]  # type: ignore[arg-type]
        return losses, numbers.clone()
