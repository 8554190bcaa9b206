"""Saving and going back, with everything that a person or a job manager is told about it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from unfog.config.schema import Config, redact_urls
from unfog.config.toml import to_toml
from unfog.errors import Interrupted, RunError
from unfog.process.heartbeat import Heartbeat, folder_identity
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.progress import say, warn
from unfog.reporting.recorder import Recorder
from unfog.training.checkpoints import ema_snapshots as averages
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import snapshot
from unfog.training.checkpoints.ema_snapshots import EmaSnapshotWriter
from unfog.training.checkpoints.sharded import ShardStatusStore
from unfog.training.checkpoints.writer import CheckpointWriter
from unfog.training.state import TrainState

_BRIEF_WAIT = 3.0  # seconds


class Saver:
    """Takes snapshots, has them written while training goes on, and returns to them."""

    def __init__(self, folder: RunFolder, config: Config, stop: StopSignals, pulse: Heartbeat, recorder: Recorder):
        self.folder, self.config, self.stop, self.pulse, self.recorder = folder, config, stop, pulse, recorder
        self.writer = CheckpointWriter(folder.checkpoints, config.checkpoint)
        self.averages = EmaSnapshotWriter(config.ema_snapshots)
        self.identity = folder_identity(folder.path)
        self._descriptor = os.open(folder.path, os.O_RDONLY) if os.name != "nt" else -1  # to find it when it is moved
        self.saved: tuple[int, list[str]] | None = None
        """The step that was saved last, and what was due after it; also where it was not finite."""
        self.before: Path | None = None
        """Where the folder was until it was moved."""
        self.stall_seconds = 0.0
        """Seconds that training stood still for checkpoints."""

    def save(self, state: TrainState, for_best: bool = False) -> None:
        """Copy the state to host memory, and have it written from there. Waits only for the one before.

        Raises:
            Interrupted, RunError: as `wait`.
        """
        self.prepare()
        self.take_snapshot(state, for_best)

    def prepare(self) -> str:
        """Wait for what has to come first. Returns the folder of checkpoints.

        Raises:
            Interrupted, RunError: as `wait`; the folder was removed.
        """
        started = time.perf_counter()
        self.averages.wait()  # a checkpoint covers the snapshots before it, which a resume would not take again
        self.wait(leaving=self.stop())
        if self.moved():
            self._follow()
        self.recorder.sync()  # a checkpoint covers its logs, also after a power cut
        self.stall_seconds += time.perf_counter() - started
        return str(self.folder.checkpoints)

    def take_snapshot(self, state: TrainState, for_best: bool = False, post: ShardStatusStore | None = None) -> None:
        """Copy what this process has of the state, and have it written; with others, if there is a `post`.

        Raises:
            RunError: the folder was moved; this is saved where it is now.
        """
        started, step = time.perf_counter(), state.seen // self.config.training.batch
        with self.stop.defer_interrupts():
            self.saved = (step, list(state.due))
            if bad := state.non_finite():
                self.recorder.warn(
                    step, f"{bad} is not finite, so step {step:,} is not saved; the checkpoints are whole"
                )
                return
            anchor = self._is_anchor(state, step)
            self.writer.submit(
                snapshot.take_snapshot(state, step, anchor, for_best, to_toml(redact_urls(self.config))), post
            )
            self.pulse.save_started()
        self.stall_seconds += time.perf_counter() - started
        if self.before is not None:
            self.wait(leaving=True)
            raise RunError(
                f"{self.before} was moved to {self.folder.path} while it was trained; step {step:,} is saved there: "
                f"unfog resume {self.folder.path}"
            )

    def save_ema_snapshot(self, state: TrainState) -> None:
        """Copy both averages to host memory, and have them written from there."""
        started = time.perf_counter()
        taken = averages.take_snapshot(state, state.seen // self.config.training.batch)
        self.averages.submit(taken, self.folder.averages)
        self.stall_seconds += time.perf_counter() - started

    def moved(self) -> bool:
        """Whether the folder is no longer where it was."""
        return folder_identity(self.folder.path) != self.identity

    def _follow(self) -> None:
        """Find where the folder is now, if the system can tell: whoever moved it wants what is saved there.

        Raises:
            RunError: it is nowhere.
        """
        self.before = self.folder.path
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        except OSError:
            place = self.before
        if folder_identity(place) != self.identity:
            raise RunError(
                f"{self.before} was removed while it was trained, or moved; what is not in a checkpoint is lost"
            )
        self.folder = RunFolder(place)
        self.writer = CheckpointWriter(self.folder.checkpoints, self.config.checkpoint)

    def poll(self) -> None:
        """Record what the writer has done; RunError at once if it has failed."""
        if not self.writer.busy:
            self.writer.wait(0)
        self.report_writer_events()

    def close(self) -> None:
        """Let go of the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_anchor(self, state: TrainState, step: int) -> bool:
        """Whether a roll-back may come back to this: at a regular step, and after enough ordinary ones.

        Not whenever somebody stopped or asked: a run that was interrupted must go back to where another would.
        """
        if step == 0:
            return True
        every, guard = self.config.checkpoint.every, state.guard
        regular = every > 0 and step % every == 0
        return regular and guard.anomalous == 0 and guard.ordinary >= self.config.training.patience

    def roll_back(self, state: TrainState, reason: str) -> str:
        """Return to the weights of the newest checkpoint that was taken at its regular time when all was well.

        Returns:
            Its folder.

        Raises:
            RunError: there is none.
            Interrupted: a stop was requested first.
        """
        self.wait()
        step = state.seen // self.config.training.batch
        good = checkpoint.find_rollback_checkpoint(self.folder.checkpoints, state, self.config.training.patience)
        if good is None:
            raise RunError(
                f"{reason} at step {step:,}, and there is no checkpoint to go back to; train anew with a lower --lr"
            )
        with self.stop.defer_interrupts():
            checkpoint.roll_back(good.folder, state)
            self.averages.wait()
            averages.remove_after(self.folder.averages, good.step)
            lr = self.config.optimizer.lr * state.guard.lr_scale
            skipped = [good.images, state.seen]
            self.recorder.event("rolled_back", step, reason=reason, to=good.step, lr=lr, images_skipped=skipped)
        warn(
            f"step {step:,}: {reason}; back to the weights of step {good.step:,} with half the learning rate "
            f"({lr:.3g}); the images since are skipped"
        )
        return str(good.folder)

    def wait(self, leaving: bool = False) -> None:
        """Wait until no checkpoint is on its way, which a full disk may delay; when leaving, not for long.

        Raises:
            Interrupted: a stop was requested meanwhile.
            RunError: it could not be written; when leaving, also if the disk stays full.
        """
        patience = 0.8 * self.config.training.grace  # the rest is for the way out
        deadline = time.monotonic() + patience
        with self.pulse.during("saving"):
            while not self.writer.wait(0.05):
                self.report_writer_events()
                self.pulse.activity = "waiting for disk space" if self.writer.waiting else "saving"
                if not self.stop():
                    deadline = time.monotonic() + patience
                elif not leaving:
                    raise Interrupted
                elif self.writer.waiting and time.monotonic() > deadline:
                    self.writer.abandon()
                    raise RunError(
                        f"the disk is full, so what was learned since the newest checkpoint in "
                        f"{self.folder.checkpoints} could not be saved; that one is whole. Make room, then "
                        f"`unfog resume {self.folder.path}`"
                    )
        self.report_writer_events()

    def finish_after_failure(self, at_once: bool, shared: bool = False) -> None:
        """After a failure: let the checkpoint on its way arrive; `at_once`, only if that is a matter of a moment; not
        for long where others write a part of it."""
        with suppress(RunError):  # the failure is what is told
            if at_once:
                self.writer.abandon()
                self.writer.wait(_BRIEF_WAIT)
            elif not shared:
                self.wait(leaving=True)
            elif not self.writer.wait(0.8 * self.config.training.grace):  # one that writes with this may be gone
                self.writer.abandon()
        self.report_writer_events()

    def report_writer_events(self) -> None:
        """Record and say what the writer has done since the last time."""
        for step, reason in self.averages.failures():
            self.recorder.event("averages_left_out", step, reason=reason)
            warn(f"the averages of step {step:,} could not be written ({reason}); others of them will do")
        for kind, step, fields in self.writer.events():
            self.recorder.event(kind, step, **fields)
            if kind == "checkpoint":
                self.pulse.save_finished()
            elif kind == "not_removed":
                warn(f"old checkpoints could not be removed ({fields['reason']}); they take room, and nothing else")
            elif kind == "disk_full":
                warn(
                    f"the disk is full: checkpoint {step:,} needs {fields['needed'] / 1e6:,.0f} MB, and there are "
                    f"{fields['free'] / 1e6:,.0f} MB; make room, and it will be written; nothing is lost"
                )
            elif kind == "disk_has_room":
                say(f"there is room again: checkpoint {step:,} is written")
