"""Part: images/s and MFU of one network, ours beside a bare step and diffusers', and memory beside `unfog plan`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from unfog.checks.gpu_checks import half_type
from unfog.config.schema import Config
from unfog.models import group_norm
from unfog.pipeline import build
from unfog.planning.flops import Device, NetworkCost, matmul_seconds
from unfog.planning.memory_estimate import MemoryEstimator
from unfog.planning.timing import StepTime, TrialTraining, measure_step, random_images, seconds_per_call
from unfog.process.device import choose_device
from unfog.process.torch_flags import caller_flags_kept
from unfog.training.precision import HalfWeights, drawing_precision
from unfog.training.settings import SamplingPrecision
from unfog.training.updates import updater

import networks
import steps
import torch
from capture import must_capture
from flags import built_once, constant, torch_flags
from parts import Setting, attempt
from rows import Row, mfu

_SECONDS, _SECONDS_ON_CPU = 3.0, 0.05  # for each way, after its first steps
_CAPTURED = 12  # steps at least of one that is captured: the first four are not replays
_LEAST = 10.0  # seconds that must be left for a way to be tried
_COMPILING = {"cifar10": 75.0, "dit-latents": 50.0, "unet-64": 90.0, "small": 75.0}
"""The same for a way that is compiled: one that would be killed in the compiler is left out."""
_STORED = 30.0  # the same, if the program was compiled before, so that its code is stored


class _Way(NamedTuple):
    """One way to train the network."""

    name: str
    measure: Callable[[], StepTime]
    compiled: bool = False
    needs_cuda: bool = False
    flags: Callable[[], AbstractContextManager[None]] = nullcontext
    batch: int = 0
    """Images of a step, if it has a batch of its own."""


def measure(setting: Setting, name: str) -> Iterator[Row]:
    """Yield the rows of all ways to train the network, those that need no compiler first."""
    part, device, config = f"steps {name}", choose_device(setting.device), networks.settings_of(name, setting.cpu)
    if setting.cpu:
        networks.disable_compiler()
    timer = _Timer(part, config, device, setting.seconds, _COMPILING[name])
    yield timer.describe()
    yield from memory(part, config, device)
    # Of this network only training is timed, and only without a compiler.
    brief = name in ("unet-64", "small")
    if not brief:
        yield from drawing(part, config, device)
    with built_once():
        trials = on_trial(config, device) if name in ("cifar10", "small") else []
        plain, compiled = ways(config, device)
        for way in (*plain, *trials, *([] if brief else compiled)):  # what takes longest comes last
            yield timer.time(way)


def ways(config: Config, device: torch.device) -> tuple[list[_Way], list[_Way]]:
    """Return all ways, ours, a bare step, and diffusers' script: those without a compiler, and those with one."""
    ours, planar = partial(_ours, config, device), _changed(config, memory_format="contiguous")
    seconds = _SECONDS if device.type == "cuda" else _SECONDS_ON_CPU
    fastest, usual = partial(torch_flags, False, True), partial(torch_flags, False, False)

    def bare(**how: bool) -> Callable[[], StepTime]:
        return lambda: StepTime.measure(steps.bare(config, device, **how), seconds)

    def theirs(compiled: bool) -> Callable[[], StepTime]:
        return lambda: StepTime.measure(steps.diffusers(config, device, compiled), seconds)

    plain = [
        _Way("bare eager", bare(), flags=fastest),
        _Way("diffusers eager", theirs(False), flags=usual),
        _Way("unfog eager", ours),
        _Way("unfog eager, NCHW", partial(_ours, planar, device)),
        _Way("unfog captured", partial(_ours_captured, config, device), needs_cuda=True),
        _Way("bare captured", bare(captured=True), needs_cuda=True, flags=fastest),
        _Way("unfog eager, not deterministic", partial(_ours, config, device, deterministic=False), flags=fastest),
    ]
    fast = _changed(config, compile=True)
    compiled = [
        _Way("unfog compiled, captured", partial(_ours_captured, fast, device), needs_cuda=True),
        _Way("unfog compiled", partial(_ours, fast, device)),
        _Way("bare compiled, captured", bare(compiled=True, captured=True), needs_cuda=True, flags=fastest),
        _Way("diffusers compiled", theirs(True), flags=usual),
        _Way("bare compiled", bare(compiled=True), flags=fastest),
    ]
    return plain, [way._replace(compiled=True) for way in compiled]


def on_trial(config: Config, device: torch.device) -> list[_Way]:
    """Return our step with each choice that one place of the package makes, made the other way."""
    ours, small = partial(_ours, config, device), max(1, config.training.batch // 4)
    planar = partial(constant, build, "_WEIGHTS_CHANNELS_LAST_ON", ())
    apart = partial(constant, group_norm, "_FUSED", False)
    at_once = partial(constant, updater, "_LATE_ON", ())
    autocast = partial(constant, HalfWeights, "of", lambda network, precision: None)
    return [
        _Way("unfog eager, weights in NCHW", ours, needs_cuda=True, flags=planar),
        _Way("unfog captured, norm not fused", partial(_ours_captured, config, device), needs_cuda=True, flags=apart),
        _Way("unfog eager, verdict at once", ours, needs_cuda=True, flags=at_once),
        _Way("unfog eager, weights cast at each use", ours, needs_cuda=True, flags=autocast),
        _Way(f"unfog eager, batch {small}", partial(_ours, _changed(config, batch=small), device), batch=small),
    ]


def _changed(config: Config, **training: Any) -> Config:
    return replace(config, training=replace(config.training, **training))


def _ours(config: Config, device: torch.device, deterministic: bool = True) -> StepTime:
    on_gpu = device.type == "cuda"
    if not deterministic:
        config = _changed(config, deterministic="off")
    trial = TrialTraining(config, random_images(config, 2048 if on_gpu else 64), device)
    return StepTime.measure(trial.run, _SECONDS if on_gpu else _SECONDS_ON_CPU)


def _ours_captured(config: Config, device: torch.device) -> StepTime:
    """Time captured steps of one training: each call of the loop would capture anew."""
    config = _changed(config, capture=True)
    with must_capture():
        return measure_step(config, random_images(config, 2048), device, lambda: False, _SECONDS, _CAPTURED)


class _Timer:
    """Times one way after the other, and says how each compares."""

    def __init__(self, part: str, config: Config, device: torch.device, seconds: float, compiling: float):
        self.part, self.config, self.device, self.compiling = part, config, device, compiling
        self.deadline = steps.time.monotonic() + seconds
        self.cost = NetworkCost.of(lambda: build.build_network(config), config.input_shape)
        self.peak, self.source = _peak(device)
        self.found: dict[str, StepTime] = {}
        self.rates: dict[str, float] = {}
        """Images/s."""

    def describe(self) -> Row:
        count = sum(p.numel() for p in build.build_network(self.config).parameters())
        channels, side, _ = self.config.input_shape
        training = self.config.training
        said = (
            f"{count / 1e6:.1f}M parameters, {channels}x{side}x{side}, batch {training.batch}, {training.precision}, "
            f"{training.memory_format}, {self.cost.training / 1e9:.3g} GFLOP to train on an image; "
            f"MFU of {self.peak / 1e12:.3g} TFLOP/s ({self.source})"
        )
        return Row(self.part, "network", said)

    def time(self, way: _Way) -> Row:
        """Return the row of one way: images/s, MFU, and the ratio to diffusers' and to the bare step."""
        on_gpu = self.device.type == "cuda"
        if way.needs_cuda and not on_gpu:
            return Row(self.part, way.name, "needs CUDA", "skipped")
        left, least = self.deadline - steps.time.monotonic(), self.least_seconds(way)
        if left < least:
            return Row(self.part, way.name, f"{left:.0f} s are left, and it may take {least:.0f}", "skipped")
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        try:
            # Options that ours gives to Inductor are not those of the ways that come after.
            with caller_flags_kept(), way.flags():
                time = way.measure()
        except ImportError as error:
            return Row(self.part, way.name, f"needs {error.name}, a package", "skipped")
        except Exception as error:
            return attempt(self.part, way.name, error)
        return self._row(way, time)

    def least_seconds(self, way: _Way) -> float:
        """Return the seconds that must be left for a way to be tried."""
        if not way.compiled or self.device.type != "cuda":
            return _LEAST
        program = way.name.split()[0]
        stored = any(name.startswith(f"{program} compiled") for name in self.found)
        return _STORED if stored else self.compiling

    def _row(self, way: _Way, time: StepTime) -> Row:
        name = way.name
        self.found[name] = time
        self.rates[name] = rate = (way.batch or self.config.training.batch) / time.step
        used = mfu(self.cost.training, rate, self.peak)
        figures = {"images_per_second": rate, "milliseconds": time.step * 1e3, "first_seconds": time.first}
        said = f"{rate:,.0f} images/s, {time.step * 1e3:.1f} ms, "
        if self.device.type == "cuda":  # of a CPU the rate of products says too little
            figures["mfu"] = used
            said += f"MFU {used:.1%}, "
        said += f"first step {time.first:.1f} s"
        said += ", compiler off" * (self.device.type == "cpu" and way.compiled)
        for other in ("bare eager", "diffusers eager", "unfog eager"):
            if other in self.found and other != name:
                figures[f"times_{other.replace(' ', '_')}"] = gain = rate / self.rates[other]
                said += f", {gain:.2f} x {other}"
        ours = [one for one in self.found if one.startswith("unfog compiled")]
        # Of the first one alone: the others load the code that it has stored.
        if ours == [name] and "unfog eager" in self.found:
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


def drawing(part: str, config: Config, device: torch.device) -> Iterator[Row]:
    """Yield how long a call of the network takes as samples are drawn: in fp32, and in 16 bits."""
    usual, count = drawing_precision("auto", device, config.training.precision), config.training.batch
    half: SamplingPrecision = "bf16" if usual == "fp32" else usual
    try:
        exact, fast = (seconds_per_call(config, device, precision) for precision in ("fp32", half))
    except Exception as error:
        yield attempt(part, "drawing", error)
        return
    said = f"a call for {count} images in fp32 {exact * 1e3:.1f} ms, in {half} {fast * 1e3:.1f} ms: "
    said += f"{exact / fast:.2f} times as fast"
    yield Row(part, "drawing", said, figures={"fp32": exact, "half": fast})


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
            with caller_flags_kept():
                TrialTraining(config, random_images(config, 2048), device).run(3)
        except Exception as error:
            yield attempt(part, "memory", error)
            return
        measured = torch.cuda.max_memory_allocated(device) - before
        figures |= {"measured": measured, "reserved": torch.cuda.max_memory_reserved(device)}
        said += f", {measured / 1e9:.3g} GB allocated at the peak: {predicted / measured - 1:+.0%}"
        said += f", {figures['reserved'] / 1e9:.3g} GB reserved"
    yield Row(part, "memory of a step", said, figures=figures)
