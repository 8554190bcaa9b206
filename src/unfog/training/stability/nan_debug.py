"""NaN debugger: replays a step that was not finite, and names the layer and the images responsible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unfog.diffusion.objective import Loss
from unfog.training.state import TrainState

_MAX_IMAGES = 8  # that are named
_MAX_BACKWARDS = 64  # images of a pass whose gradients are taken one by one

# (first position, count) -> loss of that micro-batch with its graph, as in training.
Forward = Callable[[int, int], Loss]


class NanReport(NamedTuple):
    """First place where a step was not finite, and the images affected."""

    phase: str
    """"weights", "forward", "loss", "backward", or "unknown" if a replay of the step is finite or not possible."""
    where: str = ""
    """Dotted name of the parameter or buffer ("weights"), of the first layer in order of execution ("forward"; "input"
    is what the network is given, "network" what it computes outside its layers), or of the parameter whose gradient is
    the first not to be finite ("backward")."""
    images: tuple[int, ...] = ()
    """Positions in the stream of the images that were hit, in order, at most 8; empty if no single one is to blame."""
    levels: tuple[float, ...] = ()
    """Noise quantile of each of `images`, in (0, 1), clean to noisy."""
    every: bool = False
    """Every image of the step is affected, so that the cause is the network or its rate rather than an image."""
    more: int = 0
    """Number of further parameters and buffers, or gradients, that are not finite ("weights", "backward")."""

    def describe(self, names: Sequence[str]) -> str:
        """Return one line for people, with `names` for `images`."""
        if self.phase == "unknown":
            return "the cause was not found: a replay of the step does not show it"
        if self.phase == "weights":
            others = f", nor {'is' if self.more == 1 else 'are'} {self.more} more" if self.more else ""
            return f"the weight {self.where} is not finite{others}"
        shown = [f"{name} (noise level {level:.2f} of 1)" for name, level in zip(names[:3], self.levels)]
        whom = ", ".join(shown) + (" and others" if len(self.images) > len(shown) else "")
        if self.phase == "backward":
            what = f"the gradient of {self.where} is not finite" + (f" for {whom}" if whom else "")
        else:
            what = f"the loss{f' of {whom}' if whom else ''} is not finite{_since(self.phase, self.where)}"
        if not self.every:
            return what
        cause = {"input": "the augmentation or the noise"}.get(self.where, "the network or the learning rate")
        return f"{what}; every image is affected, so the cause is {cause}, not an image"

    @classmethod
    def find(cls, state: TrainState, forward: Forward, passes: Sequence[tuple[int, int]]) -> NanReport:
        """Replay a skipped step, and find what was not finite first. Changes nothing.

        Takes a few times as long as the step; up to 64 backward passes more for each pass of which only gradients of
        parameters are not finite. In fp16 the gradients are scaled as the scaler scales them now.

        Args:
            state: as the skipped step left it, the network in training mode.
            forward: computes the losses of one micro-batch again, with the randomness of its position and the autocast.
            passes: (first position, count) of each micro-batch of the step.
        """
        try:
            # Compiled code would not call the hooks.
            with _buffers_kept(state.model), torch.compiler.set_stance("force_eager"):
                return _search(state, forward, passes)
        except RuntimeError:
            # Out of memory, most likely, for the hooks keep a little more than training does. Not knowing why a step
            # failed must not end a run that could go on without it.
            return cls("unknown")


class _Fault(NamedTuple):
    """Fault of one micro-batch: as in `NanReport`, with all images."""

    phase: str
    where: str
    hit: list[bool]
    u: list[float]
    more: int = 0


def _search(state: TrainState, forward: Forward, passes: Sequence[tuple[int, int]]) -> NanReport:
    parameters = _not_finite(state.model.named_parameters())
    buffers = _not_finite(state.model.named_buffers())
    if parameters:
        return NanReport("weights", parameters[0], every=True, more=len(parameters + buffers) - 1)
    batch = sum(count for _, count in passes)
    faults = (_examine(state, forward, *each, batch) for each in passes)
    report = NanReport("unknown")
    for (first, _), fault in zip(passes, faults):
        if fault is not None:
            # In a pass of one image, all being hit says little. The passes before were well; those after are tried.
            every = all(fault.hit) and first == passes[0][0] and all(other and all(other.hit) for other in faults)
            blamed = [] if every else [i for i, hit in enumerate(fault.hit) if hit][:_MAX_IMAGES]
            images, levels = tuple(first + i for i in blamed), tuple(fault.u[i] for i in blamed)
            report = NanReport(fault.phase, fault.where, images, levels, every, fault.more)
            break
    # Running statistics are not finite because an image went through them; other buffers hit every image.
    if buffers and not report.images:
        return NanReport("weights", buffers[0], every=True, more=len(buffers) - 1)
    return report


def _examine(state: TrainState, forward: Forward, first: int, count: int, batch: int) -> _Fault | None:
    """Replay one pass of a step of `batch` images; None if its losses and gradients are finite."""
    with ExitStack() as hooks:
        trace = _Trace(count, state.precision.device, hooks)
        with trace.attached(state.model):
            per_image, u = forward(first, count)[:2]
        levels = u.tolist()
        layer, rows = _first(trace.outputs)
        hit = (~per_image.isfinite()).tolist()
        if any(hit):
            # Where layers mix images (batch normalisation), all losses are lost but the input knows better.
            return _Fault("forward" if layer else "loss", layer, rows if layer == "input" else hit, levels)
        names = _bad_gradients(state, per_image, batch)
        if not names:
            return None
    if trace.gradients and bool(torch.stack(trace.gradients).any()):
        hit = torch.stack(trace.gradients).any(0).tolist()
    else:  # only the sum over pixels is not finite, which each image adds to
        hit = _hit_gradients(state, forward(first, count).per_image, batch)
    return _Fault("forward", layer, hit, levels) if layer else _Fault("backward", names[0], hit, levels, len(names) - 1)


class _Trace:
    """Records, for each layer in order of execution and on the way back, which images are not finite, on the device."""

    def __init__(self, count: int, device: torch.device, hooks: ExitStack):
        self.count, self.device, self.hooks = count, device, hooks
        self.outputs: list[tuple[str, Tensor]] = []
        self.gradients: list[Tensor] = []
        self._entered: list[Tensor] = []

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Watch every module of `model` inside the `with`, and the gradients of their outputs until `hooks` close."""
        # No longer than the forward pass: gradient checkpointing runs the modules once more in the backward pass.
        with ExitStack() as handles:
            for name, module in model.named_modules():
                name = _plain(name)
                handles.enter_context(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                handles.enter_context(module.register_forward_hook(partial(self._leave, name)))
            yield

    def _enter(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        # Looked at before the module runs, which may write into its inputs, or take some off a list.
        self._entered.append(self._rows((args, kwargs)))
        if not name:
            self.outputs.append(("input", self._entered[-1]))

    def _leave(self, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        name = name or "network"
        self.outputs.append((name, self._rows(output) & ~self._entered.pop().any()))
        for tensor in _tensors(output):
            if tensor.requires_grad:
                hook = tensor.register_hook(self._flow)  # type: ignore[no-untyped-call]
                self.hooks.enter_context(hook)

    def _flow(self, gradient: Tensor) -> None:
        self.gradients.append(self._rows(gradient))

    @torch.no_grad()
    def _rows(self, value: Any) -> Tensor:
        """Return the affected images, bool [B]: rows of a tensor [B, …] that are not finite; all for other tensors."""
        rows = torch.zeros(self.count, dtype=torch.bool, device=self.device)
        for tensor in _tensors(value):
            bad = ~tensor.detach().isfinite()
            rows |= bad.reshape(self.count, -1).any(1) if bad.dim() and len(bad) == self.count else bad.any()
        return rows


def _first(noted: list[tuple[str, Tensor]]) -> tuple[str, list[bool]]:
    """Name and images of the first of `noted` that hits any; ("", []) if none does."""
    found = torch.stack([rows for _, rows in noted]).tolist() if noted else []  # stacked, to wait for the device once
    return next(((name, rows) for (name, _), rows in zip(noted, found) if any(rows)), ("", []))


def _bad_gradients(state: TrainState, per_image: Tensor, batch: int) -> list[str]:
    """Return the parameters whose gradient is not finite, in order of the backward pass.

    Frees the graph of `per_image`, so that it takes no more memory than training.
    """
    scale = state.precision.scaler.get_scale()
    noted: list[tuple[str, Tensor]] = []

    def note(name: str, gradient: Tensor) -> None:
        noted.append((name, _squares(gradient, scale)))

    with ExitStack() as hooks:
        for name, parameter in state.model.named_parameters():
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_hook(partial(note, name)))  # type: ignore[no-untyped-call]
        torch.autograd.grad(per_image.sum() / batch * scale, _trained(state.model), allow_unused=True)
    return _not_finite(noted)


def _hit_gradients(state: TrainState, per_image: Tensor, batch: int) -> list[bool]:
    """Return which of the first 64 images have gradients that are not finite.

    All are False if images cannot be distinguished: an infinite derivative turns the zeros of other losses into NaN.
    """
    scale, parameters = state.precision.scaler.get_scale(), _trained(state.model)

    def hits(loss: Tensor) -> bool:
        gradients = torch.autograd.grad(loss * scale, parameters, retain_graph=True, allow_unused=True)
        squares = [_squares(gradient, scale) for gradient in gradients if gradient is not None]
        return not bool(torch.stack(squares).isfinite().all())

    images = per_image[:_MAX_BACKWARDS] / batch
    # A loss of zero has gradients of zero, but for infinite derivatives.
    if hits(images.sum() * 0):
        return [False] * len(images)
    return [hits(loss) for loss in images]


def _squares(gradient: Tensor, scale: float) -> Tensor:
    """Return the gradient's contribution to the squared norm, which can overflow where no single number does."""
    return (gradient.detach() / scale).square().sum()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the tensors that are not finite; the device is waited for once."""
    tensors = [(_plain(name), tensor.detach().isfinite().all()[None]) for name, tensor in named]
    flags = torch.cat([finite for _, finite in tensors]).tolist() if tensors else []
    return [name for (name, _), finite in zip(tensors, flags) if not finite]


def _plain(name: str) -> str:
    """`name` without the wrapper that `torch.compile` puts around a module."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's input or output: a tensor, or lists, tuples and dicts of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Give every buffer its values back at the end, and every name its buffer."""
    kept = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in kept:
                setattr(module, name, buffer.copy_(values))


def _since(phase: str, where: str) -> str:
    if phase == "loss":
        return " though the network's output is"
    if where == "input":
        return " because the network's input is not"
    return " from the network's output on" if where == "network" else f" from layer {where} on"
