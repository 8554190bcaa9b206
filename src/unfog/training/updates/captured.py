"""A whole step as one CUDA graph: the host copies a batch, sets three numbers, and launches once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from unfog.diffusion.objective import Loss
from unfog.errors import RunError
from unfog.training.autoencoder_loss import AutoencoderLoss
from unfog.training.gradient import Gradient, GradientComputer
from unfog.training.hooks import TrainingHooks
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.updates.updater import Updater
from unfog.values.conditions import Conditions

_WARM_UP = 3  # steps before a capture, in which kernels are compiled and the optimiser allocates its state


class CaptureLost(RunError):
    """A capture failed in a way after which this process does not train on."""


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the body on a separate stream, for warm-up, capture and replays; no effect on other devices.

    The default stream cannot be captured, and what warm-up leaves on another stream (a node that adds up gradients, a
    workspace of cuBLAS) would tie a capture to that.
    """
    if device.type != "cuda":
        yield
        return
    outside, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        with suppress(RuntimeError):  # of a device that has failed, and must not hide how
            outside.wait_stream(stream)


class CapturedStep:
    """Captures the step of a run, and replays it for as long as it is the same step.

    A graph is a list of kernels with their addresses. Decisions and results of the host would be frozen in
    it, so only a step without any is captured: see `_why_not_captured`. The hooks are notified once of the outcome.
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
        if reason := _why_not_captured(self._computer, self._updater.why_at_once):
            self._give_up(reason)
            return None
        if not self._addresses:  # from the first step on, so that a run and its resumes compute the same sums
            getattr(self._computer.state.model, "fuse_layers", lambda: None)()
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
        """Capture a step on images and conditions like these, without running it. Returns why that failed, or "".

        CaptureLost if CUDA has invalidated the capture, or if the optimiser has begun: the run cannot go on here.
        """
        self._pixels, self._conditions = pixels.clone(), conditions.apply(Tensor.clone)
        graph, pool, failure, has_gradient = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), "", False
        # Other threads may use the GPU during capture: they write checkpoints and copy images.
        how: Any = {"pool": pool, "stream": torch.cuda.current_stream(), "capture_error_mode": "thread_local"}
        try:
            with self._hooks.defer_interrupts(), torch.cuda.graph(graph, **how):
                try:
                    gradient = self._computer.compute_whole_batch(self._pixels, self._conditions)
                    has_gradient = True
                    self._result = gradient, self._updater.update_on_device(gradient)[1]
                except RuntimeError as error:  # kept back until CUDA says whether it has seen it too
                    failure = _in_one_line(error)
        except RuntimeError as error:
            _leave_capture(graph, pool)
            raise CaptureLost(failure or _in_one_line(error)) from error
        if failure:
            self._computer.state.optimizer.zero_grad(set_to_none=True)
            if has_gradient:
                raise CaptureLost(failure)
            return failure
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


def _why_not_captured(computer: GradientComputer, why_at_once: str | None) -> str | None:
    """Return the work of the host in each step that prevents its capture; None if nothing does."""
    settings, state = computer.settings, computer.state
    if state.precision.device.type != "cuda":
        return f"{state.precision.device.type} has none"
    if why_at_once is not None:
        return why_at_once
    if microbatch_size(settings, state) < settings.batch:
        return "a batch is several micro-batches, each with random numbers of its own"
    if isinstance(computer.task.loss_function, AutoencoderLoss):
        return "the loss of an autoencoder copies a filter from the host"
    if not type(state.model).__module__.startswith("unfog."):
        return "a network of your own may compute on the host"
    if getattr(state.model, "checkpointing", False) and getattr(state.model, "is_random", True):
        return "gradient checkpointing reads the state of the random numbers, to repeat dropout"
    return None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _leave_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Reset torch's allocator and random generator, which stay in capture mode after a capture that did not end."""
    device = torch.cuda.current_device()
    # Private functions: a torch without them, or in which there is nothing to undo, has its own way.
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
    with suppress(AttributeError, RuntimeError):
        graph.reset()
    with suppress(AttributeError, RuntimeError):
        # Another state in place of the one that refuses to be used outside a capture. The loop seeds it anew.
        torch.cuda.default_generators[device].graphsafe_set_state(
            torch.Generator(torch.device("cuda", device)).graphsafe_get_state()
        )
