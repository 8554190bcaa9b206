"""Checks of a training step on a device: its speed, plain and compiled, its waits, and whether it repeats."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cached_property

import torch

from unfog.config.schema import Config
from unfog.pipeline.build import build_network, input_shape
from unfog.planning.auto_settings import AutoSettings
from unfog.planning.flops import NetworkCost
from unfog.planning.trial_training import (
    StepTime,
    TrialTraining,
    differing_tensors,
    random_images,
    waits_for_device,
)
from unfog.process.signals import StopSignals
from unfog.reporting.findings import Finding
from unfog.reporting.progress import format_number

_SIZE = 32  # pixels of the images, unless the settings say otherwise
_WAITS = 1  # a step: to learn whether its gradient is finite
_FEW_STEPS = 2
_GAIN = 1.05  # times as fast, from which on compiling is worth its start


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
        """Time the step as it is, and count its waits for the device."""
        trial = self._trial()
        self._eager = found = StepTime.measure(trial.run)
        waits = waits_for_device(lambda: trial.run(_FEW_STEPS), self.device)
        config, batch = self.config, self.config.training.batch
        cost = NetworkCost.of(lambda: build_network(config), input_shape(config))
        rate = batch / found.step
        side, count = config.data.size, sum(p.numel() for p in trial.state.model.parameters())
        said = (
            f"a step of {batch} images ({count / 1e6:.3g}M parameters, {side}x{side}, {config.training.precision}) "
            f"takes {found.step * 1e3:,.3g} ms: {format_number(rate)} images/s, "
            f"{rate * cost.training / 1e12:.3g} TFLOP/s"
        )
        each = sum(waits.values()) / _FEW_STEPS if waits is not None else 0.0
        where = f", and waits {each:g} times for the device, at {', '.join(waits)}" if waits else ""
        return Finding.graded(
            "gpu.step",
            said,
            (each > _WAITS, "hint", where, "it waits once where all is well: please report it"),
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
        different = differing_tensors(*trials)
        several = f"{len(different)} tensors differ, such as {different[0]}" if different else ""
        remedy = "training works, but a resumed run will not equal an uninterrupted one; please report it"
        said = f"{_FEW_STEPS} steps, trained twice, are equal to the bit"
        if different:
            return Finding("gpu.repeat", "warning", f"{_FEW_STEPS} steps, trained twice: {several}", remedy)
        return Finding("gpu.repeat", "fine", said)


def trial_settings(config: Config, device: torch.device, stop: StopSignals) -> Config:
    """Return settings with size, network, rate, precision and memory format chosen as a run would choose them."""
    data = replace(config.data, size=config.data.size or _SIZE, channels=config.data.channels or 3)
    training = replace(config.training, steps=0, budget="", images=config.training.batch)
    config = replace(config, data=data, training=training)
    auto = AutoSettings(config, random_images(config), device, stop)
    auto.resolve_training()
    return auto.config
