"""Checkpoints of a run in training: taking, writing and restoring them, and reporting what the writer meets."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from unfog.callbacks import CheckpointEvent
from unfog.config.schema import Config
from unfog.errors import Interrupted, RunError
from unfog.process.device import total_memory
from unfog.process.run_folder import RunFolder
from unfog.process.run_place import PATIENCE, RunPlace
from unfog.reporting.progress import format_duration, say, warn
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import WAITING
from unfog.runs.ranks import RunContext
from unfog.training.checkpoints import posthoc_ema, snapshot
from unfog.training.checkpoints.load import find_rollback_checkpoint, roll_back
from unfog.training.checkpoints.mirror import Mirror
from unfog.training.checkpoints.posthoc_ema import EmaSnapshotWriter
from unfog.training.checkpoints.writer import CheckpointWriter, ShardStatusStore
from unfog.training.state import TrainState

_BRIEF_WAIT = 3.0  # seconds
_POLL = 0.2  # seconds between two looks for a folder that is waited for
_PINNED_SHARE = 0.25  # of the memory of the host, that a copy of the state may take from all other programs
_MIRROR_SECONDS = 1200.0  # that the end of a run waits for its mirror
_SHARE_OF_GRACE = 0.8  # of the seconds between a request to stop and the kill; the rest is for the way out


class Saver:
    """Copies the training state to host memory, has it written while training goes on, and rolls back to it."""

    def __init__(self, context: RunContext, config: Config, recorder: Recorder):
        self._settings, _ = context.folder.shown_settings(config)  # as TOML, for each checkpoint
        self.folder, self.config, self.recorder = context.folder, config, recorder
        self._stop, self._heartbeat, self._callbacks = context.stop, context.heartbeat, context.callbacks
        self._place = RunPlace(self.folder.path)
        self._writer = CheckpointWriter(self.folder.checkpoints, config.checkpoint, self._is_away)
        self._snapshots = EmaSnapshotWriter(config.ema_snapshots)
        self._mirror: Mirror | None = None
        mirror = config.checkpoint.mirror
        if mirror and Path(mirror).resolve() != self.folder.path.resolve():
            self._mirror = Mirror(self.folder.path, Path(mirror))
        self._mirror_failure = ""  # the last one, which is not said again
        self._lock = context.lock
        self._most_pinned = _PINNED_SHARE * total_memory(torch.device("cpu"))
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
        self._find_folder()
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
            taken = snapshot.take_snapshot(state, step, rollback, for_best, self._settings, self._most_pinned)
            self._writer.submit(taken, post)
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
        if self._moved_from is not None or self._place.look() != "here":
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

    def _is_away(self) -> bool:
        return self._place.look() == "away"

    def _find_folder(self) -> None:
        """Wait for the disk of the folder. Continue at the new place of a folder that was moved.

        RunError if the folder was removed, or its disk cannot be reached for minutes or once a stop is requested.
        """
        if self._moved_from is not None:
            return
        if (state := self._place.look()) == "away":
            with self._heartbeat.during(WAITING["folder"]):
                state = self._wait_for_folder()
        if state == "here":
            return
        self._moved_from, place = self.folder.path, self._place.moved_to()
        if place is None:
            raise RunError(
                f"{self._moved_from} was removed or moved during training; the steps since the last checkpoint are lost"
            )
        self.folder = RunFolder(place)
        self._writer = CheckpointWriter(self.folder.checkpoints, self.config.checkpoint)

    def _wait_for_folder(self) -> Literal["here", "moved", "away"]:
        """Return the state of the folder once its disk can be reached."""
        folder, began = self.folder.path, time.monotonic()
        warn(_away_message(folder))
        deadline = began + PATIENCE
        while (state := self._place.look()) == "away":
            if self._stop():  # a checkpoint may still be saved within the grace period
                deadline = min(deadline, time.monotonic() + self._patience)
            if time.monotonic() > deadline:
                raise RunError(_lost_message(folder))
            time.sleep(_POLL)
        say(f"{folder} can be reached again, after {format_duration(time.monotonic() - began)}")
        return state

    def poll(self) -> None:
        """Report what the writer has done. RunError if it failed."""
        if not self._writer.busy:
            self._writer.wait(0)  # raises what a write in the background has failed with
        self._report_events()

    def close(self) -> None:
        self._place.close()

    def _is_rollback_target(self, state: TrainState, step: int) -> bool:
        """Return True if a roll-back may return to this step: a regular one, after enough ordinary steps."""
        # Not to one that a stop or a request caused, so that an interrupted run rolls back as any other.
        if step == 0:  # the first steps may diverge, and there has to be one to return to
            return True
        every, guard = self.config.checkpoint.every, state.guard
        regular = every > 0 and step % every == 0
        return regular and guard.anomalous == 0 and guard.ordinary >= self.config.training.patience

    def roll_back(self, state: TrainState, reason: str) -> str:
        """Restore the weights of the newest rollback checkpoint; return its folder. RunError without one."""
        self.wait()
        self._find_folder()
        self.check_owned()
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
                self._heartbeat.activity = self._doing()
                if not self._stop():
                    deadline = time.monotonic() + self._patience
                elif not leaving:
                    raise Interrupted
                elif (self._writer.waiting or self._writer.away) and time.monotonic() > deadline:
                    self._writer.abandon()
                    if self._writer.away:
                        raise RunError(_lost_message(self.folder.path))
                    raise RunError(
                        "the disk is full, so the steps since the newest checkpoint in "
                        f"{self.folder.checkpoints} are lost. Free some space, then `unfog resume "
                        f"{self.folder.path}`"
                    )
        self._report_events()

    def _doing(self) -> str:
        """Return the activity of the writer, for monitoring."""
        if self._writer.away:
            return WAITING["folder"]
        return WAITING["disk"] if self._writer.waiting else "saving"

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

    def finish_mirror(self) -> None:
        """Copy the rest of the run to its mirror, and wait for it: minutes, after a request to stop the grace period.

        Another request to stop ends the wait. Nothing is recorded any more.
        """
        if self._mirror is None or self._moved_from is not None:
            return
        started, stopped = time.monotonic(), bool(self._stop())
        limit = self._patience if stopped else _MIRROR_SECONDS
        self._mirror.request()
        if not self._mirror.wait(1.0):
            say(f"copying the run to {self._mirror.place}")
        while not self._mirror.wait(_POLL):
            if time.monotonic() - started > limit or bool(self._stop()) != stopped:
                self._mirror.abandon()
                warn(
                    f"{self._mirror.place} has the run up to an earlier checkpoint: there was no time to copy the rest"
                )
                return
        news = self._mirror.news()
        if news and isinstance(news[-1], str):
            warn(f"the run could not be copied to {self._mirror.place} ({news[-1]}); {self.folder.path} is complete")
        elif news:
            say(f"the mirror {self._mirror.place} is complete")

    def _report_mirror(self) -> None:
        for one in self._mirror.news() if self._mirror is not None else ():
            step = self.saved[0] if self.saved else 0
            if isinstance(one, str):
                self.recorder.event("mirror_failed", step, reason=one)
                if one != self._mirror_failure:
                    warn(f"the mirror {self.config.checkpoint.mirror} was not updated ({one}); training goes on")
                self._mirror_failure = one
            else:
                self._mirror_failure = ""
                self.recorder.event("mirrored", step, newest=one.step, bytes=one.bytes, seconds=round(one.seconds, 3))

    def _report_events(self) -> None:
        """Record and print what the writers have done since the last time."""
        self._report_mirror()
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
                if self._mirror is not None and self._moved_from is None:
                    self._mirror.request()
            elif kind == "not_removed":
                warn(f"old checkpoints could not be removed ({fields['reason']}); they only take up space")
            elif kind == "disk_full":
                warn(
                    f"the disk is full: checkpoint {step:,} needs {fields['needed'] / 1e6:,.0f} MB, and "
                    f"{fields['free'] / 1e6:,.0f} MB are free. Free some space, and training saves and continues"
                )
            elif kind == "disk_away":
                warn(_away_message(self.folder.path))
            elif kind == "disk_back":
                say(f"{self.folder.path} can be reached again, after {format_duration(fields['waited'])}")
            elif kind == "disk_has_room":
                say(f"there is free space again: checkpoint {step:,} is written")


def _away_message(folder: Path) -> str:
    return (
        f"{folder} cannot be reached: its disk or mount is gone. Checkpoint and record wait for it, "
        f"{format_duration(PATIENCE)} at most"
    )


def _lost_message(folder: Path) -> str:
    return (
        f"{folder} cannot be reached, so the steps since its newest checkpoint are lost. Once it is back, "
        f"`unfog resume {folder}`"
    )
