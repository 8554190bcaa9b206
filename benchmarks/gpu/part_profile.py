"""Part: where the time of our step goes: kinds of kernels, the share of time in which none runs, and waits."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from unfog.config.schema import Config
from unfog.planning.timing import TrialTraining, random_images, waits_for_device
from unfog.process.device import choose_device, synchronize
from unfog.training.hooks import TrainingHooks

import networks
import torch
from capture import must_capture
from parts import Setting, attempt
from rows import Row, busy
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

# A profiler that is started anew must not replace the one that saw the capture.
os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
_BEFORE = 6  # steps before those that are profiled: a capture comes after three
_STEPS = 3
_TOP = 12

# Parts of names of kernels on CUDA, and of operations on a CPU; the first kind that has one counts.
KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "attention", "softmax"),
    "norms": ("norm", "rowwisemoments", "computefusedparams", "gammabeta", "computeinternalgradients"),
    "update": ("multi_tensor", "multitensor", "adam", "lerp", "foreach"),
    "convolutions": ("conv", "fprop", "dgrad", "wgrad", "implicit", "cudnn_infer"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "gemv", "splitk", "addmm", "::mm", "::bmm", "matmul", "linear"),
    "copies": ("copy", "memcpy", "nchw", "nhwc", "cat", "transpose", "clone", "contiguous", "::to"),
    "sums": ("reduce", "sum", "mean"),
    "fills": ("memset", "fill", "zero"),
    "elementwise": ("elementwise", "triton_poi", "silu", "add", "mul", "sub"),
}


def measure(setting: Setting, name: str) -> Iterator[Row]:
    """Yield the waits of a step of one network; then launches, idle share and kernels, plain and captured."""
    yield from (replace(row, part=f"profile {name}") for row in _rows(setting, name))


def _rows(setting: Setting, name: str) -> Iterator[Row]:
    config, device = networks.settings_of(name, setting.cpu), choose_device(setting.device)
    for way in ("eager", "captured"):
        if setting.cpu and way == "captured":
            yield Row("profile", way, "CUDA graphs need CUDA", "skipped")
            continue
        training = replace(config.training, capture=way == "captured")
        try:
            steps = _ProfiledSteps(replace(config, training=training), device)
            if way == "eager":
                yield _waits(steps.trial, device)
            yield from kernels(f"{name} {way}", steps.events(), steps.seconds, top=_TOP if way == "eager" else 0)
        except Exception as error:
            yield attempt("profile", way, error)


def _waits(trial: TrialTraining, device: torch.device) -> Row:
    trial.run(_STEPS)
    waits = waits_for_device(lambda: trial.run(_STEPS), device)
    if waits is None:
        return Row("profile", "waits", "torch counts them on CUDA alone", "skipped")
    each, where = sum(waits.values()) / _STEPS, ", ".join(f"{place} {n / _STEPS:g}" for place, n in waits.items())
    return Row("profile", "waits", f"{each:g} a step: {where or 'none'}", figures={"waits": each})


class _ProfiledSteps(TrainingHooks):
    """Hooks that profile the last steps of one call of the loop, which captures a step anew in each call."""

    def __init__(self, config: Config, device: torch.device):
        self.trial, self.device = TrialTraining(config, random_images(config, 256), device), device
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._profiler, self._running, self._started = profile(activities=activities), False, 0.0
        self._captured = config.training.capture
        self._batch, self._first, self.seconds = config.training.batch, 0, 0.0

    def events(self) -> list[tuple[str, float, float]]:
        """Train, and return (name, start, end in microseconds) of all work of the profiled steps."""
        self._first = self.trial.state.seen + _BEFORE * self._batch
        with must_capture(self._captured):
            self.trial.train(self)
        # On a CPU there are no kernels, and operations stand for them.
        wanted = DeviceType.CPU if self.device.type == "cpu" else DeviceType.CUDA
        events = [e for e in self._profiler.events() or () if e.device_type == wanted]
        on_cpu = self.device.type == "cpu"
        return [(e.name, e.time_range.start, e.time_range.end) for e in events if is_kernel(e.name, on_cpu)]

    def stop_requested(self) -> bool:
        """Return True after the last step; called between steps, and within them."""
        seen = self.trial.state.seen
        if seen >= self._first and not self._running:
            synchronize(self.device)
            self._profiler.start()
            self._running, self._started = True, time.perf_counter()
        ended = seen >= self._first + _STEPS * self._batch
        if ended and not self.seconds:
            synchronize(self.device)
            self.seconds = time.perf_counter() - self._started
            self._profiler.stop()
        return ended


def is_kernel(name: str, on_cpu: bool) -> bool:
    """Return whether an event of the profiler is work: not the annotation of a range, which spans all that is in it."""
    return "::" in name if on_cpu else not name.startswith(("Optimizer.", "ProfilerStep", "## ", "Torch-Compiled"))


def kind_of(name: str) -> str:
    """Return the kind of a kernel by its name."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "others")


def kernels(name: str, events: list[tuple[str, float, float]], seconds: float, top: int = _TOP) -> Iterator[Row]:
    """Yield the rows of kernels (name, start, end in microseconds) of so many seconds; a failure if there are none."""
    if not events:
        said = "the profiler saw none; see NVreg_RestrictProfilingToAdminUsers, or run as an administrator"
        yield Row("profile", f"kernels of {name}", said, "failed")
        return
    ran = busy((start, end) for _, start, end in events) / 1e6
    launches, idle = len(events) / _STEPS, max(0.0, 1 - ran / seconds)
    said = f"{launches:,.0f} a step of {seconds / _STEPS * 1e3:.1f} ms (under the profiler), idle {idle:.0%}"
    yield Row("profile", f"kernels of {name}", said, figures={"launches": launches, "idle": idle})
    spent, counts = Counter[str](), Counter(kernel for kernel, _, _ in events)
    for kernel, start, end in events:
        spent[kernel] += end - start  # type: ignore[assignment]
    whole, kinds = sum(spent.values()) or 1, Counter[str]()
    for kernel, microseconds in spent.items():
        kinds[kind_of(kernel)] += microseconds
    said = ", ".join(f"{kind} {spent_on / whole:.0%}" for kind, spent_on in kinds.most_common())
    yield Row("profile", f"kinds of {name}", said, figures={kind: spent_on / whole for kind, spent_on in kinds.items()})
    for rank, (kernel, microseconds) in enumerate(spent.most_common(top), 1):
        said = f"{microseconds / whole:.1%}, {counts[kernel] / _STEPS:g} a step: {kernel[:90]}"
        yield Row("profile", f"kernel {rank}", said, figures={"share": microseconds / whole})
