"""Findings of a dry run: a part that succeeded or failed, steps, EMA and memory."""

from __future__ import annotations

import errno
from typing import Any

import torch
from torch import Tensor

from unfog.errors import RequestError
from unfog.process.device import peak_bytes, resident_bytes
from unfog.process.run_folder import RunFolder
from unfog.reporting.findings import Finding
from unfog.reporting.progress import format_bytes
from unfog.reporting.records import read_events, read_metrics
from unfog.training.state import TrainState

# Part -> consequence of its failure for the run.
_CONSEQUENCES = {
    **dict.fromkeys(("training", "preview", "evaluation", "checkpoint"), "the run would fail with it as well"),
    "report": "the run would be trained and saved, but end with this error",
    **dict.fromkeys(("reload", "resume"), "the run itself may end well, but an interrupted one could not continue"),
    "repeat": "the run itself may end well, but `unfog resume RUN --verify` would fail",
    "sample": "the run itself may end well, but `unfog sample RUN` would fail",
    "export": "the run itself may end well, but it could not be exported to diffusers",
}


def passed(part: str, said: str, **facts: Any) -> Finding:
    """Return the finding of a part that succeeded."""
    return Finding(f"rehearsal.{part}", "fine", said, facts=facts)


def failed(part: str, error: Exception, output: str) -> Finding:
    """Return the finding for an error, with its message and the remedy where that is known."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space there, or set TMPDIR to a folder on another disk"  # it is no fault of the run
        reason = error if error.filename else error.strerror
        return Finding("rehearsal.room", "hint", f"the dry run was not finished: {reason}", remedy)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    kind = "" if isinstance(error, RequestError) else f"{type(error).__name__}: "
    # Libraries below torch raise a plain RuntimeError for it.
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "out of memory" in first.lower()
    remedy = "a smaller --microbatch, --network or --size" if memory else _CONSEQUENCES[part]
    facts = {"error": type(error).__name__, "said": output[-2000:]}
    return Finding(f"rehearsal.{part}", "fatal", f"{part} failed: {kind}{first}", remedy, facts)


def slowest(folder: RunFolder, part: str, kind: str, said: str) -> list[Finding]:
    """Return a finding with the longest time of the events of a kind, if there are any."""
    took = [event["seconds"] for event in read_events(folder.events) if event["kind"] == kind]
    return [passed(part, f"{said} in {max(took):.2g} s", seconds=max(took))] if took else []


def steps_trained(folder: RunFolder, state: TrainState, batch: int, steps: int, seconds: float) -> Finding:
    """Return a finding with the time of a step, skipped steps and shortage of memory."""
    rows = [row for row in read_metrics(folder.metrics) if "images_per_second" in row]
    first, last = (batch / rows[i]["images_per_second"] for i in (0, -1))
    events = read_events(folder.events)
    skipped = sum(event["kind"] == "step_refused" for event in events)
    shrunk = [event["microbatch"] for event in events if event["kind"] == "out_of_memory"]
    facts: dict[str, Any] = {"seconds_per_step": last, "first": first, "batch": batch, "seconds": seconds}
    if skipped:
        said = f"{skipped} of {steps} steps were skipped, as their gradient is not finite"
        return Finding("rehearsal.training", "warning", said, "--precision fp32, or bf16", facts)
    said = f"{steps} steps of {batch} images trained, {first:.2g} s the first and {last:.2g} s the last"
    # A step that only lowers the loss scale is expected of fp16, and so no warning, unlike those counted above.
    if state.updates < steps:
        said += f"; fp16's loss scale came down to {state.precision.scale:g} meanwhile, as it does in any run"
    if shrunk:
        facts["microbatch"] = shrunk[-1]
        said += f", but memory sufficed for only {shrunk[-1]} images at a time"
        return Finding("rehearsal.training", "hint", said, f"--microbatch {shrunk[-1]}", facts)
    return Finding("rehearsal.training", "fine", said, facts=facts)


def ema_moved(state: TrainState, initial: list[Tensor], precision: str, steps: int) -> Finding:
    """Compare how far the weights and their EMA have moved."""
    model, ema = list(state.model.parameters()), state.ema.parameters
    moved, followed = _distance(model, initial), _distance(ema, initial)
    facts = {"updates": state.updates, "moved": moved, "average_moved": followed}
    if not moved:
        if not state.updates and precision == "fp16":
            said = f"none of {steps} steps was taken, because every gradient overflowed fp16"
            return Finding("rehearsal.ema", "warning", said, "--precision fp32, or bf16", facts)
        said = f"the weights did not change in {steps} steps"
        return Finding("rehearsal.ema", "fatal", said, "--lr 0 chooses a learning rate", facts)
    if not followed:
        return Finding("rehearsal.ema", "fatal", "the EMA does not follow the weights", "--ema power", facts)
    return passed("ema", f"the EMA has moved {100 * followed / moved:.3g}% as far as the weights", **facts)


def _distance(a: list[Any], b: list[Tensor]) -> float:
    return float(torch.stack([(x.detach() - y).norm() for x, y in zip(a, b)]).norm())


def memory_held(before: int, device: torch.device) -> Finding:
    """Return a finding with the memory of the process before and after, and its peak."""
    facts = {"before": before, "after": resident_bytes(), "peak": peak_bytes()}
    held = [format_bytes(value) for value in facts.values()]
    said = f"the process held {held[0]} before the dry run, {held[1]} after it and {held[2]} at most"
    if device.type == "cuda":
        facts["device_peak"] = torch.cuda.max_memory_allocated(device)
        said += f"; {format_bytes(facts['device_peak'])} of {device} at most"
    return passed("memory", said, **facts)
