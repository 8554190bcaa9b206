"""Checks of a GPU: build of torch, memory, arithmetic, copies, and training steps; and how to run all of them."""

from __future__ import annotations

import gc
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from unfog.config.schema import Config
from unfog.device.copies import to_device, to_host
from unfog.errors import Interrupted, RequestError
from unfog.pipeline.build import build_network
from unfog.pipeline.compile_network import check_can_compile
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.flops import Device, NetworkCost, matmul_seconds
from unfog.planning.timing import StepTime, TrialTraining, differing_tensors, random_images, waits_for_device
from unfog.process.device import architecture, available_memory, choose_device, synchronize, total_memory, unused_gpu
from unfog.process.signals import StopSignals
from unfog.reporting.findings import Finding, Severity
from unfog.reporting.progress import Progress, format_number
from unfog.settings import is_auto
from unfog.text import format_bytes, plural, sanitize
from unfog.training.distributed.world import SINGLE_PROCESS
from unfog.training.precision import gpu_has_bf16
from unfog.training.updates.updater import why_not_masked
from unfog.values.image_format import colour_channels

_DRIVER = Path("/proc/driver/nvidia/version")
_SIDE = {"cpu": 1024, "cuda": 8192, "mps": 2048}  # of multiplied matrices; large enough to reach the full rate
_COPIED = {"cpu": 2**24, "cuda": 2**28, "mps": 2**26}  # bytes
_SLOW_RATE = 0.4  # of the data sheet's: large products reach 60 to 80%
_CROWDED = 0.5  # of the memory, which others may use before it is worth a word
_ROUNDING = 2.0**-6  # relative error of a product in bf16, whose numbers are rounded to 2^-8
_SIZE = 32  # pixels of the images, unless the settings say otherwise
_FEW_STEPS = 2
_GAIN = 1.05  # times as fast, from which on compiling is worth its start


def check_gpu(config: Config, stop: StopSignals) -> list[Finding]:
    """Check the GPU that `config` names, or the first one, in about a minute; the network's settings are its own.

    RequestError if torch can use no GPU here.
    """
    return list(iter_gpu_checks(config, stop))


def iter_gpu_checks(config: Config, stop: StopSignals, compiled: bool = True) -> Iterator[Finding]:
    """Yield the findings of `check_gpu`, each as soon as it is there; the compiled step only with `compiled`."""
    device = choose_device(config.training.device)
    if is_auto(config.training, "device") and device.type == "cpu":
        why = unused_gpu() or "torch finds neither CUDA, ROCm nor MPS"
        raise RequestError(f"there is no GPU to check: {why}; --device cpu runs the same checks on the CPU")
    steps = StepChecks(config, device, stop)
    checks: dict[str, Callable[[], Finding]] = {
        "build": partial(_check_build, device),
        "memory": partial(_check_memory, device),
        "matmul": partial(_check_matmul, device),
        "rounding": partial(_check_rounding, device),
        "copies": partial(_check_copies, device),
        "step": steps.check_eager,
        "compile": steps.check_compiled,
        "repeat": steps.check_repeat,
    }
    if device.type == "cpu" or not compiled:
        del checks["compile"]  # on a CPU minutes for a C++ compiler, and nobody trains faster by it
    with Progress("checking the device", len(checks)) as progress:
        for number, (name, check) in enumerate(checks.items()):
            stop.leave_if_requested()
            progress.update(number, note=name)
            yield _attempt(name, check)


def _attempt(name: str, check: Callable[[], Finding]) -> Finding:
    """Return the finding of a check; of a check that raises, a finding that names the error."""
    try:
        return check()
    except (Interrupted, RequestError):
        raise
    except Exception as error:
        said = sanitize(str(error).strip().partition("\n")[0])[:300]
        compiling = name == "compile"
        remedy = "train without --compile" if compiling else "update the driver, or install another build of torch"
        severity: Severity = "warning" if compiling else "fatal"
        facts = {"traceback": [sanitize(line) for line in traceback.format_exc().splitlines()]}
        return Finding(f"gpu.{name}", severity, f"{name} failed: {type(error).__name__}: {said}", remedy, facts)


def _check_build(device: torch.device) -> Finding:
    """Report the build of torch and the device; `choose_device` has refused a GPU that the build has no code for."""
    facts: dict[str, Any] = {"torch": torch.__version__, "device": str(device)}
    if device.type != "cuda":
        name = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else "Apple"
        said = f"torch {torch.__version__} on {device} ({name}), {plural(torch.get_num_threads(), 'thread')}"
        return Finding("gpu.build", "fine", said, facts=facts)
    properties, built_for = torch.cuda.get_device_properties(device), torch.cuda.get_arch_list()
    on_amd = torch.version.hip is not None
    own = architecture(properties)
    build = f"ROCm {torch.version.hip}" if on_amd else f"CUDA {torch.version.cuda}"
    said = f"torch {torch.__version__} ({build}) on {properties.name}, {own}{_driver()}"
    facts |= {"name": properties.name, "architecture": own, "built_for": built_for, "gpus": torch.cuda.device_count()}
    return Finding("gpu.build", "fine", said, facts=facts)


def _driver() -> str:
    try:
        with _DRIVER.open() as file:
            match = re.search(r"\b\d{3,4}\.[\d.]+", file.read(1000))
    except OSError:
        return ""
    return f", driver {match[0]}" if match else ""


def _check_memory(device: torch.device) -> Finding:
    """Check how much memory is free."""
    free, total = available_memory(device), total_memory(device)
    crowded, remedy = device.type != "cpu" and free < _CROWDED * total, "end the other programs; nvidia-smi lists them"
    return Finding.graded(
        "gpu.memory",
        f"{format_bytes(free)} of {format_bytes(total)} of memory are free",
        (crowded, "warning", ", others use the rest", remedy),
        facts={"free": free, "total": total},
    )


def _check_matmul(device: torch.device) -> Finding:
    """Measure matrix products in fp32 and 16 bits, and compare with the data sheet if the device has one here."""
    side = _SIDE[device.type]
    rates = {
        name: 2 * side**3 / matmul_seconds(dtype, device, side)
        for name, dtype in {"fp32": torch.float32, half_type(device)[0]: half_type(device)[1]}.items()
    }
    said = "a matrix product runs at " + " and ".join(f"{v / 1e12:,.3g} TFLOP/s in {n}" for n, v in rates.items())
    sheet = Device.of_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    share = rates[half_type(device)[0]] / sheet.half if sheet else 1.0
    said += f", {share:.0%} of the data sheet" if sheet else ""
    remedy = "look for another program, a power limit or heat: nvidia-smi -q -d PERFORMANCE"
    facts = {f"flops_{name}": rate for name, rate in rates.items()} | ({"share": share} if sheet else {})
    return Finding.graded("gpu.matmul", said, (share < _SLOW_RATE, "warning", "", remedy), facts=facts)


def half_type(device: torch.device) -> tuple[str, torch.dtype]:
    """Return the 16-bit type in which a device trains fastest, where it has one: bf16, or fp16 on older GPUs."""
    old = device.type == "cuda" and not gpu_has_bf16(device)
    return ("fp16", torch.float16) if old else ("bf16", torch.bfloat16)


def _check_rounding(device: torch.device) -> Finding:
    """Check that 16-bit arithmetic is native, and right: against a product in float64 on the CPU."""
    name, dtype = half_type(device)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator).to(dtype) for _ in range(2))
    exact, found = a.double() @ b.double(), (a.to(device) @ b.to(device)).cpu().double()
    error = float((found - exact).norm() / exact.norm())
    wrong, without = ", of which rounding explains 4e-3", "; this GPU has no bf16, so training takes fp16"
    return Finding.graded(
        "gpu.rounding",
        f"a {name} matrix product has a relative error of {error:.1e}",
        (not error < _ROUNDING, "fatal", wrong, "the GPU or its driver is faulty"),
        (name == "fp16", "hint", without, "fp16 scales the loss, and skips a step now and then"),
        facts={"error": error, "precision": name},
    )


def _check_copies(device: torch.device) -> Finding:
    """Check that bytes copied to the device and back, as training copies them, come back unchanged."""
    count = _COPIED[device.type]
    sent = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(2):  # the first pair also pins memory
        synchronize(device)
        started = time.perf_counter()
        there = to_device(sent, device)
        back = to_host(there)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    rate = 2 * count / min(seconds)
    return Finding.graded(
        "gpu.copies",
        f"{format_bytes(count)} were copied to the device and back at {rate / 1e9:,.3g} GB/s",
        (not torch.equal(sent, back), "fatal", ", and came back changed", "the memory or the driver is faulty"),
        facts={"bytes_per_second": rate},
    )


class StepChecks:
    """Checks of one training step on images of noise, with the settings that a run would choose."""

    def __init__(self, config: Config, device: torch.device, stop: StopSignals):
        self._unresolved, self.device, self._stop = config, device, stop
        self._eager: StepTime | None = None

    def _trial(self, compiled: bool = False) -> TrialTraining:
        # What an earlier trial held is given back first, so that both fit where one does.
        gc.collect()
        config = replace(self.config, training=replace(self.config.training, compile=compiled))
        return TrialTraining(config, random_images(config), self.device)

    @cached_property
    def config(self) -> Config:
        """The settings with all that a step needs chosen."""
        return trial_settings(self._unresolved, self.device, self._stop)

    def check_eager(self) -> Finding:
        """Time the uncompiled step, and count its waits for the device."""
        trial = self._trial()
        self._eager = found = StepTime.measure(trial.run)
        waits = waits_for_device(lambda: trial.run(_FEW_STEPS), self.device)
        config, batch = self.config, self.config.training.batch
        cost = NetworkCost.of(lambda: build_network(config), config.input_shape, config.conditions)
        rate = batch / found.step
        count = sum(p.numel() for p in trial.state.model.parameters())
        said = (
            f"a step of {plural(batch)} ({count / 1e6:.3g}M parameters, {config.image_format.sides}, "
            f"{config.training.precision}) takes {found.step * 1e3:,.3g} ms: {format_number(rate)} images/s, "
            f"{rate * cost.training / 1e12:.3g} TFLOP/s"
        )
        each = sum(waits.values()) / _FEW_STEPS if waits is not None else 0.0
        where = f", and waits {each:g} times for the device, at {', '.join(waits)}" if waits else ""
        # To learn whether its gradient is finite, where the device cannot decide by itself.
        usual = 0 if why_not_masked(trial.state, SINGLE_PROCESS) is None else 1
        return Finding.graded(
            "gpu.step",
            said,
            (each > usual, "hint", where, f"it waits {('never', 'once')[usual]} where all is well: please report it"),
            facts={
                "seconds": found.step,
                "images_per_second": rate,
                "flops_per_second": rate * cost.training,
                "waits": None if waits is None else each,
            },
        )

    def check_compiled(self) -> Finding:
        """Time the compiled step, and say from which step on it pays."""
        if self._eager is None:
            return Finding("gpu.compile", "hint", "a compiled step was not timed, as a plain one failed")
        try:
            check_can_compile(self.device)
        except RequestError as error:
            return Finding("gpu.compile", "hint", f"a compiled step was not timed: {error}")
        found, eager = StepTime.measure(self._trial(compiled=True).run), self._eager
        gain, cost, pays = eager.step / found.step, found.first - found.step, found.pays_from(eager)
        rate = format_number(self.config.training.batch / found.step)
        said = f"compiled: {rate} images/s, {gain:.2f} times as fast; compiling took {cost:.2g} s"
        if gain > _GAIN:
            said += f", which pays from step {pays:,.0f} on: --compile"
        facts = {"seconds": found.step, "first_seconds": found.first, "gain": gain}
        return Finding.graded("gpu.compile", said, (gain <= _GAIN, "hint", "", "train without --compile"), facts=facts)

    def check_repeat(self) -> Finding:
        """Train the same steps twice, and compare everything that a checkpoint would hold."""
        trials = []
        for _ in range(2):
            trial = self._trial()
            trial.run(_FEW_STEPS)
            trials.append(trial)
        different, twice = differing_tensors(*trials), f"{_FEW_STEPS} steps, trained twice"
        if not different:
            return Finding("gpu.repeat", "fine", f"{twice}, are equal to the bit")
        said = f"{twice}: {len(different)} tensors differ, such as {different[0]}"
        if self.config.training.deterministic == "off":
            return Finding("gpu.repeat", "hint", f"{said}, as --training.deterministic off allows")
        remedy = "training works, but a resumed run will not equal an uninterrupted one; please report it"
        return Finding("gpu.repeat", "warning", said, remedy)


def trial_settings(config: Config, device: torch.device, stop: Callable[[], bool]) -> Config:
    """Return settings with size, network, rate, precision and memory format chosen as a run would choose them."""
    usual: dict[str, Any] = {"size": _SIZE, "channels": colour_channels(True)}
    data = replace(config.data, **{name: value for name, value in usual.items() if is_auto(config.data, name)})
    training = replace(config.training, steps=0, budget="", images=config.training.likely_batch)
    config = replace(config, data=data, training=training)
    auto = AutoSettings(config, random_images(config), device, stop)
    auto.resolve_training()
    return auto.config
