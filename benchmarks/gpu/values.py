"""Networks, updates and samplers on a device, each beside the same computation in float64 on the CPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from unfog.config.presets import preset
from unfog.device.copies import to_device
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.sampler import Kind, Sampler
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.autoencoder_settings import WIDTHS, Autoencoder
from unfog.models.network_settings import build_model
from unfog.models.settings import SIZES, DiT, MPUNet, UNet
from unfog.training.ema import Ema
from unfog.training.optimizers import build_optimizer
from unfog.training.precision import HalfWeights, Precision, default_memory_format
from unfog.training.settings import Optimizer, PowerEma, PrecisionName
from unfog.values.condition_format import ConditionFormat
from unfog.values.conditions import Conditions

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CLASSES, CONDITIONS, CHANNELS = 5, 9, 3
_FLOOR = 1e-2
"""Least norm that an error is divided by, as a share of what the tensor's norm would be if all numbers were alike.

Some gradients are 0 but for rounding: that of the bias of attention's keys, say.
"""
_LR = 1e-3
_UPDATE = 5  # number of the update that the EMA follows


@dataclass(frozen=True)
class Case:
    """A network with random weights, and inputs for it."""

    name: str
    settings: Any
    side: int
    batch: int = 3
    inputs: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def network(self) -> nn.Module:
        """The network in float32 on the CPU. Weights that begin as zero are random: zeros hide faults before them."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if isinstance(self.settings, Autoencoder):
                network: nn.Module = AutoencoderModel(self.settings, CHANNELS)
            else:
                network = build_model(self.settings, CHANNELS, ConditionFormat.numbered(CLASSES, CONDITIONS))
            with torch.no_grad():
                for p in network.parameters():
                    if not p.any():
                        p.normal_(std=0.1 if p.ndim else 1.0)
        return network

    @cached_property
    def x(self) -> Tensor:
        return drawn(1, self.batch, CHANNELS, self.side, self.side)

    def call(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return the output [B, N] of the network, or of its copy elsewhere; of an autoencoder all that it computes."""
        if isinstance(self.settings, Autoencoder):
            mean, logvar = network.posterior(x)  # type: ignore[operator]
            return torch.cat([part.flatten(1) for part in (network.decode(mean), mean, logvar)], 1)  # type: ignore[operator]
        level = torch.linspace(20, 900, self.batch, dtype=torch.float64).to(x)
        label = to_device(torch.arange(self.batch) % (CLASSES + 1), x.device)
        output: Tensor = network(x, level, Conditions(label, drawn(2, self.batch, CONDITIONS).to(x)))
        return output.flatten(1)


def cases(cpu: bool) -> list[Case]:
    """Return a U-Net, a magnitude-preserving one, a transformer and an autoencoder; small ones, or tiny on a CPU."""
    if cpu:
        return [
            Case("U-Net", UNet(channels=(16, 32), attention=(False, True), norm_groups=8), 8),
            Case("mpunet", MPUNet(channels=(16, 32), attention=(False, True)), 8),
            Case("DiT", DiT(width=64, depth=2), 8),
            Case("autoencoder", Autoencoder(4, channels=(16, 32)), 16),
        ]
    return [
        Case("U-Net", SIZES["small"], 32),
        Case("mpunet", SIZES["mp-small"], 32),
        Case("DiT", SIZES["dit-small"], 32),
        Case("autoencoder", Autoencoder(4, channels=WIDTHS["small"][:2]), 32),
    ]


class Result(NamedTuple):
    """What one pass gives, on the CPU in float64."""

    output: Tensor
    gradients: dict[str, Tensor]
    """By the name of the weight; "input" for that of x."""


class Difference(NamedTuple):
    """Norm of the difference over the norm, of the output and of the gradient that differs most."""

    output: float
    gradient: float
    worst: str


def reference(case: Case) -> Result:
    """Return the pass of a case in float64 on the CPU."""
    with InDouble():
        return _pass(case, copy.deepcopy(case.network).double(), case.x.double(), nullcontext, None)


def computed(case: Case, device: torch.device, precision: PrecisionName, compiled: bool = False) -> Result:
    """Return the pass of a case on a device, as training computes it: memory format, autocast, 16-bit weights."""
    from unfog.pipeline.compile_network import compile_network

    network: Any = copy.deepcopy(case.network).to(device)
    network.channels_last = default_memory_format(device, precision)[0] == "channels_last"
    if compiled:
        compile_network(network, device)
    kind = Precision(precision, device)
    half = HalfWeights.of(network, kind)
    with poisoned(device), nullcontext() if half is None else half.in_use():
        return _pass(case, network, to_device(case.x, device), kind.autocast, half)


def _pass(case: Case, network: nn.Module, x: Tensor, autocast: Callable[[], Any], half: HalfWeights | None) -> Result:
    x = x.detach().clone().requires_grad_()
    with autocast():
        output = case.call(network, x)
    wide = torch.promote_types(output.dtype, torch.float32)
    (output.to(wide) * drawn(3, *output.shape).to(x.device, wide)).sum().backward()
    if half is not None:
        half.collect_gradients()
    found = {name: p.grad for name, p in network.named_parameters()} | {"input": x.grad}
    gradients = {name: gradient.detach().double().cpu() for name, gradient in found.items() if gradient is not None}
    # Each scalar is a sum of many numbers that cancel: only together do they say something.
    scalars = [gradients.pop(name) for name in [*gradients] if not gradients[name].ndim]
    if scalars:
        gradients["scalars"] = torch.stack(scalars)
    return Result(output.detach().double().cpu(), gradients)


def difference(found: Result, exact: Result) -> Difference:
    """Return how far a pass is from the exact one; inf where a gradient is missing."""
    total = sum(float(g.square().sum()) for g in exact.gradients.values())
    typical = (total / sum(g.numel() for g in exact.gradients.values())) ** 0.5
    errors = {}
    for name, right in exact.gradients.items():
        floor = _FLOOR * typical * right.numel() ** 0.5
        errors[name] = relative(found.gradients[name], right, floor) if name in found.gradients else float("inf")
    # A NaN is the worst of all, which max alone would not say.
    worst = max(errors, key=lambda name: float("inf") if errors[name] != errors[name] else errors[name])
    return Difference(relative(found.output, exact.output), errors[worst], worst)


def relative(found: Tensor, right: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference over that of `right`, or over `floor` if that is more; both on the CPU."""
    found, right = found.double(), right.double()
    return float((found - right).norm() / max(float(right.norm()), floor, 1e-300))


def drawn(seed: int, *shape: int) -> Tensor:
    """Return standard normal numbers, float32 on the CPU, the same everywhere."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def poisoned(device: torch.device) -> Iterator[None]:
    """Inside, memory that a kernel is given to write to holds NaN: what it leaves out shows."""
    deterministic, filled = torch.are_deterministic_algorithms_enabled(), _fills()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    if device.type == "cuda":  # what the allocator hands out again, for kernels that ask it directly
        gc.collect()
        torch.full((2**26,), float("nan"), device=device)
        for _ in range(8):
            torch.full((2**20,), float("nan"), device=device)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def _fills() -> bool:
    return bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


class Update(NamedTuple):
    """What became of two updates that were to be left out, and of one that was taken."""

    unchanged: bool
    """Whether those left out changed no bit of weights, moments and EMA."""
    weights: float
    """Norm of the difference of all changes from those in float64, over their norm."""
    ema: float


def masked_update(case: Case, method: Any, device: torch.device, fast: torch.dtype) -> Update:
    """Take an update of the optimiser and the EMA by the device's own verdict, between two that it leaves out."""
    network = copy.deepcopy(case.network).to(device)
    exact = copy.deepcopy(case.network).double()
    settings = Optimizer(lr=_LR, method=method, betas=(0.9, 0.99))
    optimizer, ema, precision = (
        build_optimizer(network, settings, fast),
        Ema(network, PowerEma()),
        Precision("fp32", device),
    )

    def update(skip: float, seed: int) -> None:
        for i, p in enumerate(network.parameters()):
            p.grad = to_device(drawn(seed + i, *p.shape), device)
        precision.update_unless(torch.full((), skip, device=device), optimizer, None)
        ema.prepare(_UPDATE)
        ema.update_unless(torch.full((), skip, device=device))

    def bits() -> list[Tensor]:
        moments = [v for held in optimizer.state.values() for v in held.values() if isinstance(v, Tensor)]
        return [t.detach().clone() for t in (*network.parameters(), *ema.parameters, *moments)]

    before = [t.detach().clone() for t in (*network.parameters(), *ema.parameters)]
    update(1.0, 1000)
    unchanged = all(map(torch.equal, before, bits()))
    update(0.0, 2000)
    taken = bits()
    update(1.0, 3000)
    unchanged &= all(map(torch.equal, taken, bits()))
    plain, average = build_optimizer(exact, settings, torch.float64), Ema(exact, PowerEma())
    for i, p in enumerate(exact.parameters()):
        p.grad = drawn(2000 + i, *p.shape).double()
    plain.step()
    average.update(_UPDATE)
    start = [p.detach() for p in case.network.parameters()]
    return Update(
        unchanged,
        _change_error(list(network.parameters()), list(exact.parameters()), start),
        _change_error(ema.parameters, average.parameters, start),
    )


def _change_error(found: list[Any], right: list[Any], start: list[Tensor]) -> float:
    def change(tensors: list[Any]) -> Tensor:
        return torch.cat([(a.detach().double().cpu() - b.double()).flatten() for a, b in zip(tensors, start)])

    return relative(change(found), change(right))


def sampled(case: Case, kind: Kind, device: torch.device, dtype: torch.dtype, half: torch.dtype | None) -> Tensor:
    """Return images, float64 on the CPU, that ten steps draw from the same noise everywhere.

    The sampler computes in `dtype`, and the network under autocast to `half`.
    """
    network: Any = copy.deepcopy(case.network).to(device, dtype).eval()
    precision: PrecisionName = "fp32" if half is None else "bf16"
    network.channels_last = default_memory_format(device, precision)[0] == "channels_last"
    config, generator = preset("default"), torch.Generator().manual_seed(5)
    denoiser = Denoiser(network, config.diffusion, dtype=half)
    label = to_device(torch.arange(case.batch) % CLASSES, device)

    def draw() -> Tensor:
        return torch.randn(case.x.shape, generator=generator).to(device, dtype)

    diffusion = config.diffusion
    with InDouble() if dtype == torch.float64 else poisoned(device):
        images = Sampler(kind, steps=10)(
            lambda x, logsnr: denoiser(x, logsnr, Conditions(label)), diffusion.path, diffusion.schedule, draw
        )
    return images.double().cpu()


class InDouble(TorchFunctionMode):
    """Inside, `float()` leaves float64 as it is: networks call it where 16 bits would not do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


class HostDraws(TorchFunctionMode):
    """Inside, random numbers for a device are drawn on the CPU and copied: the same on every device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in (torch.rand, torch.randn, torch.randint) and given.get("device") is not None:
            device = given.pop("device")
            return func(*args, **given).to(device)
        if func is torch.randn_like:
            x = args[0]
            made: Tensor = torch.empty_like(x, device="cpu").normal_()
            return made.to(x.device)
        return func(*args, **given)
