"""Part: a few steps of a small network, plain, captured or compiled. What fails here fails everywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from unfog.planning.timing import TrialTraining, random_images
from unfog.process.device import choose_device

import networks
import torch
from capture import must_capture
from parts import Setting, attempt
from rows import Row

_STEPS = 12


def measure(setting: Setting, way: str) -> Iterator[Row]:
    """Yield whether the steps of one way give finite weights."""
    if setting.cpu and way == "captured":
        yield Row("smoke captured", "12 steps", "CUDA graphs need CUDA", "skipped")
        return
    if setting.cpu:
        networks.disable_compiler()
    started = time.perf_counter()
    try:
        # A smaller network where a compiler has to finish in time.
        config = networks.settings_of("tiny" if way == "compiled" else "small", setting.cpu)
        training = replace(config.training, compile=way == "compiled", capture=way == "captured")
        config, device = replace(config, training=training), choose_device(setting.device)
        trial = TrialTraining(config, random_images(config, 64), device)
        with must_capture(training.capture):
            seconds = trial.run(_STEPS)
        length = math.sqrt(sum(float(p.detach().double().square().sum()) for p in trial.state.model.parameters()))
    except Exception as error:
        yield attempt(f"smoke {way}", f"{_STEPS} steps", error)
        return
    if way == "compiled":
        print(torch._dynamo.utils.compile_times(repr="str", aggregate=True))  # for the log: where the seconds went
    good = math.isfinite(length) and trial.state.updates == _STEPS
    said = f"{trial.state.updates} of {_STEPS} steps taken, {seconds:.1f} s of {time.perf_counter() - started:.1f} s; "
    said += f"weights of length {length:.6g}, {config.training.precision}, {config.training.memory_format}"
    yield Row(f"smoke {way}", f"{_STEPS} steps", said, "ok" if good else "failed", {"seconds": seconds})
