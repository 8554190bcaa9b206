"""A session: one process at work on a run. It is the `Run` that the training loop talks to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from unfog.config.tree import Config
from unfog.data.augment import Augment
from unfog.data.images import Prepared
from unfog.data.stream import ImageStream
from unfog.diffusion.objective import Objective
from unfog.diffusion.sampler import noise_levels
from unfog.evaluation.held_out import HeldOut, midpoints
from unfog.reporting.figures import Pixels
from unfog.reporting.progress import duration, say, warn
from unfog.reporting.recorder import Recorder
from unfog.reporting.report import write_report
from unfog.reporting.sinks import require
from unfog.runs.build import build_state
from unfog.runs.choices import Choice
from unfog.runs.folder import RunFolder
from unfog.runs.pictures import Strip
from unfog.runs.sampling import draw, picture_grid, usual
from unfog.training import checkpoint
from unfog.training.loop import Every, to_model_range, train
from unfog.training.state import TrainState


class Session:
    """Trains a run from where it is to its end, and records, draws, measures and saves when the loop says so."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        prepared: Prepared,
        device: torch.device,
        stop_requested: Callable[[], bool],
    ):
        self.folder, self.config, self.prepared = folder, config, prepared
        self.stop_requested = stop_requested
        self.objective = Objective(config.diffusion, len(config.classes), config.label_dropout)
        noise_levels(config.diffusion.schedule, config.sampler.steps, config.sampler.grid)  # may be refused
        require(config.log.sinks)
        self.held_out = held_out_set(prepared, config, device)
        self.state = build_state(config, device)
        self.pass_size = config.training.microbatch or config.training.batch
        self.saved_step = self.drawn_step = -1
        self.recorder: Recorder

    @property
    def step(self) -> int:
        """Steps taken or refused so far."""
        return self.state.seen // self.config.training.batch

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.config.training.images // self.config.training.batch

    def run(self, choices: list[Choice], saved: checkpoint.Saved | None = None) -> bool:
        """Train from a checkpoint, or from the beginning, to the end or until a stop is requested; True for the end."""
        if saved is not None:
            checkpoint.load(saved.folder, self.state)
            self.saved_step = self.step
        else:
            self.folder.metrics.unlink(missing_ok=True)  # of a start that was cut short before its first checkpoint
        with Recorder(self.folder.path, self.config.log, self.steps, self.step, asdict(self.config)) as self.recorder:
            try:
                self._introduce(choices, fresh=saved is None)
                if saved is None:
                    self._rehearse()
                self.recorder.begin()
                self._train()
                done = self._conclude()
            except Exception as error:
                self.recorder.event("failed", self.step, reason=f"{type(error).__name__}: {error}")
                raise
        say(f"{'finished' if done else 'stopped'} at step {self.step:,} after {duration(self.recorder.seconds)}")
        try:
            write_report(self.folder.path)
        except OSError as error:
            warn(f"the report could not be written: {error}")
        return done

    def _train(self) -> None:
        config = self.config
        train(
            config.training,
            config.optimizer,
            Every(config.log.every, config.preview.every, config.evaluate.every, config.checkpoint.every),
            self.state,
            ImageStream(self.prepared.train, config.training.seed),
            Augment(config.data.flip, config.data.jitter),
            self.objective,
            self,
        )

    def _introduce(self, choices: list[Choice], fresh: bool) -> None:
        """Say and record what is about to happen."""
        for choice in choices:
            say(f"  {choice}")
            self.recorder.event("choice", self.step, name=choice.name, value=str(choice.value), reason=choice.reason)
        self.recorder.event("data", self.step, summary=self.prepared.ledger.line())
        parameters = sum(p.numel() for p in self.state.model.parameters())
        training = self.config.training
        say(
            f"{'training' if fresh else 'resuming'} {parameters / 1e6:.2f}M parameters in {self.folder.path}: "
            f"steps {self.step:,} to {self.steps:,} of {training.batch} images, "
            f"{training.precision} on {training.device}"
        )
        self.recorder.event(
            "started" if fresh else "resumed",
            self.step,
            steps=self.steps,
            device=training.device,
            parameters=parameters,
            torch=torch.__version__,
        )

    def _rehearse(self) -> None:
        """Evaluate, draw and save before the first step: what would fail after an hour fails in the first minute."""
        record = self.evaluate(self.state) if self.config.evaluate.every > 0 else {}
        if record:
            self.log(0, 0, record)
        self.preview(self.state)
        self.save(self.state)

    def _conclude(self) -> bool:
        """Save where the run ends; at its end also log what is left, evaluate and draw, unless just done."""
        done = self.step >= self.steps
        if done and self.saved_step != self.step:
            self._last_record()
        if self.saved_step != self.step:
            self.save(self.state)
        if done and self.drawn_step != self.step:
            self.preview(self.state)
        if done:
            self.recorder.images(self.step, "denoising", self._denoising())
        self.recorder.event("finished" if done else "stopped", self.step)
        return done

    def _last_record(self) -> None:
        """The steps since the last log, and the held-out loss of the final weights."""
        record: dict[str, Any] = {}
        if self.step % self.config.log.every:
            record |= self.state.window.close()
        if self.config.evaluate.every > 0 and self.step % self.config.evaluate.every:
            record |= self.evaluate(self.state)
        if record:
            self.log(self.step, self.state.seen, record)

    def _denoising(self) -> Pixels:
        """How the first picture of the preview came out of the noise."""
        strip = Strip(self.config.diffusion.schedule, self.config.sampler)
        with self.state.ema.swapped_into(self.state.model):
            draw(self.state.model, self.config, usual(self.config, 1, 1), observe=strip)
        return strip.picture()

    # What the loop asks for.

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Record numbers."""
        self.recorder.log(step, images, **record)

    def refused(self, step: int, images: int, norm: float) -> None:
        """Record a refused step."""
        self.recorder.event("step_refused", step, gradient_norm=norm, precision=self.config.training.precision)

    def advance(self, step: int) -> None:
        """Move the progress line."""
        self.recorder.advance(step)

    def preview(self, state: TrainState) -> None:
        """Sample grid from the EMA weights, from the same noise each time: what `unfog sample` gives without flags."""
        started = time.perf_counter()
        with state.ema.swapped_into(state.model):
            pictures = draw(state.model, self.config, usual(self.config, self.config.preview.images, self.pass_size))
        self.recorder.images(self.step, "samples", picture_grid(pictures, self.config.classes))
        self.recorder.event("preview", self.step, seconds=seconds_since(started))
        self.drawn_step = self.step

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Held-out loss of the EMA weights; empty if nothing is held out."""
        if self.held_out is None:
            return {}
        started, schedule = time.perf_counter(), self.config.diffusion.schedule

        def loss_at(x0: Tensor, label: Tensor | None, u: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
            return self.objective.at(state.model, x0, label, schedule(u), noise)

        state.model.eval()
        try:
            with state.ema.swapped_into(state.model):
                record = self.held_out.measure(loss_at, self.pass_size)
        finally:
            state.model.train()
        self.recorder.event("evaluated", self.step, seconds=seconds_since(started))
        return record

    def save(self, state: TrainState) -> None:
        """Save a checkpoint."""
        started = time.perf_counter()
        folder = checkpoint.save(self.folder.checkpoints, self.step, state, self.config.checkpoint)
        self.recorder.event("checkpoint", self.step, folder=folder.name, seconds=seconds_since(started))
        self.saved_step = self.step


def seconds_since(started: float) -> float:
    """What something cost, for the record."""
    return round(time.perf_counter() - started, 3)


def held_out_set(prepared: Prepared, config: Config, device: torch.device) -> HeldOut | None:
    """The held-out images that are measured, evenly spread over the set; None if there are none."""
    images, wanted = prepared.held_out, config.evaluate.images
    if not len(images):
        return None
    index = torch.linspace(0, len(images) - 1, min(wanted, len(images))).long()
    x0 = to_model_range(torch.from_numpy(images.pixels[index.numpy()])).to(device)
    label = None if images.labels is None else torch.from_numpy(images.labels)[index].to(device)
    return HeldOut(x0, label, midpoints(config.evaluate.levels).to(device))
