"""Dry run: everything that a run does later, done now in two steps, so that what fails after a day fails in a minute.

It is a real run in a temporary folder, with the code that trains: session, loop, checkpoints, the replay of
`unfog resume --verify`, the loading of `unfog sample`, and the export.
"""

from __future__ import annotations

import contextlib
import errno
import io
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.errors import Interrupted, RequestError
from unfog.export.diffusers_unet import Network, to_unet2d
from unfog.inference.run import Run
from unfog.pipeline.build import input_shape
from unfog.planning.disk import disk_space_needed
from unfog.process.device import peak_bytes, resident_bytes
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.findings import Finding
from unfog.reporting.progress import Progress, format_bytes
from unfog.reporting.records import read_events, read_metrics
from unfog.reporting.settings import Log
from unfog.runs.context import RunContext
from unfog.runs.metrics_hook import MIN_SAMPLES, TRIAL_SAMPLES
from unfog.runs.replay import differing_tensors, replay_newest
from unfog.runs.resume import find_resume_point
from unfog.runs.session import Session
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.writer import free_bytes
from unfog.training.settings import Evaluate

PART_OF_ACTIVITY = {"preview": "preview", "drawing": "preview", "evaluation": "evaluation", "saving": "checkpoint"}
"""Activity of the heartbeat -> part of the dry run."""


class TimedHeartbeat(Heartbeat):
    """A heartbeat that records the duration of each activity, and during which one an error was raised."""

    def __init__(self, folder: Path, stop: StopSignals):
        super().__init__(folder, stop)
        self.spent: dict[str, list[float]] = {}
        self.failed = ""

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with super().during(what):
                yield
        except Exception:
            self.failed = self.failed or what
            raise
        finally:
            self.spent.setdefault(what, []).append(time.perf_counter() - started)


class PartError(Exception):
    """A failed part of the dry run ("" for the current one), and the error."""

    def __init__(self, part: str, reason: Exception):
        super().__init__(str(reason))
        self.part, self.reason = part or "training", reason


def shortened(config: Config, steps: int) -> Config:
    """Return the same run in so many steps, with every hook due in it, and without trackers."""
    training = config.training
    at_once = training.microbatch or training.batch
    return replace(
        config,
        training=replace(training, images=steps * training.batch, steps=0, budget=""),
        log=Log(every=1),
        preview=replace(config.preview, every=-1, images=min(config.preview.images, at_once)),
        evaluate=shortened_evaluation(config.evaluate, steps),
        checkpoint=replace(config.checkpoint, every=1, milestones=0),
        ema_snapshots=replace(config.ema_snapshots, every=min(config.ema_snapshots.every, 1)),
    )


def shortened_evaluation(evaluate: Evaluate, steps: int) -> Evaluate:
    """Return settings with one evaluation, at the end, of as few samples as can be measured. The best checkpoint is
    chosen by the held-out loss, as some metrics reject so few."""
    if evaluate.every <= 0:
        return replace(evaluate, every=-1)
    evaluate = replace(evaluate, every=steps)
    if not evaluate.metrics or evaluate.metrics_every < 0:
        return evaluate
    best = "held_out_loss"
    return replace(
        evaluate, samples=TRIAL_SAMPLES, reference=min(evaluate.reference, MIN_SAMPLES), metrics_every=steps, best=best
    )


def passed(part: str, said: str, **facts: Any) -> Finding:
    return Finding(f"rehearsal.{part}", "fine", said, facts=facts)


CONSEQUENCE = {
    **dict.fromkeys(("training", "preview", "evaluation", "checkpoint"), "the run would fail of it as well"),
    "report": "the run would be trained and saved, but end with this error",
    **dict.fromkeys(("reload", "resume"), "the run itself may end well, but an interrupted one could not go on"),
    "repeat": "the run itself may end well, but `unfog resume RUN --verify` would fail",
    "sample": "the run itself may end well, but `unfog sample RUN` would fail",
    "export": "the run itself may end well, but it could not be exported to diffusers",
}
"""Part -> consequence of its failure for the run."""


def no_room(said: str) -> Finding:
    """Return the finding for a dry run without enough disk space, which is no fault of the run."""
    remedy = "make room there, or let TMPDIR name a folder that has it"
    return Finding("rehearsal.room", "hint", f"the rehearsal was not finished: {said}", remedy)


def failed(part: str, error: Exception, told: str) -> Finding:
    """Return the finding for an error, with its message and the remedy where that is known."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_room(str(error))
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    kind = "" if isinstance(error, RequestError) else f"{type(error).__name__}: "
    short = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in first.lower()
    remedy = "a smaller --microbatch, --network or --size" if short else CONSEQUENCE[part]
    facts = {"error": type(error).__name__, "said": told[-2000:]}
    return Finding(f"rehearsal.{part}", "fatal", f"{part} failed: {kind}{first}", remedy, facts)


class NoRoomError(Exception):
    """Not enough disk space for the dry run."""


def check_room(folder: Path, session: Session) -> None:
    """NoRoomError unless there is disk space for all checkpoints that a dry run keeps at a time."""
    parameters = sum(p.numel() for p in session.state.model.parameters())
    room, free = (
        disk_space_needed(parameters, session.config.checkpoint, 0, session.config.ema_snapshots),
        free_bytes(folder),
    )
    if free < room.maximum:
        said = (
            f"{folder.parent} has {format_bytes(free)} free, and {room.checkpoints} checkpoints of this network take "
        )
        raise NoRoomError(said + format_bytes(room.checkpoints * room.checkpoint))


def distance(a: list[Any], b: list[Tensor]) -> float:
    """Return the Euclidean distance between two lists of tensors."""
    return float(torch.stack([(x.detach() - y).norm() for x, y in zip(a, b)]).norm())


@torch.inference_mode()
def export_difference(run: Run) -> float:
    """Return the largest output difference between a run's network and its export to diffusers, relative to ours.

    Both get random weights: many branches of a network start at zero and are nearly zero after two steps, so that an
    exchanged weight would go unnoticed.

    Raises:
        RequestError: diffusers has no equivalent network.
    """
    from diffusers import UNet2DModel

    config, network = run.config, randomized(run.network.cpu())
    assert config.network is not None  # a run's is settled
    channels, side, _ = input_shape(config)
    out = channels * (2 if config.diffusion.learned_variance else 1)
    ours = Network(config.network, channels, len(config.classes), network.state_dict(), out)
    settings, state = to_unet2d(ours, side)
    theirs = UNet2DModel(**settings).eval()
    theirs.load_state_dict(state)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, channels, side, side, generator=generator)
    level = torch.tensor([10.0, 500.0])
    label = torch.tensor([0, len(config.classes)]) if config.classes else None
    expected = network(x, level, label)
    given = theirs(x, level, class_labels=label).sample
    return float((given - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def randomized(network: nn.Module) -> nn.Module:
    """Return a copy of a network with random weights of ordinary size, so that all of them affect the output."""
    copy, generator = deepcopy(network), torch.Generator().manual_seed(0)
    for parameter in copy.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * (parameter.numel() / parameter.shape[0]) ** -0.5)
        else:  # biases about 0, the scales of normalisations about 1
            parameter.copy_(parameter.round().clamp(0, 1) + 0.1 * noise)
    return copy


def memory(before: int, device: torch.device) -> Finding:
    """Return a finding with the memory of the process before and after, and its peak."""
    after, peak = resident_bytes(), peak_bytes()
    facts = {"before": before, "after": after, "peak": peak}
    said = (
        f"the process held {format_bytes(before)} before the rehearsal, {format_bytes(after)} after it and "
        f"{format_bytes(peak)} at most"
    )
    if device.type == "cuda":
        facts["device_peak"] = torch.cuda.max_memory_allocated(device)
        said += f"; {format_bytes(facts['device_peak'])} of {device} at most"
    return passed("memory", said, **facts)


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
