"""A session: one process at work on a run. It is the `Run` that the training loop talks to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from unfog.config.resume_rules import settings_digests
from unfog.config.schema import Config, redact_urls
from unfog.data.dataset import Dataset
from unfog.data.stream import ImageStream
from unfog.errors import Interrupted, LostProcess
from unfog.pipeline.build import build_held_out_set, build_objective, build_state
from unfog.pipeline.failed_shards import FailureReporter
from unfog.planning.auto_settings import Choice
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.findings import Finding
from unfog.reporting.progress import format_duration, say, warn
from unfog.reporting.recorder import Recorder
from unfog.reporting.report import write_report
from unfog.reporting.trackers import check_installed
from unfog.runs.autoencoder_previews import AutoencoderPreviews
from unfog.runs.evaluation_hook import EvaluationHook
from unfog.runs.previews import Previews
from unfog.runs.saver import Saver
from unfog.runs.workers import run_training_loop
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.sharded import ShardStatusStore
from unfog.training.distributed.world import SINGLE_PROCESS, World
from unfog.training.loop import Stopwatch, run_due_hooks
from unfog.training.stability.nan_debug import NanReport
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState


class Session:
    """Trains a run from where it is to its end, and records, draws, measures and saves when the loop says so."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        prepared: Dataset,
        device: torch.device,
        stop: StopSignals,
        heartbeat: Heartbeat,
        weights: dict[str, torch.Tensor] | None = None,
        world: World = SINGLE_PROCESS,
    ):
        self.folder, self.config, self.prepared, self.stop, self.pulse = folder, config, prepared, stop, heartbeat
        self.world = world
        config.sampler.visits(config.diffusion.schedule)  # may be refused
        check_installed(config.log.sinks)
        self.stream = ImageStream(prepared.as_network_input.train, config.training.seed)
        self.state = build_state(config, device, weights, world.init_device(config.training.shard, device))
        self.state.precision.processes = world.size
        self.divided = config.training.is_sharded(world.size)
        # Nothing changes it before it is divided, so that the first checkpoint, of the beginning, needs no copy.
        self.state.in_host_memory = self.divided
        self.saved: Path | None = None
        """The checkpoint that a divided state is read from."""
        self.objective = build_objective(config)
        previews = AutoencoderPreviews if config.trains_autoencoder else Previews
        self.looks = previews(config, self.state, self.objective, build_held_out_set(prepared, config, device), stop)
        self.evaluation = EvaluationHook(folder, config, prepared, self.looks, device)
        self.recorder: Recorder
        self.saver: Saver
        self.failures = FailureReporter(folder, prepared)

    @property
    def step(self) -> int:
        """Steps taken or refused so far."""
        return self.state.seen // self.config.training.batch

    @property
    def done(self) -> bool:
        """Whether it is at its end."""
        return self.step >= self.steps and not self.state.due

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.config.training.images // self.config.training.batch

    def run(
        self,
        choices: Sequence[Choice],
        findings: Sequence[Finding] = (),
        saved: checkpoint.CheckpointInfo | None = None,
        changes: Sequence[str] = (),
    ) -> bool:
        """Train from a checkpoint, or from the beginning, to the end or until a stop is requested; True for the end.

        Args:
            choices: what was chosen for the person.
            findings: what an examination of images and settings found; those that cost something are warned of.
            saved: the checkpoint; None for the beginning.
            changes: lines on settings that differ from those of the run so far.
        """
        if saved is None:
            self.folder.metrics.unlink(missing_ok=True)  # of a start that was cut short before its first checkpoint
        else:
            self._load(saved)
        self.state.adopt_settings(settings_digests(self.config))
        with self._recorder() as recorder:
            self.attach(recorder)
            if saved is not None:
                self.saver.saved = (self.step, list(self.state.due))
            try:
                self._introduce(choices, findings, changes, fresh=saved is None)
                if saved is None:
                    self._rehearse()
                self.recorder.start_progress()
                self.pulse.activity = "training"
                self.train()
                done = self._conclude()
            except (Exception, KeyboardInterrupt) as error:
                # Whoever asked twice to leave gets what is on its way saved if that is a matter of a moment.
                at_once = isinstance(error, KeyboardInterrupt) or (self.divided and isinstance(error, LostProcess))
                self.saver.finish_after_failure(at_once, shared=self.divided)
                self.recorder.event("failed", self.step, reason=f"{type(error).__name__}: {error}")
                self.pulse.end(f"failed: {error}")
                raise
            finally:
                self.saver.close()
                self.stream.close()
            self.pulse.end("finished" if done else "stopped")
        say(
            f"{'finished' if done else 'stopped'} at step {self.step:,} after "
            f"{format_duration(self.recorder.seconds)}, of which checkpoints took {self.saver.stall_seconds:.1f} s"
        )
        try:
            write_report(self.folder.path)
        except OSError as error:
            warn(f"the report could not be written: {error}")
        return done

    def attach(self, recorder: Recorder) -> None:
        """Write things down here from now on."""
        self.recorder = recorder
        self.saver = Saver(self.folder, self.config, self.stop, self.pulse, recorder)
        self.save_ema_snapshot = self.saver.save_ema_snapshot
        self.pulse.step, self.pulse.steps = self.step, self.steps

    def _recorder(self) -> Recorder:
        """The record from here on; lines of logs that are due will be written again."""
        logged = self.step - ("log" in self.state.due or "evaluate" in self.state.due)
        return Recorder(
            self.folder.path,
            self.config.log,
            self.steps,
            self.step,
            asdict(redact_urls(self.config)),
            logged,
            self.stop.defer_interrupts,
        )

    def _load(self, saved: checkpoint.CheckpointInfo) -> None:
        """Take over a checkpoint; where the network will be divided, each process takes its rows of it then."""
        if self.divided:
            self.state.load_progress(checkpoint.read_state(saved.folder))
            self.saved = saved.folder
        else:
            checkpoint.load(saved.folder, self.state)
        if saved.made_on != (machine := self.state.precision.describe_machine()):
            say(f"  computed by {machine} from here on, before by {saved.made_on}: the last bits may differ")

    def train(self) -> None:
        """Train to the end, or until a stop is requested; the caller's random numbers are then what they were."""
        device = self.state.precision.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            run_training_loop(self.config, self.state, self.stream, self, self.world, self.saved)

    def _introduce(
        self, choices: Sequence[Choice], findings: Sequence[Finding], changes: Sequence[str], fresh: bool
    ) -> None:
        """Say and record what is about to happen."""
        for change in changes:
            say(f"  changed: {change}")
            self.recorder.event("changed", self.step, setting=change)
        for choice in choices:
            say(f"  {choice}")
            self.recorder.event("choice", self.step, name=choice.name, value=str(choice.value), reason=choice.reason)
        for finding in findings:
            if finding.severity in ("fatal", "warning"):
                self.recorder.warn(self.step, f"{finding.evidence}; {finding.remedy}".removesuffix("; "))
        self.recorder.event("data", self.step, summary=self.prepared.report.line())
        if self.config.ema_snapshots.every > 0 and not self.state.ema_history_known:
            say("  no snapshots of averages are taken: the two have not been kept alike since the run began")
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
        state, training = self.state, self.config.training
        state.due = [*(["evaluate"] if self.config.evaluate.every > 0 else []), "preview", "save"]
        with suppress(Interrupted):  # what is still due then, is done after a resume
            run_due_hooks(state, self, Stopwatch(), training.batch)
            self.saver.wait()  # steps without anything to go back to would be steps that can be lost

    def _conclude(self) -> bool:
        """Wait for the last checkpoint, or save where a stop was asked for; True at the end of the run."""
        done = self.done
        if done:
            with suppress(Interrupted):  # it can be had by `unfog sample --strip` as well
                with self.pulse.during("drawing"):
                    strip = self.looks.final_image()
                self.recorder.log_image(self.step, self.looks.final_name, strip)
            if self.state.guard.anomalous:
                strange = self.state.guard.anomalous
                self.recorder.warn(self.step, f"the last {strange} step(s) were refused or lost far more than usual")
        self.stop.silence()
        if self.needs_final_save(self.state):
            self.save(self.state)
        self.saver.wait(leaving=True)
        self.recorder.event("finished" if done else "stopped", self.step)
        return done

    # What the loop asks for.

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        """Record numbers, and which images could not be decoded since the last ones."""
        self.recorder.log(step, images, **record)
        self.failures.report(self.recorder, step, self.world.collect_reports())

    def on_skipped_step(self, state: TrainState, norm: float, culprit: NanReport | None) -> None:
        """Record a refused step; with the culprit, if that was looked for."""
        fields: dict[str, Any] = {"gradient_norm": norm, "precision": self.config.training.precision}
        if culprit is not None:
            # By what was in the batch, which may be an image that stands in for another.
            names = [self.prepared.train.names[int(self.stream.batch(place, 1).index[0])] for place in culprit.images]
            fields |= {"images": names, "levels": culprit.levels, "layer": culprit.where, "phase": culprit.phase}
            warn(f"step {self.step:,} was refused: {culprit.describe(names)}")
        self.recorder.event("step_refused", self.step, **fields)

    def on_out_of_memory(self, state: TrainState) -> None:
        """Say and record that memory did not suffice."""
        now = microbatch_size(self.config.training, state)
        checkpointing = getattr(state.model, "checkpointing", False)
        how = "one at a time with gradient checkpointing" if checkpointing else f"{now:,} images at a time"
        self.recorder.warn(self.step, f"memory did not suffice; going on with {how}, for the same batch")
        self.recorder.event("out_of_memory", self.step, microbatch=now, checkpointing=checkpointing)

    def on_step_end(self, step: int) -> None:
        """Move the progress line, and record what the writer has done meanwhile."""
        self.recorder.update_progress(step)
        self.pulse.step = step
        self.saver.poll()

    def save_requested(self) -> bool:
        """Whether somebody made RUN/SAVE, or moved the folder, which is then to be saved where it is."""
        return self.pulse.save_requested or self.pulse.moved

    def stop_requested(self) -> bool:
        """Whether somebody wants the run to stop."""
        return self.stop()

    def defer_interrupts(self) -> AbstractContextManager[None]:
        """A stretch that a stop waits for."""
        return self.stop.defer_interrupts()

    def preview(self, state: TrainState) -> None:
        """Sample grid from the EMA weights."""
        started = time.perf_counter()
        with self.pulse.during("preview"):
            grid = self.looks.preview()
        self.recorder.log_image(self.step, "samples", grid)
        self.recorder.event("preview", self.step, seconds=seconds_since(started))

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        """Held-out loss of the EMA weights, empty if nothing is held out; and what is measured of drawn pictures."""
        return self.evaluation.evaluate(self.step, self.recorder, self.pulse)

    def save(self, state: TrainState, for_best: bool = False) -> None:
        """Save a checkpoint."""
        state.lost_shards = self.failures.shards
        self.saver.save(state, for_best)

    def prepare_save(self, state: TrainState) -> str:
        """Before `save_shards`: wait for what comes before a checkpoint."""
        state.lost_shards = self.failures.shards
        return self.saver.prepare()

    def save_shards(self, state: TrainState, for_best: bool, place: str, post: ShardStatusStore) -> None:
        """Save the rows that this process has, and what all have."""
        self.saver.take_snapshot(state, for_best, post)

    def needs_final_save(self, state: TrainState) -> bool:
        """Whether a run that ends before its end is yet to be saved; nothing interrupts that."""
        if not self.done:
            self.stop.silence()
        return not self.done and self.saver.saved != (self.step, state.due)

    def roll_back(self, state: TrainState, reason: str) -> str:
        """Return to the last good weights."""
        return self.saver.roll_back(state, reason)


def seconds_since(started: float) -> float:
    """What something cost, for the record."""
    return round(time.perf_counter() - started, 3)
