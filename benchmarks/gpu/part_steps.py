"""Part: images/s and MFU of one network, ours beside a bare step and diffusers', and memory beside `unfog plan`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from unfog.checks.gpu_checks import half_type
from unfog.config.schema import Config
from unfog.pipeline.build import build_network
from unfog.planning.flops import Device, NetworkCost, matmul_seconds
from unfog.planning.memory_estimate import MemoryEstimator
from unfog.planning.timing import StepTime, TrialTraining, measure_step, random_images

import networks
import steps
import torch
from parts import Setting, attempt, missing
from rows import Row, mfu

_SECONDS = 3.0  # for each way, after its first steps
_LEAST = 12.0  # seconds that must be left for a way to be tried


def measure(setting: Setting, name: str) -> Iterator[Row]:
    """Yield the rows of all ways to train the network, the plain ones first, as they need no compiler."""
    part, device, config = f"steps {name}", torch.device(setting.device), networks.settings_of(name, setting.cpu)
    if setting.cpu:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # a C++ compiler takes minutes; everything around it is rehearsed
        torch._dynamo.config.disable = True  # type: ignore[attr-defined]
    timer = _Timer(part, config, device, setting.seconds)
    yield timer.describe()
    yield from memory(part, config, device)
    yield timer.time("bare eager", lambda: steps.bare(config, device))
    if not missing(["diffusers"]):
        yield timer.time("diffusers eager", lambda: steps.diffusers(config, device))
    yield timer.time("unfog eager", lambda: _ours(config, device))
    yield timer.time("unfog compiled", lambda: _ours(config, device, compiled=True))
    if setting.cpu:
        for name in ("unfog captured", "unfog compiled, captured", "bare captured"):
            yield Row(part, name, "CUDA graphs need CUDA", "skipped")
    else:
        for name, compiled in (("unfog captured", False), ("unfog compiled, captured", True)):
            yield timer.time_steps(name, partial(_ours_captured, config, device, compiled))
        yield timer.time("bare captured", lambda: steps.bare(config, device, captured=True))
        yield timer.time("bare compiled, captured", lambda: steps.bare(config, device, True, captured=True))
    yield timer.time("bare compiled", lambda: steps.bare(config, device, compiled=True))
    if not missing(["diffusers"]):
        yield timer.time("diffusers compiled", lambda: steps.diffusers(config, device, compiled=True))


def _ours(config: Config, device: torch.device, compiled: bool = False) -> steps.Run:
    config = replace(config, training=replace(config.training, compile=compiled))
    return TrialTraining(config, random_images(config, 2048 if device.type == "cuda" else 64), device).run


def _ours_captured(config: Config, device: torch.device, compiled: bool) -> StepTime:
    """Time captured steps of one training: each call of the loop would capture anew."""
    config = replace(config, training=replace(config.training, compile=compiled, capture=True))
    return measure_step(config, random_images(config, 2048), device, lambda: False, _SECONDS)


class _Timer:
    """Times one way after the other, and tells how each compares."""

    def __init__(self, part: str, config: Config, device: torch.device, seconds: float):
        self.part, self.config, self.device = part, config, device
        self.deadline = steps.time.monotonic() + seconds
        self.cost = NetworkCost.of(lambda: build_network(config), config.input_shape)
        self.peak, self.source = _peak(device)
        self.found: dict[str, StepTime] = {}

    def describe(self) -> Row:
        count = sum(p.numel() for p in build_network(self.config).parameters())
        channels, side, _ = self.config.input_shape
        training = self.config.training
        said = (
            f"{count / 1e6:.1f}M parameters, {channels}x{side}x{side}, batch {training.batch}, {training.precision}, "
            f"{training.memory_format}, {self.cost.training / 1e9:.3g} GFLOP to train on an image; "
            f"MFU of {self.peak / 1e12:.3g} TFLOP/s ({self.source})"
        )
        return Row(self.part, "network", said)

    def time(self, name: str, make: Callable[[], steps.Run]) -> Row:
        """Return the row of one way: images/s, MFU, and the ratio to diffusers' and to the bare step."""
        return self.time_steps(name, lambda: StepTime.measure(make(), _SECONDS if self.device.type == "cuda" else 0.2))

    def time_steps(self, name: str, measure: Callable[[], StepTime]) -> Row:
        """Return the same row, of steps that `measure` times."""
        if self.deadline - steps.time.monotonic() < _LEAST:
            return Row(self.part, name, "no time was left for it", "skipped")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            time = measure()
        except Exception as error:
            return attempt(self.part, name, error)
        self.found[name] = time
        rate = self.config.training.batch / time.step
        used = mfu(self.cost.training, rate, self.peak)
        figures = {"images_per_second": rate, "milliseconds": time.step * 1e3, "first_seconds": time.first}
        said = f"{rate:,.0f} images/s, {time.step * 1e3:.1f} ms, "
        if self.device.type == "cuda":  # of a CPU the rate of products says too little
            figures["mfu"] = used
            said += f"MFU {used:.1%}, "
        said += f"first step {time.first:.1f} s"
        said += ", compiler off" * (self.device.type == "cpu" and "compiled" in name)
        for other in ("bare eager", "diffusers eager"):
            if other in self.found and other != name:
                figures[f"times_{other.replace(' ', '_')}"] = gain = self.found[other].step / time.step
                said += f", {gain:.2f} x {other}"
        if name == "unfog compiled" and "unfog eager" in self.found:
            figures["pays_from"] = pays = time.pays_from(self.found["unfog eager"])
            said += ", never pays" if pays == float("inf") else f", pays from step {pays:,.0f} on"
        return Row(self.part, name, said, figures=figures)


def _peak(device: torch.device) -> tuple[float, str]:
    """Return FLOP/s in 16 bits by the data sheet, or measured where none is known."""
    sheet = Device.of_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if sheet:
        return sheet.half, "data sheet"
    side = 8192 if device.type == "cuda" else 512
    return 2 * side**3 / matmul_seconds(half_type(device)[1], device, side), "a measured product"


def memory(part: str, config: Config, device: torch.device) -> Iterator[Row]:
    """Yield the peak memory of a step beside the prediction of `unfog plan`."""
    training = config.training
    predicted = MemoryEstimator(config, device.type).step(training.batch, training.checkpointing).total
    said, figures = f"{predicted / 1e9:.3g} GB predicted", {"predicted": predicted}
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            _ours(config, device)(3)
        except Exception as error:
            yield attempt(part, "memory", error)
            return
        measured = torch.cuda.max_memory_allocated(device) - before
        figures |= {"measured": measured, "reserved": torch.cuda.max_memory_reserved(device)}
        said += f", {measured / 1e9:.3g} GB allocated at the peak: {predicted / measured - 1:+.0%}"
    yield Row(part, "memory of a step", said, figures=figures)
