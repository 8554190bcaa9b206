"""Hooks of a session: what the training loop calls to record, preview, evaluate, save and plan its length."""

from __future__ import annotations

import shlex
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.errors import RunError
from unfog.pipeline.build import open_stream
from unfog.pipeline.skipped_images import FailureReporter
from unfog.process.device import resource_use
from unfog.reporting.progress import format_duration, plural, say, warn
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import LENGTH_EVENT, PAUSE_EVENT
from unfog.runs.evaluation_hook import EvaluationHook
from unfog.runs.previews import Previews
from unfog.runs.ranks import RunContext, StoppableHooks, watch_outages
from unfog.runs.saver import Saver
from unfog.runs.time_budget import STRETCHES, TimeBudget
from unfog.training.checkpoints.writer import ShardStatusStore
from unfog.training.length import Plan
from unfog.training.stability.nan_debug import NanReport
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState


class SessionHooks(StoppableHooks):
    """The parts of a run in training, and the hooks that use them."""

    def __init__(self, context: RunContext, config: Config, dataset: Dataset, state: TrainState):
        super().__init__(context.stop)
        self.context, self.config, self.dataset = context, config, dataset
        self.stream = open_stream(dataset, config)
        self.state, world = state, context.world
        self.state.precision.processes = world.size
        self.sharded = config.training.is_sharded(world.size)
        # Nothing changes it before it is sharded, so that the first checkpoint, of the beginning, needs no copy.
        self.state.in_host_memory = self.sharded
        self.sharded_from: Path | None = None  # the checkpoint that a sharded state is read from
        self.previews = Previews.build(config, dataset, self.state, context.stop, world)
        self.evaluation = EvaluationHook(context, config, dataset, self.previews)
        self.failures = FailureReporter(context.folder, dataset)
        self.state.length.adopt(config.training.images // config.training.batch)
        self.budget: TimeBudget | None = None
        self._said_steps = 0  # the length that was printed last
        self._new_length = False  # a resume gives one
        self.recorder: Recorder
        self.saver: Saver

    @property
    def step(self) -> int:
        """Steps taken or skipped so far."""
        return self.state.seen // self.config.training.batch

    @property
    def steps(self) -> int:
        """Steps of the whole run, as planned last."""
        return self.state.length.steps

    @property
    def done(self) -> bool:
        """True at the end of the run, with nothing left to do."""
        return self.step >= self.steps and not self.state.due

    def attach(self, recorder: Recorder) -> None:
        recorder.callbacks = self.context.callbacks
        self.recorder, self.saver = recorder, Saver(self.context, self.config, recorder)
        self.context.heartbeat.step, self.context.heartbeat.steps = self.step, self.steps
        self.context.heartbeat.on_activity = recorder.progress.show
        watch_outages(
            self.dataset,
            self.config,
            self.context.world,
            self.context.stop,
            warn=lambda text: recorder.warn(self.step, text),
            pulse=self.context.heartbeat,
        )

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        # Beside the losses: a line of an evaluation alone would show what the evaluation took.
        use = resource_use(self.context.device, self.context.folder.path) if "loss" in record else {}
        self.recorder.log(step, images, **record, **use)
        self.failures.report(self.recorder, step, self.context.world.collect_reports())

    def on_skipped_step(self, state: TrainState, norm: float, culprit: NanReport | None) -> None:
        """Record a skipped step, with the images and the layer that made it not finite, where these are known."""
        fields: dict[str, Any] = {"gradient_norm": norm, "precision": self.config.training.precision}
        if culprit is not None:
            # Read through the stream, as an image that cannot be decoded is replaced by another.
            index = [int(self.stream.batch(place, 1).index[0]) for place in culprit.images]
            names = [self.dataset.train.names[i] for i in index]
            fields |= {"images": names, "levels": culprit.levels, "layer": culprit.where, "phase": culprit.phase}
            warn(f"step {self.step:,} was skipped: {culprit.describe(names)}")
        self.recorder.event("step_refused", self.step, **fields)

    def on_out_of_memory(self, state: TrainState) -> None:
        now = microbatch_size(self.config.training, state)
        checkpointing = getattr(state.model, "checkpointing", False)
        how = "one at a time with gradient checkpointing" if checkpointing else f"{now:,} images at a time"
        self.recorder.warn(self.step, f"out of memory; continuing with {how}, at the same batch size")
        self.recorder.event("out_of_memory", self.step, microbatch=now, checkpointing=checkpointing)

    def on_capture(self, message: str) -> None:
        say(f"  {message}")

    def on_capture_lost(self, state: TrainState, reason: str) -> None:
        try:
            self.save(state)
            saved = f"step {self.step:,} is saved"
        except RuntimeError:  # CUDA does not answer any more
            saved = "the newest checkpoint is whole"
        again = f"unfog resume {shlex.quote(str(self.context.folder.path))} --training.no-capture"
        raise RunError(f"CUDA ended the capture of a step ({reason}); {saved}. To go on without: `{again}`")

    def on_step_end(self, step: int) -> None:
        self.recorder.update_progress(step)
        self.context.heartbeat.step = step
        self.saver.poll()

    def save_requested(self) -> bool:
        """Return True if RUN/SAVE exists, or if the folder was moved or taken over, which a save finds out."""
        heartbeat = self.context.heartbeat
        return heartbeat.save_requested or heartbeat.moved or self.context.lost

    def preview_requested(self) -> bool:
        return self.context.heartbeat.preview_requested

    def preview(self, state: TrainState) -> None:
        started = time.perf_counter()
        self.context.heartbeat.preview_requested = False  # a request that comes from now on is for another one
        with self.aside("preview"), self.context.heartbeat.during("preview"):
            grid = self.previews.preview()
        self.recorder.log_image(self.step, "samples", grid)
        self.recorder.event("preview", self.step, seconds=round(time.perf_counter() - started, 3))

    def save_ema_snapshot(self, state: TrainState) -> None:
        with self.aside("averages"):
            self.saver.save_ema_snapshot(state)

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        with self.aside("evaluate"):
            return self.evaluation.evaluate(self.step, self.recorder)

    def save(self, state: TrainState, for_best: bool = False) -> None:
        state.lost_shards = self.failures.shards
        with self.aside("save"):
            self.saver.save(state, for_best)

    def prepare_save(self, state: TrainState) -> str:
        state.lost_shards = self.failures.shards
        return self.saver.prepare()

    def save_shards(self, state: TrainState, for_best: bool, place: str, post: ShardStatusStore) -> None:
        with self.aside("save"):
            self.saver.take_snapshot(state, for_best, post)

    def needs_final_save(self, state: TrainState) -> bool:
        """Return True if the run stops early and the newest checkpoint is older; nothing interrupts from here."""
        if self.done:
            return False
        self.stop.silence()
        return self.saver.saved != (self.step, state.due)

    def roll_back(self, state: TrainState, reason: str) -> str:
        with self.aside("roll-back"):
            return self.saver.roll_back(state, reason)

    def aside(self, kind: str) -> AbstractContextManager[None]:
        """Count the time inside the `with` as that of a `kind` of work besides training, for the time budget."""
        return nullcontext() if self.budget is None else self.budget.aside(kind)

    def plan_due(self) -> bool:
        if self.budget is None:
            return False
        due = self.budget.due(self.step + 1, self.step + 1 >= self.steps)
        while self.budget.pauses:
            seconds = self.budget.pauses.pop(0)
            say(f"  paused for {format_duration(seconds)}, which counts as a part of the time budget")
            self.recorder.event(PAUSE_EVENT, self.step, seconds=round(seconds, 3))
        return due

    def plan_length(self, state: TrainState) -> Plan | None:
        """Return how the run goes on to end in time, if that changes; print and record it."""
        if self.budget is None or (plan := self.budget.plan(self.step, state.length)) is None:
            return None
        before, why = state.length.at(self.step), self.budget.describe(plan)
        self._record_plan(plan, seconds_per_step=self.budget.step_seconds, reason=why)
        self.recorder.set_total(plan.steps)
        self.context.heartbeat.steps = plan.steps
        if abs(plan.steps - (self._said_steps or before.steps)) > 0.1 * plan.steps:
            self._said_steps = plan.steps
            say(f"  {plural(plan.steps, 'step')} in all from here on: {why}")
        if plan.stretch != before.stretch:
            apart = f"{plan.stretch} times as far apart" if plan.stretch < STRETCHES[-1] else "at the end only"
            what = f"previews and evaluation {apart}" if plan.stretch else "previews at the end only, no evaluation"
            say(f"  {what}, so that they and checkpoints take at most a tenth of the budget")
        return plan

    def _record_plan(self, plan: Plan, **facts: object) -> None:
        fields = {"first": self.state.length.first, "steps": plan.steps, "stretch": plan.stretch}
        self.recorder.event(LENGTH_EVENT, self.step, **fields, position=plan.position, limit=plan.limit, **facts)
