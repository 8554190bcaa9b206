"""Recovery from a step that went wrong: look for the cause, and roll back once there are several in a row."""

from __future__ import annotations

from unfog.errors import Interrupted, RunError
from unfog.text import plural
from unfog.training.batches import rng_batch_size, split_batch
from unfog.training.gradient import GradientComputer
from unfog.training.hooks import TrainingHooks
from unfog.training.settings import Training
from unfog.training.stability.nan_debug import NanReport
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState


def skip_step(
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
    skipped = state.guard.skipped
    return f"the gradient was not finite in {plural(skipped, 'step')}{' in a row' * (skipped > 1)}"


def _replay_step(training: Training, state: TrainState, computer: GradientComputer) -> NanReport:
    """Compute the last step again, to find what was not finite."""
    positions = range(state.seen - training.batch, state.seen)
    rng_size, most = rng_batch_size(training, state), microbatch_size(training, state)
    batches = {b[:2]: b for b in split_batch(positions[0], training.batch, rng_size, positions, most)}
    state.model.to(state.precision.device)  # a sharded network was gathered in host memory
    return NanReport.find(state, lambda *place: computer.forward(batches[place], state.model), list(batches))


def roll_back_if_needed(training: Training, state: TrainState, hooks: TrainingHooks, reason: str) -> None:
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
