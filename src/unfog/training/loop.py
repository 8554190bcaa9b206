"""The training loop. Time is counted in images, so every schedule is a pure function of `state.seen`."""

from __future__ import annotations

import math
from contextlib import nullcontext, suppress
from typing import NamedTuple

from unfog.errors import Interrupted
from unfog.training.batches import rng_batch_size
from unfog.training.checkpoints.posthoc_ema import snapshot_interval
from unfog.training.distributed.coordination import CoordinatedHooks, StepResult
from unfog.training.distributed.world import SINGLE_PROCESS, World
from unfog.training.gradient import Gradient, GradientComputer
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.optimizers import set_learning_rate
from unfog.training.settings import Optimizer, Training
from unfog.training.stability.out_of_memory import retry_with_smaller_micro_batches
from unfog.training.state import TrainState
from unfog.training.statistics import Stopwatch
from unfog.training.updates.captured import CapturedStep, CaptureLost, own_stream
from unfog.training.updates.recovery import roll_back_if_needed, skip_step
from unfog.training.updates.updater import Updater

_RAREST_CHECKPOINTS = 4  # times the interval, at most
_AT_THE_END = 10**12  # interval of what is due after the last step alone


class Intervals(NamedTuple):
    """Steps between two calls of a hook; 0: never."""

    log: int = 0
    preview: int = 0
    evaluate: int = 0
    checkpoint: int = 0
    ema_snapshot: int = 0

    def due(self, step: int, last: bool) -> list[str]:
        """Return the hooks to call after step number `step` (1, 2, …), in order; names as stored in `TrainState.due`.

        All are due after the last step, but evaluation and EMA snapshots only if they are wanted at all.
        """
        wanted = {
            "evaluate": self.evaluate > 0 and (last or step % self.evaluate == 0),
            "log": last or (self.log > 0 and step % self.log == 0),
            "averages": self.ema_snapshot > 0 and (last or step % snapshot_interval(self.ema_snapshot, step) == 0),
            "preview": last or (self.preview > 0 and step % self.preview == 0),
            # Last, so that the checkpoint covers its own logs.
            "save": last or (self.checkpoint > 0 and step % self.checkpoint == 0),
        }
        return [name for name, is_due in wanted.items() if is_due]

    def stretched(self, factor: int) -> Intervals:
        """Return these intervals with those of a `Plan`, which is made for a time budget."""
        # A crash must not cost most of a run, so that checkpoints are not left out.
        checkpoint = self.checkpoint * min(factor or _RAREST_CHECKPOINTS, _RAREST_CHECKPOINTS)
        # Without an evaluation of trained weights the untrained ones would be the best checkpoint.
        evaluate = (factor or _AT_THE_END) * self.evaluate
        return self._replace(preview=factor * self.preview, evaluate=evaluate, checkpoint=checkpoint)


class LoopSettings(NamedTuple):
    """Settings that the training loop reads."""

    training: Training
    optimizer: Optimizer
    intervals: Intervals = Intervals()


def train(
    settings: LoopSettings, state: TrainState, task: Task, hooks: TrainingHooks, world: World = SINGLE_PROCESS
) -> None:
    """Advance `state` until `settings.training.images` images are seen, or a stop is requested.

    The hooks may plan another length on the way, for a time budget.

    `state` is all that a resume needs: the order of images is a function of (seed, seen) and so is all randomness, so
    a run that was interrupted anywhere ends bit-identical to one that was not. Every rank calls this with rank 0's
    state, and has the same state after each step. RunError if training diverged again after `training.rollbacks`
    roll-backs; the last good weights are saved.
    """
    with own_stream(state.precision.device) if settings.training.capture and world.size == 1 else nullcontext():
        _train(settings, state, task, hooks, world)


def _train(settings: LoopSettings, state: TrainState, task: Task, hooks: TrainingHooks, world: World) -> None:
    training, batch_size = settings.training, settings.training.batch
    stopwatch = Stopwatch()
    # Before anything asks for the length: a resume with another --steps voids the plans that the checkpoint brought.
    state.length.adopt(training.images // batch_size)
    state.model.train()
    network = world.wrap_network(state.model, training.compress)
    computer = GradientComputer(training, state, task, world, stopwatch, network)
    # A single process needs no agreement, and its interruptions may come at once.
    hooks = CoordinatedHooks(hooks, world) if world.size > 1 else hooks
    updater = Updater(training, state, hooks, world)
    captured = CapturedStep(computer, updater, hooks) if training.capture else None
    reason = "it was stopped while in trouble"  # for the next roll-back
    rates: list[float] = []  # of the steps whose verdict is not read yet
    lost_capture = ""
    try:
        while not hooks.stop_requested():
            # 0. What the last step left to do, also if an interruption and a resume lie between.
            with stopwatch.exclude():
                roll_back_if_needed(training, state, hooks, reason)
                run_due_hooks(state, hooks, stopwatch, batch_size)
            if state.seen >= _planned_images(training, state):
                return

            # 1. Gradient of the mean loss over the batch, one micro-batch at a time; or all at once in a captured step.
            step = state.seen // batch_size
            gradient = captured and captured.gradient()
            gradient = gradient or _compute_gradient(training, state, hooks, computer)

            # 2. One update, or none, and the position. An interrupt between the two would leave weights of one step
            #    with the position of another.
            with hooks.defer_interrupts():
                rates.append(_set_learning_rate(settings, state, step))
                updater.update(gradient)
                plan_due = hooks.plan_due()
                state.seen += batch_size  # also of a step that is not taken, so that it is not tried for ever
                if plan_due and (plan := hooks.plan_length(state)) is not None:
                    state.length.add([plan])
                last = step + 1 >= _planned_images(training, state) // batch_size
                state.due = settings.intervals.stretched(state.length.at(step + 1).stretch).due(step + 1, last)

            # 3. What a person or a job manager asks for.
            if hooks.save_requested() and "save" not in state.due:
                state.due.append("save")
            if hooks.preview_requested() and "preview" not in state.due:
                state.due.append("preview")
            stopwatch.images += batch_size

            # 4. The verdict on the step, and its end; on a GPU those of the step before, but where a hook is due.
            reason = _read_verdicts(computer, hooks, updater, rates, wait=bool(state.due)) or reason
    except Interrupted:
        state.optimizer.zero_grad(set_to_none=True)  # the sum over half a batch; a resume begins the step anew
    except CaptureLost as error:
        state.optimizer.zero_grad(set_to_none=True)
        lost_capture = str(error)
    with suppress(Interrupted):  # a stop that is under way already
        _read_verdicts(computer, hooks, updater, rates, wait=True)
    if lost_capture:
        hooks.on_capture_lost(state, lost_capture)


def _read_verdicts(
    computer: GradientComputer, hooks: TrainingHooks, updater: Updater, rates: list[float], wait: bool
) -> str | None:
    """Read the verdicts on the last steps, `wait` for all; count the steps, and debug one that was not finite.

    `rates` are the learning rates of these steps. Steps after one that went wrong are taken back, to be taken once
    more. Returns why to roll back, if there is reason.
    """
    training, state, reason = computer.settings, computer.state, None
    while updater.has_verdict(wait):
        with hooks.defer_interrupts():
            result = updater.read_verdict()
            reason = _count_step(training, state, result, rates.pop(0)) or reason
            if result.outcome != "accepted" or state.guard.anomalous >= training.patience:
                computer.stopwatch.images -= updater.take_back() * training.batch
                rates.clear()
        if result.outcome == "skipped":
            with computer.stopwatch.exclude():
                reason = skip_step(training, state, hooks, result.norm_value, computer)
        hooks.on_step_end(state.seen // training.batch - updater.unread)
    return reason


def _compute_gradient(
    training: Training, state: TrainState, hooks: TrainingHooks, computer: GradientComputer
) -> Gradient:
    """Return the gradient of the next batch, with smaller micro-batches if memory does not suffice."""
    ranks = computer.world.size
    # A single process draws noise for whatever fits. Several ranks must draw the same, so they keep the size of the
    # step's beginning, and agree on the smallest after it.
    rng_size = rng_batch_size(training, state) if ranks > 1 else None
    return retry_with_smaller_micro_batches(training, state, hooks, lambda: computer.compute(hooks, rng_size), ranks)


def _set_learning_rate(settings: LoopSettings, state: TrainState, step: int) -> float:
    """Set and return the learning rate of step `step`, halved by each roll-back so far."""
    steps = settings.training.images // settings.training.batch
    length = state.length
    rate = settings.optimizer.learning_rate(length.position(step), steps, length.warmed(step))
    lr = rate * state.guard.lr_scale
    set_learning_rate(state.optimizer, lr)
    return lr


def _planned_images(training: Training, state: TrainState) -> int:
    """Return the planned number of images of the whole run, at the position of the state."""
    # Whole batches are counted below; a run without plans ends at the image that its settings say.
    if not state.length.plans:
        return training.images
    return state.length.at(state.seen // training.batch).steps * training.batch


def _count_step(training: Training, state: TrainState, result: StepResult, lr: float) -> str | None:
    """Count a step, which was taken if gradient and loss are finite. Returns why to roll back if it was anomalous."""
    outcome = result.outcome
    accepted = outcome == "accepted"
    if accepted:
        state.count_update(result.losses)
        if result.first_square is not None:
            square = result.first_square / result.scale**2
            state.window.noise.add(square, result.first_images, result.norm.square(), training.batch)
    state.last = {"gradient_norm": result.norm_value, "lr": lr}
    if outcome == "overflow":  # of fp16: nobody's fault, and the scale is lower from here on
        state.window.overflows += 1
    elif not state.guard.update(result.relative_loss if accepted else math.nan):
        state.window.skipped += not accepted
        return f"the loss stayed at {result.relative_loss:.3g} times that of an all-zero output"
    return None


def run_due_hooks(state: TrainState, hooks: TrainingHooks, stopwatch: Stopwatch, batch_size: int) -> None:
    """Call the hooks in `state.due`. One that is interrupted stays due, and starts anew after a resume."""
    step = state.seen // batch_size
    if "log" in state.due or "evaluate" in state.due:
        record = hooks.evaluate(state) if "evaluate" in state.due else {}
        with hooks.defer_interrupts():
            if "log" in state.due:
                record = state.window.close() | state.last | stopwatch.lap() | record
            if record:
                hooks.log(step, state.seen, record)
            state.due = [name for name in state.due if name not in ("log", "evaluate")]
            if state.update_best(record) and "save" not in state.due:
                state.due.append("keep the best")
    if "averages" in state.due:
        hooks.save_ema_snapshot(state)
        state.due.remove("averages")
    if "preview" in state.due:
        hooks.preview(state)
        state.due.remove("preview")
    if state.due:  # only one of "save" and "keep the best" can be left
        for_best = "save" not in state.due
        state.due = []  # before saving, so that the checkpoint does not ask for itself
        hooks.save(state, for_best)
