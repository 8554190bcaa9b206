"""Overfit-one-batch test: a working setup memorizes eight images with fixed noise within seconds.

Whatever keeps a run from learning, such as a missing gradient, a wrong target or a tiny learning rate, fails this test.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unfog.config.schema import Config
from unfog.data.dataset import ImageSet
from unfog.data.stream import Batch
from unfog.diffusion.objective import Loss, Objective
from unfog.errors import Interrupted
from unfog.evaluation.held_out import fixed_losses, midpoints
from unfog.pipeline.build import build_objective, fixed_loss, without_augmentation
from unfog.pipeline.latents import ImageMap, Show
from unfog.reporting.charts import line_chart
from unfog.reporting.findings import DRY_RUN, Figure, Finding
from unfog.reporting.image_grids import Pixels, grid
from unfog.reporting.progress import Progress, format_number
from unfog.reporting.records import json_values
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import LoopSettings, train
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState
from unfog.values.conditions import Conditions

_IMAGES = 8
# Loss, over that of an answer which looks at each pixel alone, at which the images count as learned.
LEARNED = 0.25
# Share of the loss of answering 0 beyond which no answer need go: the noise is nearly all there is to be seen at noisy
# levels, so that repeating the input answers the eps target to a hundred thousandth.
_LEAST = 0.01
# Loss over that of the first step, above which nothing is learned after so many steps. Measured over targets and
# schedules: up to 0.66 after 100 steps at a learning rate of 2e-4, up to 0.54 after 30 at the usual one, and 1 where no
# gradient arrives.
STUCK, _STUCK_AFTER = 0.95, 100
# The same for weights that do not move at all, which shows at once.
_FROZEN, _FROZEN_AFTER = 0.999, 20
# The first limit that is reached counts; the test ends sooner once the images are learned.
_MOST_STEPS, _MOST_SECONDS = 600, 20.0
# Relative change of the outputs when an input is exchanged; below it, the network ignores that input.
_IGNORED = 1e-6

_ToModel = Callable[[Tensor], Tensor]


def overfit_one_batch(
    config: Config, state: TrainState, images: ImageSet, stop: Callable[[], bool] = lambda: False
) -> Finding:
    """Overfit eight images in the real training loop, with the run's network, objective, optimiser and precision.

    The settings are resolved. The state is fresh, and of no use afterwards. Eight evenly spread images are learned,
    each at a noise level of its own. Interrupted is raised once `stop` returns True.
    """
    device, see = state.precision.device, without_augmentation(config)
    batch = OverfitBatch.of(images, build_objective(config), device, see, ImageMap.of(config, device).view)
    batch.at_once = min(_IMAGES, config.training.microbatch or _IMAGES)
    settings = replace(config.training, batch=_IMAGES, microbatch=batch.at_once, images=10**6 * _IMAGES)
    settings = replace(settings, capture=False)  # the loss of each image is read in each step
    optimizer = replace(config.optimizer, warmup=20, schedule="constant")
    task = Task(batch, lambda pixels: (see(pixels), None), batch.loss)
    with Progress("overfitting eight images, step", None) as progress:  # it ends by time, or once they are learned
        monitor = _OverfitMonitor(batch, progress, stop)
        train(LoopSettings(settings, optimizer), state, task, monitor)
    if stop():
        raise Interrupted
    batch.at_once = min(batch.at_once, microbatch_size(settings, state))  # memory may not have sufficed even so
    return _finding(config, state, batch, monitor)


@dataclass(eq=False)
class OverfitBatch:
    """Eight images with conditions, noise levels and noise; serves as data stream and as loss function."""

    x0: Tensor
    """float32 [B, C, H, W]."""
    pixels: Tensor
    """As the stream gives them: uint8 [B, C, H, W], or stored latents."""
    conditions: Conditions
    u: Tensor
    noise: Tensor
    objective: Objective
    show: Show
    at_once: int = _IMAGES
    """How many the network is given at a time, for lack of memory."""
    place: int = 0
    """Of the first image of the batch that was asked for last."""
    step: int = 1
    """That it belongs to, from 1 on."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Losses of steps whose end is not reported yet: float32 [B] on the CPU."""

    @classmethod
    def of(
        cls, images: ImageSet, objective: Objective, device: torch.device, see: _ToModel, show: Show
    ) -> OverfitBatch:
        """Take eight evenly spread images of a set, without dropout, which would hide conditions."""
        index = np.unique(np.linspace(0, len(images) - 1, _IMAGES).astype(np.int64))
        index = np.resize(index, _IMAGES)  # of a smaller set each comes at several levels
        taken = images.take(index)
        pixels = torch.from_numpy(taken.pixels)
        x0 = see(pixels).to(device)
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(x0.shape, generator=generator).to(device)
        u = midpoints(_IMAGES).to(device)
        return cls(x0, pixels, taken.conditions, u, noise, replace(objective, dropout=0.0), show)

    def batch(self, first: int, size: int) -> Batch:
        self.step, self.place = 1 + first // _IMAGES, first % _IMAGES
        part = slice(self.place, self.place + size)
        return Batch(first, self.pixels[part], self.conditions.rows(part), torch.arange(_IMAGES)[part])

    def loss(self, network: nn.Module, x0: Tensor, conditions: Conditions) -> Loss:
        """Return the loss of the run's objective, with the fixed level and noise of each image."""
        part = slice(self.place, self.place + len(x0))
        loss = self.objective(network, x0, conditions._replace(augment=None), u=self.u[part], noise=self.noise[part])
        losses = self.losses.setdefault(self.step, torch.full((_IMAGES,), math.nan))
        losses[part] = loss.measured.detach().cpu()
        return loss

    def pixelwise_loss(self) -> Tensor:
        """Return the loss, float64 [B] on the CPU, of the best prediction from each pixel alone.

        For pixels of variance s^2 about a mean m it is x0 = m + alpha s^2 / (alpha^2 s^2 + sigma^2) (x_t - alpha m).
        """
        diffusion = self.objective.diffusion
        logsnr = diffusion.schedule(self.u)
        x_t = diffusion.add_noise(self.x0, self.noise, logsnr)
        alpha, sigma = (part[:, None, None, None] for part in diffusion.path(logsnr))
        mean = self.x0.mean(0, keepdim=True)
        # Of each pixel: those that are the same in all images need no guessing.
        variance = (self.x0 - mean).square().mean(0, keepdim=True)
        x0 = mean + alpha * variance / (alpha.square() * variance + sigma.square()) * (x_t - alpha * mean)
        answer = diffusion.network_target(x0, (x_t - alpha * x0) / sigma, logsnr)
        loss_at = fixed_loss(lambda x, c_noise, conditions: answer, self.objective)
        losses = fixed_losses(loss_at, self.x0, self.conditions, self.u[None], lambda level: self.noise, _IMAGES)
        return losses[0, 0]

    def answers(self, network: nn.Module, exchanged: str = "") -> Tensor:
        """Return the outputs [B, C, H, W], optionally with one input exchanged: image, level or a condition.

        Images and levels are rotated among the batch; conditions are hidden.
        """
        diffusion = self.objective.diffusion
        logsnr = diffusion.schedule(self.u)
        x, c_noise = diffusion.network_input(diffusion.add_noise(self.x0, self.noise, logsnr), logsnr)
        conditions = self.conditions.to(x.device)
        if exchanged in conditions.droppable:
            conditions = conditions.dropped(only=exchanged)
        x = x.roll(1, 0) if exchanged == "image" else x
        c_noise = c_noise.roll(1, 0) if exchanged == "level" else c_noise
        was_training = network.training
        network.eval()
        with torch.inference_mode():
            parts = [slice(first, first + self.at_once) for first in range(0, _IMAGES, self.at_once)]
            answer = [network(x[part], c_noise[part], conditions.rows(part)) for part in parts]
        network.train(was_training)
        return torch.cat(answer)

    def ignored_inputs(self, network: nn.Module) -> list[str]:
        """Return the names of inputs that do not change the outputs."""
        answers = self.answers(network)
        inputs = ["image", "level", *self.conditions.droppable]
        limit = _IGNORED * answers.norm()
        return [name for name in inputs if (self.answers(network, name) - answers).norm() <= limit]

    def image_grid(self, network: nn.Module) -> Pixels:
        """Return a grid with a column for each image: clean, noisy, and denoised by the network."""
        diffusion = self.objective.diffusion
        logsnr = diffusion.schedule(self.u)
        x_t = diffusion.add_noise(self.x0, self.noise, logsnr)
        guess = diffusion.recover(self.answers(network), x_t, logsnr)[0]
        # On the VE path x_t reaches far beyond the range; each is shown as far as it reaches.
        x_t = x_t / x_t.abs().amax((1, 2, 3), keepdim=True).clamp_min(1)
        pixels = self.show(torch.cat([self.x0, x_t, guess]))
        names = [name for name in ("images", "noisy", "denoised") for _ in range(_IMAGES)]
        return grid(pixels, columns=_IMAGES, row_names=names)


class _OverfitMonitor(TrainingHooks):
    """Training hooks that watch the loss and stop when the images are learned or the time is up."""

    def __init__(self, batch: OverfitBatch, progress: Progress, interrupted: Callable[[], bool]):
        self.batch, self.progress, self.interrupted = batch, progress, interrupted
        self.deadline = time.monotonic() + _MOST_SECONDS
        self.pixelwise = batch.pixelwise_loss()
        self.first: Tensor
        self.relative: list[float] = []
        """Loss of each step over that of the blind answer; the geometric mean over the images, as levels differ."""
        self.fallen: list[float] = []
        """The same over that of the first step, when the network still answered 0."""

    def on_step_end(self, step: int) -> None:
        # By its number: on a GPU the next step may have been computed by now.
        loss = self.batch.losses.pop(step)
        if not self.relative:
            self.first = loss
        self.relative.append(_ratio(loss, torch.maximum(self.pixelwise, _LEAST * self.first)))
        self.fallen.append(_ratio(loss, self.first))
        self.progress.update(step)

    @property
    def reached(self) -> tuple[float, float]:
        """Recent loss, divided by that of predicting each pixel alone, and by that of the first step."""
        if not self.relative:
            return math.inf, math.inf
        return statistics.median(self.relative[-5:]), statistics.median(self.fallen[-5:])

    def stop_requested(self) -> bool:
        learned = len(self.relative) >= 5 and self.reached[0] < LEARNED
        late = len(self.relative) >= _MOST_STEPS or time.monotonic() > self.deadline
        return learned or late or self.interrupted()


def _ratio(loss: Tensor, other: Tensor) -> float:
    """Geometric mean of the ratios of losses [B]."""
    return float((loss.double().clamp_min(1e-30) / other.double().clamp_min(1e-30)).log().mean().exp())


def _finding(config: Config, state: TrainState, batch: OverfitBatch, monitor: _OverfitMonitor) -> Finding:
    steps, (relative, fallen) = len(monitor.relative), monitor.reached
    facts: dict[str, Any] = {"steps": steps, "images": _IMAGES, "loss_to_blind": relative, "loss_to_first": fallen}
    facts = json_values(facts) | {"lr": config.optimizer.lr, "precision": config.training.precision}
    began = f"in {steps} steps of {_IMAGES} images at lr {config.optimizer.lr:.2g} the loss"
    went = f"fell to {format_number(100 * fallen)}% of" if fallen <= 1 else f"rose to {format_number(fallen)} times"
    said = f"{began} {went} what it was at first"
    finding = partial(Finding, f"{DRY_RUN}.overfit", facts=facts, figures=_figures(batch, monitor, state.model))
    if steps and not math.isfinite(fallen):
        skipped = f"became infinite, and {steps - state.updates} steps were skipped"
        return finding(
            "fatal",
            f"{began} {skipped}",
            "a lower --lr" + ", or --precision fp32" * (config.training.precision != "fp32"),
        )
    if (fallen > _FROZEN and steps >= _FROZEN_AFTER) or (fallen > STUCK and steps >= _STUCK_AFTER):
        remedy = (
            "use --lr 0, which chooses a usual rate; if that is the rate already, no gradient reaches the "
            "network: please report it"
        )
        return finding("fatal", f"{said}, so the network learns nothing", remedy if fallen <= 1.01 else "a lower --lr")
    ignored = batch.ignored_inputs(state.model)
    if ignored and fallen < _FROZEN:
        said = f"{said}, but the network's output does not depend on its {' or its '.join(ignored)}"
        return finding(
            "fatal", said, "check how the network uses its inputs; if it is a network of Unfog, please report it"
        )
    if relative < LEARNED:
        return finding("fine", f"{said}, {format_number(100 * relative)}% of the loss of predicting each pixel alone")
    remedy = "normal with a low --lr or a slow machine"
    return finding("hint", f"{said} when time ran out: the network learns, but has not memorized them yet", remedy)


def _figures(batch: OverfitBatch, monitor: _OverfitMonitor, network: nn.Module) -> tuple[Figure, ...]:
    steps = list(range(1, len(monitor.relative) + 1))
    curves = {
        "of the first step": (steps, monitor.fallen),
        "of predicting each pixel alone": (steps, monitor.relative),
    }
    curve = line_chart(curves, "step", "loss, as a share", log_y=True)
    caption = "Eight images at noise levels from clean (left) to noisy, always with the same noise."
    return (
        Figure("Overfitted images", image=batch.image_grid(network), caption=caption),
        Figure("Loss while overfitting", svg=curve, caption="Geometric mean over the images."),
    )
