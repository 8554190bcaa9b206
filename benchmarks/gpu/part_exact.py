"""Part: whether a run resumes, and steps repeat, to the bit: with attention and without, in 16 bits and in fp32."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import unfog
from unfog.config.schema import Config
from unfog.models import group_norm
from unfog.planning.timing import TrialTraining, differing_tensors, random_images
from unfog.process.device import choose_device
from unfog.training.settings import PrecisionName

import networks
from capture import must_capture
from flags import constant
from parts import Setting, attempt
from photos import draw_photos
from rows import Row

_STEPS = 4


def measure(setting: Setting) -> Iterator[Row]:
    """Yield whether a run that is resumed is the same, then whether steps are: twice, and captured."""
    yield from resumed(setting)
    cases: list[tuple[Callable[[Setting, str, PrecisionName], Row], str, PrecisionName]] = [
        (repeated, "small", "bf16"),
        (captured, "small", "bf16"),
        (captured_twice, "small", "bf16"),
        (repeated, "dit-256", "bf16"),
        (captured, "dit-256", "bf16"),
        (repeated, "small", "fp32"),
    ]
    for compare, name, precision in cases:
        if setting.cpu and compare is not repeated:
            said = "steps plain and captured" if compare is captured else "captured steps twice"
            yield Row("exact", f"{said}, {name} in {precision}", "CUDA graphs need CUDA", "skipped")
            continue
        try:
            yield compare(setting, name, precision)
        except Exception as error:
            yield attempt("exact", f"{name} {precision}", error)


def repeated(setting: Setting, name: str, precision: PrecisionName) -> Row:
    """Train the same steps twice, in micro-batches too, and compare all that a checkpoint would hold."""
    config = networks.settings_of(name, setting.cpu)
    batch = min(16, config.training.batch)
    training = replace(config.training, batch=batch, microbatch=batch // 2, precision=precision)
    config = replace(config, training=training)
    return _compared(setting, f"{_STEPS} steps twice, {name} in {precision}", [config] * 2, _STEPS)


def captured(setting: Setting, name: str, precision: PrecisionName) -> Row:
    """Train the same steps plain, and captured in a CUDA graph from the fourth on, and compare; norms are not fused."""
    what = f"steps plain and captured, {name} in {precision}"
    with constant(group_norm, "_FUSED", False):  # in captured steps alone they are
        return _compared(setting, what, _to_capture(setting, name, precision, (False, True)), 2 * _STEPS)


def captured_twice(setting: Setting, name: str, precision: PrecisionName) -> Row:
    """Train the same captured steps twice, with fused norms, and compare."""
    what = f"captured steps twice, {name} in {precision}"
    return _compared(setting, what, _to_capture(setting, name, precision, (True, True)), 2 * _STEPS)


def _to_capture(setting: Setting, name: str, precision: PrecisionName, captures: tuple[bool, bool]) -> list[Config]:
    config = networks.settings_of(name, setting.cpu)
    training = replace(config.training, batch=min(16, config.training.batch), precision=precision)
    return [replace(config, training=replace(training, capture=capture)) for capture in captures]


def _compared(setting: Setting, what: str, configs: list[Config], steps: int) -> Row:
    device, trials = choose_device(setting.device), []
    for config in configs:
        trials.append(TrialTraining(config, random_images(config, 64), device))
        with must_capture(config.training.capture):
            trials[-1].run(steps)
    different = differing_tensors(*trials)
    said = f"{len(different)} tensors differ, such as {different[0]}" if different else "equal to the bit"
    return Row("exact", what, said, "failed" if different else "ok", {"differing": len(different)})


def resumed(setting: Setting) -> Iterator[Row]:
    """Yield whether a run that lost its last checkpoint trains the same one again, and whether `--verify` agrees."""
    whole, again = setting.folder / "whole", setting.folder / "again"
    network = "unet:channels=32/32,attention=0/1" if setting.cpu else "small"
    settings: dict[str, Any] = {"network": network, "size": 16 if setting.cpu else 32, "batch": 8, "steps": 8}
    settings |= {"preview.images": 1, "sampler.steps": 1}
    settings |= {"preview.every": 4, "evaluate.every": 4, "checkpoint.every": 4, "ema_snapshots.every": -1}
    try:
        photos = draw_photos(setting.folder / "photos")
        unfog.train(photos, out=whole, device=setting.device, **settings)
        shutil.copytree(whole, again)
        shutil.rmtree(again / "checkpoints" / "00000008")
        unfog.resume(again)
        different = [name for name, digest in digests(whole).items() if digests(again).get(name) != digest]
        said = f"{', '.join(different)} differ" if different else "equal to the bit"
        yield Row("exact", "a run resumed", said, "failed" if different else "ok", {"differing": len(different)})
        unfog.verify(whole)  # which raises an error where something differs
        yield Row("exact", "resume --verify", "equal to the bit", figures={"differing": 0})
    except Exception as error:
        yield attempt("exact", "a run resumed", error)


def digests(run: Path) -> dict[str, str]:
    """Return the SHA-256 of each tensor file of the last checkpoint of a run of 8 steps."""
    files = sorted((run / "checkpoints" / "00000008").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
