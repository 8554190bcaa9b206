"""Obstacles: parts of a run that need the host to decide on a step, or to compute in it, so that no graph holds it."""

from __future__ import annotations

import inspect

from unfog.training.autoencoder_loss import AutoencoderLoss
from unfog.training.distributed.world import World
from unfog.training.gradient import GradientComputer
from unfog.training.optimizers import can_be_masked
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState

_LATE_ON = ("cuda",)  # device types; elsewhere nothing is gained


def why_not_masked(state: TrainState, world: World) -> str | None:
    """Return why a step cannot be left out by the device alone, or is not worth it; None if it can and is."""
    project = getattr(state.model, "project", None)
    if world.size > 1:
        return "several processes decide on each step together"
    if state.precision.device.type not in _LATE_ON:
        return f"{state.precision.device.type} gains nothing from it"
    if state.levels is not None:
        return "noise levels or weights follow the losses"
    if not can_be_masked(state.optimizer):
        return f"{type(state.optimizer).__name__} cannot leave out a step by itself"
    if project is not None and "skip" not in inspect.signature(project).parameters:
        return "the network's project cannot leave out a step by itself"
    # Such as running statistics, which a pass of a step that is left out would change.
    return "the network has buffers" if any(True for _ in state.model.buffers()) else None


def why_not_captured(computer: GradientComputer, why_at_once: str | None) -> str | None:
    """Return the work of the host in each step that prevents its capture; None if there is none."""
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
