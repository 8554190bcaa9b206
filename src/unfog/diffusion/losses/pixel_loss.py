"""Error of each value of the network's output, which the objective averages over an image and weighs by its level.

d = y - target is the difference of one value. The default is d^2. Other errors give large differences less influence.
They change what the network learns: the minimum of d^2 is the mean of all targets, that of |d| their median.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

from unfog.custom import CustomPart
from unfog.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SquaredError:
    """Squared error, d^2, which every sampler and weighting is derived from (Ho et al. 2020)."""

    kind: ClassVar[str] = "mse"

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        """Return the error of each value, like y."""
        return (y - target).square()


@dataclass(frozen=True)
class AbsoluteError:
    """Absolute error, |d|. The gradient of each value has the same size."""

    kind: ClassVar[str] = "l1"

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        """Return the error of each value, like y."""
        return (y - target).abs()


@dataclass(frozen=True)
class PseudoHuber:
    """Pseudo-Huber error, sqrt(d^2 + c^2) - c: d^2 / (2 c) of small differences, |d| of large ones.

    Charbonnier et al. 1997. Song and Dhariwal 2023 use it for consistency models, with one root for each image.
    """

    kind: ClassVar[str] = "pseudo-huber"
    c: float = 0.03
    """Difference at which the error turns from squared to absolute; targets have a deviation of about 1."""

    def __post_init__(self) -> None:
        if not 1e-6 <= self.c <= 1e3:
            raise RequestError(f"c = {self.c}: must be from 1e-6 to 1000; 0.03 is usual, and a large c is mse / (2 c)")

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        """Return the error of each value, like y."""
        square = (y - target).square()
        # Not the difference of the root and c, which loses all digits where d is far below c.
        return square / ((square + self.c**2).sqrt() + self.c)


@dataclass(frozen=True)
class CustomLoss(CustomPart):
    """A function of your own module: `loss(y, target, **arguments)` -> error of each value [B, C, H, W] or image [B].

    A class is called with the arguments once, and its instance with y and target.
    """

    noun: ClassVar[str] = "a loss"

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        """Return the error of each value [B, C, H, W], or [B, 1, 1, 1] if there is one for each image."""
        from torch._subclasses import FakeTensor

        if isinstance(y, FakeTensor) and _is_network(self):  # memory is planned on tensors without values
            return SquaredError()(y, target)
        # float32, as of the built-in errors, also where the output is in 16 bits.
        errors: Tensor = _function(self, y.device)(y.float(), target)
        return errors[:, None, None, None] if errors.shape == y.shape[:1] else errors

    def try_out(self, shape: tuple[int, int, int], masked: bool) -> None:
        """Raise RequestError unless the loss can be imported, and gives errors and gradients of two images.

        Args:
            shape: [C, H, W] of an image.
            masked: images have unknown pixels, which only errors of each value can leave out.
        """
        import torch

        self.load(), self.keywords()
        target = torch.linspace(-1, 1, 2 * shape[0] * shape[1] * shape[2]).view(2, *shape)
        # The first image equals its target, where the root of a square has no gradient.
        y = torch.cat([target[:1], -target[1:]]).requires_grad_()
        try:
            with torch.enable_grad():
                errors = self(y, target)
                errors.mean().backward()  # type: ignore[no-untyped-call]
        except Exception as error:  # anything may go wrong in other people's code
            raise RequestError(f"{self.path} cannot be used as a loss: {error}") from error
        self._check(errors, y, masked)

    def _check(self, errors: Tensor, y: Tensor, masked: bool) -> None:
        if errors.shape not in (y.shape, (len(y), 1, 1, 1)):
            raise RequestError(
                f"{self.path} gives errors of shape {tuple(errors.shape)} for outputs of {tuple(y.shape)}; give one "
                "for each value, or for each image"
            )
        if masked and errors.shape != y.shape:
            raise RequestError(
                f"{self.path} gives one error for an image, and these have unknown pixels; give one for each value"
            )
        if y.grad is None or not (errors.isfinite().all() and y.grad.isfinite().all()):
            raise RequestError(
                f"{self.path} has no finite error and gradient where output and target are equal or far apart; add a "
                "small constant below a root or a logarithm"
            )


@cache
def _function(loss: CustomLoss, device: Any) -> Any:
    """Return the function (y, target) -> errors of a loss; on `device` if it is a network, without its gradients."""
    import torch

    found = loss.load()
    if not isinstance(found, type):
        return partial(found, **loss.keywords())
    # What it draws is the same after a resume, and not taken from the numbers of the run.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(0)
        made = found(**loss.keywords())
    return made.to(device).eval().requires_grad_(False) if isinstance(made, torch.nn.Module) else made


def _is_network(loss: CustomLoss) -> bool:
    import torch

    found = loss.load()
    return isinstance(found, type) and issubclass(found, torch.nn.Module)


PixelLoss = SquaredError | AbsoluteError | PseudoHuber | CustomLoss
"""(y, target), both [B, C, H, W] -> error of each value."""
PIXEL_LOSSES = (SquaredError, AbsoluteError, PseudoHuber)
