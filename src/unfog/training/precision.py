"""Precision of a step: autocast to bf16 or fp16, loss scaling, the update, and 16-bit copies of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unfog.device.compilation import compiled_with, is_compiled
from unfog.settings import AUTO
from unfog.training.gradient_clipping import clip_gradients, gradients, scale_gradients
from unfog.training.settings import MemoryFormat, PrecisionName, SamplingPrecision
from unfog.training.sharded_tensors import total_norm

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Device types on which samples are drawn in 16 bits if nothing else is asked for. With () all are drawn in fp32. 50,000
# images of `cifar10` for FID take 1.2e16 operations, by the data sheet of an H100 five minutes in fp32 and one in bf16;
# pixels differ by less than 1 of 255 on average (test_guidance).
_HALF_DRAWING_ON = ("cuda",)
_FEWEST_PARAMETERS_FOR_BF16 = 700_000  # the smallest network that was measured to gain on a CPU


class _LossScaler(torch.amp.GradScaler):
    """torch's loss scaler, which the device can also adapt by its own verdict."""

    def update_unless(self, skip: Tensor) -> None:
        """Adapt the scale to the gradient, as `update`, unless `skip`, 0-d on the device, is 1. Waits for nothing."""
        if not self.is_enabled():
            return
        numbers = self._check_scale_growth_tracker("update_unless")
        before = [number.clone() for number in numbers]
        self.update()  # on the device too: an infinite gradient was counted there
        for number, old in zip(numbers, before):
            number.copy_(torch.where(skip > 0, old, number))


class Precision:
    """One precision on one device. The scaler is inert except in fp16, and is part of the training state."""

    def __init__(self, name: PrecisionName, device: torch.device):
        self.name = name
        self.device = device
        self.processes = 1  # that compute together, and sum gradients in an order of their own
        # bf16 needs none: it has the exponents of fp32, so that no gradient underflows.
        self.scaler = _LossScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self.name == "fp32":
            return nullcontext()
        # The cache would keep casts of weights alive across the optimiser step of a captured graph; it gains nothing
        # here, because each weight is used once in a forward pass.
        return torch.autocast(self.device.type, DTYPES[self.name], cache_enabled=False)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` (scalar), scaled in fp16, to the parameters' .grad."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def gradient_norm(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Unscale the gradients, and return their norm as a 0-d tensor on the device."""
        self.scaler.unscale_(optimizer)
        return total_norm(gradients(optimizer))

    def update_unless(self, skip: Tensor, optimizer: torch.optim.Optimizer, factor: Tensor | None) -> None:
        """Step with the gradient times `factor`, unless `skip` is 1; both 0-d on the device."""
        scale_gradients(optimizer, factor)
        # Where torch's own loss scaler puts it, and fused optimisers look.
        cast(Any, optimizer).found_inf = skip
        optimizer.step()
        del cast(Any, optimizer).found_inf

    def update(self, optimizer: torch.optim.Optimizer, clip: float, norm: float, accepted: bool) -> None:
        """Step with the gradient clipped to norm `clip` (0: not clipped), or only adapt the loss scale."""
        if accepted:
            clip_gradients(optimizer, clip, norm)
            # Not by the scaler, which would wait for the device to learn that the gradient is finite.
            optimizer.step()
        self.scaler.update()

    def iteration_dtype(self) -> torch.dtype:
        """Return the type of Muon's iterations: bf16, whose digits suffice, or fp32 where a GPU only emulates bf16."""
        # Not fp16: small momenta would be zero in it, and the norm of large ones infinite.
        return torch.bfloat16 if self.name == "bf16" or gpu_has_bf16(self.device) else torch.float32

    @property
    def scale(self) -> float:
        """Loss scale of the gradients until `gradient_norm` unscales them; 1 except in fp16."""
        return self.scaler.get_scale()

    def scale_tensors(self) -> list[Tensor]:
        """Return the loss scale, 0-d on the device, to be read together with other numbers; nothing except in fp16."""
        return [self.scaler.scale(torch.ones((), device=self.device))] if self.scaler.is_enabled() else []

    @property
    def may_overflow(self) -> bool:
        """Return whether the loss scale, which can still fall, may be all that made a gradient infinite."""
        return self.scaler.is_enabled() and self.scale > 1

    def describe_machine(self) -> str:
        """Describe the hardware and software; equal descriptions give equal results to the bit."""
        others = f" in {self.processes} processes" if self.processes > 1 else ""
        if self.device.type == "cuda":
            name, cudnn = torch.cuda.get_device_name(self.device), torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            return f"torch {torch.__version__} with cuDNN {cudnn} on {name}{others}"
        kind = torch.backends.cpu.get_cpu_capability()
        return (
            f"torch {torch.__version__} on {self.device.type} ({kind}) with {torch.get_num_threads()} threads{others}"
        )


def gpu_has_bf16(device: torch.device) -> bool:
    """Return whether a device is a CUDA GPU with bf16 units; older ones emulate it, at the speed of fp32 at best."""
    return device.type == "cuda" and bool(torch.cuda.is_bf16_supported(including_emulation=False))


def default_precision(device: torch.device, parameters: Callable[[], int]) -> tuple[PrecisionName, str]:
    """Return the precision in which a network of so many `parameters` usually trains fastest, and the reason.

    The rule depends on hardware and network alone, so that a repeated command trains the same model. Its constants are
    measured in the benchmark ledger.
    """
    if device.type == "cuda":
        return ("bf16" if gpu_has_bf16(device) else "fp16"), f"native to {device}"
    if device.type != "cpu":
        return "fp32", f"native to {device}"
    if not _cpu_has_fast_bf16():
        return "fp32", "this CPU has no fast instructions for bf16"
    if parameters() < _FEWEST_PARAMETERS_FOR_BF16:
        return "fp32", f"converting to bf16 takes longer than it saves below {_FEWEST_PARAMETERS_FOR_BF16:,} parameters"
    return "bf16", "this CPU has fast instructions for bf16"


def drawing_precision(asked: SamplingPrecision, device: torch.device, trained: PrecisionName) -> SamplingPrecision:
    """Return the precision in which samples are drawn: as `asked`, or by the device and how the run `trained`."""
    if asked != AUTO:
        return asked
    if device.type not in _HALF_DRAWING_ON:
        return "fp32"
    if gpu_has_bf16(device):
        return "bf16"
    # What a network computes need not fit fp16 unless it has learned in that.
    return "fp16" if trained == "fp16" else "fp32"


def _cpu_has_fast_bf16() -> bool:
    # Not every version of torch has this; then nothing is known.
    known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    # Intel's avx512_bf16 is half as fast as its fp32; only AMX is faster. AMD's avx512_bf16 is twice as fast.
    on_intel = "intel" in str(known.get("cpu_name", "")).lower()
    return bool(known.get("amx_bf16") or (known.get("avx512_bf16") and not on_intel))


def default_memory_format(device: torch.device, precision: PrecisionName) -> tuple[MemoryFormat, str]:
    """Return the memory format in which convolutions are faster, and the reason; measured in the benchmark ledger."""
    # In bf16 convolutions are faster too, but normalisation loses what they gain.
    if device.type == "cpu" and precision == "fp32":
        return "channels_last", "faster in fp32 on a CPU"
    if device.type == "cuda" and precision in DTYPES:
        return "channels_last", "what tensor cores work in"
    return "contiguous", f"usual in {precision} on {device.type}"


class HalfWeights:
    """16-bit copies of the weights of linear layers and convolutions, which these compute with while `in_use`.

    They are made once a step. Autocast would cast each weight at each use, in hundreds of launches. Gradients are the
    same as those of autocast to the bit, as long as a layer is called once in a forward pass: with more calls, autocast
    adds their gradients in float32.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype):
        self._active = False
        # Compiled code chooses formats of its own, which torch's copy of many tensors would convert one by one.
        self._copy = compiled_with(network, next(network.parameters()).device, _copy)
        is_last = is_compiled(network) and getattr(network, "channels_last", False)
        self._format = torch.channels_last if is_last else torch.preserve_format
        self._weights: list[Tensor] = []
        self._copies: list[Tensor] = []
        for layer in network.modules():
            # A subclass may do anything with its weights, unless it states that they may be copies.
            if type(layer) in (nn.Linear, nn.Conv2d) or getattr(layer, "takes_copies", False):
                self._wrap(cast("nn.Linear | nn.Conv2d", layer), dtype)

    @classmethod
    def of(cls, network: nn.Module, precision: Precision) -> HalfWeights | None:
        """Return copies for a network on a GPU; None if they gain nothing, or would change gradients."""
        dtype = DTYPES.get(precision.name) if precision.device.type == "cuda" else None
        if dtype is None or not getattr(network, "calls_layers_once", False):
            return None
        return cls(network, dtype)

    def _wrap(self, layer: nn.Linear | nn.Conv2d, dtype: torch.dtype) -> None:
        own = [parameter for parameter in (layer.weight, layer.bias) if parameter is not None]
        copies = [self._empty_copy(parameter, dtype) for parameter in own]
        self._weights += own
        self._copies += copies
        weight, bias, usual = copies[0], copies[1] if len(copies) > 1 else None, layer.forward

        def forward(x: Tensor) -> Tensor:
            if not self._active:
                return usual(x)
            if isinstance(layer, nn.Linear):
                return F.linear(x, weight, bias)
            return cast(Tensor, cast(Any, layer)._conv_forward(x, weight, bias))

        # The parameters stay where they are: an interrupt at any place leaves the network as it was.
        cast(Any, layer).forward = forward

    def _empty_copy(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        form = self._format if parameter.dim() == 4 else torch.preserve_format
        return torch.empty_like(parameter, dtype=dtype, requires_grad=parameter.requires_grad, memory_format=form)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Copy the weights, and let the layers compute with the copies inside, also where they are recomputed."""
        with torch.no_grad():
            self._copy(self._copies, self._weights)
        self._active = True
        try:
            yield
        finally:
            self._active = False
            for copy in self._copies:
                copy.grad = None

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the gradients of the copies to those of the weights, in float32."""
        pairs = [(weight, copy) for weight, copy in zip(self._weights, self._copies) if copy.grad is not None]
        if not pairs:
            return
        wide = [torch.empty_like(weight) for weight, _ in pairs]
        self._copy(wide, [cast(Tensor, copy.grad) for _, copy in pairs])
        if summed := [weight.grad for weight, _ in pairs if weight.grad is not None]:
            torch._foreach_add_(summed, [w for w, (weight, _) in zip(wide, pairs) if weight.grad is not None])
        for (weight, copy), gradient in zip(pairs, wide):
            weight.grad = gradient if weight.grad is None else weight.grad
            copy.grad = None


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)
