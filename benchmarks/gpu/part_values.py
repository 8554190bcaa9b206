"""Part: values beside those of the CPU, most of them in float64: networks, updates, samplers, features, checkpoints."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import unfog
from unfog.data.augmentation import Augment
from unfog.evaluation.features import open_features
from unfog.inference.run import Run
from unfog.models.group_norm import GroupNorm, fuse_norms, group_norm
from unfog.process.device import choose_device
from unfog.reporting.records import read_metrics
from unfog.training.settings import AdamW, Muon

import networks
import numpy as np
import reference
import torch
import values
from parts import Setting, attempt
from photos import draw_photos
from rows import Row
from torch import Tensor
from torch.nn import functional as F

OUTPUT = {"fp32": 1e-4, "bf16": 4e-2}
"""Largest relative error of a network's output. On a CPU it is 3e-6 and 2e-2, and 1 where something is wrong."""
GRADIENT = {"fp32": 2e-4, "bf16": 0.15}
"""Largest relative error of the gradient of a weight. On a CPU 1e-5 and 6e-2."""
_UPDATE = {torch.float32: 1e-3, torch.bfloat16: 4e-2}
_DRAWN, _DRAWN_HALF = 1e-3, 0.05  # largest difference in fp32, root mean square in bf16, of images in [-1, 1]
_LOSS, _HELD_OUT = 2e-3, 1e-4  # relative, against the stored figures
_COMPILING = 15.0  # seconds that must be left for a network to be compiled
_KINDS: tuple[Any, ...] = ("ddpm", "heun", "dpmpp")


def measure(setting: Setting) -> Iterator[Row]:
    """Yield a row for each comparison, the most telling ones first."""
    deadline, device = time.monotonic() + setting.seconds, choose_device(setting.device)
    if setting.cpu:
        networks.disable_compiler()
    large, small = values.cases(setting.cpu), values.cases(True)
    for case in large:
        yield from _attempts(case.name, partial(_network, case, device))
    checks: dict[str, Callable[[], Iterator[Row]]] = {
        "updates": partial(_updates, small[0], device),
        "group norm": partial(_group_norm, device),
        "fused norm": partial(_fused_norm, device),
        "samplers": partial(_samplers, [small[0], small[2]], device),
        "augmentation": partial(_augmentation, device),
        "features": partial(_features, device),
        "stored figures": partial(_stored, device),
        "checkpoints": partial(_checkpoints, setting.folder / "run", setting.device),
    }
    for name, check in checks.items():
        yield from _attempts(name, check)
    for case in small[2 if setting.cpu else 0 : 3 : 2]:
        if not setting.cpu and deadline - time.monotonic() < _COMPILING:
            yield Row("values", f"{case.name}, compiled", "no time was left for it", "skipped")
        else:
            yield from _attempts(f"{case.name}, compiled", partial(_network, case, device, compiled=True))


def _attempts(name: str, check: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    try:
        yield from check()
    except Exception as error:
        yield attempt("values", name, error)


def _row(name: str, said: str, good: bool, **figures: float) -> Row:
    return Row("values", name, said, "ok" if good else "failed", figures)


def _network(case: values.Case, device: torch.device, compiled: bool = False) -> Iterator[Row]:
    """Yield output and gradients in fp32 and bf16 against float64."""
    exact = values.reference(case)
    precision: Any
    for precision in ("fp32", "bf16"):
        found = values.difference(values.computed(case, device, precision, compiled), exact)
        # Comparisons that a NaN fails.
        good = found.output < OUTPUT[precision] and found.gradient < GRADIENT[precision]
        said = f"output {found.output:.1e} off, gradients {found.gradient:.1e} at most ({found.worst})"
        said += ", compiler off" * (compiled and device.type == "cpu")
        name = f"{case.name} in {precision}{', compiled' * compiled}"
        yield _row(name, said, good, output=found.output, gradient=found.gradient)


def _updates(case: values.Case, device: torch.device) -> Iterator[Row]:
    """Yield updates that are left out and taken by the device, of AdamW, of Muon, and of the EMA behind both."""
    methods = [
        ("AdamW", AdamW(), torch.float32),
        ("Muon", Muon(), torch.float32),
        ("Muon in bf16", Muon(), torch.bfloat16),
    ]
    for name, method, fast in methods:
        found = values.masked_update(case, method, device, fast)
        good = found.unchanged and found.weights < _UPDATE[fast] and found.ema < _UPDATE[fast]
        left_out = "left out to the bit" if found.unchanged else "NOT left out"
        said = f"{left_out}; taken, weights {found.weights:.1e} off, EMA {found.ema:.1e}"
        yield _row(f"update of {name}", said, good, weights=found.weights, ema=found.ema)


def _group_norm(device: torch.device) -> Iterator[Row]:
    """Yield the group norm of channels last, forward and backward, against float64."""
    x, gradient = values.drawn(1, 4, 64, 16, 16) + 3, values.drawn(2, 4, 64, 16, 16)
    norm = GroupNorm(8, 64)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(3))
    wide, exact = x.double().requires_grad_(), [p.detach().double().requires_grad_() for p in norm.parameters()]
    right = F.group_norm(wide, 8, exact[0], exact[1], norm.eps)
    right.backward(gradient.double())
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        module = GroupNorm(8, 64).to(device)
        module.load_state_dict(norm.state_dict())
        there = x.to(device, dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
        with values.poisoned(device):
            # On a CPU the module would take torch's own way.
            on_cpu = device.type == "cpu"
            found = group_norm(there, 8, module.weight, module.bias, module.eps) if on_cpu else module(there)
            found.backward(gradient.to(device, found.dtype))
        pairs = [
            (found, right),
            (there.grad, wide.grad),
            (module.weight.grad, exact[0].grad),
            (module.bias.grad, exact[1].grad),
        ]
        errors = [values.relative(a.detach().cpu(), b.detach()) for a, b in pairs if a is not None and b is not None]
        said = "output {:.1e} off, gradients {:.1e}, {:.1e}, {:.1e}".format(*errors)
        good = max(errors) < bound and not any(map(math.isnan, errors)) and len(errors) == 4
        yield _row(f"group norm, channels last, {str(dtype)[6:]}", said, good, error=max(errors))


def _fused_norm(device: torch.device) -> Iterator[Row]:
    """Yield group norm, scale, shift and SiLU in the kernels of Triton, forward and backward, against float64."""
    if device.type != "cuda" or find_spec("triton") is None:
        yield Row("values", "fused norm", "needs CUDA and Triton", "skipped")
        return
    inputs = [values.drawn(1, 4, 64, 16, 16) + 3, values.drawn(2, 4, 64, 1, 1), values.drawn(3, 4, 64, 1, 1)]
    norm, gradient = GroupNorm(8, 64), values.drawn(4, 4, 64, 16, 16)
    torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(5))

    def computed(module: GroupNorm, place: torch.device, dtype: torch.dtype) -> list[Tensor]:
        x, scale, shift = (t.to(place, dtype).detach() for t in inputs)
        leaves = [x.contiguous(memory_format=torch.channels_last), scale, shift]
        for leaf in leaves:
            leaf.requires_grad_()
        output = module.silu(*leaves)
        output.backward(gradient.to(place, output.dtype))
        found = [output.detach(), *(leaf.grad for leaf in (*leaves, *module.parameters()))]
        return [t.cpu() for t in found if t is not None]

    right = computed(copy.deepcopy(norm).double(), torch.device("cpu"), torch.float64)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        with values.poisoned(device):
            fused = copy.deepcopy(norm).to(device)
            fuse_norms(fused)
            first, second = (computed(copy.deepcopy(fused), device, dtype) for _ in range(2))
        errors, same = [*map(values.relative, first, right)], all(map(torch.equal, first, second))
        good = max(errors) < bound and not any(map(math.isnan, errors)) and len(errors) == 6 and same
        said = f"output {errors[0]:.1e} off, gradients {max(errors[1:]):.1e} at most"
        said += "; twice equal to the bit" if same else "; twice NOT equal"
        yield _row(f"fused norm, {str(dtype)[6:]}", said, good, error=max(errors))


def _samplers(cases: list[values.Case], device: torch.device) -> Iterator[Row]:
    """Yield how far images are, drawn in ten steps from the same noise; the last sampler alone by all networks."""
    for case, kind in [*((cases[0], kind) for kind in _KINDS), *((case, _KINDS[-1]) for case in cases[1:])]:
        exact = values.sampled(case, kind, torch.device("cpu"), torch.float64, None)
        most = float((values.sampled(case, kind, device, torch.float32, None) - exact).abs().max())
        yield _row(f"{kind}, {case.name}", f"pixels {most:.1e} off at most, of 2", most < _DRAWN, most=most)
    half = (values.sampled(case, kind, device, torch.float32, torch.bfloat16) - exact).abs()
    most, spread = float(half.max()), float(half.square().mean().sqrt())
    said = f"pixels {most:.1e} off at most, of 2; root mean square {spread:.1e}"
    yield _row(f"{kind} in bf16, {case.name}", said, spread < _DRAWN_HALF, most=most, rms=spread)


def _augmentation(device: torch.device) -> Iterator[Row]:
    """Yield how far augmented images are, with the same random numbers."""
    pixels = (torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(4)) * 255).to(torch.uint8)
    for name, augment in {
        "flip, jitter, crop": Augment(True, 0.2, 0.2),
        "augment": Augment(augment=0.5, upright=0.5),
    }.items():
        made = []
        for place in (torch.device("cpu"), device):
            with torch.random.fork_rng(devices=[]), values.HostDraws():
                torch.manual_seed(0)
                images, condition = augment(pixels.to(place))
                made.append((images.cpu(), torch.zeros(1) if condition is None else condition.cpu()))
        (images, condition), (others, conditions) = made
        off = (images - others).abs()
        # A pixel may be rounded the other way, by one of 255 levels, before it is cropped.
        share, most = float((off > 1e-4).double().mean()), float(off.max())
        said = f"pixels {most:.1e} off at most, {share:.1%} of them by more than 1e-4"
        good = most < 0.02 and share < 0.01 and bool(torch.allclose(condition, conditions, atol=1e-5))
        yield _row(f"augmentation: {name}", said, good, most=most, share=share)


def _features(device: torch.device) -> Iterator[Row]:
    """Yield how far features of metrics are that need no file."""
    pixels = (torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(6)) * 255).to(torch.uint8)
    for name in ("texture", "pixels"):
        error = values.relative(open_features(name, device)(pixels).cpu(), open_features(name)(pixels))
        yield _row(f"features: {name}", f"{error:.1e} off", error < 1e-4, error=error)


def _stored(device: torch.device) -> Iterator[Row]:
    """Yield losses beside those that a CPU gave, which are stored here."""
    stored = reference.read()
    losses = reference.training_losses(device)
    apart = max(abs(a / b - 1) for a, b in zip(losses, stored["losses"], strict=True))
    said = f"{apart:.1e} off at most, {losses[0]:.6f} to {losses[-1]:.6f}; a CPU gave {stored['losses'][-1]:.6f}"
    yield _row(f"losses of {len(losses)} steps in fp32", said, apart < _LOSS, apart=apart)
    held_out = reference.held_out_losses(device)
    apart = max(abs(a / b - 1) for a, b in zip(held_out, stored["held_out"], strict=True))
    yield _row(
        "held-out loss at fixed weights",
        f"{apart:.1e} off at most of {len(held_out)} levels",
        apart < _HELD_OUT,
        apart=apart,
    )


def _checkpoints(run: Path, device: str) -> Iterator[Row]:
    """Yield whether a run goes on on the CPU, and there again, with the weights that it had."""
    network = "unet:channels=32/32,attention=0/1"
    settings: dict[str, Any] = {"network": network, "size": 16, "batch": 8, "steps": 4, "precision": "fp32"}
    quiet: dict[str, Any] = {f"{name}.every": -1 for name in ("preview", "evaluate", "ema_snapshots")}
    quiet |= {"preview.images": 1, "sampler.steps": 1, "log.every": 1, "checkpoint.every": 100}
    unfog.train(draw_photos(run.with_name("photos")), out=run, device=device, **settings, **quiet)
    images = [_images(run, device)]
    for there, steps in (("cpu", 6), (device, 8)):
        images.append(_images(run, there))
        unfog.resume(run, device=there, steps=steps)
    losses = {row["step"]: row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row}
    apart = float((images[0] - images[1]).abs().max())
    all_there = sorted(losses) == list(range(1, 9)) and all(map(math.isfinite, losses.values()))
    # Weights of a fresh network moved a little: losses of a few steps differ by their noise alone.
    close = max(losses.values()) < 3 * min(losses.values()) if all_there else False
    said = f"resumed on the CPU after step 4, on {device} after step 6, losses " + ", ".join(
        f"{v:.3f}" for v in losses.values()
    )
    said += f"; drawn on both after step 4, images differ by {apart:g} of 255 levels"
    yield _row("a checkpoint there and back", said, all_there and close and apart <= 1, apart=apart)


def _images(run: Path, device: str) -> Tensor:
    drawn = Run(str(run), device=device).sample(4, steps=4, precision="fp32")
    return torch.from_numpy(np.array(drawn)).double()
