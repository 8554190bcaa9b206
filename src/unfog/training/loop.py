"""The training loop. Time is counted in images, so every schedule is a pure function of `state.seen`."""

from __future__ import annotations

import math
from typing import NamedTuple

from unfog.errors import Interrupted, RunError
from unfog.training.checkpoints.posthoc_ema import snapshot_interval
from unfog.training.distributed.coordination import CoordinatedHooks, StepResult, reduce_step
from unfog.training.distributed.world import SINGLE_PROCESS, World
from unfog.training.gradient import Gradient, GradientComputer, rng_batch_size, split_batch
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.optimizer_settings import Optimizer
from unfog.training.settings import Training
from unfog.training.stability.nan_debug import NanReport
from unfog.training.stability.out_of_memory import microbatch_size, retry_with_smaller_micro_batches
from unfog.training.state import TrainState
from unfog.training.statistics import Stopwatch

_RAREST_CHECKPOINTS = 4  # times the interval, at most


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
        return self._replace(preview=factor * self.preview, evaluate=factor * self.evaluate, checkpoint=checkpoint)


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
    training, batch_size = settings.training, settings.training.batch
    stopwatch = Stopwatch()
    # Before anything asks for the length: a resume with another --steps voids the plans that the checkpoint brought.
    state.length.adopt(training.images // batch_size)
    state.model.train()
    network = world.wrap_network(state.model, training.compress)
    computer = GradientComputer(training, state, task, world, stopwatch, network)
    # A single process needs no agreement, and its interruptions may come at once.
    hooks = CoordinatedHooks(hooks, world) if world.size > 1 else hooks
    reason = "it was stopped while in trouble"  # for the next roll-back
    try:
        while not hooks.stop_requested():
            # 0. What the last step left to do, also if an interruption and a resume lie between.
            with stopwatch.exclude():
                _roll_back_if_needed(training, state, hooks, reason)
                run_due_hooks(state, hooks, stopwatch, batch_size)
            if state.seen >= _planned_images(training, state):
                return

            # 1. Gradient of the mean loss over the batch, one micro-batch at a time.
            step = state.seen // batch_size
            gradient = _compute_gradient(training, state, hooks, computer)

            # 2. One update, or none, and everything that counts it. An interrupt between the two would leave weights of
            #    one step with the position of another.
            with hooks.defer_interrupts():
                lr = _set_learning_rate(settings, state, step)
                # The loop's only wait for the device between logs.
                result = reduce_step(training, state, gradient, hooks, world)
                plan_due = hooks.plan_due()
                reason = _update_weights(training, state, result, lr) or reason
                if plan_due and (plan := hooks.plan_length(state)) is not None:
                    state.length.add([plan])
                last = step + 1 >= _planned_images(training, state) // batch_size
                state.due = settings.intervals.stretched(state.length.at(step + 1).stretch).due(step + 1, last)

            # 3. Debugging of a step that was not finite, and what a person or a job manager asks for.
            if result.outcome == "skipped":
                with stopwatch.exclude():
                    reason = _skip_step(training, state, hooks, result.norm_value, computer)
            if hooks.save_requested() and "save" not in state.due:
                state.due.append("save")
            if hooks.preview_requested() and "preview" not in state.due:
                state.due.append("preview")
            hooks.on_step_end(step + 1)
            stopwatch.images += batch_size
    except Interrupted:
        state.optimizer.zero_grad(set_to_none=True)  # the sum over half a batch; a resume begins the step anew


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
    for group in state.optimizer.param_groups:
        group["lr"] = lr
    return lr


def _planned_images(training: Training, state: TrainState) -> int:
    """Return the images of the whole run, as they are planned at the position of the state."""
    # Whole batches are counted below; a run without plans ends at the image that its settings say.
    if not state.length.plans:
        return training.images
    return state.length.at(state.seen // training.batch).steps * training.batch


def _update_weights(training: Training, state: TrainState, result: StepResult, lr: float) -> str | None:
    """Take the optimiser's step if gradient and loss are finite. Returns why to roll back if the loss was anomalous."""
    outcome = result.outcome
    accepted = outcome == "accepted"
    if accepted and result.first_square is not None:
        square = result.first_square / result.scale**2
        state.window.noise.add(square, result.first_images, result.norm.square(), training.batch)
    state.precision.update(state.optimizer, training.clip, result.norm_value, accepted)
    state.optimizer.zero_grad(set_to_none=True)
    state.advance(training.batch, accepted, result.losses)
    state.last = {"gradient_norm": result.norm_value, "lr": lr}
    if outcome == "overflow":  # of fp16: nobody's fault, and the scale is lower from here on
        state.window.overflows += 1
    elif not state.guard.update(result.relative_loss if accepted else math.nan):
        state.window.skipped += not accepted
        return f"the loss rose to {result.relative_loss:.3g} of what no answer would lose, and stayed there"
    return None


def _skip_step(
    training: Training, state: TrainState, hooks: TrainingHooks, norm: float, computer: GradientComputer
) -> str:
    """Report a step that was skipped, and debug the first of several in a row. Returns the reason for a roll-back."""
    report = None
    try:
        if state.guard.skipped == 1:  # a replay takes a few times as long as the step
            with computer.world.full_state(state, "model"):
                replay = computer.world.run_on_main("replay", lambda: _replay_step(training, state, computer))
                report = NanReport(*replay)
    except Interrupted:
        hooks.on_skipped_step(state, norm, None)  # now, because the step is counted already
        raise
    hooks.on_skipped_step(state, norm, report)
    if report is not None and report.phase == "weights":
        # No image will make the weights finite again, so roll back at once.
        state.guard.anomalous = training.patience
        return f"weights were not finite ({report.where})"
    return f"the gradient was not finite in {state.guard.skipped} steps in a row"


def _replay_step(training: Training, state: TrainState, computer: GradientComputer) -> NanReport:
    """Compute the last step again, to find what was not finite."""
    positions = range(state.seen - training.batch, state.seen)
    rng_size, most = rng_batch_size(training, state), microbatch_size(training, state)
    batches = {b[:2]: b for b in split_batch(positions[0], training.batch, rng_size, positions, most)}
    state.model.to(state.precision.device)  # a sharded network was gathered in host memory
    return NanReport.find(state, lambda *place: computer.forward(batches[place], state.model), list(batches))


def _roll_back_if_needed(training: Training, state: TrainState, hooks: TrainingHooks, reason: str) -> None:
    """Restore the last good weights after `patience` anomalous steps, or if what is to be saved is not finite.

    RunError if that happened more than `rollbacks` times.
    """
    with hooks.defer_interrupts():
        bad = state.non_finite() if "save" in state.due else None
        if bad is None and state.guard.anomalous < training.patience:
            return
        reason = reason if bad is None else f"{bad} was not finite"
        hooks.roll_back(state, reason)
        if state.guard.roll_backs > training.rollbacks:
            # Before the error, so that a resume with a lower learning rate begins from the good weights.
            hooks.save(state)
            raise RunError(
                f"training diverged {state.guard.roll_backs} times, the last time at step "
                f"{state.seen // training.batch:,} (lr {state.last['lr']:.3g}): {reason}. The last good weights are "
                "saved. Resume with a lower --lr, which starts this count anew, or with --precision fp32, or train "
                "without the images that events.jsonl names."
            )


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
