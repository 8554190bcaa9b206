"""`unfog plan`: what training will take, before it is begun."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from unfog.config.requests import PlanRequest
from unfog.config.schema import Config
from unfog.config.validate import check_request, parse_duration
from unfog.data.dataset import Dataset
from unfog.errors import RequestError
from unfog.pipeline.build import build_network, zero_batch
from unfog.pipeline.load_data import load_images
from unfog.planning.accelerators import Device, find_device
from unfog.planning.auto_settings import AutoSettings, Choice
from unfog.planning.disk import bytes_to_decode, check_disk_room, decoded_bytes, is_memory_mapped
from unfog.planning.flops import NetworkCost, TimeRange, count_flops
from unfog.planning.memory_estimate import MemoryEstimate, MemoryEstimator, batch_shape, with_precision
from unfog.planning.microbatch import MARGIN, choose_microbatch, count_of, required_memory
from unfog.planning.peak_memory import CUDA_CONTEXT, available_memory
from unfog.planning.step_benchmark import decoded_images
from unfog.planning.timing import (
    TOO_SLOW,
    benchmark_cpu,
    format_flops,
    format_time,
    pace_of,
    run_times,
    step_of,
    time_finding,
)
from unfog.process.device import choose_device
from unfog.process.run_folder import next_folder
from unfog.process.signals import StopSignals
from unfog.reporting.findings import Finding, has_fatal, json_values, print_findings
from unfog.reporting.progress import format_bytes, print_result
from unfog.training.precision import Precision
from unfog.training.settings import at_least_one
from unfog.training.stability.out_of_memory import microbatch_size
from unfog.training.state import TrainState


@dataclass(frozen=True)
class Plan:
    """What a run will take. All of it is predicted, but for the times of the machine at hand, which are measured."""

    config: Config
    """With all choices made."""
    processes: int
    """That train together, each on a device of its own, or all on this CPU; memory and times are those of the first."""
    choices: tuple[Choice, ...]
    images: int
    """To train on."""
    machine: str
    estimated: bool
    """Whether times come from arithmetic: of another machine by its data sheet, here of what cannot be timed."""
    parameters: int
    """Of the whole network."""
    work: NetworkCost
    memory: MemoryEstimate
    available: int
    """Bytes of memory on the device, for one process."""
    times: dict[str, TimeRange]
    """Seconds by what takes them: step, training, previews, evaluations, total, and those of drawing pictures."""
    disk: tuple[str, ...]
    findings: tuple[Finding, ...]

    def lines(self) -> list[str]:
        """The plan, for people to read."""
        training = self.config.training
        pixels, count = self.config.data.size, f"{self.parameters / 1e6:.2f}M parameters"
        title = f"plan: {count}, {self.images:,} images of {pixels}x{pixels}, batches of {training.batch:,}"
        apart = self.processes > 1
        several = f"{self.processes:,} processes, {'the network divided' if training.shard else 'each with all'}: "
        rows = [
            ("machine", several * apart + f"{self.machine}, {training.precision}" + ", estimated" * self.estimated),
            *((choice.name, f"{choice.value}: {choice.reason}") for choice in self.choices),
            (
                "arithmetic",
                f"{format_flops(self.work.forward)} an image, {format_flops(self.work.training)} to train on it",
            ),
            (
                "memory",
                f"{format_bytes(self.memory.peak)} at the most, of {format_bytes(self.available)} available"
                + " each" * apart,
            ),
            *self._memory_rows(),
            ("time", f"{format_time(self.times['in all'])} in all" + ", but for what they send each other" * apart),
            *self._time_rows(),
            *(("disk", line) for line in self.disk),
        ]
        return [title, *(f"  {name:<22} {text}" for name, text in rows)]

    def _memory_rows(self) -> list[tuple[str, str]]:
        memory, step = self.memory, self.memory.step
        largest = sorted(((count, name) for name, count in step.parts.items() if count), reverse=True)
        parts = ", ".join(f"{name} {format_bytes(count)}" for count, name in largest)
        rows = {"drawing a preview": memory.drawing, "held-out loss": memory.measuring}
        rows |= {"checkpoint (host)": memory.snapshot, "images (host)": memory.images}
        told = [(f"  {name}", format_bytes(count)) for name, count in rows.items() if count]
        return [("  a step", f"{format_bytes(step.total)}: {parts}"), *told]

    def _time_rows(self) -> list[tuple[str, str]]:
        told = {name: format_time(time) for name, time in self.times.items() if name != "in all"}
        if all(time == "?" for time in told.values()):
            return []
        return [(f"  {'a step' if name == 'step' else name.removesuffix(' pictures')}", t) for name, t in told.items()]

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON."""
        memory = self.memory
        return {
            "machine": self.machine,
            "processes": self.processes,
            "estimated": self.estimated,
            "images": self.images,
            "parameters": self.parameters,
            "flops": {"forward": self.work.forward, "training": self.work.training},
            "training": {
                name: getattr(self.config.training, name)
                for name in ("batch", "microbatch", "checkpointing", "shard", "precision", "images")
            },
            "choices": [{"name": c.name, "value": str(c.value), "reason": c.reason} for c in self.choices],
            "memory": {
                "available": self.available,
                "peak": memory.peak,
                "step": memory.step.total,
                "parts": dict(memory.step.parts),
                "drawing": memory.drawing,
                "measuring": memory.measuring,
                "snapshot": memory.snapshot,
                "images": memory.images,
            },
            "seconds": json_values(self.times),
            "disk": list(self.disk),
            "findings": [
                {"code": f.code, "severity": f.severity, "evidence": f.evidence, "remedy": f.remedy, **f.facts}
                for f in self.findings
            ],
        }


def plan(config: Config, device_for: str = "", processes: int = 1) -> Plan:
    """Predict what training takes. Decodes a few of the images, and trains nothing but a few steps to time them.

    Args:
        config: as asked for.
        device_for: "", or the name of a device in place of the one at hand: see `diagnosis.devices`.
        processes: among which torchrun would share each batch.

    Raises:
        RequestError: the settings, the source or the device will not do.
    """
    check_request(config)
    at_least_one("processes", processes)
    other = find_device(device_for) if device_for else None
    device = torch.device("cuda") if other else choose_device(config.training.device)
    with StopSignals(saves=False) as stop:
        prepared, config = load_images(config, stop, few=True)
        decoded = (
            prepared.as_network_input.train
            if other or config.data.cache == "none"
            else decoded_images(prepared.as_network_input.train)
        )
        auto = AutoSettings(config, decoded, device, stop, processes)
        auto.check_length()
        auto.resolve_network()
        auto.resolve_learning_rate()
        auto.resolve_weight_decay()
        together = processes if device.type == "cpu" else 1  # on one device
        available = other.memory - CUDA_CONTEXT if other else available_memory(device) // together
        machine = other.name if other else str(device)
        coming = 0 if other else bytes_to_decode(prepared, config)
        if device.type == "cpu":  # where they come before anything else
            available = max(0, available - coming)
        fatal = too_many(coming * processes) or settle_memory(auto, device, available, machine)
        work = count_flops(lambda: build_network(auto.config), batch_shape(auto.config, 1)[1:])
        lengthy = auto.config.training.batch * work.training > TOO_SLOW
        if not other and device.type == "cpu" and (together > 1 or lengthy):
            other = benchmark_cpu(available, together)
        untimed = bool(fatal) or auto.sharded
        settle_length(auto, work, other, untimed)
        now, share = auto.config, auto.process_config()
        step, call = pace_of(auto, work, other, device, untimed)
    in_memory = decoded_bytes(prepared, now) if now.data.cache == "memory" or not is_memory_mapped(prepared) else 0
    traces = MemoryEstimator(share, device.type, processes)
    memory = traces.estimate(microbatch_size(share.training), now.training.checkpointing, in_memory)
    disk, findings = disk_of(now, prepared, in_memory)
    if not fatal:
        findings.append(memory_finding(memory, available))
    times = run_times(now, step, call, len(prepared.held_out))
    if slow := time_finding(times["in all"]):
        findings.append(slow)
    return Plan(
        now,
        processes,
        tuple(auto.choices),
        len(prepared.train),
        machine,
        other is not None,
        memory.weights // 4,
        work,
        memory,
        available,
        times,
        tuple(disk),
        tuple(fatal + findings),
    )


def settle_length(auto: AutoSettings, work: NetworkCost, other: Device | None, untimed: bool) -> None:
    """Precision, length and intervals: by data sheet for another machine, by measuring here where that is possible."""
    if other:
        settle_elsewhere(auto, work, other)
    elif untimed:
        auto.config = with_length(with_precision(auto.config), 0.0)
    else:
        auto.resolve_precision()
        auto.resolve_memory_format()
        auto.resolve_length()
    auto.resolve_intervals()


def too_many(images: int) -> list[Finding]:
    """A fatal finding where so many bytes of images have no room in host memory."""
    if not images or images < MARGIN * (host := available_memory(torch.device("cpu"))):
        return []
    evidence = f"the decoded images take {format_bytes(images)} of memory, and there is {format_bytes(host)} available"
    return [Finding("plan.memory", "fatal", evidence, "--data.cache disk", {"needed": images, "available": host})]


def settle_memory(auto: AutoSettings, device: torch.device, available: int, machine: str) -> list[Finding]:
    """Choose how many images go through at once; what was asked for and does not fit is a fatal finding."""
    training, share, processes = auto.config.training, auto.process_config(), auto.processes
    asked = share.training.microbatch
    if asked and (takes := required_memory(share, device, available, processes)) < available:
        return []
    try:
        fit = choose_microbatch(share, device, available, machine, processes)
    except RequestError as error:
        return [Finding("plan.memory", "fatal", str(error))]  # which says what to do
    if not asked:
        if fit.microbatch < share.training.batch:
            auto.choices.append(Choice("microbatch", fit.microbatch, fit.reason))
            auto.config = replace_training(auto.config, microbatch=fit.microbatch)
        if fit.checkpointing and not training.checkpointing:
            auto.choices.append(Choice("checkpointing", True, "not even one image fits without"))
            auto.config = replace_training(auto.config, checkpointing=True)
        return []
    evidence = (
        f"{count_of(asked)} at once need about {format_bytes(takes)}, and {machine} has "
        f"{format_bytes(available)} available"
    )
    extra = " --training.checkpointing" if fit.checkpointing and not training.checkpointing else ""
    facts = {"needed": takes, "available": available, "microbatch": fit.microbatch}
    return [Finding("plan.memory", "fatal", evidence, f"--microbatch {fit.microbatch}{extra} fits", facts)]


def memory_finding(memory: MemoryEstimate, available: int) -> Finding:
    """Whether the whole run fits, drawing and measuring included."""
    evidence = f"{format_bytes(memory.peak)} of memory at the most, of {format_bytes(available)} available"
    facts = {"needed": memory.peak, "available": available}
    if memory.peak < MARGIN * available:
        return Finding("plan.memory", "fine", evidence, facts=facts)
    remedy = "lower --microbatch, --preview.images or --evaluate.images"
    return Finding("plan.memory", "fatal" if memory.peak > available else "warning", evidence, remedy, facts)


def settle_elsewhere(auto: AutoSettings, work: NetworkCost, other: Device) -> None:
    """Precision and length on a device where nothing is measured, from its rates."""
    if auto.config.training.precision == "auto":
        auto.config = replace_training(auto.config, precision=other.precision)
        why = "several processes share this CPU" if auto.processes > 1 else "a step takes minutes"
        reason = f"native to {other.name}" if other.precision != "fp32" else f"not timed, as {why}"
        auto.choices.append(Choice("precision", other.precision, reason))
    step = step_of(auto.process_config(), work, other)
    auto.config = with_length(auto.config, (step.low + step.high) / 2)
    auto.resolve_length()


def with_length(config: Config, pace: float) -> Config:
    """The length as a number of images; of a budget, how many it takes at this pace, or one step where that is 0."""
    training = config.training
    if training.images or training.steps:
        images = training.images or training.steps * training.batch
    else:
        steps = int(parse_duration(training.budget or "1h") / pace) if pace else 1
        images = max(1, steps) * training.batch
    return replace_training(config, images=images, steps=0, budget="")


def disk_of(config: Config, prepared: Dataset, in_memory: int) -> tuple[list[str], list[Finding]]:
    """Lines on what will be written, and whether there is room for it."""
    lines: list[str] = []
    if not in_memory and config.data.cache != "none":
        there = isinstance(prepared.train.pixels, np.ndarray)
        when = "in the cache already" if there else "which the run decodes first"
        lines.append(f"{format_bytes(decoded_bytes(prepared, config))} of decoded images, {when}")
    if config.uses_latents:
        count = (len(prepared.train) + len(prepared.held_out)) * zero_batch(config, 1).numel()
        lines.append(f"{format_bytes(2 * count)} of latents, in the cache")
    steps = config.training.images // config.training.batch
    with FakeTensorMode():  # only its sizes are asked for
        state = TrainState(build_network(config), config.optimizer, config.ema, Precision("fp32", torch.device("cpu")))
    try:
        line = check_disk_room(
            next_folder(config.source).absolute() / "checkpoints", state, config.checkpoint, steps, config.ema_snapshots
        )
    except RequestError as error:
        return lines, [Finding("plan.disk", "fatal", str(error))]
    waits = "may have to wait" in line
    lines.append(line.removeprefix("disk: "))
    return lines, [Finding("plan.disk", "warning" if waits else "fine", line)]


def replace_training(config: Config, **changes: Any) -> Config:
    """The same with other settings of training."""
    return replace(config, training=replace(config.training, **changes))


def main(request: PlanRequest) -> int:
    """Print the plan, and return the exit status: 2 where it does not fit."""
    planned = plan(request.settings, request.device, request.processes)
    print_result(json.dumps(planned.to_dict(), indent=2) if request.json else "\n".join(planned.lines()))
    print_findings(planned.findings)
    return 2 if has_fatal(planned.findings) else 0
