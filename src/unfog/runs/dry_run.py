"""Dry run: everything that a run does later, done now in two steps, so that what fails after a day fails in a minute.

It is a real run in a temporary folder, with the code that trains: session, loop, checkpoints, the replay of
`unfog resume --verify`, the loading of `unfog sample`, and the export.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.errors import Interrupted, RequestError
from unfog.inference.run import Run
from unfog.process.memory import resident_bytes
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.findings import Finding
from unfog.reporting.progress import Progress, format_bytes
from unfog.reporting.records import read_events, read_metrics
from unfog.runs.context import RunContext
from unfog.runs.dry_run_parts import (
    PART_OF_ACTIVITY,
    NoRoomError,
    PartError,
    TimedHeartbeat,
    check_room,
    distance,
    export_difference,
    failed,
    memory,
    no_room,
    passed,
    shortened,
)
from unfog.runs.replay import differing_tensors, replay_newest
from unfog.runs.resume import find_resume_point
from unfog.runs.session import Session
from unfog.training.checkpoints import format as checkpoint

_STEPS = 2
_MAX_STEPS = 16  # fp16's loss scale begins at 2^16 and halves where it is too large: after 16 steps it is 1
_SAMPLES = 4
_EXPORT_TOLERANCE = 1e-4  # of the largest output: what rounding may change between our network and diffusers'


def dry_run(
    config: Config, dataset: Dataset, device: torch.device, stop: StopSignals, folder: Path | None = None
) -> list[Finding]:
    """Return a finding for each part of a run, rehearsal.*: fine with its cost, or fatal with the error.

    Trackers are left out, as others see them. The random state of torch is left as it was.

    Args:
        config: settings with none left open.
        dataset: the images.
        device: where the run will compute.
        stop: a request raises Interrupted; the temporary folder is removed then too.
        folder: where the temporary folder is made, which needs room for as many checkpoints as a run keeps; None for
            the system's.
    """
    before = resident_bytes()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    devices = [device] if device.type == "cuda" else []
    with (
        Progress("rehearsing", None) as progress,
        tempfile.TemporaryDirectory(prefix="unfog-rehearsal-", dir=folder) as place,
        torch.random.fork_rng(devices=devices),
    ):
        findings = _DryRun(config, dataset, device, stop, RunFolder(Path(place))).run(progress)
    return [*findings, memory(before, device)]


class _DryRun:
    """One dry run, part by part. After a failure, the parts that need the failed one are left out."""

    def __init__(self, config: Config, dataset: Dataset, device: torch.device, stop: StopSignals, folder: RunFolder):
        self.steps = _STEPS
        self.config, self.dataset, self.device = shortened(config, _STEPS), dataset, device
        self.stop, self.folder = stop, folder
        self.findings: list[Finding] = []

    def run(self, progress: Progress) -> list[Finding]:
        self.progress = progress
        if self._part("training", self._train):
            self._part("reload", self._reload)
            self._part("repeat", self._repeat)
            self._part("resume", self._resume)
            if self._part("sample", self._sample):
                self._part("export", self._export)
        return self.findings

    def _part(self, name: str, action: Callable[[], list[Finding]]) -> bool:
        """Do a part without output. Returns True if it succeeded."""
        self.stop.leave_if_requested()
        self.progress.update(len(self.findings), note=name)
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told):
                self.findings += action()
        except NoRoomError as error:
            self.findings.append(no_room(str(error)))
            return False
        except PartError as error:
            self.findings.append(failed(error.part, error.reason, told.getvalue()))
            return False
        except Exception as error:  # any error that would end the run later is a finding
            self.findings.append(failed(name, error, told.getvalue()))
            return False
        return True

    def _session(self, config: Config, saved: checkpoint.CheckpointInfo | None) -> tuple[Session, TimedHeartbeat]:
        """Run a session to its end. PartError names the part in which it failed."""
        with StopSignals() as own, self.folder.locked(), (pulse := TimedHeartbeat(self.folder.path, own)):
            try:
                context = RunContext(self.folder, self.device, own, pulse)
                session = Session(context, config, self.dataset)
                if saved is None:
                    check_room(self.folder.path, session)
                    self.folder.checkpoints.mkdir()
                    self.initial = [p.detach().clone() for p in session.state.model.parameters()]
                self.folder.write_config(config)
                session.run((), saved=saved)
            except NoRoomError:
                raise
            except Exception as error:
                ended = "report" if pulse.activity == "finished" else ""
                raise PartError(ended or PART_OF_ACTIVITY.get(pulse.failed, ""), error) from error
            if own():
                self.stop.request(own.received or "a signal")
                raise Interrupted
        return session, pulse

    def _train(self) -> list[Finding]:
        """Train two steps with all hooks; return a finding for each part."""
        started = time.perf_counter()
        session, pulse = self._session(self.config, None)
        while not session.state.updates and session.state.precision.may_overflow and self.steps < _MAX_STEPS:
            # Every step overflowed: a run spends its first steps on finding fp16's loss scale.
            self.steps = min(2 * self.steps, _MAX_STEPS)
            self.config = shortened(self.config, self.steps)
            session, pulse = self._session(self.config, find_resume_point(self.folder, self.config).saved)
        whole = time.perf_counter() - started
        self.state, path = session.state, self.folder.path
        saved = checkpoint.list_checkpoints(self.folder.checkpoints)[0][-1]
        stored = sum(file.bytes for file in saved.files.values())
        page = path / "report.html"
        return [
            self._steps(whole),
            self._average(),
            self._timed("preview", pulse.spent.get("preview", []), f"{self.config.preview.images} pictures drawn"),
            *(
                [self._timed("evaluation", pulse.spent["evaluation"], "the held-out loss measured")]
                if pulse.spent.get("evaluation")
                else []
            ),
            passed(
                "checkpoint",
                f"a checkpoint of {format_bytes(stored)} written,"
                f" for which training stood still {session.saver.stall_seconds:.2g} s",
                seconds=session.saver.stall_seconds,
                bytes=stored,
            ),
            passed("report", f"a report of {format_bytes(page.stat().st_size)} written", bytes=page.stat().st_size),
        ]

    def _steps(self, whole: float) -> Finding:
        rows = [row for row in read_metrics(self.folder.metrics) if "images_per_second" in row]
        batch, steps = self.config.training.batch, self.steps
        paces = [batch / row["images_per_second"] for row in rows]
        refused = [e for e in read_events(self.folder.path / "events.jsonl") if e["kind"] == "step_refused"]
        shrunk = [e for e in read_events(self.folder.path / "events.jsonl") if e["kind"] == "out_of_memory"]
        facts: dict[str, Any] = {"seconds_per_step": paces[-1], "first": paces[0], "batch": batch, "seconds": whole}
        said = f"{steps} steps of {batch} images trained, {paces[0]:.2g} s the first and {paces[-1]:.2g} s the last"
        if self.state.updates < steps - len(refused):
            said += f"; fp16's loss scale came down to {self.state.precision.scale:g} meanwhile, as it does in any run"
        if refused:
            said = f"{len(refused)} of {steps} steps were refused, as their gradient is not finite"
            return Finding("rehearsal.training", "warning", said, "--precision fp32, or bf16", facts)
        if shrunk:
            now = shrunk[-1]["microbatch"]
            facts["microbatch"] = now
            said = f"{said}, but memory did not suffice for more than {now} images at a time"
            return Finding("rehearsal.training", "hint", said, f"--microbatch {now}", facts)
        return Finding("rehearsal.training", "fine", said, facts=facts)

    def _average(self) -> Finding:
        """Compare how far the weights and their EMA have moved."""
        model, average = list(self.state.model.parameters()), self.state.ema.parameters
        moved, followed = distance(model, self.initial), distance(average, self.initial)
        self.initial = []
        facts = {"updates": self.state.updates, "moved": moved, "average_moved": followed}
        if not moved and not self.state.updates and self.config.training.precision == "fp16":
            said = f"none of {self.steps} steps was taken, as every gradient was beyond what fp16 can hold"
            return Finding("rehearsal.ema", "warning", said, "--precision fp32, or bf16", facts)
        if not moved:
            said = f"the weights are after {self.steps} steps what they were before"
            return Finding("rehearsal.ema", "fatal", said, "--lr 0 chooses a learning rate", facts)
        if not followed:
            return Finding("rehearsal.ema", "fatal", "the average does not follow the weights", "--ema power", facts)
        return passed(
            "ema", f"the average follows: it has moved {100 * followed / moved:.3g}% as far as the weights", **facts
        )

    def _timed(self, part: str, seconds: list[float], said: str) -> Finding:
        took = max(seconds, default=0.0)
        return passed(part, f"{said} in {took:.2g} s", seconds=took)

    def _reload(self) -> list[Finding]:
        """Compare the checkpoint on disk with the state in memory and with its own checksums."""
        started = time.perf_counter()
        saved, broken = checkpoint.newest(self.folder.checkpoints)
        if saved is None or broken:
            raise PartError("reload", ValueError(f"it was written and cannot be read: {broken[0] if broken else ''}"))
        different, count = differing_tensors(self.state, saved), sum(map(len, self.state.tensors().values()))
        del self.state
        took = time.perf_counter() - started
        if different:
            raise PartError("reload", ValueError(f"{different[0]} and {len(different) - 1} others are not as saved"))
        return [
            passed("reload", f"{count} tensors read back as they were, in {took:.2g} s", seconds=took, tensors=count)
        ]

    def _repeat(self) -> list[Finding]:
        """Train from the first checkpoint to the last once more, as after an interruption."""
        different = replay_newest(self.folder, self.config, self.dataset, self.stop)
        if not different:
            return [passed("repeat", "a step repeated after going back to a checkpoint is equal to the bit")]
        said = (
            f"a step repeated from its checkpoint came out otherwise ({different[0]} and {len(different) - 1} others)"
        )
        remedy = "an interrupted run goes on just as well, but not to the bit as it would have"
        return [Finding("rehearsal.repeat", "hint", said, remedy, {"different": len(different)})]

    def _resume(self) -> list[Finding]:
        """Train one step from the newest checkpoint, as `unfog resume` does."""
        started = time.perf_counter()
        saved = find_resume_point(self.folder, self.config).saved
        config = shortened(self.config, self.steps + 1)
        session, _ = self._session(replace(config, preview=replace(config.preview, images=1)), saved)
        took = time.perf_counter() - started
        if session.step != self.steps + 1:
            raise PartError("resume", ValueError(f"it ended at step {session.step} instead of {self.steps + 1}"))
        return [passed("resume", f"resumed at step {self.steps} and trained one more, in {took:.2g} s", seconds=took)]

    def _sample(self) -> list[Finding]:
        """Load a new network from the run folder alone and sample, as `unfog sample` does."""
        started = time.perf_counter()
        self.loaded = Run(self.folder.path, device=str(self.device))
        pictures = self.loaded.sample(_SAMPLES, batch=_SAMPLES)
        took = time.perf_counter() - started
        return [passed("sample", f"{len(pictures)} pictures drawn from the saved run in {took:.2g} s", seconds=took)]

    def _export(self) -> list[Finding]:
        """Compare the outputs of the exported network in diffusers; a hint if it is missing or has no such network."""
        if find_spec("diffusers") is None:
            remedy = "pip install 'unfog[export]' before you export"
            return [Finding("rehearsal.export", "hint", "diffusers is not installed, so export was not tried", remedy)]
        started = time.perf_counter()
        try:
            off = export_difference(self.loaded)
        except RequestError as error:
            return [Finding("rehearsal.export", "hint", str(error))]
        took = time.perf_counter() - started
        if off > _EXPORT_TOLERANCE:
            raise PartError("export", ValueError(f"diffusers' network answers otherwise, by {off:.2g} of the largest"))
        said = f"diffusers' network answers as ours does, to {off:.1g} of the largest value, in {took:.2g} s"
        return [passed("export", said, seconds=took, difference=off)]
