"""Base of all network settings, networks from somebody's own module, and building either. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from unfog.custom import CustomPart
from unfog.errors import RequestError
from unfog.values.condition_format import ConditionFormat
from unfog.values.image_format import CHANNELS, check_sides, describe_channels, size_of
from unfog.values.unknown import NONE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfog.models.layers import ConditionalNetwork


class NetworkSettings:
    """Base of the settings of every network; a new network overrides the defaults that do not hold for it."""

    kind: ClassVar[str]
    """Name on the command line and in config.toml."""
    model: ClassVar[str]
    """MODULE:CLASS of the network, called as CLASS(settings, channels, conditions, out_channels)."""
    fixed_norm_weights: ClassVar[bool] = False
    """Weights are normalised after every step, so that weight decay would only shrink the gains."""
    prefers_channels_last: ClassVar[bool] = False
    """Most of the time goes into convolutions, which some devices compute faster in that memory format."""
    reference_lr: ClassVar[float] = 3e-3
    """Learning rate of AdamW for a million parameters at batch 64 (docs/decisions/0007-default-recipe.md)."""
    lr_exponent: ClassVar[float] = 0.5
    """The learning rate falls as the number of parameters to the power of minus this."""
    muon_lr_factor: ClassVar[float] = 1.0
    """Learning rate of Muon over that of AdamW."""

    wraps: ClassVar[bool] = False
    """Whether the edges of its images may be joined, by `data.wrap`."""

    def check_wrap(self, wrap: str) -> None:
        """Raise `RequestError` if images are to be joined at their edges, and the network cannot do that."""
        if wrap and not self.wraps:
            raise RequestError(
                f"wrap = {wrap} needs a network whose edges can be joined: --network unet, mpunet, dit or a size of "
                f"them; {self.kind} pads with zeros or has positions without a period"
            )

    takes_mask: ClassVar[bool] = False
    """Whether it has an input for `Conditions.known`, which `data.unknown` needs."""

    def check_mask(self, unknown: str) -> None:
        """Raise `RequestError` if pixels are unknown, `data.unknown` of a run, and the network takes no mask."""
        if unknown != NONE and not self.takes_mask:
            raise RequestError(
                f"data.unknown = {unknown} needs a network with an input for the mask: --network unet, mpunet, dit or "
                f"a size of them; {self.kind} has none"
            )

    takes_text: ClassVar[bool] = False
    """Whether its blocks attend to a text, which an encoder of the network reads."""

    def check_text(self, has_text: bool) -> None:
        """Raise `RequestError` if images have texts, and the network has no attention to them."""
        if has_text and not self.takes_text:
            raise RequestError(
                f"a text is given, and {self.kind} has no attention to it; give --network unet, mpunet, dit or a size "
                "of them, or leave the text out"
            )

    @property
    def widest(self) -> int:
        """Channels of the widest layer, by which the width of an encoder of texts is chosen."""
        raise NotImplementedError

    def build(self, channels: int, conditions: ConditionFormat, out_channels: int | None) -> Any:
        """Return the network, a torch.nn.Module with fresh weights."""
        # By name, as the modules of networks import torch, and settings must load without it.
        module, _, name = self.model.partition(":")
        return getattr(import_module(module), name)(self, channels, conditions, out_channels)

    def check(self, size: int | tuple[int, int]) -> None:
        """Raise `RequestError` unless images of `size` pixels (side, or height and width) fit."""

    def layout(self, height: int, width: int) -> str:
        """Describe for people how the network works on images of this size."""
        return f"for {width}x{height} pixels"

    def size_bound(self, channels: int, side: float, conditions: int) -> tuple[float, float]:
        """Return upper bounds of (numbers of weights, numbers kept of each image for the backward pass).

        For images of side x side pixels; `conditions` is the number of rows of the embeddings of all
        conditions. Infinity, which is always right, makes planning slower.
        """
        return float("inf"), float("inf")

    def text_bound(self, side: float, text_width: int, tokens: int) -> tuple[float, float]:
        """Return the same bounds of what attention to a text of so many tokens of `text_width` channels adds."""
        return float("inf"), float("inf")


class LevelSettings(NetworkSettings):
    """Base of the settings of U-Nets. Level i works at 1/2^i of the image's height and width."""

    prefers_channels_last: ClassVar[bool] = True
    lowest_side: ClassVar[int] = 1
    """Least height and width at the lowest level."""
    remedy: ClassVar[str] = ""
    """End of the message for a size that does not fit."""
    attention: tuple[bool, ...]
    """An entry for each level."""

    def check(self, size: int | tuple[int, int]) -> None:
        levels = len(self.attention)
        # An odd side at any level would not come back at its size after it was halved and doubled.
        factor, least = 2 ** (levels - 1), self.lowest_side
        height, width = (size, size) if isinstance(size, int) else size
        rule = f"a multiple of {factor} and at least {least * factor} for a network of {levels} levels"
        check_sides(height, width, lambda side: max(least, round(side / factor)) * factor, rule, self.remedy)

    def layout(self, height: int, width: int) -> str:
        levels = len(self.attention)
        lowest = size_of(height // 2 ** (levels - 1), width // 2 ** (levels - 1))
        return f"in {levels} levels for {width}x{height} pixels, the lowest at {lowest}"


class PatchSettings(NetworkSettings):
    """Base of the settings of transformers, which work on square patches of the image."""

    remedy: ClassVar[str] = ""
    """End of the message for a size that does not fit."""
    patch: int
    depth: int

    def check(self, size: int | tuple[int, int]) -> None:
        height, width = (size, size) if isinstance(size, int) else size
        patch = self.patch
        rule = f"a multiple of patch = {patch}"
        check_sides(height, width, lambda side: max(1, round(side / patch)) * patch, rule, self.remedy)

    def layout(self, height: int, width: int) -> str:
        tokens = f"{width // self.patch}x{height // self.patch} patches of {self.patch}x{self.patch}"
        return f"in {self.depth} blocks over {tokens} pixels"


@dataclass(frozen=True)
class CustomNetwork(CustomPart, NetworkSettings):
    """A network from your own module by its dotted path. Naming one runs its code: it is imported to build it.

    The class is called as `MyNet(channels=3, classes=10, out_channels=3, **arguments)`, and must give a
    torch.nn.Module with

        forward(x [B, channels, H, W], c_noise float [B], label int64 [B] or None) -> [B, out_channels, H, W]

    Labels are 0 to classes - 1, and `classes` where a sample has none; without classes, label is None. `out_channels`
    is twice `channels` with a learned variance. With data.augment, the class also gets `augment_inputs`, and forward
    a fourth argument, float [B, augment_inputs]. A third parameter that is named `conditions` gets all `Conditions`
    in their place, and parameters named as columns of the images get these: see `take_conditions`. A network that
    depends on the image size takes it as an argument, such as size=64. An output of zero at the start trains best, as
    in the built-in networks.
    """

    kind: ClassVar[str] = "custom"
    noun: ClassVar[str] = "a network"
    takes_mask: ClassVar[bool] = True
    takes_text: ClassVar[bool] = True

    def check(self, size: int | tuple[int, int]) -> None:
        if not self.path:
            raise RequestError("path = '' of a custom network must name a class, as in custom:path=mymodule.MyNet")
        self.keywords()

    def build(self, channels: int, conditions: ConditionFormat, out_channels: int | None) -> Any:
        from torch import nn

        classes = len(conditions.classes)
        options = {"channels": channels, "classes": classes, "out_channels": out_channels or channels}
        if conditions.augment_inputs:
            options["augment_inputs"] = conditions.augment_inputs
        kind = self.load()
        try:
            network = kind(**options, **self.keywords())
        except Exception as error:  # anything may go wrong in other people's code
            raise RequestError(f"{self.path} cannot be built as a network: {error}") from error
        if not isinstance(network, nn.Module):
            raise RequestError(f"{self.path} is not a torch.nn.Module; name a class that is")
        network.image_channels, network.num_classes = channels, classes  # type: ignore[assignment]
        return network

    def try_out(self, network: Any, shape: tuple[int, int, int], format: ConditionFormat, out_channels: int) -> None:
        """Call the network once, so that errors surface before training.

        Raises:
            RequestError: it fails for an image of this shape (C, H, W), or its output has another shape.
        """
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        expected, conditions = (1, out_channels, *shape[1:]), format.blank(1)
        plain = at = f"for an image of shape {shape}"
        found: tuple[int, ...] | None = None
        try:
            with torch.no_grad():
                found = tuple(network(torch.zeros(1, *shape), torch.ones(1), conditions).shape)
                if format.mask_channels:  # training gives a mask, and samples without unknown values have none
                    at = f"{plain} with a mask of its known values"
                    masked = conditions._replace(known=torch.ones(1, *shape))
                    network(torch.zeros(1, *shape), torch.ones(1), masked)
                    at = plain
                if format.columns:
                    hidden = network(torch.zeros(1, *shape), torch.ones(1), conditions.dropped())
        except Exception as error:
            remedy = ""
            if found is None:  # else it takes these channels
                remedy = channels_remedy(lambda x: network(x, torch.ones(1), conditions), shape)
            if isinstance(error, KeyError | AttributeError | TypeError):  # perhaps of a condition that is missing
                names = ", ".join([*["label"] * bool(format.classes), *(one.name for one in format.columns)])
                remedy += f". The conditions of the images are: {names or 'none'}"
            what = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else error
            raise RequestError(f"{self.path} fails {at}: {what}{remedy}") from error
        if found != expected:
            raise RequestError(f"{self.path} returns shape {found}, but must return {expected}")
        if format.columns and not isinstance(hidden, FakeTensor) and not bool(hidden.isfinite().all()):
            raise RequestError(
                f"{self.path} returns values that are not finite for an image whose conditions are hidden: numbers are "
                "NaN there; replace them: torch.nan_to_num(age)"
            )


def channels_remedy(call: Callable[[Any], Any], shape: tuple[int, int, int]) -> str:
    """Return the remedy for a network that fails for images of this shape (C, H, W), if it takes other channels.

    `call` calls the network on x [1, C', H, W]. "" if that fails, too.
    """
    import torch

    if shape[0] not in CHANNELS:
        return ""
    other = next(count for count in CHANNELS if count != shape[0])
    try:
        with torch.no_grad():
            call(torch.zeros(1, other, *shape[1:]))
    except Exception:  # anything may go wrong in other people's code
        return ""
    return (
        f". It takes {other} channels, and these images are {describe_channels(shape[0])}: data.channels = {other} "
        f"makes them {describe_channels(other)}"
    )


def build_model(
    settings: NetworkSettings,
    channels: int,
    conditions: ConditionFormat = ConditionFormat(),  # noqa: B008
    out_channels: int | None = None,
    wrap: str = "",
) -> ConditionalNetwork:
    """Return a network with fresh weights from torch's global generator; the built-in ones begin with an output of 0.

    Args:
        settings: of a built-in, registered or custom network.
        channels: C of the images.
        conditions: of the images; by default there are none.
        out_channels: C' if it differs from C.
        wrap: axes along which images continue at their other side, "x", "y" or "xy".

    Returns:
        (x [B, C, H, W], c_noise [B], `Conditions`) -> y [B, C', H, W].

    Raises:
        RequestError: the network cannot join the edges of images, or somebody's own network cannot be built.
    """
    settings.check_wrap(wrap)
    settings.check_text(conditions.text is not None)
    network: ConditionalNetwork = settings.build(channels, conditions, out_channels)
    if wrap:
        network.wrap_edges(wrap)
    take_conditions(network, conditions)
    return network


def take_conditions(network: nn.Module, format: ConditionFormat) -> None:
    """Let a network be called with `Conditions` as its third argument, whatever its `forward` takes.

    - A `forward` whose third parameter is named `conditions` gets them.
    - Images with columns, or with unknown values: parameters named as the columns, `label`, `augment` and `known` get
      these, and `**` all columns; see `ConditionKind.argument`.
    - Others get the label, int64 [B] or None, in which the number of classes stands for a hidden class; and the
      augmentation as a fourth argument, if there is one.

    RequestError if there are other conditions, which it would not see.
    """
    import torch

    # By name and not by type: somebody's own network need not import anything of this package.
    parameters = list(islice(inspect.signature(network.forward).parameters.values(), 2, None))
    if parameters and parameters[0].name == "conditions" and parameters[0].kind is not inspect.Parameter.VAR_KEYWORD:
        return
    # A hook rather than a module around it, which would change the names of the weights. It is not compiled, as it
    # would be a graph of its own: torch compiles no call around hooks as one.
    if format.columns or format.mask_channels:
        names = _accepted_names(type(network).__name__, parameters, format)
        network.register_forward_pre_hook(
            partial(torch.compiler.disable(_unpack_by_name), names, format),  # type: ignore[no-untyped-call]
            with_kwargs=True,
        )
    else:
        network.register_forward_pre_hook(partial(torch.compiler.disable(_unpack), len(format.classes)))  # type: ignore[no-untyped-call]


def _accepted_names(kind: str, parameters: Sequence[inspect.Parameter], format: ConditionFormat) -> tuple[str, ...]:
    """Return the names of the conditions that these parameters, from the third on, take.

    RequestError if a condition of the images has no parameter, or a parameter no condition.
    """
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    every = any(one.kind is one.VAR_KEYWORD for one in parameters)
    columns = [one.name for one in format.columns]
    given = [*columns, *["label"] * bool(format.classes), *["augment"] * bool(format.augment_inputs)]
    given += ["known"] * bool(format.mask_channels)
    remedy = "or name its third parameter `conditions`, and read them from it"
    if twice := [name for name in columns if given.count(name) > 1]:
        raise RequestError(
            f"a column is called {twice[0]}, as another input of {kind}.forward is: give it another name, {remedy}"
        )
    if missing := [name for name in given if name not in named and not (every and name in columns)]:
        has = ", ".join(missing)
        if missing == ["known"]:
            has = "unknown pixels (data.unknown), and so the mask `known`"
        raise RequestError(
            f"{kind}.forward takes {', '.join(named) or 'no condition'}, and the images have {has}: add a parameter of "
            f"that name, {remedy}; or train without it"
        )
    needed = {one.name for one in parameters if one.default is one.empty and one.name in named}
    if unknown := sorted(needed - {*given, "label", "augment", "known"}):
        raise RequestError(
            f"{kind}.forward needs {', '.join(unknown)}, and the images have {', '.join(given)}; give "
            f"--condition {','.join([*columns, *unknown])}, {remedy}"
        )
    return tuple(dict.fromkeys([*(name for name in named if name in {*given, *needed}), *columns * every]))


def _unpack_by_name(
    names: Sequence[str], format: ConditionFormat, network: nn.Module, inputs: tuple[Any, ...], known: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the inputs with named conditions in place of `Conditions`; None if these were not given."""
    from unfog.values.conditions import Conditions

    if len(inputs) < 3 or not isinstance(inputs[2], Conditions):
        return None
    told = inputs[2]
    others = {"label": told.label_or(len(format.classes)), "augment": told.augment, "known": told.known}
    arguments = others | format.arguments(told)
    return inputs[:2], {**known, **{name: arguments[name] for name in names}}


def _unpack(classes: int, network: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor | None, ...] | None:
    """Return the inputs with the label in place of the conditions; None if a label was given."""
    from unfog.values.conditions import Conditions

    if len(inputs) < 3 or not isinstance(inputs[2], Conditions):
        return None  # called with a label
    conditions = inputs[2]
    augment = () if conditions.augment is None else (conditions.augment,)
    return *inputs[:2], conditions.label_or(classes), *augment
