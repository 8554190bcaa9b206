"""The training loop. Time is counted in images, so every schedule is a pure function of `state.seen`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from unfog.errors import RunError
from unfog.training.protocols import LossFunction, Run, Stream
from unfog.training.settings import Optimizer, Training, learning_rate
from unfog.training.state import TrainState


class Every(NamedTuple):
    """Steps between …; 0: never."""

    log: int
    preview: int
    evaluate: int
    checkpoint: int


def train(
    settings: Training,
    optimizer: Optimizer,
    every: Every,
    state: TrainState,
    stream: Stream,
    augment: Callable[[Tensor], Tensor],
    loss_function: LossFunction,
    run: Run,
) -> None:
    """Advance `state` until `settings.images` images are seen, or a stop is requested.

    `state` is all that a resume needs: the order of images is a function of (seed, seen) and so is all randomness, so
    a run that was interrupted ends bit-identical to one that was not.

    Raises:
        RunError: `settings.patience` steps in a row had a gradient that is not finite.
    """
    device, batch_size = state.precision.device, settings.batch
    steps = settings.images // batch_size
    stopwatch = Stopwatch()
    state.model.train()

    while state.seen < settings.images:
        before, step = state.seen, state.seen // batch_size
        losses: list[tuple[Tensor, Tensor]] = []

        # 1. Gradient of the mean loss over the batch, one micro-batch at a time.
        for first, count in micro_batches(before, batch_size, settings.microbatch or batch_size):
            if run.stop_requested():  # half a batch is no loss: its randomness is a function of the position
                state.optimizer.zero_grad(set_to_none=True)
                return
            started = time.perf_counter()
            batch = stream.batch(first, count)
            stopwatch.data_wait += time.perf_counter() - started
            pixels = to_device(batch.pixels, device)
            label = None if batch.label is None else to_device(batch.label, device)

            seed_at(settings.seed, first)
            x0 = to_model_range(augment(pixels))
            with state.precision.autocast():
                per_image, u = loss_function(state.model, x0, label)
            # Divide by the whole batch, not by this micro-batch: the sum of the passes is then the exact mean,
            # also when the last pass is smaller.
            state.precision.backward(per_image.sum() / batch_size)
            losses.append((per_image.detach(), u))

        # 2. One update, or none.
        lr = learning_rate(optimizer, step, steps)
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        norm, accepted = state.precision.step(state.optimizer, settings.clip)
        state.optimizer.zero_grad(set_to_none=True)
        state.advance(batch_size, accepted, losses)
        if not accepted:
            run.refused(step + 1, state.seen, float(norm))
            if state.refused_in_a_row >= settings.patience:
                raise RunError(too_many_refused(state.refused_in_a_row, step + 1, lr))

        # 3. What a person or a crash needs. The checkpoint comes last, so that it covers its own logs.
        run.advance(step + 1)
        stopwatch.images += batch_size
        record = {}
        if crossed(every.log * batch_size, before, state.seen):
            record = state.window.close() | {"gradient_norm": float(norm), "lr": lr} | stopwatch.lap()
        with stopwatch.paused():
            if crossed(every.evaluate * batch_size, before, state.seen):
                record |= run.evaluate(state)
            if record:
                run.log(step + 1, state.seen, record)
            if crossed(every.preview * batch_size, before, state.seen):
                run.preview(state)
            if crossed(every.checkpoint * batch_size, before, state.seen):
                run.save(state)


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
    def paused(self) -> Iterator[None]:
        """Let what happens inside not count as training."""
        self.busy += time.perf_counter() - self.mark
        yield
        self.mark = time.perf_counter()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device; without waiting where that is safe, which is from pinned memory to CUDA."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_model_range(pixels: Tensor) -> Tensor:
    """uint8 [0, 255] to float32 [-1, 1]: the one place where that happens."""
    return pixels.float() / 127.5 - 1


def seed_at(seed: int, position: int) -> None:
    """Seed every generator from a position in the stream, so that randomness needs no saved state.

    SplitMix64's finaliser keeps neighbouring positions from giving related seeds (Steele et al. 2014).
    """
    z = (seed * 0xD1342543DE82EF95 + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    torch.manual_seed((z ^ (z >> 31)) % 2**63)


def micro_batches(first: int, batch: int, microbatch: int) -> Iterator[tuple[int, int]]:
    """(first position, count) of each pass over one batch; the last may be smaller."""
    for start in range(first, first + batch, microbatch):
        yield start, min(microbatch, first + batch - start)


def crossed(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies in (before, now]; never if `every` is 0."""
    return every > 0 and now // every > before // every


def too_many_refused(count: int, step: int, lr: float) -> str:
    """What to say when the gradient stays non-finite."""
    return (
        f"the gradient was not finite in {count} steps in a row, the last of them step {step} (lr {lr:.3g}). "
        "No such step was taken and no such weight was saved. Lower --lr, lengthen --optimizer.warmup, "
        "or use --precision fp32; then resume."
    )
