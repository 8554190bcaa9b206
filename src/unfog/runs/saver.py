"""Checkpoints of a run in training: taking, writing and restoring them, and reporting what the writer meets."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from unfog.callbacks import CheckpointEvent
from unfog.config.schema import Config
from unfog.errors import Interrupted, RunError
from unfog.process.heartbeat import folder_identity
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import say, warn
from unfog.reporting.recorder import Recorder
from unfog.runs.ranks import RunContext
from unfog.training.checkpoints import posthoc_ema, snapshot
from unfog.training.checkpoints.load import find_rollback_checkpoint, roll_back
from unfog.training.checkpoints.posthoc_ema import EmaSnapshotWriter
from unfog.training.checkpoints.writer import CheckpointWriter, ShardStatusStore
from unfog.training.state import TrainState

_BRIEF_WAIT = 3.0  # seconds
_SHARE_OF_GRACE = 0.8  # of the seconds between a request to stop and the kill; the rest is for the way out


class Saver:
    """Copies the training state to host memory, has it written while training goes on, and rolls back to it."""

    def __init__(self, context: RunContext, config: Config, recorder: Recorder):
        self._settings, _ = context.folder.shown_settings(config)  # as TOML, for each checkpoint
        self.folder, self.config, self.recorder = context.folder, config, recorder
        self._stop, self._heartbeat, self._callbacks = context.stop, context.heartbeat, context.callbacks
        self._writer = CheckpointWriter(self.folder.checkpoints, config.checkpoint)
        self._snapshots = EmaSnapshotWriter(config.ema_snapshots)
        self._lock = context.lock
        self._identity = folder_identity(self.folder.path)
        # An open descriptor finds the folder again after somebody moved it; Windows cannot open folders.
        self._descriptor = os.open(self.folder.path, os.O_RDONLY) if os.name != "nt" else -1
        self._patience = _SHARE_OF_GRACE * config.training.grace
        # The last step saved, and what was due after it; also a step that was not finite, and so not written.
        self.saved: tuple[int, list[str]] | None = None
        self._moved_from: Path | None = None
        self.stall_seconds = 0.0  # time that training stood still for checkpoints

    def save(self, state: TrainState, for_best: bool = False) -> None:
        """Take a snapshot and have it written. Waits only for the checkpoint before it. Raises as `wait`."""
        self.prepare()
        self.take_snapshot(state, for_best)

    def prepare(self) -> str:
        """Wait for what must be on disk before a checkpoint; return the folder of checkpoints. Raises as `wait`."""
        started = time.perf_counter()
        self._snapshots.wait()  # a checkpoint covers the snapshots before it: a resume would not take them again
        self.wait(leaving=self._stop())
        if folder_identity(self.folder.path) != self._identity:
            self._follow_moved_folder()
        self.check_owned()
        self.recorder.sync()  # a checkpoint covers its logs, also after a power cut
        self.stall_seconds += time.perf_counter() - started
        return str(self.folder.checkpoints)

    def take_snapshot(self, state: TrainState, for_best: bool = False, post: ShardStatusStore | None = None) -> None:
        """Copy this rank's part of the state to host memory, and have it written; with other ranks through `post`.

        RunError if the folder was moved: the checkpoint is saved at its new place.
        """
        started, step = time.perf_counter(), self._step(state)
        with self._stop.defer_interrupts():
            self.saved = (step, list(state.due))
            if bad := state.non_finite():  # writing it would delete an older checkpoint, which is whole
                self.recorder.warn(
                    step, f"{bad} is not finite, so step {step:,} is not saved; earlier checkpoints are unharmed"
                )
                return
            rollback = self._is_rollback_target(state, step)
            self._writer.submit(snapshot.take_snapshot(state, step, rollback, for_best, self._settings), post)
            self._heartbeat.save_started()
        self.stall_seconds += time.perf_counter() - started
        if self._moved_from is not None:
            self.wait(leaving=True)
            raise RunError(
                f"{self._moved_from} was moved to {self.folder.path} during training; step {step:,} is saved there: "
                f"unfog resume {self.folder.path}"
            )

    def check_owned(self) -> None:
        """RunError if another process trains in the run folder, which this one then leaves alone."""
        if folder_identity(self.folder.path) != self._identity or self._moved_from is not None:
            return  # another folder at that path is another run
        try:
            self.folder.check_owned(self._lock)
        except RunError:
            self._heartbeat.silent = True
            raise

    def save_ema_snapshot(self, state: TrainState) -> None:
        """Copy both EMAs to host memory, and have them written."""
        started = time.perf_counter()
        self._snapshots.submit(posthoc_ema.take_ema_snapshot(state, self._step(state)), self.folder.averages)
        self.stall_seconds += time.perf_counter() - started

    def _step(self, state: TrainState) -> int:
        return state.seen // self.config.training.batch

    def _follow_moved_folder(self) -> None:
        """Continue at the new place of the folder, where the operating system can tell it; else RunError."""
        self._moved_from = self.folder.path
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        except OSError:
            place = self._moved_from
        if folder_identity(place) != self._identity:
            raise RunError(
                f"{self._moved_from} was removed or moved during training; the steps since the last checkpoint are lost"
            )
        self.folder = RunFolder(place)
        self._writer = CheckpointWriter(self.folder.checkpoints, self.config.checkpoint)

    def poll(self) -> None:
        """Report what the writer has done. RunError if it failed."""
        if not self._writer.busy:
            self._writer.wait(0)  # raises what a write in the background has failed with
        self._report_events()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_rollback_target(self, state: TrainState, step: int) -> bool:
        """Return True if a roll-back may return to this step: a regular one, after enough ordinary steps."""
        # Not to one that a stop or a request caused, so that an interrupted run rolls back as any other.
        if step == 0:  # the first steps may diverge, and there has to be one to return to
            return True
        every, guard = self.config.checkpoint.every, state.guard
        regular = every > 0 and step % every == 0
        return regular and guard.anomalous == 0 and guard.ordinary >= self.config.training.patience

    def roll_back(self, state: TrainState, reason: str) -> str:
        """Restore the weights of the newest rollback checkpoint; return its folder. RunError if there is none."""
        self.wait()
        step = self._step(state)
        good, broken = find_rollback_checkpoint(self.folder.checkpoints, state, self.config.training.patience)
        for one in broken:
            self.recorder.event("passed_over", step, checkpoint=one.folder.name, reason=one.reason)
            warn(str(one))
        if good is None:
            raise RunError(
                f"{reason} at step {step:,}, and there is no checkpoint to roll back to; start a new run "
                "with a lower --lr"
            )
        with self._stop.defer_interrupts():
            roll_back(good.folder, state)
            self._snapshots.wait()  # one that is still being written is of the steps that are undone
            posthoc_ema.remove_after(self.folder.averages, good.step)
            lr = self.config.optimizer.lr * state.guard.lr_scale
            skipped = [good.images, state.seen]
            self.recorder.event("rolled_back", step, reason=reason, to=good.step, lr=lr, images_skipped=skipped)
        warn(
            f"step {step:,}: {reason}; rolled back to step {good.step:,} with half the learning rate "
            f"({lr:.3g}); skipping the images since then"
        )
        return str(good.folder)

    def wait(self, leaving: bool = False) -> None:
        """Wait until no checkpoint is being written, when `leaving` no longer than the grace period allows.

        Interrupted if a stop is requested meanwhile and the process is not leaving yet; RunError if the checkpoint
        could not be written.
        """
        deadline = time.monotonic() + self._patience
        with self._heartbeat.during("saving"):
            while not self._writer.wait(0.05):
                self._report_events()
                self._heartbeat.activity = "waiting for disk space" if self._writer.waiting else "saving"
                if not self._stop():
                    deadline = time.monotonic() + self._patience
                elif not leaving:
                    raise Interrupted
                elif self._writer.waiting and time.monotonic() > deadline:
                    self._writer.abandon()
                    raise RunError(
                        "the disk is full, so the steps since the newest checkpoint in "
                        f"{self.folder.checkpoints} are lost. Free some space, then `unfog resume "
                        f"{self.folder.path}`"
                    )
        self._report_events()

    def finish_after_failure(self, at_once: bool, shared: bool = False) -> None:
        """Wait for a checkpoint that is being written: `at_once` only seconds.

        If it is `shared`, other ranks write parts of it and may be gone, so there is a limit as well.
        """
        with suppress(RunError):  # the failure before it is the one to report
            if at_once:
                self._writer.abandon()
                self._writer.wait(_BRIEF_WAIT)
            elif not shared:
                self.wait(leaving=True)
            elif not self._writer.wait(self._patience):
                self._writer.abandon()
        self._report_events()

    def _report_events(self) -> None:
        """Record and print what the writers have done since the last time."""
        for step, reason in self._snapshots.failures():
            self.recorder.event("averages_left_out", step, reason=reason)
            warn(
                f"the EMA snapshot of step {step:,} could not be written ({reason}); unfog ema-sweep will use "
                "the others"
            )
        for kind, step, fields in self._writer.events():
            self.recorder.event(kind, step, **fields)
            if kind == "checkpoint":
                self._heartbeat.save_finished()
                place = self.folder.checkpoints / str(fields["folder"])
                self._callbacks(CheckpointEvent(step, self.recorder.seconds, place))
            elif kind == "not_removed":
                warn(f"old checkpoints could not be removed ({fields['reason']}); they only take up space")
            elif kind == "disk_full":
                warn(
                    f"the disk is full: checkpoint {step:,} needs {fields['needed'] / 1e6:,.0f} MB, and "
                    f"{fields['free'] / 1e6:,.0f} MB are free. Free some space, and training saves and continues"
                )
            elif kind == "disk_has_room":
                say(f"there is free space again: checkpoint {step:,} is written")
