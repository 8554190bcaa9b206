"""Updates of the weights, and the verdict on each: whether gradient and loss were finite, so that it was taken.

On the CPU the host reads the verdict, and then takes the update or leaves it out. A GPU would be idle meanwhile, so
there the device masks the update by its own verdict, and the host reads that once it has launched the next step. After
an update that was left out, the device leaves out the next one too; the host then takes that step once more. So a run
is the same to the bit whenever the verdict is read: a step that went wrong is looked into before another changes
anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from unfog.device.compilation import compiled_with
from unfog.device.copies import to_host
from unfog.diffusion.objective import Loss
from unfog.training.distributed.coordination import StepResult, judge, reduce_step
from unfog.training.distributed.world import World
from unfog.training.gradient import Gradient
from unfog.training.hooks import TrainingHooks
from unfog.training.optimizers import can_be_masked
from unfog.training.settings import Training
from unfog.training.state import TrainState

_LAG = 1  # steps by which the verdict is read late
_LATE_ON = ("cuda",)  # device types; elsewhere nothing is gained


class Updater:
    """Takes the steps of the optimiser, and reads the verdicts on them in the same order."""

    def __init__(self, training: Training, state: TrainState, hooks: TrainingHooks, world: World):
        self._training, self._state, self._hooks, self._world = training, state, hooks, world
        # Of each step whose verdict the host has not read; to call it may be to wait for the device.
        self._unread: list[Callable[[], StepResult]] = []
        self.why_at_once = why_not_masked(state, world)
        """Why the host reads each verdict before the update; None if it reads them one step late."""
        if self.why_at_once is None:
            self._judge = compiled_with(state.model, state.precision.device, judge)
            self._halted = torch.zeros((), device=state.precision.device)  # 1 from an update that was left out on

    def update(self, gradient: Gradient) -> None:
        """Take the optimiser's step with the gradient, if it is finite."""
        self._unread.append(self._launch(gradient) if self.why_at_once is None else self._decide(gradient))

    def _decide(self, gradient: Gradient) -> Callable[[], StepResult]:
        """Read the verdict, which is the loop's only wait for the device between logs, and update by it."""
        state = self._state
        result = reduce_step(self._training, state, gradient, self._hooks, self._world)
        accepted = result.outcome == "accepted"
        state.precision.update(state.optimizer, self._training.clip, result.norm_value, accepted)
        state.optimizer.zero_grad(set_to_none=True)
        if accepted:
            state.follow_update(result.losses)
        return lambda: result

    def _launch(self, gradient: Gradient) -> Callable[[], StepResult]:
        """Have the device update by its own verdict, and copy what the host needs for the same one to its memory."""
        for ema in self._state.emas:
            # As if all steps before were taken: after one that is not, this one is left out.
            ema.prepare(self._state.updates + len(self._unread) + 1)
        losses, numbers = self.update_on_device(gradient) if gradient.replay is None else gradient.replay()
        copy = to_host(numbers)
        ready = torch.cuda.Event() if numbers.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if ready is not None:
            ready.record()

        def read() -> StepResult:
            if ready is not None:
                ready.synchronize()  # with this step alone: the next one is on its way
            norm, loss, null_loss, *scale = copy.tolist()
            first, square = gradient.micro_batches[0].images, gradient.first_square
            return StepResult.of(losses, (norm, loss, null_loss), numbers[0], first, square, *scale)

        return read

    def update_on_device(self, gradient: Gradient) -> tuple[list[Loss], Tensor]:
        """Clip, update and average without the host, which reads nothing and decides nothing here.

        Returns the losses, and float32 [3] on the device: norm of the gradient, and sums of losses and null losses;
        in fp16 [4], with the loss scale of the gradient.
        """
        state, clip = self._state, self._training.clip
        norm = state.precision.gradient_norm(state.optimizer)
        scale = state.precision.scale_tensors()
        # By the steps before alone: a gradient that is infinite itself is what lowers the scale.
        state.precision.scaler.update_unless(self._halted)
        numbers, factor = self._judge(self._halted, norm, gradient.losses, scale, clip)
        state.precision.update_unless(self._halted, state.optimizer, factor)
        state.optimizer.zero_grad(set_to_none=True)
        state.follow_update(gradient.losses, self._halted)
        return gradient.losses, numbers

    @property
    def unread(self) -> int:
        """Number of steps whose verdicts the host has not read."""
        return len(self._unread)

    def has_verdict(self, wait: bool) -> bool:
        """Return whether a verdict is to be read now. With `wait` also that of the last step, which may still run."""
        late = self.why_at_once is None and not wait
        return len(self._unread) > (_LAG if late else 0)

    def read_verdict(self) -> StepResult:
        """Return the result of the oldest step whose verdict was not read."""
        return self._unread.pop(0)()

    def take_back(self) -> int:
        """Undo the steps launched after a rejected step. Return how many they are.

        The device has left them out, or a roll-back is due, which replaces all that they changed.
        """
        count = len(self._unread)
        if count:
            self._state.seen -= count * self._training.batch
            self._state.due = []  # the step before had none, or else it would have been read at once
        self._unread.clear()
        if self.why_at_once is None:
            self._halted.zero_()
        return count


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
