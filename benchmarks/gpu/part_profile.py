"""Part: where the time of our step goes: kernels, the share of time in which none runs, and waits for the device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from unfog.planning.timing import TrialTraining, random_images, waits_for_device
from unfog.process.device import synchronize

import networks
import torch
from parts import Setting
from rows import Row, busy
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_STEPS = 3
_TOP = 20


def measure(setting: Setting, name: str) -> Iterator[Row]:
    """Yield the waits of a step, its launches and idle share, and the kernels that take most."""
    config, device = networks.settings_of(name, setting.cpu), torch.device(setting.device)
    trial = TrialTraining(config, random_images(config, 256), device)
    trial.run(3)
    waits = waits_for_device(lambda: trial.run(_STEPS), device)
    if waits is None:
        yield Row("profile", "waits", "torch counts them on CUDA alone", "skipped")
    else:
        each, where = sum(waits.values()) / _STEPS, ", ".join(f"{place} {n / _STEPS:g}" for place, n in waits.items())
        yield Row("profile", "waits", f"{each:g} a step: {where or 'none'}", figures={"waits": each})
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not setting.cpu)
    with profile(activities=activities) as profiler:
        synchronize(device)
        started = time.perf_counter()
        trial.run(_STEPS)
        seconds = time.perf_counter() - started
    # On a CPU there are no kernels, and operations stand for them.
    wanted = DeviceType.CPU if setting.cpu else DeviceType.CUDA
    events = [e for e in profiler.events() if e.device_type == wanted and is_kernel(e.name, setting.cpu)]
    yield from kernels(name, [(e.name, e.time_range.start, e.time_range.end) for e in events], seconds)


def is_kernel(name: str, on_cpu: bool) -> bool:
    """Return whether an event of the profiler is work: not the annotation of a range, which spans all that is in it."""
    return "::" in name if on_cpu else not name.startswith(("Optimizer.", "ProfilerStep", "## ", "Torch-Compiled"))


def kernels(name: str, events: list[tuple[str, float, float]], seconds: float) -> Iterator[Row]:
    """Yield the rows of kernels (name, start, end in microseconds) that ran within so many seconds."""
    ran = busy((start, end) for _, start, end in events) / 1e6
    launches, idle = len(events) / _STEPS, max(0.0, 1 - ran / seconds)
    said = f"{launches:,.0f} a step of {seconds / _STEPS * 1e3:.1f} ms (under the profiler), idle {idle:.0%}"
    yield Row("profile", f"kernels of {name}", said, figures={"launches": launches, "idle": idle})
    spent: Counter[str] = Counter()
    counts = Counter(kernel for kernel, _, _ in events)
    for kernel, start, end in events:
        spent[kernel] += end - start  # type: ignore[assignment]
    whole = sum(spent.values()) or 1
    for rank, (kernel, microseconds) in enumerate(spent.most_common(_TOP), 1):
        said = f"{microseconds / whole:.1%}, {counts[kernel] / _STEPS:g} a step: {kernel[:90]}"
        yield Row("profile", f"kernel {rank}", said, figures={"share": microseconds / whole})
