"""Dry run of the doctor: a run of two steps in a temporary folder, then reload, repeat, resume, sample and export.

The session that it trains begins with the dry run of every run, `Session._dry_run`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.errors import Interrupted, RequestError, install_command
from unfog.inference.exports.diffusers import export_difference
from unfog.inference.run import Run
from unfog.pipeline.generate import GenerationSettings, sample_calls
from unfog.planning.disk import disk_space_needed
from unfog.process.device import peak_bytes, resident_bytes
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.findings import DRY_RUN, Finding
from unfog.reporting.log_settings import Log
from unfog.reporting.progress import Progress, format_duration
from unfog.reporting.records import read_events, read_metrics
from unfog.runs.evaluation_hook import MIN_SAMPLES, TRIAL_SAMPLES
from unfog.runs.ranks import RunContext
from unfog.runs.replay import differing_tensors, replay_newest
from unfog.runs.resume import find_resume_point
from unfog.runs.session import Session
from unfog.runs.train import open_session, train_session
from unfog.text import format_bytes, plural
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.writer import free_bytes
from unfog.training.settings import Evaluate
from unfog.training.state import TrainState

_STEPS = 2
_MAX_STEPS = 16  # fp16's loss scale begins at 2^16 and halves where it is too large: after 16 steps it is 1
_SAMPLES = 4
_FINAL_IMAGES = 4  # drawn at both ends of the resume, and as the last image of both sessions
_AIM, _MOST_SECONDS = 20.0, 90.0  # seconds that the parts are shortened to, and after which none is begun
# Images of a training batch, previews, sampling steps and evaluated images below which none is shortened.
_LEAST = {"batch": 4, "preview": 1, "steps": 4, "evaluate": 2}
_EXPORT_TOLERANCE = 1e-4  # of the largest output: what rounding may change between our network and diffusers'
# Part -> consequence of its failure for the run.
_CONSEQUENCES = {
    **dict.fromkeys(("training", "preview", "evaluation", "checkpoint"), "the run would fail with it as well"),
    "report": "the run would be trained and saved, but end with this error",
    **dict.fromkeys(("reload", "resume"), "the run itself may end well, but an interrupted one could not continue"),
    "repeat": "the run itself may end well, but `unfog resume RUN --verify` would fail",
    "sample": "the run itself may end well, but `unfog sample RUN` would fail",
    "export": "the run itself may end well, but it could not be exported to diffusers",
}
# Activity of the heartbeat -> part of the dry run.
_PART_OF_ACTIVITY = {"preview": "preview", "drawing": "preview", "evaluation": "evaluation", "saving": "checkpoint"}


class Trial(NamedTuple):
    """A run as the dry run takes it: smaller, if the machine is slow."""

    config: Config
    seconds: float
    """Time of all parts, as estimated; 0 if the pace is not known."""
    smaller: str = ""
    """What is smaller than in the run; "" if nothing is."""

    @classmethod
    def of(cls, config: Config, held_out: int, seconds_per_step: float) -> Trial:
        """Halve what takes longest until all parts fit into twenty seconds, or nothing can be halved."""
        per_image, sizes = seconds_per_step / config.training.batch, _sizes(config)
        sizes["evaluate"] = min(sizes["evaluate"], held_out) or sizes["evaluate"]
        now = dict(sizes)
        try:
            while sum(costs := _costs(_resized(config, now), held_out, per_image)) > _AIM:
                open_ones = {name: cost for name, cost in zip(now, costs) if cost and now[name] // 2 >= _LEAST[name]}
                if not open_ones:
                    break
                now[max(open_ones, key=lambda name: open_ones[name])] //= 2
        except RequestError:  # settings that do not fit together, which the dry run will find
            return cls(config, 0.0)
        names = {"batch": "images in a batch", "preview": "in a preview", "steps": "sampling steps"}
        names["evaluate"] = "held-out images"
        changed = [f"{now[name]} of {sizes[name]} {what}" for name, what in names.items() if now[name] < sizes[name]]
        return cls(_resized(config, now) if changed else config, sum(costs), ", ".join(changed))


def check_dry_run(
    trial: Trial, dataset: Dataset, device: torch.device, stop: StopSignals, folder: Path | None = None
) -> list[Finding]:
    """Return a finding for each part of a run: fine with its cost, fatal with the error, or a hint if not tried.

    No setting of the `trial` is open. `folder` is the parent of the temporary folder, with space for as many
    checkpoints as a run keeps; None for the system's. Trackers are disabled. The random state of torch is left as it
    was. A request to `stop`, polled between the parts, raises Interrupted.
    """
    before = resident_bytes()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with (
        Progress("dry run", None) as progress,
        tempfile.TemporaryDirectory(prefix="unfog-dry-run-", dir=folder) as place,
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        findings = _DryRun(trial.config, dataset, device, stop, RunFolder(Path(place))).run(progress)
    if trial.smaller:
        said = f"the dry run was shortened, as this machine is slow: {trial.smaller}"
        findings.append(Finding(f"{DRY_RUN}.shortened", "fine", said))
    return [*findings, _memory_held(before, device)]


class _Heartbeat(Heartbeat):
    """A heartbeat that remembers the activity in which an error was raised."""

    failed = ""

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        try:
            with super().during(what):
                yield
        except Exception:
            self.failed = self.failed or what  # activities nest, and the innermost one is reported first
            raise


class _DryRun:
    """One dry run, part by part. After a failure, the parts that need the failed one are skipped."""

    def __init__(self, config: Config, dataset: Dataset, device: torch.device, stop: StopSignals, folder: RunFolder):
        self.steps = _STEPS
        self.config, self.dataset, self.device = shorten(config, _STEPS), dataset, device
        self.stop, self.folder = stop, folder
        self.findings: list[Finding] = []
        self.left_out: list[str] = []
        self.deadline = time.monotonic() + _MOST_SECONDS

    def run(self, progress: Progress) -> list[Finding]:
        self.progress = progress
        if self._part("training", self._train):
            self._part("reload", self._reload)
            self._part("repeat", self._repeat)
            self._part("resume", self._resume)
            if self._part("sample", self._sample):
                self._part("export", self._export)
        if self.left_out:
            self.left_out += ["export"] * ("sample" in self.left_out)
            said = f"not tried, as the dry run had taken over {format_duration(_MOST_SECONDS)}: "
            remedy = "they take longer on this machine; a smaller --network, --size or --batch is quicker"
            self.findings.append(Finding(f"{DRY_RUN}.time", "hint", said + ", ".join(self.left_out), remedy))
        return self.findings

    def _part(self, name: str, action: Callable[[], list[Finding]]) -> bool:
        """Do a part without output, if there is time. Returns True if it succeeded."""
        self.stop.leave_if_requested()
        if self.findings and time.monotonic() > self.deadline:
            self.left_out.append(name)
            return False
        self.progress.update(len(self.findings), note=name)
        self.started, self.part = time.perf_counter(), name
        output = io.StringIO()
        try:
            with contextlib.redirect_stderr(output):
                self.findings += action()
        except Exception as error:  # any error that would end the run later is a finding
            self.findings.append(failure_finding(self.part, error, output.getvalue()))
            return False
        return True

    def _finding(self, said: str, **facts: Any) -> list[Finding]:
        """Return the finding of a part that succeeded, with the time since it began."""
        took = time.perf_counter() - self.started
        return [_passed(self.part, f"{said} in {took:.2g} s", seconds=took, **facts)]

    def _session(self, config: Config, saved: checkpoint.CheckpointInfo | None) -> Session:
        """Run a session to its end. Where it fails, `part` becomes the part in which it did."""
        # Signals and heartbeat of its own: at its end a session silences its signals for good.
        with StopSignals() as own, self.folder.locked(), (heartbeat := _Heartbeat(self.folder.path, own)):
            try:
                session = open_session(RunContext(self.folder, self.device, own, heartbeat), config, self.dataset)
                if saved is None:
                    _check_disk_space(self.folder.path, session)
                    self.folder.checkpoints.mkdir()
                    self.initial = [p.detach().clone() for p in session.state.model.parameters()]
                self.folder.write_config(config)
                train_session(session, (), saved=saved)
            except Exception:
                # The session writes its report after the last heartbeat, so nothing else can have failed then.
                ended = heartbeat.activity == "finished"
                self.part = "report" if ended else _PART_OF_ACTIVITY.get(heartbeat.failed, "training")
                raise
            if own():
                self.stop.request(own.received or "a signal")
                raise Interrupted
        return session

    def _train(self) -> list[Finding]:
        """Train two steps with all hooks; return a finding for each part."""
        session = self._session(self.config, None)
        while not session.state.updates and session.state.precision.may_overflow and self.steps < _MAX_STEPS:
            # Every step overflowed: a run spends its first steps on finding fp16's loss scale.
            self.steps = min(2 * self.steps, _MAX_STEPS)
            self.config = shorten(self.config, self.steps)
            session = self._session(self.config, find_resume_point(self.folder, self.config).saved)
        seconds, self.state = time.perf_counter() - self.started, session.state
        saved = checkpoint.list_checkpoints(self.folder.checkpoints)[0][-1]
        stored, stall = sum(file.bytes for file in saved.files.values()), session.saver.stall_seconds
        training = self.config.training
        moved = _ema_moved(self.state, self.initial, training.precision, self.steps)
        self.initial = []  # as large as the network, and needed no more
        page = (self.folder.path / "report.html").stat().st_size
        written = f"a checkpoint of {format_bytes(stored)} written, for which training stood still {stall:.2g} s"
        return [
            _steps_trained(self.folder, self.state, training.batch, self.steps, seconds),
            moved,
            *_slowest(self.folder, "preview", "preview", f"{plural(self.config.preview.images, 'sample')} generated"),
            *_slowest(self.folder, "evaluation", "evaluated", "held-out loss measured"),
            _passed("checkpoint", written, seconds=stall, bytes=stored),
            _passed("report", f"a report of {format_bytes(page)} written", bytes=page),
        ]

    def _reload(self) -> list[Finding]:
        """Compare the checkpoint on disk with the state in memory and with its own checksums."""
        saved, broken = checkpoint.newest(self.folder.checkpoints)
        if saved is None or broken:
            raise ValueError(f"it was written and cannot be read: {broken[0] if broken else ''}")
        different, count = differing_tensors(self.state, saved), sum(map(len, self.state.tensors().values()))
        del self.state  # the parts from here on build one of their own
        if different:
            raise ValueError(f"{different[0]} and {len(different) - 1} others are not as saved")
        return self._finding(f"{count} tensors read back as they were,", tensors=count)

    def _repeat(self) -> list[Finding]:
        """Train from the first checkpoint to the last once more, as after an interruption."""
        different, _ = replay_newest(self.folder, self.config, self.dataset, self.stop)
        if not different:
            return [_passed("repeat", "a step repeated from its checkpoint is equal to the bit")]
        said = f"a step repeated from its checkpoint differs ({different[0]} and {len(different) - 1} others)"
        remedy = (
            "an interrupted run continues just as well, but its result is not bit-identical to an uninterrupted one"
        )
        return [Finding(f"{DRY_RUN}.repeat", "hint", said, remedy, {"different": len(different)})]

    def _resume(self) -> list[Finding]:
        """Train one step from the newest checkpoint, as `unfog resume` does."""
        saved = find_resume_point(self.folder, self.config).saved
        config = shorten(self.config, self.steps + 1)
        session = self._session(replace(config, preview=replace(config.preview, images=1)), saved)
        if session.step != self.steps + 1:
            raise ValueError(f"it ended at step {session.step} instead of {self.steps + 1}")
        return self._finding(f"resumed at step {self.steps} and trained one more,")

    def _sample(self) -> list[Finding]:
        """Load a new network from the run folder alone and sample, as `unfog sample` does."""
        self.loaded = Run(self.folder.path, device=str(self.device))
        count = len(self.loaded.sample(_SAMPLES, batch=_SAMPLES))
        return self._finding(f"{plural(count, 'sample')} generated from the saved run")

    def _export(self) -> list[Finding]:
        """Compare the outputs of the exported network in diffusers; a hint if it is missing or has no such network."""
        if find_spec("diffusers") is None:
            remedy = f"{install_command('export')} before you export"
            return [Finding(f"{DRY_RUN}.export", "hint", "diffusers is not installed, so export was not tried", remedy)]
        try:
            difference = export_difference(self.loaded)
        except RequestError as error:
            return [Finding(f"{DRY_RUN}.export", "hint", str(error))]
        if difference > _EXPORT_TOLERANCE:
            raise ValueError(f"the output of diffusers' network differs, by {difference:.2g} of the largest value")
        said = f"diffusers' network agrees to {difference:.1g} of the largest value,"
        return self._finding(said, difference=difference)


def _sizes(config: Config) -> dict[str, int]:
    """Return the parts of a dry run that may be shortened."""
    return {
        "batch": config.training.batch,
        "preview": config.preview.images,
        "steps": config.sampler.steps,
        "evaluate": config.evaluate.images,
    }


def _resized(config: Config, sizes: Mapping[str, int]) -> Config:
    """Return the same run with other sizes, the inverse of `_sizes`."""
    training, batch = config.training, sizes["batch"]
    return replace(
        config,
        training=replace(training, batch=batch, microbatch=min(training.microbatch, batch)),
        preview=replace(config.preview, images=sizes["preview"]),
        sampler=replace(config.sampler, steps=sizes["steps"]),
        evaluate=replace(config.evaluate, images=sizes["evaluate"]),
    )


def _costs(config: Config, held_out: int, per_image: float) -> tuple[float, ...]:
    """Return the seconds of all training steps, of previews, of other samples and of evaluations, by estimate.

    `per_image` is the time of a training step for each of its images. A backward pass costs two forward passes.
    """
    short = shorten(config, _STEPS)
    calls = sample_calls(GenerationSettings.default(short, 1, 1), short.diffusion.schedule)
    metrics = short.evaluate.samples if short.evaluate.metrics_every > 0 and short.evaluate.metrics else 0
    others = _SAMPLES + _FINAL_IMAGES + metrics
    evaluated = 3 * min(short.evaluate.images, held_out) * short.evaluate.levels * (short.evaluate.every > 0)
    passes = 2 * short.preview.images * calls, others * calls, evaluated
    # Two steps, one repeated and one after a resume.
    return (_STEPS + 2) * short.training.batch * per_image, *(each * per_image / 3 for each in passes)


def shorten(config: Config, steps: int) -> Config:
    """Return the same run in so many steps, with every hook due in it, and without trackers."""
    training = config.training
    at_once = training.microbatch or training.batch  # a larger preview would take more memory than training
    return replace(
        config,
        training=replace(training, images=steps * training.batch, steps=0, budget=""),
        log=Log(every=1),
        preview=replace(config.preview, every=-1, images=min(config.preview.images, at_once)),
        evaluate=shorten_evaluation(config.evaluate, steps),
        # After every step, as two checkpoints are needed to repeat the steps between.
        checkpoint=replace(config.checkpoint, every=1, milestones=0, mirror=""),
        ema_snapshots=replace(config.ema_snapshots, every=min(config.ema_snapshots.every, 1)),
    )


def shorten_evaluation(evaluate: Evaluate, steps: int) -> Evaluate:
    """Return settings with one evaluation, at the end, of as few samples as can be measured."""
    every = steps if evaluate.every > 0 else -1
    if every < 0 or not evaluate.metrics or evaluate.metrics_every < 0:
        return replace(evaluate, every=every)
    # Some metrics reject so few samples, and could not choose the best checkpoint.
    few = replace(evaluate, samples=TRIAL_SAMPLES, reference=min(evaluate.reference, MIN_SAMPLES), best="held_out_loss")
    return replace(few, every=every, metrics_every=every)


def _check_disk_space(folder: Path, session: Session) -> None:
    """OSError unless there is disk space for all checkpoints that a dry run keeps at a time."""
    parameters = sum(p.numel() for p in session.state.model.parameters())
    needed = disk_space_needed(parameters, session.config.checkpoint, 0, session.config.ema_snapshots)
    if (free := free_bytes(folder)) < needed.maximum:
        size = format_bytes(needed.checkpoints * needed.checkpoint)
        said = f"{folder.parent} has {format_bytes(free)} free, and {needed.checkpoints} checkpoints take {size}"
        raise OSError(errno.ENOSPC, said)


def _passed(part: str, said: str, **facts: Any) -> Finding:
    """Return the finding of a part that succeeded."""
    return Finding(f"{DRY_RUN}.{part}", "fine", said, facts=facts)


def failure_finding(part: str, error: Exception, output: str) -> Finding:
    """Return the finding for an error, with its message and the remedy where that is known."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space there, or set TMPDIR to a folder on another disk"  # it is not a fault of the run
        reason = error if error.filename else error.strerror
        return Finding(f"{DRY_RUN}.room", "hint", f"the dry run was not finished: {reason}", remedy)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    kind = "" if isinstance(error, RequestError) else f"{type(error).__name__}: "
    # Libraries below torch raise a plain RuntimeError for it.
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in first.lower()
    remedy = "a smaller --microbatch, --network or --size" if memory else _CONSEQUENCES[part]
    facts = {"error": type(error).__name__, "said": output[-2000:]}
    return Finding(f"{DRY_RUN}.{part}", "fatal", f"{part} failed: {kind}{first}", remedy, facts)


def _slowest(folder: RunFolder, part: str, kind: str, said: str) -> list[Finding]:
    """Return a finding with the longest time of the events of a kind, if there are any."""
    took = [event["seconds"] for event in read_events(folder.events) if event["kind"] == kind]
    return [_passed(part, f"{said} in {max(took):.2g} s", seconds=max(took))] if took else []


def _steps_trained(folder: RunFolder, state: TrainState, batch: int, steps: int, seconds: float) -> Finding:
    """Return a finding with the time of a step, skipped steps and shortage of memory."""
    rows = [row for row in read_metrics(folder.metrics) if "images_per_second" in row]
    first, last = (batch / rows[i]["images_per_second"] for i in (0, -1))
    events = read_events(folder.events)
    skipped = sum(event["kind"] == "step_refused" for event in events)
    shrunk = [event["microbatch"] for event in events if event["kind"] == "out_of_memory"]
    facts: dict[str, Any] = {"seconds_per_step": last, "first": first, "batch": batch, "seconds": seconds}
    if skipped:
        said = f"{skipped} of {steps} steps were skipped, as their gradient is not finite"
        return Finding(f"{DRY_RUN}.training", "warning", said, "--precision fp32, or bf16", facts)
    said = f"{steps} steps of {plural(batch)} trained, {first:.2g} s the first and {last:.2g} s the last"
    # A step that only lowers the loss scale is expected of fp16, and so no warning, unlike those counted above.
    if state.updates < steps:
        said += f"; fp16's loss scale came down to {state.precision.scale:g} meanwhile, as it does in any run"
    if shrunk:
        facts["microbatch"] = shrunk[-1]
        said += f", but memory sufficed for only {shrunk[-1]} images at a time"
        return Finding(f"{DRY_RUN}.training", "hint", said, f"--microbatch {shrunk[-1]}", facts)
    return Finding(f"{DRY_RUN}.training", "fine", said, facts=facts)


def _ema_moved(state: TrainState, initial: list[Tensor], precision: str, steps: int) -> Finding:
    """Compare how far the weights and their EMA have moved."""
    model, ema = list(state.model.parameters()), state.ema.parameters
    moved, followed = _distance(model, initial), _distance(ema, initial)
    facts = {"updates": state.updates, "moved": moved, "average_moved": followed}
    if not moved:
        if not state.updates and precision == "fp16":
            said = f"none of {steps} steps was taken, because every gradient overflowed fp16"
            return Finding(f"{DRY_RUN}.ema", "warning", said, "--precision fp32, or bf16", facts)
        said = f"the weights did not change in {steps} steps"
        return Finding(f"{DRY_RUN}.ema", "fatal", said, "--lr 0 chooses a learning rate", facts)
    if not followed:
        return Finding(f"{DRY_RUN}.ema", "fatal", "the EMA does not follow the weights", "--ema power", facts)
    return _passed("ema", f"the EMA has moved {100 * followed / moved:.3g}% as far as the weights", **facts)


def _distance(a: list[Any], b: list[Tensor]) -> float:
    return float(torch.stack([(x.detach() - y).norm() for x, y in zip(a, b)]).norm())


def _memory_held(before: int, device: torch.device) -> Finding:
    """Return a finding with the memory of the process before and after, and its peak."""
    facts = {"before": before, "after": resident_bytes(), "peak": peak_bytes()}
    held = [format_bytes(value) for value in facts.values()]
    said = f"the process held {held[0]} before the dry run, {held[1]} after it and {held[2]} at most"
    if device.type == "cuda":
        facts["device_peak"] = torch.cuda.max_memory_allocated(device)
        said += f"; {format_bytes(facts['device_peak'])} of {device} at most"
    return _passed("memory", said, **facts)
