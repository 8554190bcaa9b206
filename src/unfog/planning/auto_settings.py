"""Automatic choices: each is made once, printed, recorded, and stored in config.toml as if a person had made it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from unfog.config.schema import Config
from unfog.config.validate import parse_duration
from unfog.data.dataset import ImageSet
from unfog.doctor.settings.learning_rate_checks import fine_tuning, usual_learning_rate
from unfog.errors import RequestError
from unfog.models.settings import SIZES, Architecture
from unfog.pipeline.build import build_network, input_shape
from unfog.planning.disk import snapshot_bytes
from unfog.planning.microbatch import choose_microbatch, memory_per_process, required_memory
from unfog.planning.run_costs import forward_passes
from unfog.planning.step_benchmark import seconds_per_step
from unfog.reporting.progress import format_bytes
from unfog.training.checkpoints.writer import free_bytes
from unfog.training.precision import default_memory_format, emulates_bf16, native_precision
from unfog.training.settings import MemoryFormat, PrecisionName

AVERAGES = 24
"""Snapshots of a run, left open: an average 0.3 to 2 times as long is rebuilt to within 0.1%."""
WORTH_AVERAGES = 200
"""Steps from which on they are taken."""
MOST_STEPS_LOST = 1000  # to a crash, at the automatic interval of checkpoints


class Choice(NamedTuple):
    """A setting that was left open, what it became, and why."""

    name: str
    value: object
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


class AutoSettings:
    """A configuration on its way to being complete. Each method settles one thing and notes the choice, if it was open.

    Measuring runs real training steps on a throwaway network; `stop` ends it early. Of the `processes` that train
    together each takes its share of a batch.
    """

    def __init__(
        self, config: Config, images: ImageSet, device: torch.device, stop: Callable[[], bool], processes: int = 1
    ):
        self.config = replace(config, training=replace(config.training, device=str(device)))
        self.choices: list[Choice] = []
        self._images, self._device, self._stop, self.processes = images, device, stop, processes
        self._measured: dict[str, float] = {}  # precision -> seconds per step

    def resolve(self) -> None:
        """All that is open, for a new run, in the order in which one follows from another."""
        self.resolve_network()
        self.resolve_learning_rate()
        self.resolve_weight_decay()
        self.resolve_microbatch()
        self.resolve_precision()
        self.resolve_memory_format()
        self.resolve_length()
        self.resolve_intervals()

    def resolve_network(self) -> None:
        """A network for the device and the image size. RequestError if the one that was asked for does not fit it."""
        if self.config.trains_autoencoder:
            return
        size = input_shape(self.config)[1]
        if self.config.network is not None:
            self.config.network.check(size)
            return
        if self._device.type == "cpu":
            wanted, reason = ("tiny" if size <= 32 else "small"), "what a CPU trains in reasonable time"
        else:
            wanted, reason = ("cifar10" if size <= 32 else "base"), "the usual network"
        # Sizes that the usual one cannot halve often enough get the next that can.
        name = next((n for n in (wanted, "small", "tiny") if _image_size_fits(SIZES[n], size)), wanted)
        self.config = replace(self.config, network=SIZES[name])
        self._note("network", name, f"{reason} at {size} {'latents' if self.config.uses_latents else 'pixels'}")

    def resolve_microbatch(self, resuming: bool = False) -> None:
        """Fewer images at once where memory does not suffice for the batch; the gradient stays that of the batch.

        What is set is kept if it fits, with no margin; of a run that goes on, also the whole batch, as with fewer at
        once the noise is another.

        Raises:
            RequestError: not even one image fits.
        """
        training, share = self.config.training, self.process_config()
        if training.microbatch or resuming:
            available = memory_per_process(self._device)
            if required_memory(share, self._device, available, self.processes) < available:
                return
        fit = choose_microbatch(share, self._device, processes=self.processes)
        if fit.microbatch != (share.training.microbatch or share.training.batch):
            self._note("microbatch", fit.microbatch, fit.reason)
            training = replace(training, microbatch=fit.microbatch)
        if fit.checkpointing and not training.checkpointing:
            self._note("checkpointing", True, "not even one image fits without")
            training = replace(training, checkpointing=True)
        self.config = replace(self.config, training=training)

    def resolve_precision(self) -> None:
        """What the hardware is made for on a GPU; on a CPU, whichever of fp32 and bf16 is faster here.

        That is measured only where it may be bf16: it takes longer than all the rest of a start.
        """
        if self.config.training.precision != "auto":
            return
        name: PrecisionName = "fp32"
        if self._device.type == "cpu" and emulates_bf16():
            reason = "this CPU has no instructions for bf16"
        elif self._device.type == "cpu":
            # A second is enough for the one that hardly ever is the faster where there are instructions for the other.
            fp32, bf16 = self._seconds_per_step("fp32", 1.0), self._seconds_per_step("bf16")
            name = "bf16" if bf16 < 0.95 * fp32 else "fp32"
            reason = f"{fp32 * 1e3:.0f} ms a step in fp32, {bf16 * 1e3:.0f} in bf16"
        else:
            name, reason = native_precision(self._device), f"native to {self._device}"
        self.config = replace(self.config, training=replace(self.config.training, precision=name))
        self._note("precision", name, reason)

    def resolve_memory_format(self) -> None:
        """What suits the precision. Not for a run that goes on: one from before there was a choice keeps what it had.

        By rule rather than by timing, so that a command repeated gives the same bits.
        """
        if self.config.training.memory_format != "auto":
            return
        name: MemoryFormat = "contiguous"
        if self.config.network is not None and self.config.network.prefers_channels_last:
            name, reason = default_memory_format(self._device, self.config.training.precision)
            self._note("memory_format", name, reason)
        self.config = replace(self.config, training=replace(self.config.training, memory_format=name))

    def resolve_learning_rate(self) -> None:
        """Large networks want small steps, large batches allow large ones; both go by the square root.

        The constant was measured with 1M parameters (docs/decisions/0007-default-recipe.md); at 35M the rule gives
        0.0005, between DDPM's 2e-4 and EDM's 1e-3.
        """
        optimizer, batch = self.config.optimizer, self.config.training.batch
        if optimizer.lr:
            return
        # In memory, as that is quick; on the "meta" device it would cost a second of imports.
        parameters = sum(p.numel() for p in build_network(self.config).parameters())
        share = fine_tuning(self.config)
        usual = usual_learning_rate(parameters, batch, self.config.network, optimizer.method)
        lr = float(f"{share * usual:.2g}")
        self.config = replace(self.config, optimizer=replace(optimizer, lr=lr))
        why = f"for {parameters / 1e6:.2f}M parameters and batches of {batch}"
        why += f", {share:g} of what random weights get: more would undo what these know" if share < 1 else ""
        self._note("optimizer.lr", lr, why)

    def resolve_weight_decay(self) -> None:
        """None for weights of fixed length: they are brought back to it after each step, so that decay would only
        shrink the gains that they are multiplied by."""
        network = self.config.network
        if network is not None and network.fixed_norm_weights and self.config.optimizer.weight_decay:
            self.config = replace(self.config, optimizer=replace(self.config.optimizer, weight_decay=0.0))
            self._note("optimizer.weight_decay", 0, "the weights of this network have a fixed length")

    def resolve_length(self, seen: int = 0) -> None:
        """Fix the number of images, whichever way the length was given. A budget begins after the `seen` images."""
        training = self.config.training
        images = training.images or training.steps * training.batch
        self.check_length()
        if not images:
            budget = training.budget or "1h"
            pace = self.seconds_per_step()
            possible = parse_duration(budget) / pace * training.batch
            images = seen + self._trained_of(possible)
            reason = f"{budget} at {training.batch / pace:,.0f} images/s, less what previews and evaluation take"
            self._note("images", images, reason)
        steps = max(1, -(-images // training.batch))
        if steps * training.batch < seen:
            raise RequestError(
                f"the run is at step {seen // training.batch:,} already, so {steps:,} steps in all are behind it; "
                "--steps and --images count from the beginning of the run, --budget from now on"
            )
        training = replace(training, images=steps * training.batch, steps=0, budget="")
        self.config = replace(self.config, training=training)

    def check_length(self) -> None:
        """RequestError where the length would have to be measured, and cannot be."""
        if self.sharded and not (self.config.training.images or self.config.training.steps):
            raise RequestError(
                "training.budget measures the speed of a whole network on one device, which training.shard is there to "
                "avoid; give --steps or --images"
            )

    def _trained_of(self, possible: float) -> int:
        """How many images are trained in the time of so many, less what previews and evaluation take; at least half.

        Their intervals follow from the length, so that is guessed and corrected a few times.
        """
        images = possible
        for _ in range(4):
            training = replace(self.config.training, images=max(1, round(images)))
            config, _ = _with_intervals(replace(self.config, training=training))
            costs = forward_passes(config, config.evaluate.images)
            aside = (sum(costs.values()) - costs["training"]) * training.images / costs["training"]
            images = max(possible / 2, possible - aside)
        return round(images)

    def resolve_intervals(self) -> None:
        """Warm-up and intervals that were left open follow from the length."""
        config = self.config
        steps = config.training.images // config.training.batch
        if config.optimizer.warmup == 0:
            warmup = max(1, min(5000, steps // 20))
            config = replace(config, optimizer=replace(config.optimizer, warmup=warmup))
            self._note("optimizer.warmup", warmup, "5% of the run, at most 5000 steps")
        if config.log.every == 0:
            config = replace(config, log=replace(config.log, every=min(50, round_down_to_125(steps / 20))))
            self._note("log.every", config.log.every, "twenty times or more, at most 50 steps apart")
        if config.ema_snapshots.every > 0 and config.ema_snapshots.second_schedule(config.ema) is None:
            config = replace(config, ema_snapshots=replace(config.ema_snapshots, every=-1))
            self._note("ema_snapshots.every", -1, "averages of a fixed decay cannot be rebuilt into others")
        if config.ema_snapshots.every == 0:
            config = replace(
                config, ema_snapshots=replace(config.ema_snapshots, every=self._averages_every(config, steps))
            )
        config, open_ones = _with_intervals(config)
        if open_ones:
            told = ", ".join(f"{name} {getattr(config, name).every}" for name in open_ones)
            self._note("every", told, "ten to twenty times in the run, and no more than 1000 steps to lose")
        self.config = config

    def _averages_every(self, config: Config, steps: int) -> int:
        """Some 24 snapshots, from which `unfog ema-sweep` finds the best length; none where nobody would sweep."""
        if steps < WORTH_AVERAGES or config.ema_snapshots.second_schedule(config.ema) is None:
            return -1
        every = max(1, round(steps / AVERAGES))
        takes = snapshot_bytes(sum(p.numel() for p in build_network(config).parameters()), every, steps)
        if takes > free_bytes(Path.cwd()) / 4:
            self._note(
                "ema_snapshots.every", -1, f"{format_bytes(takes)} would be over a quarter of the disk that is free"
            )
            return -1
        reason = f"{format_bytes(takes)} of snapshots, from which unfog ema-sweep rebuilds an average of any length"
        self._note("ema_snapshots.every", every, reason)
        return every

    def seconds_per_step(self) -> float:
        """Wall time of a training step as it is settled, measured once."""
        return self._seconds_per_step(self.config.training.precision)

    def _seconds_per_step(self, precision: PrecisionName, limit: float = 3.0) -> float:
        if precision not in self._measured:
            config = self.process_config()
            config = replace(config, training=replace(config.training, precision=precision))
            self._measured[precision] = seconds_per_step(config, self._images, self._device, self._stop, limit)
        return self._measured[precision]

    def process_config(self) -> Config:
        """The settings of what one process does of each batch, at the most."""
        training = self.config.training
        batch = -(-training.batch // self.processes)
        return replace(self.config, training=replace(training, batch=batch, microbatch=min(training.microbatch, batch)))

    @property
    def sharded(self) -> bool:
        """Whether the network will be divided among processes."""
        return self.config.training.is_sharded(self.processes)

    def _note(self, name: str, value: object, reason: str) -> None:
        self.choices.append(Choice(name, value, reason))


def _with_intervals(config: Config) -> tuple[Config, list[str]]:
    """With intervals of previews, evaluation and checkpoints that follow from its length, and which were left open."""
    every = round_down_to_125(config.training.images // config.training.batch / 10)
    open_ones = [name for name in ("preview", "evaluate", "checkpoint") if getattr(config, name).every == 0]
    for name in open_ones:
        interval = min(every, MOST_STEPS_LOST) if name == "checkpoint" else every
        config = replace(config, **{name: replace(getattr(config, name), every=interval)})
    return config, open_ones


def _image_size_fits(network: Architecture, size: int) -> bool:
    """Whether images of this size pass through the network."""
    try:
        network.check(size)
    except RequestError:
        return False
    return True


def round_down_to_125(x: float) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, … that is at most x; at least 1."""
    power = int(10 ** math.floor(math.log10(max(x, 1))))
    return max(m * power for m in (1, 2, 5) if m == 1 or m * power <= x)
