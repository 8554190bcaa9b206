"""Settings of training, optimiser, EMA, previews, evaluation and checkpoints. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from unfog.custom import CustomPart
from unfog.errors import RequestError
from unfog.settings import AUTO, check_bounds, is_auto, setting
from unfog.values.image_format import parse_view

PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
USUAL_BATCH = 64
SamplingPrecision = Literal["auto", "fp32", "bf16", "fp16"]
MemoryFormat = Literal["auto", "contiguous", "channels_last"]
Deterministic = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Training:
    """Length of training, batch size, precision and device."""

    steps: int = setting(0, short="steps", at_least=0, affects="steps", resume="free", common=True)
    """Optimiser steps of the whole run. Give one of steps, images and budget."""
    images: int = setting(0, short="images", at_least=0, affects="steps", resume="free")
    """Training images of the whole run, repeats counted."""
    budget: str = setting("", short="budget", affects="steps", resume="free", common=True)
    """Total time of the command, as 90s, 10m or 2h. The length of the run follows from the measured speed."""
    batch: int = setting(
        USUAL_BATCH,
        short="batch",
        auto=0,
        at_least=0,
        at_most=1000000,
        usual="64",
        common=True,
        measured="`tiny` on CIFAR-10, six minutes of one core: loss 0.157 with 32, 0.156 with 64",
        see="docs/decisions/0007-default-recipe.md",
    )
    """Images for one optimiser step. 0: 64, and 256 on CUDA where the network sees at most 32x32 pixels or latents."""
    microbatch: int = setting(0, short="microbatch", auto=0, at_least=0, affects="steps", resume="free")
    """Images in one forward and backward pass; gradients add up to `batch`. 0: the whole batch."""
    noise: Literal["microbatch", "batch"] = setting("microbatch", affects="steps", resume="free", added_later=True)
    """batch: draw the same noise whatever the micro-batch and the number of processes. microbatch: draw it for each."""
    clip: float = setting(1.0, at_least=0, resume="free")
    """Gradient norm above which the gradient is scaled down to it. 0: no clipping."""
    precision: PrecisionName = setting(AUTO, short="precision", auto=AUTO, resume="free")
    """Of forward and backward; weights stay fp32. auto: by hardware and size of the network."""
    memory_format: MemoryFormat = setting(
        AUTO,
        auto=AUTO,
        affects="steps",
        resume="free",
        added_later=True,
        measured="a step in fp32 on a CPU is 1.18 to 1.40 times as fast in channels_last",
        see="docs/decisions/0016-memory-format.md",
    )
    """Memory format of convolutions. auto: channels_last in fp32 on a CPU and in 16 bits on CUDA."""
    deterministic: Deterministic = setting(
        AUTO, auto=AUTO, affects="steps", resume="free", added_later=True, see="docs/devices.md"
    )
    """off: let CUDA take kernels whose sums vary, so a resume goes on but not to the bit. auto: on."""
    device: str = setting(AUTO, short="device", auto=AUTO, affects="nothing", resume="free", common=True)
    """auto, cpu, cuda, cuda:1 or mps. auto: cuda, else mps, else cpu."""
    seed: int = setting(0, short="seed", at_least=0, at_most=9223372036854775807, resume="force", common=True)
    """Seed of the initial weights, the order of images, noise and dropout."""
    patience: int = setting(20, at_least=1, affects="steps", resume="free", see="docs/decisions/0009-divergence.md")
    """Steps in a row that may be skipped for a non-finite gradient, or have a far higher loss, before a roll-back."""
    rollbacks: int = setting(8, at_least=0, affects="steps", resume="free")
    """Roll-backs to the last good weights, each with half the learning rate, before the run stops."""
    grace: float = setting(30.0, at_least=0, affects="nothing", resume="free")
    """Seconds within which a stop ends the run, even if the disk is full; job managers usually grant 30."""
    timeout: float = setting(600.0, at_least=1, at_most=1000000, usual="600", affects="nothing", resume="free")
    """Seconds that several processes wait for one that hangs before they end."""
    compress: Literal["none", "bf16"] = setting("none", affects="steps", resume="free", added_later=True)
    """Compression of gradients between processes. bf16: half the bytes, and three digits of each."""
    shard: bool = setting(False, affects="nothing", resume="free")
    """Shard weights, gradients, EMAs and optimiser state over the processes of torchrun, for large networks."""
    checkpointing: bool = setting(False, affects="nothing", resume="free")
    """Gradient checkpointing: a third more time, for a third to a half less peak memory."""
    compile: bool | None = setting(
        None, short="compile", auto=None, affects="nothing", resume="free", see="docs/devices.md"
    )
    """Compile the network with torch.compile: slow to start, faster after that on GPUs. auto: off."""
    capture: bool | None = setting(None, auto=None, affects="nothing", resume="free", see="docs/devices.md")
    """Capture each step as one CUDA graph, which one launch replays. auto: on for NVIDIA GPUs where it can be."""

    def __post_init__(self) -> None:
        check_bounds(self)
        # Positions are whole numbers in float64 columns and JSON, which hold them exactly up to 2**53.
        if max(self.steps, self.images // 1000) > 10**12:
            raise RequestError(f"steps = {self.steps}, images = {self.images}: this is too long; give less")
        # Compression hooks into DistributedDataParallel, and FSDP2 reduces gradients by itself.
        if self.shard and self.compress != "none":
            raise RequestError("training.compress and training.shard cannot be combined; omit one of them")
        if not is_auto(self, "batch") and self.batch < self.microbatch:
            raise RequestError(
                f"microbatch = {self.microbatch} must be at most batch = {self.batch}; lower it, or omit it"
            )

    @property
    def likely_batch(self) -> int:
        """Images for one optimiser step before the device is known: if `batch` is open, the number usual on a CPU."""
        return USUAL_BATCH if is_auto(self, "batch") else self.batch

    def is_sharded(self, processes: int) -> bool:
        """Return whether so many processes shard the network."""
        return self.shard and processes > 1


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) for every weight, with the betas, eps and decay of the section."""

    kind: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024) for matrices and convolutions; AdamW for embeddings, norms, biases and both ends.

    The update of a matrix is its orthogonalised momentum times 0.2 sqrt(longer side). That is as long as an update of
    AdamW (Liu et al. 2025, "Muon is Scalable"), so that one learning rate serves both.
    """

    kind: ClassVar[str] = "muon"
    momentum: float = 0.95
    """Decay of the running mean of the gradient; Nesterov's."""
    rounds: int = setting(5, at_least=1, at_most=20, usual="5")
    """Newton-Schulz iterations; each costs time, and 5 bring singular values to about 0.7 to 1.2."""

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise RequestError(f"momentum = {self.momentum} must be from 0 up to, not including, 1; 0.95 is usual")
        check_bounds(self)


@dataclass(frozen=True)
class Custom(CustomPart):
    """Any torch optimiser by its dotted path. Naming one runs its code: it is imported when the run begins.

    It is called with the parameters, `lr`, and the arguments; its moments are saved and restored like AdamW's.
    """

    noun: ClassVar[str] = "an optimiser"

    @property
    def identity(self) -> str:
        """Return the name under which a checkpoint stores the optimiser state; only an equal name can load it."""
        # The state may depend on any of the arguments.
        return f"{self.kind}:{self.path}({', '.join(sorted(self.arguments))})"


OptimizerKind = AdamW | Muon | Custom
OPTIMIZERS = (AdamW, Muon, Custom)


@dataclass(frozen=True)
class Optimizer:
    """Optimiser, and its learning rate over the run."""

    lr: float = setting(
        0.0,
        short="lr",
        auto=0.0,
        at_least=0,
        usual="1e-4 to 6e-3, or 0 to choose it,",
        common=True,
        why="0.003 suits a million parameters at batch 64; it follows the square roots of batch and 1 / parameters",
        measured="Fréchet distance on Fashion-MNIST, AdamW: 29.0 with 0.001, 16.5 with 0.003, 17.8 with 0.006",
        see="docs/decisions/0007-default-recipe.md",
    )
    """Peak learning rate. 0: by size: 0.006 with Muon, 0.003 with AdamW for a U-Net of 1M, batch 64."""
    warmup: int = setting(0, auto=0, at_least=0)
    """Steps of linear rise to the peak; the first step is not zero. 0: 5% of the run, at most 5000 steps."""
    schedule: Literal["constant", "cosine", "inverse-sqrt", "cooldown"] = "constant"
    """After warm-up: cosine to zero; constant, with no end yet; cooldown, which ends a constant one; or 1/sqrt."""
    cooldown: float = setting(0.2, above=0, at_most=1, usual="0.2", added_later=True)
    """Share of the run, at its end, in which the schedule `cooldown` falls to zero."""
    method: OptimizerKind = setting(
        AdamW(),
        short="optimizer",
        added_later=True,
        why="Muon reaches AdamW's last loss after 40 to 50% of its images",
        measured="CIFAR-10, six minutes of one core: KID 0.0625 with Muon, 0.0901 with AdamW",
        paper="Jordan et al. 2024 (Muon); Liu et al. 2025 (its scale); Loshchilov and Hutter 2019 (AdamW)",
        see="docs/decisions/0007-default-recipe.md",
    )
    """adamw, muon, or custom:path=torch.optim.RMSprop, which runs the code that is named."""
    betas: tuple[float, float] = setting((0.9, 0.999), at_least=0, below=1, usual="0.9 0.999")
    """Decay of AdamW's running mean and running square of the gradient."""
    eps: float = setting(1e-8, above=0, usual="1e-8")
    """AdamW's guard against division by zero."""
    weight_decay: float = setting(0.01, at_least=0)
    """Decoupled weight decay, of AdamW and Muon."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def learning_rate(self, step: float, steps: int, warmed: float | None = None) -> float:
        """Return the learning rate of step `step` (0, 1, …) of `steps`: a function of position alone.

        A run whose length was planned anew gives its position in the schedule instead of the step, and how far its
        warm-up has come as `warmed`; see `training.length.Length`.
        """
        warmup = max(self.warmup, 1)
        warmed = step if warmed is None else warmed
        if warmed >= warmup:
            return self._after_warmup(warmup, step, steps)
        lr = self.lr * min(warmed + 1, warmup) / warmup  # a first step at 0 would be wasted
        # A run that was shortened may have to cool down before it is warm.
        return lr if step < warmup else min(lr, self._after_warmup(warmup, step, steps))

    def _after_warmup(self, warmup: int, step: float, steps: int) -> float:
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))
        if self.schedule == "inverse-sqrt":
            return self.lr * math.sqrt(warmup / (step + 1))
        if self.schedule == "cooldown":
            # 1 - sqrt ends better than a line does, and a fifth of the run as well as a cosine (Haegele et al. 2024).
            length = max(1, min(round(self.cooldown * steps), steps - warmup))
            return self.lr * (1 - math.sqrt(max(0, step - (steps - length)) / length))
        return self.lr


@dataclass(frozen=True)
class PowerEma:
    """EMA with a power-function profile: its horizon is a share of the run so far, so a run of any length has one.

    decay = (1 - 1/n)^(gamma + 1) at update n (EDM2, eq. 127 with unit steps). `width` is the profile's standard
    deviation relative to the run's length; gamma solves width^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) (eq. 126).
    The first update copies the weights, so the initial random ones never count.
    """

    kind: ClassVar[str] = "power"
    width: float = setting(0.1, at_least=0.01, at_most=0.28, usual="0.05 to 0.15")
    """Standard deviation of the averaging window as a share of the run so far; 0.01 to 0.28."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @cached_property
    def gamma(self) -> float:
        """Exponent of the profile, by bisection: the right-hand side falls as gamma grows."""
        low, high = 0.0, 200.0
        # After sixty halvings of 200 the interval is as small as float64 can resolve.
        for _ in range(60):
            middle = (low + high) / 2
            if (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > self.width**2:
                low = middle
            else:
                high = middle
        return low

    def decay(self, update: int) -> float:
        """Return the weight of the old average at update 1, 2, 3, …"""
        return float((1 - 1 / update) ** (self.gamma + 1))


@dataclass(frozen=True)
class FixedEma:
    """EMA with a fixed decay, and a warm-up so that a short run is not mostly its initial weights.

    At update n the decay is at most (1 + n) / (10 + n). With 0.9999, 1 - 1/e = 63% of the average comes from the last
    10,000 updates (the last 5,000 make 39%).
    """

    kind: ClassVar[str] = "fixed"
    decay_max: float = 0.9999
    """Decay that the warm-up rises to."""

    def __post_init__(self) -> None:
        if not 0 <= self.decay_max < 1:
            raise RequestError(f"decay_max = {self.decay_max} must be from 0 up to, not including, 1; 0.9999 is usual")

    def decay(self, update: int) -> float:
        """Return the weight of the old average at update 1, 2, 3, …"""
        return min(self.decay_max, (1 + update) / (10 + update))


EmaSchedule = PowerEma | FixedEma
EMA_SCHEDULES = (PowerEma, FixedEma)


# Beyond so many snapshots every other one is removed.
MAX_EMA_SNAPSHOTS = 48


@dataclass(frozen=True)
class EmaSnapshots:
    """Snapshots of two EMAs, from which `unfog ema-sweep` rebuilds one of any length after training."""

    every: int = setting(0, auto=0)
    """Steps between snapshots. 0: about 24 in a run of 200 steps or more with --ema power; -1: none, no second EMA."""
    second: float = setting(0.0, auto=0.0)
    """Width of the second EMA, which only these snapshots need. 0: half of that of --ema."""

    def __post_init__(self) -> None:
        _check_interval("ema_snapshots.every", self.every)
        if not is_auto(self, "second"):
            PowerEma(self.second)

    def second_schedule(self, ema: EmaSchedule) -> PowerEma | None:
        """Return the schedule of the second EMA, or None."""
        if self.every < 0 or not isinstance(ema, PowerEma):
            return None
        if not is_auto(self, "second"):
            return PowerEma(self.second)
        # Half of a width below 0.02 would be out of the bounds of a width.
        return PowerEma(ema.width / 2 if ema.width >= 0.02 else 2 * ema.width)


@dataclass(frozen=True)
class Preview:
    """Sample grids during training, from the same noise each time."""

    every: int = setting(0, auto=0)
    """Steps between previews. 0: about ten in the run, fewer in a short one; -1: only the first and the last."""
    images: int = setting(16, at_least=1, at_most=10000)
    """Samples in a preview. With classes, they cycle through them."""
    view: str = setting("", added_later=True)
    """Channels to show of arrays with other values: one, such as 0 or 0:viridis, or three, such as 3,2,1. Default: the
    first."""

    def __post_init__(self) -> None:
        check_bounds(self)
        _check_interval("preview.every", self.every)
        parse_view(self.view)


def split_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return each name once, in order; a word may hold several with commas between."""
    return tuple(dict.fromkeys(name.strip() for word in words for name in word.split(",")))


@dataclass(frozen=True)
class Evaluate:
    """Evaluation during training: held-out loss on the same images, noise and noise levels each time, and optionally
    metrics of samples, generated from the same noise each time."""

    VALUES: ClassVar[tuple[str, ...]] = ("spectrum", "histogram", "correlation")
    """Metrics of samples with any channels and values; all others of `DRAWN` are of pictures of 8 bits."""
    OBEYS: ClassVar[str] = "obeys"
    """Whether samples have the conditions that were asked, by a judge; of runs with conditions."""
    DRAWN: ClassVar[tuple[str, ...]] = (
        *("fid", "kid", "precision", "recall", "density", "coverage", "sliced"),
        *VALUES,
        OBEYS,
    )
    """Metrics that need samples."""
    HIGHER: ClassVar[tuple[str, ...]] = ("precision", "recall", "density", "coverage", OBEYS)
    """Metrics that are better when higher."""

    every: int = setting(0, auto=0)
    """Steps between evaluations. 0: about ten in the run, fewer in a short one; -1: none."""
    images: int = setting(64, at_least=1, at_most=1000000, affects="held_out_loss")
    """Held-out images to use."""
    levels: int = setting(8, at_least=1, at_most=1000, affects="held_out_loss")
    """Noise levels, at equal quantiles of the training distribution."""
    metrics: tuple[str, ...] = ()
    """Metrics of samples: kid, fid, precision, recall, density, coverage, sliced; of any values spectrum, histogram,
    correlation; obeys, whether samples have their conditions. With commas between."""
    features: str = setting("texture", affects="samples")
    """Features that the metrics compare: texture, pixels (coarser), or inception, which needs its file."""
    samples: int = setting(0, auto=0, affects="samples")
    """Samples to generate for the metrics. 0: as many as `share` permits, up to 5000."""
    reference: int = setting(0, auto=0, affects="samples")
    """Training images to compare them with. 0: as many as `share` permits, up to 10000."""
    metrics_every: int = setting(0, auto=0)
    """Steps between evaluations that generate samples. 0: as often as `share` permits; -1: never."""
    share: float = setting(0.05, above=0, at_most=0.5, usual="0.05")
    """Share of the arithmetic of training that the metrics may take, where `samples` or `metrics_every` is 0."""
    best: str = "held_out_loss"
    """Metric by which the best checkpoint is chosen and kept: held_out_loss, or one of `metrics`."""

    def __post_init__(self) -> None:
        check_bounds(self)
        _check_interval("evaluate.every", self.every)
        _check_interval("evaluate.metrics_every", self.metrics_every)
        # Stored split, so that "kid,fid" and two words are the same settings, with the same digest.
        object.__setattr__(self, "metrics", split_names(self.metrics))
        for name in self.metrics:
            if name not in self.DRAWN:
                raise RequestError(f"evaluate.metrics names {name!r}, which is not one of {', '.join(self.DRAWN)}")
        # Any other name must be a file of weights: a misspelt one is to fail here, and not at the first evaluation.
        if self.features not in ("texture", "pixels", "inception") and ".pt" not in self.features:
            raise RequestError(
                f"evaluate.features = {self.features!r} is unknown; give texture, pixels, inception or its file"
            )
        if self.best not in ("held_out_loss", *self.metrics):
            asked = f" of --evaluate.metrics {','.join((*self.metrics, self.best))}" if self.best in self.DRAWN else ""
            raise RequestError(f"evaluate.best = {self.best} is not measured; give held_out_loss, or one{asked}")
        for name in ("samples", "reference"):
            value = getattr(self, name)
            if not (is_auto(self, name) or 10 <= value <= 1_000_000):
                raise RequestError(f"evaluate.{name} = {value} must be 0 to choose it, or from 10 to 1000000")


@dataclass(frozen=True)
class Checkpoint:
    """Saving of checkpoints, and which of them are kept."""

    every: int = setting(0, auto=0)
    """Steps between checkpoints. 0: about ten in the run; -1: only the first and the last."""
    keep: int = setting(3, at_least=1)
    """Newest checkpoints to keep, besides the best one by `evaluate.best`."""
    milestones: int = setting(0, at_least=0)
    """Keep checkpoints at multiples of this many steps for good; 0: none."""
    mirror: str = setting(
        "",
        short="mirror",
        why="a rented machine may lose its disk; `unfog resume` continues from the mirror",
        see="docs/mirror.md",
    )
    """Folder that the run is copied to after each checkpoint, in the background, such as one on a mounted drive."""

    def __post_init__(self) -> None:
        check_bounds(self)
        _check_interval("checkpoint.every", self.every)


def _check_interval(name: str, steps: int) -> None:
    if steps < -1:
        raise RequestError(f"{name} = {steps} must be a number of steps, 0 to choose it, or -1 for never")
