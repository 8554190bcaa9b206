"""Part: the checks of `unfog doctor --gpu`, each a row as soon as it is there; without that of compiled code."""

from __future__ import annotations

from collections.abc import Iterator

from unfog.checks.gpu_checks import iter_gpu_checks
from unfog.config.presets import preset
from unfog.config.toml import update
from unfog.process.signals import StopSignals

from parts import Setting
from rows import Row

TINY = "unet:channels=32/32,attention=0/0,mid_attention=0"


def measure(setting: Setting) -> Iterator[Row]:
    """Yield a row for each finding. One that is fatal is a failure."""
    changes = {"network": TINY if setting.cpu else "small", "data": {"size": 16 if setting.cpu else 32}}
    training = {"device": setting.device, "batch": 4 if setting.cpu else 64}
    config = update(preset("default"), {**changes, "training": training}, "")
    with StopSignals(saves=False) as stop:
        for one in iter_gpu_checks(config, stop, compiled=False):
            state = "failed" if one.severity in ("fatal", "warning") else "ok"
            facts = dict(one.facts)
            print("\n".join(facts.pop("traceback", [])))
            yield Row("device", one.code.removeprefix("gpu."), str(one), state, facts)
