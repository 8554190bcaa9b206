"""A plan: memory, time and disk of a run that was not started, in lines of text and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from unfog.config.schema import Config
from unfog.planning.flops import NetworkCost, TimeRange
from unfog.planning.intervals import Choice
from unfog.planning.memory_estimate import MemoryEstimate
from unfog.reporting.findings import Finding
from unfog.reporting.notebook import preformatted
from unfog.reporting.progress import format_bytes, format_duration
from unfog.reporting.records import json_values

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

    def __repr__(self) -> str:
        return f"<{self.lines()[0]}>"

    def _repr_html_(self) -> str:
        return preformatted(self.lines())

    def lines(self) -> list[str]:
        """Return the plan as lines of text."""
        training = self.config.training
        sides, count = self.config.image_format.sides, f"{self.parameters / 1e6:.2f}M parameters"
        title = f"plan: {count}, {self.images:,} images of {sides}, batches of {training.batch:,}"
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
        largest = sorted(((count, name) for name, count in step.parts.items() if count), reverse=True)
        parts = ", ".join(f"{name} {format_bytes(count)}" for count, name in largest)
        rows = {"kept by its graph": memory.graph}
        rows |= {"sampling a preview": memory.drawing, "held-out loss": memory.measuring}
        rows |= {"checkpoint (host)": memory.snapshot, "images (host)": memory.images}
        lines = [(f"  {name}", format_bytes(count)) for name, count in rows.items() if count]
        return [("  a step", f"{format_bytes(step.total)}: {parts}"), *lines]

    def _time_rows(self) -> list[tuple[str, str]]:
        times = {name: format_time(time) for name, time in self.times.items() if name != "in all"}
        if all(time == "?" for time in times.values()):
            return []
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
            "disk": list(self.disk),
            "transfer": self.transfer,
            "findings": [{**{name: getattr(f, name) for name in _OF_FINDING}, **f.facts} for f in self.findings],
        }


def format_time(seconds: TimeRange) -> str:
    """Format seconds; "?" if they are unknown."""
    if math.isnan(seconds.low):
        return "?"
    low, high = (f"{s * 1e3:.0f} ms" if s < 1 else f"{s:.1f} s" if s < 10 else format_duration(s) for s in seconds)
    return low if low == high else f"{low} to {high}"


def _format_flops(flops: float) -> str:
    return f"{flops / 1e9:,.3g} GFLOP" if flops < 1e12 else f"{flops / 1e12:,.3g} TFLOP"
