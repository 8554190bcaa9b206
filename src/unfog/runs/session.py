"""A session: one process trains a run, from a checkpoint or the beginning to the end or a stop, and records it."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from unfog.callbacks import EndEvent
from unfog.checks.settings.learning_rate_checks import describe_high_rate
from unfog.checks.settings.length_checks import check_length
from unfog.checks.settings.settings_checks import check_settings
from unfog.config.resume_rules import settings_digests
from unfog.config.schema import Config
from unfog.data.augmentation import Augment
from unfog.data.dataset import Dataset
from unfog.device.cores import SPINNING_LIMITED, describe_quota
from unfog.errors import Interrupted, LostProcess, RunError
from unfog.files.safe_files import remove, write_atomic
from unfog.pipeline.build import build_intervals, open_stream
from unfog.pipeline.contact_sheet import contact_sheet
from unfog.pipeline.skipped_images import DATA_FILE, FailureReporter, data_json
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.intervals import Choice
from unfog.process.device import resource_use
from unfog.process.run_folder import RunFolder
from unfog.reporting.channel_sheets import FOLDER as CHANNELS
from unfog.reporting.findings import Finding
from unfog.reporting.image_grids import encode_png
from unfog.reporting.progress import format_duration, say, warn
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import LENGTH_EVENT, PAUSE_EVENT, read_events
from unfog.reporting.report import write_report
from unfog.runs.evaluation_hook import EvaluationHook
from unfog.runs.previews import Previews
from unfog.runs.ranks import RunContext, StoppableHooks, say_what_resume_promises, watch_outages
from unfog.runs.saver import Saver
from unfog.runs.time_budget import PlanNotices, TimeBudget, resume_length
from unfog.text import plural, without_secrets
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.load import load_checkpoint, read_state
from unfog.training.checkpoints.writer import ShardStatusStore
from unfog.training.length import LengthPlan
from unfog.training.loop import run_due_hooks
from unfog.training.stability.nan_debug import NanReport
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState
from unfog.training.statistics import Stopwatch


@cache
def _say_that_threads_spin() -> None:
    say(
        "  torch was imported before unfog, so its idle threads spin, and other programs slow this one down; "
        "import unfog first, or start Python with OMP_WAIT_POLICY=PASSIVE"
    )


def last_logged_step(step: int, due: Sequence[str]) -> int:
    """Return the last step whose line of the record stays; a log that is still due will write its line again."""
    return step - ("log" in due or "evaluate" in due)


def _other_threads(now: str, before: str) -> str:
    """Return how the same bits are had where two machines differ in the number of threads alone; "" elsewhere."""
    threads = re.search(r"with (\d+) threads", before)
    if threads is None or re.sub(r"with \d+ threads", threads[0], now) != before:
        return ""
    return f", but not with OMP_NUM_THREADS={threads[1]}"


def write_data_report(folder: RunFolder, dataset: Dataset, augment: Augment, seed: int) -> None:
    """Write contact-sheet.png and data.json into a run folder, each atomically. OSError if that is impossible.

    `seed` is that of the stream and of the augmentation; the random state of torch is left as it is.
    """
    write_atomic(folder.path / DATA_FILE, data_json(dataset), folder.path)
    sheet = encode_png(contact_sheet(dataset, augment, seed))
    write_atomic(folder.path / "contact-sheet.png", sheet, folder.path)


class Session(StoppableHooks):
    """The parts and hooks of a run in training, which it records from the first line to the last."""

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
        self._plan_notices, self._length_unchecked = PlanNotices(), False
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

    def keep_budget(self, auto: AutoSettings) -> None:
        """Plan the length anew as the run trains, if a time budget chose it; else end earlier plans if it is given."""
        self._new_length = auto.new_length
        if auto.budget and auto.began is not None:
            every = build_intervals(self.config, self.state)
            pace, suspended = auto.seconds_per_step(), self.context.heartbeat.suspended
            costs, timed = TimeBudget.estimated_costs(self.config, len(self.dataset.held_out)), {}
            dear = TimeBudget.is_dear(costs, pace, auto.budget)
            if dear and (seconds := self.previews.seconds_per_sample()) is not None:
                # Passes of a preview may be far quicker than those of training, and none may be drawn before the end.
                preview = seconds * self.config.preview.images
                timed = {kind: cost * preview / costs["preview"] for kind, cost in costs.items()}
            self.budget = TimeBudget(auto.budget, auto.began, pace, every, costs, suspended, timed)

    @contextmanager
    def recording(
        self,
        choices: Sequence[Choice],
        findings: Sequence[Finding] = (),
        saved: checkpoint.CheckpointInfo | None = None,
        changes: Sequence[str] = (),
    ) -> Iterator[None]:
        """Record the training inside the `with`, from the state of the checkpoint `saved`, or from the beginning.

        Automatic `choices`, `changes` of settings and bad `findings` of the checks are printed and recorded first.
        """
        logged, fixed = self._restore(saved)
        self.state.adopt_settings(settings_digests(self.config))
        with self._open_recorder(logged) as recorder:
            self.attach(recorder)
            if saved is not None:  # otherwise a stop before the first step would save the same once more
                self.saver.saved = (self.step, list(self.state.due))
            try:
                self._announce(choices, findings, changes, fresh=saved is None)
                self._record_length(fixed)
                if saved is None:
                    self._dry_run()
                recorder.progress.restart()  # without the time of preparations
                self.context.heartbeat.activity = "training"
                yield
                done = self._conclude()
            except (Exception, KeyboardInterrupt) as error:
                self._record_failure(error)
                if isinstance(error, OSError):
                    place, reason = self.context.folder.path, error.strerror or error
                    said = f"{error.filename or place}: {reason}; once that is corrected, `unfog resume {place}`"
                    raise RunError(said) from error
                raise
            finally:
                self.saver.close()
                self.stream.close()
            self.context.heartbeat.end("finished" if done else "stopped")
        self._report(done)
        self.saver.finish_mirror()
        self._end(done)
        self.context.callbacks.raise_error()

    def settings_findings(self) -> list[Finding]:
        """Return the doctor's findings on the settings; none for an autoencoder, as the rules are about diffusion."""
        if not self.config.task.generates:
            return []
        return check_settings(self.config, self.dataset, self.context.device, folder=self.context.folder.path)

    def write_data_files(self) -> None:
        """Write data.json and the contact sheet; if that fails, warn and train without."""
        augment = Augment.from_settings(self.config.data)
        try:
            write_data_report(self.context.folder, self.dataset, augment, self.config.training.seed)
        except OSError as error:
            warn(f"data.json and contact-sheet.png could not be written: {error.strerror or error}")

    def _resume_length(self) -> LengthPlan | None:
        """Take up the length of the run where a checkpoint left it; return the plan if a resume has given another."""
        length, events = self.state.length, read_events(self.context.folder.events)
        first = self.config.training.images // self.config.training.batch
        fixed = resume_length(length, first, self.step, events, self._new_length)
        if self.done:  # a step that was not to be the last when it was trained
            every = build_intervals(self.config, self.state).stretched(length.at(self.step).stretch)
            due = every.due(self.step, last=True)
            self.state.due = [name for name in due if name != "log" or not self.state.window.empty]
        return fixed

    def _record_length(self, fixed: LengthPlan | None) -> None:
        """Record the length that a resume has given, or plan it by the time budget."""
        if fixed is not None:
            reason = "the length was given" if self._new_length else "there is no time budget any more"
            self._record_plan(fixed, reason=reason)
            if self.budget is None and self._new_length:
                say(f"  {plural(fixed.steps, 'step')} in all, as given; the time budget no longer applies")
        if self.budget is not None and (plan := self.plan_length(self.state)) is not None:
            self.state.length.add([plan])

    def _dry_run(self) -> None:
        """Evaluate, preview and save once before the first step, with few samples, so that errors surface early.

        After a request to stop, the hooks that are left stay due, and a resume runs them.
        """
        state = self.state
        state.due = [*(["evaluate"] if self.config.evaluate.every > 0 else []), "preview", "save"]
        if self.budget is not None and (kept := self.budget.affordable(state.due)) != state.due:
            left_out = " and ".join(sorted({*state.due} - {*kept})).replace("evaluate", "evaluation")
            say(f"  no {left_out} before the first step, as it would take more than its share of the time budget")
            state.due = kept
        with suppress(Interrupted):
            run_due_hooks(state, self, Stopwatch(), self.config.training.batch)
            with self.aside("write"):
                self.saver.wait()  # without a checkpoint on disk, the first steps could be lost

    def _end(self, done: bool, error: str = "") -> None:
        place = self.context.folder.path
        self.context.callbacks(EndEvent(self.step, self.recorder.seconds, place, done, error))

    def _record_failure(self, error: BaseException) -> None:
        # A second signal wants to leave now: a checkpoint on its way gets seconds, not the grace period.
        at_once = isinstance(error, KeyboardInterrupt) or (self.sharded and isinstance(error, LostProcess))
        self.saver.finish_after_failure(at_once, shared=self.sharded)
        reason = without_secrets(str(error))
        if not self.context.lost:
            self.recorder.event("failed", self.step, reason=f"{type(error).__name__}: {reason}")
        self.context.heartbeat.end(f"failed: {reason}")
        self._end(False, f"{type(error).__name__}: {reason}")

    def _report(self, done: bool) -> None:
        took = self.recorder.describe_time(self.saver.stall_seconds)
        start = self.budget.describe_start(self.recorder.session_seconds) if self.budget is not None else ""
        say(f"{'finished' if done else 'stopped'} at step {self.step:,} after {took}{start}")
        try:  # the run is saved, so a report that fails must not make it one that failed
            write_report(self.context.folder.path)
        except OSError as error:
            warn(f"the report could not be written: {error}")

    def _open_recorder(self, logged: int) -> Recorder:
        folder = self.context.folder
        _, settings = folder.shown_settings(self.config)
        return Recorder(folder.path, self.config.log, self.steps, self.step, settings, logged, self.defer_interrupts)

    def _restore(self, saved: checkpoint.CheckpointInfo | None) -> tuple[int, LengthPlan | None]:
        """Go back to the state of a checkpoint, or to the beginning.

        Returns:
            The last step whose line of the record stays, and the plan if a resume has given another length.
        """
        if saved is None:
            # Left by a start that was killed before its first checkpoint.
            remove(self.context.folder.metrics, self.context.folder.path)
            return 0, None
        self._load(saved)
        return last_logged_step(self.step, self.state.due), self._resume_length()

    def _load(self, saved: checkpoint.CheckpointInfo) -> None:
        """Restore a checkpoint; of a sharded state only the progress, as each rank reads its own rows later."""
        if self.sharded:
            self.state.load_progress(read_state(saved.folder))
            self.sharded_from = saved.folder
        else:
            load_checkpoint(saved.folder, self.state)
        if saved.made_on != (machine := self.state.precision.describe_machine()):
            same = _other_threads(machine, saved.made_on)
            say(f"  now computed by {machine}, before by {saved.made_on}; the last bits may differ{same}")

    def _announce(
        self, choices: Sequence[Choice], findings: Sequence[Finding], changes: Sequence[str], fresh: bool
    ) -> None:
        """Print and record what is about to be trained, and how."""
        self._plan_notices.steps = self.steps
        for change in changes:
            say(f"  changed: {change}")
            self.recorder.event("changed", self.step, setting=change)
        for choice in choices:
            say(f"  {choice}")
            self.recorder.event("choice", self.step, name=choice.name, value=str(choice.value), reason=choice.reason)
        if self.budget is not None:  # which has only guessed the length by now
            settled = [finding for finding in findings if finding.code != "settings.length"]
            self._length_unchecked, findings = len(settled) < len(findings), settled
        self._record_findings(findings)
        self.recorder.event("data", self.step, summary=self.dataset.report.line())
        if self.config.ema_snapshots.every > 0 and not self.state.ema_history_known:
            say("  no EMA snapshots are taken: the two averages were not both kept since the run began")
        parameters = sum(p.numel() for p in self.state.model.parameters())
        training = self.config.training
        if training.device == "cpu" and torch.get_num_threads() > 1 and not SPINNING_LIMITED:
            _say_that_threads_spin()
        say(
            f"{'training' if fresh else 'resuming'} {parameters / 1e6:.2f}M parameters in {self.context.folder.path}: "
            f"steps {self.step:,} to {self.steps:,} of {plural(training.batch)}, "
            f"{training.precision} on {training.device}"
        )
        if quota := describe_quota():
            say(f"  {quota}, and {plural(torch.get_num_threads(), 'thread')} compute")
        say_what_resume_promises(self.config, self.context.device)
        if training.compile:
            say("  compiling: the first step may take minutes, unless an earlier run has stored the compiled code")
        facts = {"steps": self.steps, "device": training.device, "parameters": parameters, "torch": torch.__version__}
        self.recorder.event("started" if fresh else "resumed", self.step, **facts)
        self.recorder.begin_report()
        folder = self.context.folder.path
        say(f"  report, refreshed as it trains: {folder / 'report.html'}; samples: {folder / 'samples'}")

    def _record_findings(self, findings: Sequence[Finding]) -> None:
        """Print and record the findings that are bad."""
        for finding in findings:
            if finding.severity in ("fatal", "warning"):
                self.recorder.warn(self.step, f"{finding.evidence}; {finding.remedy}".removesuffix("; "))
            elif finding.facts.get("grey", 0) == finding.facts.get("looked_at"):  # three times the values for nothing
                say(f"  {finding.evidence}; {finding.remedy}")

    def _conclude(self) -> bool:
        """Draw the last image, or save where a stop was requested. Returns True at the end of the run."""
        done = self.done
        self.saver.check_owned()
        if done:
            with suppress(Interrupted):  # the image is optional: `unfog sample --strip` makes it as well
                with self.context.heartbeat.during("drawing"):
                    image = self.previews.final_image()
                self.recorder.log_image(self.step, self.previews.final_name, image)
            if anomalous := self.state.guard.anomalous:
                self.recorder.warn(
                    self.step, f"the last {anomalous} step(s) were skipped, or had a far higher loss than usual"
                )
        self.stop.silence()  # nothing may interrupt the last save
        if self.needs_final_save(self.state):
            self.save(self.state)
        self.saver.wait(leaving=True)
        lost = "" if done else self.context.world.lost_rank()  # torchrun stops the others when a rank is killed
        why = {"reason": f"{lost} has ended"} if lost else {}
        self.recorder.event("finished" if done else "stopped", self.step, **why)
        return done

    # Hooks, which the training loop calls: record, preview, evaluate, save, and plan the length.

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
            heartbeat=self.context.heartbeat,
        )

    def log(self, step: int, images: int, record: dict[str, Any]) -> None:
        # Beside the losses: a line of an evaluation alone would show what the evaluation took.
        use = resource_use(self.context.device, self.context.folder.path) if "loss" in record else {}
        self.recorder.log(step, images, **record, **use)
        self.failures.report(self.recorder, step, self.context.world.collect_reports())

    def on_skipped_step(self, state: TrainState, norm: float, report: NanReport | None) -> None:
        """Record a skipped step, with the images and the layer that made it not finite, where these are known."""
        fields: dict[str, Any] = {"gradient_norm": norm, "precision": self.config.training.precision}
        if report is not None:
            # Read through the stream, as an image that cannot be decoded is replaced by another.
            index = [int(self.stream.batch(place, 1).index[0]) for place in report.images]
            names = [self.dataset.train.names[i] for i in index]
            fields |= {"images": names, "levels": report.levels, "layer": report.where, "phase": report.phase}
            parameters = sum(p.numel() for p in state.model.parameters())
            high = describe_high_rate(self.config, parameters, state.guard.lr_scale)
            warn(f"step {self.step:,} was skipped: {high}{report.describe(names)}")
        self.recorder.event("step_refused", self.step, **fields)

    def on_out_of_memory(self, state: TrainState) -> None:
        now = microbatch_size(self.config.training, state)
        checkpointing = getattr(state.model, "checkpointing", False)
        how = "one at a time with gradient checkpointing" if checkpointing else f"{plural(now)} at a time"
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
            preview = self.previews.preview()
        if preview.channels:  # before the grid, whose arrival makes the page look for both
            self.recorder.keep_image(self.step, CHANNELS, preview.channels)
        self.recorder.log_image(self.step, "samples", preview.grid)
        self.recorder.event("preview", self.step, seconds=round(time.perf_counter() - started, 3))

    def save_ema_snapshot(self, state: TrainState) -> None:
        with self.aside("averages"):
            self.saver.save_ema_snapshot(state)

    def evaluate(self, state: TrainState) -> dict[str, Any]:
        stretch = state.length.at(self.step).stretch
        if self.step and self.budget is not None and not self.budget.evaluates_at_end(stretch):
            return {}
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

    def plan_length(self, state: TrainState) -> LengthPlan | None:
        """Return how the run goes on to end in time, if that changes; print and record it."""
        if self.budget is None:
            return None
        plan = self.budget.plan(self.step, state.length)
        if plan is not None:
            self._record_plan(plan, seconds_per_step=self.budget.step_seconds, reason=self.budget.describe(plan))
            self.recorder.set_total(plan.steps)
            self.context.heartbeat.steps = plan.steps
        now = plan or state.length.at(self.step)
        for sentence in self._plan_notices.describe(now, self.budget):
            say(f"  {sentence}")
        if self._length_unchecked and self.budget.is_settled:
            self._length_unchecked = False
            self._record_findings([check_length(self.config, self.dataset, now.steps)])
        return plan

    def _record_plan(self, plan: LengthPlan, **facts: object) -> None:
        fields = {"first": self.state.length.first, "steps": plan.steps, "stretch": plan.stretch}
        self.recorder.event(LENGTH_EVENT, self.step, **fields, position=plan.position, limit=plan.limit, **facts)
