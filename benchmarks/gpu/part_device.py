"""Part: the checks of `unfog doctor --gpu`, each a row."""

from __future__ import annotations

from collections.abc import Iterator

from unfog.checks.gpu_checks import check_gpu
from unfog.config.presets import preset
from unfog.config.toml import update
from unfog.process.signals import StopSignals

from parts import Setting
from rows import Row

TINY = "unet:channels=32/32,attention=0/0,mid_attention=0"


def measure(setting: Setting) -> Iterator[Row]:
    """Yield a row for each finding. One that is fatal is a failure."""
    # On a GPU a network whose compilation takes seconds: larger ones have parts of their own.
    changes = {"network": TINY if setting.cpu else "small", "data": {"size": 16 if setting.cpu else 32}}
    training = {"device": setting.device, "batch": 4 if setting.cpu else 64}
    with StopSignals(saves=False) as stop:
        findings = check_gpu(update(preset("default"), {**changes, "training": training}, ""), stop)
    for one in findings:
        state = "failed" if one.severity in ("fatal", "warning") else "ok"
        yield Row("device", one.code.removeprefix("gpu."), str(one), state, dict(one.facts))
