"""Plan of a run: its memory, time and disk, predicted before it starts; as lines of text and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from unfog.config.requests.plan import PlanRequest
from unfog.config.schema import Config
from unfog.config.validate import check_request
from unfog.data.dataset import Dataset
from unfog.data.stream import DeviceStream
from unfog.device.cores import describe_quota
from unfog.errors import RequestError
from unfog.pipeline.load_data import load_images
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.disk import bytes_to_decode, condition_bytes, decoded_bytes, disk_lines, is_memory_mapped
from unfog.planning.flops import Device, NetworkCost, TimeRange, benchmark_cpu
from unfog.planning.intervals import Choice
from unfog.planning.memory_estimate import MemoryEstimate, MemoryEstimator
from unfog.planning.memory_recorder import CUDA_CONTEXT
from unfog.planning.microbatch import MARGIN, Machine, rooms_per_process, with_precision
from unfog.planning.timing import TOO_SLOW, decoded_images, run_times, seconds_per_call
from unfog.process.device import available_memory, choose_device, total_memory
from unfog.process.signals import StopSignals
from unfog.process.torch_flags import caller_flags_kept
from unfog.reporting.findings import Finding
from unfog.reporting.notebook import preformatted
from unfog.reporting.progress import format_duration
from unfog.reporting.records import json_values
from unfog.text import LEAST_SHOWN, format_bytes, plural
from unfog.training.stability.out_of_memory import microbatch_size

_LONG = 30 * 86400.0  # seconds from which on a plan warns
_UNKNOWN = TimeRange(math.nan, math.nan)
_OF_FINDING = ("code", "severity", "evidence", "remedy")
_SHOWN = ("batch", "microbatch", "checkpointing", "shard", "precision", "images")


@dataclass(frozen=True)
class Plan:
    """Memory, time and disk of a run: predicted, except times on the machine at hand, which are measured."""

    config: Config
    """With every open setting chosen."""
    processes: int
    """That train together, each on its own GPU, or all on this CPU; memory and times are those of rank 0."""
    choices: tuple[Choice, ...]
    images: int
    """To train on."""
    machine: str
    estimated: bool
    """True if times are predicted from floating-point operations instead of measured."""
    parameters: int
    """Of the whole network."""
    work: NetworkCost
    memory: MemoryEstimate
    available: int
    """Bytes of memory on the device, for one process."""
    times: dict[str, TimeRange]
    """Seconds of each part: step, training, previews, evaluations, total, and of generating samples."""
    disk: tuple[str, ...]
    transfer: str
    """How training images reach a GPU; "" on other devices."""
    findings: tuple[Finding, ...]
    compiling: str = ""
    """What compiling costs and gains; "" if it is not asked for."""
    quota: str = ""
    """What a CPU quota leaves of the cores; "" without one."""
    doubt: str = ""
    """The reason not to trust the measured times; "" without one, or if none was measured."""

    def __repr__(self) -> str:
        return f"<{self.lines()[0]}>"

    def _repr_html_(self) -> str:
        return preformatted(self.lines())

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        training = self.config.training
        sides, count = self.config.image_format.sides, f"{self.parameters / 1e6:.2f}M parameters"
        title = f"plan: {count}, {plural(self.images)} of {sides}, batches of {training.batch:,}"
        apart = self.processes > 1
        forward, peak = _format_flops(self.work.forward), format_bytes(self.memory.peak)
        several = f"{self.processes:,} processes, {'the network divided' if training.shard else 'each with all'}: "
        rows = [
            ("machine", several * apart + f"{self.machine}, {training.precision}" + ", estimated" * self.estimated),
            *((choice.name, f"{choice.value}: {choice.reason}") for choice in self.choices),
            ("arithmetic", f"{forward} an image, {_format_flops(self.work.training)} to train on it"),
            ("memory", f"{peak} at the most, of {format_bytes(self.available)} available" + " each" * apart),
            *self._memory_rows(),
            ("time", f"{format_time(self.times['in all'])} in all" + ", but for what they send each other" * apart),
            *self._time_rows(),
            *([("cores", self.quota)] * bool(self.quota)),
            *([("compiling", self.compiling)] * bool(self.compiling)),
            *(("disk", line) for line in self.disk),
            *((("images", self.transfer),) if self.transfer else ()),
        ]
        return [title, *(f"  {name:<22} {text}" for name, text in rows)]

    def _memory_rows(self) -> list[tuple[str, str]]:
        memory, step = self.memory, self.memory.step
        largest = sorted(((count, name) for name, count in step.parts.items() if count >= LEAST_SHOWN), reverse=True)
        parts = ", ".join(f"{name} {format_bytes(count)}" for count, name in largest)
        rows = {"kept by its graph": memory.graph}
        rows |= {"sampling a preview": memory.drawing, "held-out loss": memory.measuring}
        rows |= {"checkpoint (host)": memory.snapshot, "images (host)": memory.images}
        # Why evaluation may take more than a step, which half precision makes smaller.
        beside = ", beside the graph" if memory.graph else ""
        why = {"held-out loss": f": in fp32{beside}"} if memory.measuring > max(step.total, memory.drawing) else {}
        lines = [(f"  {name}", format_bytes(count) + why.get(name, "")) for name, count in rows.items() if count]
        return [("  a step", f"{format_bytes(step.total)}: {parts}"), *lines]

    def _time_rows(self) -> list[tuple[str, str]]:
        times = {name: format_time(time) for name, time in self.times.items() if name != "in all"}
        if all(time == "?" for time in times.values()):
            return []
        times["step"] += f"; {self.doubt}" * bool(self.doubt)
        return [(f"  {'a step' if name == 'step' else name.removesuffix(' images')}", t) for name, t in times.items()]

    def to_dict(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "machine": self.machine,
            "processes": self.processes,
            "estimated": self.estimated,
            "images": self.images,
            "parameters": self.parameters,
            "flops": {"forward": self.work.forward, "training": self.work.training},
            "training": {name: getattr(self.config.training, name) for name in _SHOWN},
            "choices": [{"name": c.name, "value": str(c.value), "reason": c.reason} for c in self.choices],
            "memory": {
                "available": self.available,
                "peak": memory.peak,
                "step": memory.step.total,
                "parts": dict(memory.step.parts),
                **{name: getattr(memory, name) for name in ("graph", "drawing", "measuring", "snapshot", "images")},
            },
            "seconds": json_values(self.times),
            "compiling": self.compiling,
            "quota": self.quota,
            "doubt": self.doubt,
            "disk": list(self.disk),
            "transfer": self.transfer,
            "findings": [{**{name: getattr(f, name) for name in _OF_FINDING}, **f.facts} for f in self.findings],
        }


@caller_flags_kept()
def plan(request: PlanRequest) -> Plan:
    """Predict what training takes. Decodes a few of the images, and trains only a few steps to time them."""
    config, processes = request.settings, request.processes
    check_request(config)
    if processes < 1:
        raise RequestError(f"processes = {processes} must be at least 1")
    target = Device.find(request.device) if request.device else None
    # Before images are read, so that a device that is not there is noticed at once.
    device = torch.device("cuda") if target else choose_device(config.training.device)
    with StopSignals(saves=False) as stop:
        dataset, facts = load_images(config, stop, few=True)
        config = config.adopt(facts)
        machine = _describe_machine(config, device, target, dataset, processes)
        images = dataset.of_one_size.as_network_input.train
        if target is None and config.data.cache != "none":
            images = decoded_images(images)
        auto = AutoSettings(config, images, machine, stop, processes)
        # A data sheet does not state host memory, which decoded images need.
        fatal = _resolve(auto, 0 if target else bytes_to_decode(dataset, config) * processes)
        step, call = _step_and_call_time(auto)
    available, (memory, disk, findings) = machine.memory or 0, _predict_memory_and_disk(auto, dataset)
    times = run_times(auto.config, step, call, len(dataset.held_out))
    findings += [] if fatal else [_memory_finding(memory, available)]
    return Plan(
        config=auto.config,
        processes=processes,
        choices=tuple(auto.choices),
        images=len(dataset.train),
        machine=machine.name,
        estimated=auto.machine.data_sheet is not None,
        parameters=memory.weights // 4,
        work=auto.network_cost,
        memory=memory,
        available=available,
        times=times,
        disk=tuple(disk),
        transfer=_describe_transfer(auto.config, device, target, dataset),
        findings=(*fatal, *findings, *_time_findings(times["in all"])),
        compiling=_describe_compiling(auto),
        quota="" if target else describe_quota(),
        doubt=auto.doubt_of_pace,
    )


def _resolve(auto: AutoSettings, to_decode: int) -> list[Finding]:
    """Resolve all settings; return fatal findings of memory, for so many bytes of images to decode too."""
    # In the order of a run: each choice uses those before it, such as the learning rate the size of the network.
    auto.check_length()
    auto.resolve_network()
    auto.resolve_learning_rate()
    auto.resolve_weight_decay()
    auto.resolve_precision()
    auto.resolve_compile()
    fatal = _image_memory_findings(to_decode) or _resolve_microbatch(auto)
    # From here on steps are timed, which cannot be done with what does not fit.
    auto.machine = _with_speed(auto, runnable=not fatal)
    auto.resolve_memory_format()
    auto.resolve_capture()
    auto.resolve_length()
    auto.resolve_intervals()
    return fatal


def _describe_machine(
    config: Config, device: torch.device, target: Device | None, dataset: Dataset, processes: int
) -> Machine:
    """Return the machine of the plan, with the memory that one process has on it besides the images."""
    if target is not None:
        return Machine(device, target.name, target.memory - CUDA_CONTEXT, data_sheet=target)
    available = available_memory(device)
    if device.type == "cpu":  # all processes share its memory, and the run decodes its images before anything else
        available = max(0, available // processes - bytes_to_decode(dataset, config))
        return Machine(device, str(device), available, tuple(room // processes for room in rooms_per_process(device)))
    return Machine(device, str(device), available, rooms_per_process(device))


def _with_speed(auto: AutoSettings, runnable: bool) -> Machine:
    """Return the machine and the source of its speed: a data sheet, a measurement, or none if nothing can run."""
    machine = replace(auto.machine, timed=runnable and not auto.sharded)
    slow = auto.config.training.batch * auto.network_cost.training > TOO_SLOW
    if machine.data_sheet is None and machine.device.type == "cpu" and (auto.processes > 1 or slow):
        # Several processes would disturb each other's timing, which one process cannot imitate.
        return replace(machine, data_sheet=benchmark_cpu(machine.memory or 0, auto.processes))
    return machine


def _step_and_call_time(auto: AutoSettings) -> tuple[TimeRange, TimeRange]:
    """Return seconds of a step, and of a forward pass for each image; nan if nothing can be timed."""
    config, device = auto.process_config(), auto.machine.device
    count, sheet = microbatch_size(config.training), auto.machine.data_sheet
    if sheet is not None:
        return auto.predicted_step_time(sheet), auto.network_cost.call_time(count, sheet).times(1 / count)
    if not auto.machine.timed:
        return _UNKNOWN, _UNKNOWN
    step, call = auto.seconds_per_step(), seconds_per_call(config, device) / count
    return TimeRange(step, step), TimeRange(call, call)


def _describe_transfer(config: Config, device: torch.device, target: Device | None, dataset: Dataset) -> str:
    """Return a line on whether a run keeps its images on the GPU, as `DeviceStream.open` decides; "" without one."""
    if device.type != "cuda":
        return ""
    size = dataset.as_network_input.train.device_bytes
    if config.data.cache == "none":
        return "decoded while training, and copied to the GPU one batch ahead"
    if DeviceStream.fits(size, target.memory if target else total_memory(device)):
        return f"kept on the GPU, {format_bytes(size)}, so that a step copies none"
    return f"copied to the GPU one batch ahead: {format_bytes(size)} are too much to be kept there"


def _image_memory_findings(images: int) -> list[Finding]:
    """Return a fatal finding if so many bytes of decoded images do not fit host memory."""
    if not images or images < MARGIN * (host := available_memory(torch.device("cpu"))):
        return []
    evidence = f"the decoded images take {format_bytes(images)} of memory, of {format_bytes(host)} available"
    return [Finding("plan.memory", "fatal", evidence, "--data.cache disk", {"needed": images, "available": host})]


def _resolve_microbatch(auto: AutoSettings) -> list[Finding]:
    """Resolve the micro-batch; a given one that does not fit, where training would take less, is a fatal finding."""
    asked = auto.process_config().training.microbatch
    needed, available = auto.machine.memory_needed(auto.process_config(), auto.processes) if asked else (0, 0)
    try:
        if needed < available or not asked:
            auto.resolve_microbatch()
            return []
        fit = auto.machine.largest_microbatch(auto.process_config(), auto.processes, available)
    except RequestError as error:
        return [Finding("plan.memory", "fatal", str(error))]  # whose message has the remedy
    evidence = (
        f"{plural(asked)} at once need about {format_bytes(needed)}, and {auto.machine.name} has "
        f"{format_bytes(available)} available"
    )
    extra = " --training.checkpointing" if fit.checkpointing and not auto.config.training.checkpointing else ""
    facts = {"needed": needed, "available": available, "microbatch": fit.microbatch}
    return [Finding("plan.memory", "fatal", evidence, f"--microbatch {fit.microbatch}{extra} fits", facts)]


def _predict_memory_and_disk(auto: AutoSettings, dataset: Dataset) -> tuple[MemoryEstimate, list[str], list[Finding]]:
    config, share = auto.config, auto.process_config()
    in_memory = config.data.cache == "memory" or not is_memory_mapped(dataset)
    images = decoded_bytes(dataset, config) if in_memory else 0
    kept = images + condition_bytes(dataset)
    estimator = MemoryEstimator(with_precision(share), auto.machine.device.type, auto.processes)
    memory = estimator.estimate(microbatch_size(share.training), config.training.checkpointing, kept)
    return memory, *disk_lines(config, dataset, images)


def _memory_finding(memory: MemoryEstimate, available: int) -> Finding:
    """Return whether the run fits the memory, with previews and evaluation."""
    evidence = f"{format_bytes(memory.peak)} of memory at the most, of {format_bytes(available)} available"
    facts = {"needed": memory.peak, "available": available}
    if memory.peak < MARGIN * available:
        return Finding("plan.memory", "fine", evidence, facts=facts)
    remedy = "lower --microbatch, --preview.images or --evaluate.images"
    return Finding("plan.memory", "fatal" if memory.peak > available else "warning", evidence, remedy, facts)


def _describe_compiling(auto: AutoSettings) -> str:
    """Measure the cost and gain of compiling, if requested; no rule predicts them."""
    if not auto.config.training.compile:
        return ""
    if auto.machine.data_sheet is not None or not auto.machine.timed:
        return "its time and its gain are measured on the device alone: unfog doctor --gpu, there"
    compiled, eager = auto.measured_step, auto.measure_eager_step()
    took, pays = format_duration(compiled.first - compiled.step), compiled.pays_from(eager)
    verdict = "it never pays" if math.isinf(pays) else f"it pays from step {pays:,.0f} on"
    return f"takes {took}, and a step is {eager.step / compiled.step:.2f} times as fast: {verdict}"


def _time_findings(total: TimeRange) -> list[Finding]:
    """Return a warning if a run takes more than a month."""
    remedy = "a smaller --size, --network, --batch or --steps, or another machine: --for h100"
    said, facts = f"all of it takes {format_time(total)}", {"seconds": total.low}
    return [Finding("plan.time", "warning", said, remedy, facts)] if total.low > _LONG else []


def format_time(seconds: TimeRange) -> str:
    """Format seconds; "?" if they are unknown."""
    if math.isnan(seconds.low):
        return "?"
    low, high = (f"{s * 1e3:.0f} ms" if s < 1 else f"{s:.1f} s" if s < 10 else format_duration(s) for s in seconds)
    return low if low == high else f"{low} to {high}"


def _format_flops(flops: float) -> str:
    return f"{flops / 1e9:,.3g} GFLOP" if flops < 1e12 else f"{flops / 1e12:,.3g} TFLOP"
