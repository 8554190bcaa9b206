"""Settings of training, one frozen dataclass for each thing that is configured. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from unfog.errors import RequestError
from unfog.training.ema_schedules import EmaSchedule, PowerEma
from unfog.training.optimizer_settings import AdamW, OptimizerKind

PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
SamplingPrecision = Literal["fp32", "bf16"]
MemoryFormat = Literal["auto", "contiguous", "channels_last"]


@dataclass(frozen=True)
class Training:
    """How long, how much at once, on what."""

    steps: int = 0
    """Optimiser steps of the whole run. Short: --steps. Give one of steps, images and budget."""
    images: int = 0
    """Training images of the whole run, repeats counted. Short: --images."""
    budget: str = ""
    """Wall time from here on, as 90s, 10m or 2h: measures the speed, then fixes `images`. Short: --budget."""
    batch: int = 64
    """Images for one optimiser step. Short: --batch."""
    microbatch: int = 0
    """Images in one forward and backward pass; gradients add up to `batch`. 0: the whole batch. Short: --microbatch."""
    noise: Literal["microbatch", "batch"] = "microbatch"
    """batch: the same noise however many images go at once, and on however many processes. microbatch: of before."""
    clip: float = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it. 0: no clipping."""
    precision: PrecisionName = "auto"
    """Of forward and backward; weights stay fp32. auto: whichever of them is fast on the device. Short: --precision."""
    memory_format: MemoryFormat = "auto"
    """How convolutions have images in memory. auto: channels_last in fp32 on a CPU and in 16 bits on CUDA."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 or mps. auto: cuda, else mps, else cpu. Short: --device."""
    seed: int = 0
    """Seed of the initial weights, the order of images, noise and dropout. Short: --seed."""
    patience: int = 20
    """Steps in a row that may be refused for a non-finite gradient, or lose far more than usual, before a roll-back."""
    rollbacks: int = 8
    """Times that a run may go back to its last good weights, with half the learning rate, before it stops."""
    grace: float = 30.0
    """Seconds within which a stop ends the run, also if the disk is full; job managers usually grant 30."""
    timeout: float = 600.0
    """Seconds that processes which train together wait for one that hangs before they end."""
    compress: Literal["none", "bf16"] = "none"
    """What gradients travel as between processes. bf16: half the bytes, and each to three digits."""
    shard: bool = False
    """Divide weights, gradients, averages and moments among the processes that torchrun starts, for large networks."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: a third more time, for a third to a half less memory at the peak."""
    compile: bool = False
    """Compile the network with torch.compile: slow to start, faster after that on GPUs. Short: --compile."""

    def __post_init__(self) -> None:
        for name in ("steps", "images", "microbatch", "clip"):
            if getattr(self, name) < 0:
                raise RequestError(f"{name} = {getattr(self, name)} must not be negative")
        at_least_one("patience", self.patience)
        if not 1 <= self.timeout <= 10**6:
            raise RequestError(f"timeout = {self.timeout} must be from 1 to 1000000 seconds; 600 is usual")
        if not (self.rollbacks >= 0 and self.grace >= 0):
            raise RequestError(f"rollbacks = {self.rollbacks} and grace = {self.grace} must not be negative")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"seed = {self.seed} must be from 0 to 2^63 - 1")
        if not 1 <= self.batch <= 1_000_000:
            raise RequestError(f"batch = {self.batch} must be from 1 to 1000000 images; 64 is usual")
        if max(self.steps, self.images // 1000) > 10**12:
            raise RequestError(f"steps = {self.steps}, images = {self.images}: nobody waits for that; give less")
        if self.shard and self.compress != "none":
            raise RequestError("training.compress is of whole networks; leave it away, or training.shard")
        if self.microbatch > self.batch:
            raise RequestError(
                f"microbatch = {self.microbatch} is larger than batch = {self.batch}; lower it, or leave it away"
            )

    def is_sharded(self, processes: int) -> bool:
        """Whether so many processes divide the network."""
        return self.shard and processes > 1


@dataclass(frozen=True)
class Optimizer:
    """What moves the weights, and its learning rate over the run."""

    lr: float = 0.0
    """Peak learning rate. 0: by size: 0.006 with Muon, 0.003 with AdamW for a U-Net of 1M, batch 64. Short: --lr."""
    warmup: int = 0
    """Steps of linear rise to the peak; the first step is not zero. 0: 5% of the run, at most 5000 steps."""
    schedule: Literal["constant", "cosine", "inverse-sqrt", "cooldown"] = "constant"
    """After warm-up: cosine to zero; constant, with no end yet; cooldown, which ends a constant one; or 1/sqrt."""
    cooldown: float = 0.2
    """Share of the whole run, at its end, in which `cooldown` falls to zero."""
    method: OptimizerKind = AdamW()
    """adamw, muon, or custom:path=torch.optim.RMSprop, which runs the code that is named. Short: --optimizer."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's running mean and running square of the gradient."""
    eps: float = 1e-8
    """AdamW's guard against division by zero."""
    weight_decay: float = 0.01
    """Decoupled weight decay, of AdamW and Muon."""

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise RequestError(f"lr = {self.lr} must be above 0, or 0 to choose it; 1e-4 to 3e-3 is usual")
        if not (self.warmup >= 0 and self.weight_decay >= 0):
            raise RequestError(f"warmup = {self.warmup} and weight_decay = {self.weight_decay} must not be negative")
        if not self.eps > 0:  # the gradient of a class that is not in a batch is exactly zero
            raise RequestError(f"eps = {self.eps} must be above 0, as some gradients are zero; 1e-8 is usual")
        if not 0 < self.cooldown <= 1:
            raise RequestError(f"cooldown = {self.cooldown} must be a share above 0, up to 1; 0.2 is usual")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise RequestError(f"betas = {self.betas} must be from 0 up to, not including, 1; 0.9 0.999 is usual")


MAX_EMA_SNAPSHOTS = 48
"""Snapshots that are kept; beyond, every other one goes."""


@dataclass(frozen=True)
class EmaSnapshots:
    """Snapshots of two averages, from which `unfog ema-sweep` rebuilds one of any length after training."""

    every: int = 0
    """Steps between snapshots. 0: some 24 in a run of 200 steps or more with --ema power; -1: none, and no second."""
    second: float = 0.0
    """Width of the second average, which only these snapshots need. 0: half of that of --ema."""

    def __post_init__(self) -> None:
        check_interval("ema_snapshots.every", self.every)
        if self.second:
            PowerEma(self.second)

    def second_schedule(self, ema: EmaSchedule) -> PowerEma | None:
        """The second average; None where there is none."""
        if self.every < 0 or not isinstance(ema, PowerEma):
            return None
        return PowerEma(self.second or (ema.width / 2 if ema.width >= 0.02 else 2 * ema.width))


@dataclass(frozen=True)
class Preview:
    """Sample grids during training, from the same noise each time."""

    every: int = 0
    """Steps between previews. 0: about ten in the run; -1: only the first and the last."""
    images: int = 16
    """Pictures in a preview. With classes, they cycle through them."""

    def __post_init__(self) -> None:
        at_least_one("preview.images", self.images, most=10_000)
        check_interval("preview.every", self.every)


def split_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Each name once, in the order given; a word may hold several with commas between."""
    return tuple(dict.fromkeys(name.strip() for word in words for name in word.split(",")))


@dataclass(frozen=True)
class Evaluate:
    """What is measured during training: held-out loss, on the same images, noise and noise levels each time; and, where
    it is asked for, metrics of pictures that are drawn for it, always from the same noise."""

    DRAWN: ClassVar[tuple[str, ...]] = ("fid", "kid", "precision", "recall", "density", "coverage", "sliced")
    """Metrics that need drawn pictures."""
    HIGHER: ClassVar[tuple[str, ...]] = ("precision", "recall", "density", "coverage")
    """Those that are better when higher."""

    every: int = 0
    """Steps between evaluations. 0: about ten in the run; -1: none."""
    images: int = 64
    """Held-out images that are used."""
    levels: int = 8
    """Noise levels, at equal quantiles of the training distribution."""
    metrics: tuple[str, ...] = ()
    """Of drawn pictures as well: kid, fid, precision, recall, density, coverage, sliced, with commas between."""
    features: str = "texture"
    """What the metrics compare: texture, pixels (coarser), or inception, which needs its file."""
    samples: int = 0
    """Pictures that are drawn for the metrics. 0: as many as `share` permits, up to 5000."""
    reference: int = 0
    """Training images that they are compared with. 0: as many as `share` permits, up to 10000."""
    metrics_every: int = 0
    """Steps between two times that pictures are drawn, at evaluations. 0: what `share` permits; -1: never."""
    share: float = 0.05
    """Share of the training time that the metrics may take, where `samples` or `metrics_every` is 0."""
    best: str = "held_out_loss"
    """What says which checkpoint is the best, and kept: held_out_loss, or one of `metrics`."""

    def __post_init__(self) -> None:
        at_least_one("evaluate.images", self.images, most=1_000_000)
        at_least_one("evaluate.levels", self.levels, most=1000)
        check_interval("evaluate.every", self.every)
        check_interval("evaluate.metrics_every", self.metrics_every)
        object.__setattr__(self, "metrics", split_names(self.metrics))
        for name in self.metrics:
            if name not in self.DRAWN:
                raise RequestError(f"evaluate.metrics names {name!r}, which is not one of {', '.join(self.DRAWN)}")
        if self.features not in ("texture", "pixels", "inception") and ".pt" not in self.features:
            raise RequestError(
                f"evaluate.features = {self.features!r} is none; give texture, pixels, inception or its file"
            )
        if self.best not in ("held_out_loss", *self.metrics):
            asked = f" of --evaluate.metrics {','.join((*self.metrics, self.best))}" if self.best in self.DRAWN else ""
            raise RequestError(f"evaluate.best = {self.best} is not measured; give held_out_loss, or one{asked}")
        if not 0 < self.share <= 0.5:
            raise RequestError(f"evaluate.share = {self.share} must be above 0 and at most 0.5; 0.05 is usual")
        for name in ("samples", "reference"):
            if (value := getattr(self, name)) and not 10 <= value <= 1_000_000:
                raise RequestError(f"evaluate.{name} = {value} must be 0 to choose it, or from 10 to 1000000")


@dataclass(frozen=True)
class Checkpoint:
    """What a crash leaves behind."""

    every: int = 0
    """Steps between checkpoints. 0: about ten in the run; -1: only the first and the last."""
    keep: int = 3
    """Newest checkpoints to keep, besides the best one by `evaluate.best`."""
    milestones: int = 0
    """Also keep those at multiples of this many steps, for good; 0: none."""

    def __post_init__(self) -> None:
        at_least_one("checkpoint.keep", self.keep)
        check_interval("checkpoint.every", self.every)
        if self.milestones < 0:
            raise RequestError(f"checkpoint.milestones = {self.milestones} must not be negative; 0 keeps none")


def check_interval(name: str, steps: int) -> None:
    """RequestError for a negative interval other than -1."""
    if steps < -1:
        raise RequestError(f"{name} = {steps} must be a number of steps, 0 to choose it, or -1 for never")


def at_least_one(name: str, value: int, most: int | None = None) -> None:
    """RequestError unless `value` is 1 or more, and at most `most`."""
    if value < 1 or (most is not None and value > most):
        raise RequestError(f"{name} = {value} must be at least 1" + (f" and at most {most}" if most else ""))


def learning_rate(settings: Optimizer, step: int, steps: int) -> float:
    """Learning rate of optimiser step `step` (0, 1, …) of `steps`: a function of position, with no state to resume."""
    warmup = max(settings.warmup, 1)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    if settings.schedule == "cosine":
        return settings.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))
    if settings.schedule == "inverse-sqrt":
        return settings.lr * math.sqrt(warmup / (step + 1))
    if settings.schedule == "cooldown":
        # 1 - sqrt ends better than a line does, and a fifth of the run as well as a cosine (Haegele et al. 2024).
        length = max(1, min(round(settings.cooldown * steps), steps - warmup))
        return settings.lr * (1 - math.sqrt(max(0, step - (steps - length)) / length))
    return settings.lr
