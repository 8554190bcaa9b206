"""The training loop. Time is counted in images, so every schedule is a pure function of `state.seen`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unfog.diffusion.objective import Loss
from unfog.errors import Interrupted, RunError
from unfog.sharded_rng import rows_of
from unfog.training.checkpoints.ema_snapshots import snapshot_interval
from unfog.training.distributed.coordination import CoordinatedHooks
from unfog.training.distributed.world import SINGLE_PROCESS, World
from unfog.training.hooks import Augmentation, LossFunction, Rank, Run, Stream
from unfog.training.micro_batches import (
    MicroBatch,
    compute_gradient,
    rng_batch_size,
    seed_generators,
    split_batch,
    with_own_seed,
)
from unfog.training.precision import to_device
from unfog.training.settings import Optimizer, Training, learning_rate
from unfog.training.stability.nan_debug import NanReport, find_nan_source
from unfog.training.stability.out_of_memory import microbatch_size, retry_with_smaller_micro_batches
from unfog.training.state import TrainState


class Intervals(NamedTuple):
    """Steps between …; 0: never."""

    log: int
    preview: int
    evaluate: int
    checkpoint: int
    averages: int = 0

    def due(self, step: int, last: bool) -> list[str]:
        """What follows step number `step` (1, 2, …); after the last one all, but evaluation only if ever wanted.

        The checkpoint comes last, so that it covers its own logs.
        """
        wanted = {
            "evaluate": self.evaluate > 0 and (last or step % self.evaluate == 0),
            "log": last or (self.log > 0 and step % self.log == 0),
            "averages": self.averages > 0 and (last or step % snapshot_interval(self.averages, step) == 0),
            "preview": last or (self.preview > 0 and step % self.preview == 0),
            "save": last or (self.checkpoint > 0 and step % self.checkpoint == 0),
        }
        return [name for name, is_due in wanted.items() if is_due]


def train(
    settings: Training,
    optimizer: Optimizer,
    every: Intervals,
    state: TrainState,
    stream: Stream,
    augment: Augmentation,
    loss_function: LossFunction,
    own: Rank,
    world: World = SINGLE_PROCESS,
) -> None:
    """Advance `state` until `settings.images` images are seen, or a stop is requested.

    `state` is all that a resume needs: the order of images is a function of (seed, seen) and so is all randomness, so
    a run that was interrupted ends bit-identical to one that was not, wherever that was. Where there are several
    processes, each calls this with the first one's state, and has the same one at each step.

    Raises:
        RunError: it diverged again after `settings.rollbacks` roll-backs; the last good weights are saved.
    """
    device, batch_size = state.precision.device, settings.batch
    steps = settings.images // batch_size
    stopwatch = Stopwatch()
    state.model.train()
    network = world.wrap_network(state.model, settings.compress)
    together = CoordinatedHooks(own, world) if world.size > 1 else None
    run: Run = together or own

    def forward(one: MicroBatch, network: nn.Module) -> Loss:
        """Loss of the images of a pass, always the same for the same weights."""
        world.set_phase("data", state.seen // batch_size)
        started = time.perf_counter()
        batch = stream.batch(one.first, one.images)
        stopwatch.data_wait += time.perf_counter() - started
        pixels = to_device(batch.pixels, device)
        label = None if batch.label is None else to_device(batch.label, device)
        world.set_phase("forward", state.seen // batch_size)
        seed_generators(settings.seed, one.rng_first)
        with rows_of(one.first - one.rng_first, one.rng_count) if one.is_split else nullcontext():
            x0, condition = augment(pixels)
            called = with_own_seed(network, settings.seed, one.first) if one.is_split else network
            with state.precision.autocast():
                return loss_function(called, x0, label, condition)

    why = "it was stopped while in trouble"  # of a roll-back
    try:
        while not run.stop_requested():
            # 0. What the last step left to do, also if an interruption lies between.
            with stopwatch.exclude():
                roll_back_if_needed(settings, state, run, why)
                run_due_hooks(state, run, stopwatch, batch_size)
            if state.seen >= settings.images:
                return

            # 1. Gradient of the mean loss over the batch, one micro-batch at a time.
            step = state.seen // batch_size
            # Alone, whatever memory suffices for; several stay with what they began the step with, and agree after it.
            drawn = rng_batch_size(settings, state) if together is not None else None
            attempt = partial(compute_gradient, forward, network, world, drawn)
            passes, losses, part_square = retry_with_smaller_micro_batches(settings, state, run, attempt, world.size)

            # 2. One update, or none, and everything that counts it.
            with run.defer_interrupts():
                lr = learning_rate(optimizer, step, steps) * state.guard.lr_scale
                for group in state.optimizer.param_groups:
                    group["lr"] = lr
                norm = state.precision.gradient_norm(state.optimizer)
                part = passes[0].images
                if together is None:
                    verdict = torch.stack([norm, *_sum_losses(losses)])
                else:
                    losses, norm, voices = together.all_reduce_step(state, settings, passes, losses, norm, part_square)
                    verdict = torch.cat([torch.stack([norm, *_sum_losses(losses)]), voices.flatten()])
                # The loop's only wait for the device between logs.
                size, cost, reference, *said = verdict.tolist()
                relative = cost / max(reference, 1e-30)  # 0 over 0 where all weights of a small batch are
                if together is not None:
                    part, part_square = together.apply_statuses(said, voices, state)
                accepted = math.isfinite(size) and math.isfinite(relative)
                if accepted and part_square is not None:
                    part_square = part_square / state.precision.scale**2
                    state.window.noise.add(part_square, part, norm.square(), batch_size)
                overflow = not accepted and math.isfinite(relative) and state.precision.may_overflow
                state.precision.update(state.optimizer, settings.clip, size, accepted)
                state.optimizer.zero_grad(set_to_none=True)
                state.advance(batch_size, accepted, losses)
                if overflow:
                    state.window.overflows += 1
                elif not state.guard.update(relative if accepted else math.nan):
                    state.window.refused += not accepted
                    why = f"the loss rose to {relative:.3g} of what no answer would lose, and stayed there"
                state.last = {"gradient_norm": size, "lr": lr}
                state.due = every.due(step + 1, last=step + 1 >= steps)

            # 3. Whether it was refused, and what a person or a job manager wants to know or to have.
            if not accepted and not overflow:
                with stopwatch.exclude():
                    why = skip_step(settings, state, run, size, forward, world)
            if run.save_requested() and "save" not in state.due:
                state.due.append("save")
            run.on_step_end(step + 1)
            stopwatch.images += batch_size
    except Interrupted:
        state.optimizer.zero_grad(set_to_none=True)


def skip_step(
    settings: Training,
    state: TrainState,
    run: Run,
    norm: float,
    forward: Callable[[MicroBatch, nn.Module], Loss],
    world: World,
) -> str:
    """Have a refused step recorded, the first of several in a row with the culprit. Returns what is wrong.

    Weights that are not finite get no patience: no image will make them so again.
    """
    culprit = None
    try:
        if state.guard.skipped == 1:
            whole = range(state.seen - settings.batch, state.seen)
            parts = split_batch(
                whole[0], settings.batch, rng_batch_size(settings, state), whole, microbatch_size(settings, state)
            )
            passes = {one[:2]: one for one in parts}

            def again(first: int, count: int) -> Loss:
                return forward(passes[first, count], state.model)

            def replay() -> NanReport:
                state.model.to(state.precision.device)  # where it is divided, it is in host memory here
                return find_nan_source(state, again, list(passes))

            with world.full_state(state, "model"):
                culprit = NanReport(*world.run_on_main("replay", replay))
    except Interrupted:
        run.on_skipped_step(state, norm, None)  # the step is behind us, so nobody would say it later
        raise
    run.on_skipped_step(state, norm, culprit)
    if culprit is not None and culprit.phase == "weights":
        state.guard.anomalous = settings.patience
        return f"weights were not finite ({culprit.where})"
    return f"the gradient was not finite in {state.guard.skipped} steps in a row"


def roll_back_if_needed(settings: Training, state: TrainState, run: Run, why: str) -> None:
    """Go back to the last good weights once patience is at its end, or where what is to be saved is not finite.

    Raises:
        RunError: that was done too often.
    """
    with run.defer_interrupts():
        bad = state.non_finite() if "save" in state.due else None
        if bad is None and state.guard.anomalous < settings.patience:
            return
        why = why if bad is None else f"{bad} was not finite"
        run.roll_back(state, why)
        if state.guard.roll_backs > settings.rollbacks:
            run.save(state)
            raise RunError(
                _rollbacks_exhausted(state.guard.roll_backs, state.seen // settings.batch, why, state.last["lr"])
            )


def run_due_hooks(state: TrainState, run: Run, stopwatch: Stopwatch, batch_size: int) -> None:
    """Do what is due after the last step. What is interrupted stays due, and is begun anew after a resume."""
    step = state.seen // batch_size
    if "log" in state.due or "evaluate" in state.due:
        record = run.evaluate(state) if "evaluate" in state.due else {}
        with run.defer_interrupts():
            if "log" in state.due:
                record = state.window.close() | state.last | stopwatch.lap() | record
            if record:
                run.log(step, state.seen, record)
            state.due = [name for name in state.due if name not in ("log", "evaluate")]
            if state.update_best(record) and "save" not in state.due:
                state.due.append("keep the best")
    if "averages" in state.due:
        run.save_ema_snapshot(state)
        state.due.remove("averages")
    if "preview" in state.due:
        run.preview(state)
        state.due.remove("preview")
    if state.due:  # one of "save" and "keep the best" is all that can be left
        for_best = "save" not in state.due
        state.due = []  # before, so that the checkpoint does not ask for itself
        run.save(state, for_best)


class Stopwatch:
    """Speed since the last log. Time spent on previews, evaluation and checkpoints is not training time."""

    def __init__(self) -> None:
        self.data_wait = self.busy = 0.0
        self.images = 0
        self.mark = time.perf_counter()

    def lap(self) -> dict[str, float]:
        """Images per second and the share of time spent waiting for data since the last lap."""
        now = time.perf_counter()
        seconds = max(self.busy + now - self.mark, 1e-9)
        record = {"images_per_second": self.images / seconds, "data_wait": self.data_wait / seconds}
        self.data_wait = self.busy = 0.0
        self.images, self.mark = 0, now
        return record

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Let what happens inside not count as training."""
        self.busy += time.perf_counter() - self.mark
        yield
        self.mark = time.perf_counter()


def _sum_losses(losses: list[Loss]) -> tuple[Tensor, Tensor]:
    """Weighted squared error of a step, and that of answering 0 at the same noise levels: 0-d tensors."""
    cost, reference = [loss.measured.sum() for loss in losses], [loss.null_loss.sum() for loss in losses]
    return (cost[0], reference[0]) if len(losses) == 1 else (torch.stack(cost).sum(), torch.stack(reference).sum())


def _rollbacks_exhausted(times: int, step: int, why: str, lr: float) -> str:
    """What to say when roll-backs do not help."""
    return (
        f"training diverged {times} times, the last time at step {step:,} (lr {lr:.3g}): {why}. "
        "The last good weights are saved. Resume with a lower --lr, which starts this count anew, or with "
        "--precision fp32, or train without the images that events.jsonl names."
    )
