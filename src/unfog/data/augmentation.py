"""Augmentation of whole batches on their device: flip, colour jitter, crop, roll, and EDM's non-leaking augmentation.

`flip`, `jitter` and `crop` show in the samples, which are mirrored, tinted and enlarged as the training images were.
`augment` does not show: the network is conditioned on nine numbers that describe how its input was mirrored, rotated
and stretched, and sampling sets them to zero (Karras et al. 2022, EDM, appendix F.2, after ADA, Karras et al. 2020).

Probabilities and spreads are EDM's. Differences: of the stretches, EDM has half along the sides and the others in any
direction, which `upright = 0.5` gives, while with the default, `upright = 0`, all are in any direction; shifts by whole
pixels are a change of their own beside those by fractions; a stretch has one pair of numbers (see `_Geometry.stretch`);
images are resampled with the Cohen-Daubechies-Feauveau 9/7 wavelet (see `_warp`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.data.settings import Data
from unfog.device.sharded_rng import draw_rows
from unfog.values.conditions import Conditions
from unfog.values.image_format import BYTES, StoredValues, in_colour, luma_weights
from unfog.values.kinds.image_kinds import IMAGE_KINDS, image_spans
from unfog.values.kinds.made_conditions import with_made

if TYPE_CHECKING:
    from unfog.values.condition_kinds import ColumnFacts

Move: TypeAlias = Callable[[Tensor, bool], Tensor]
"""(images float32 [B, C, H, W], whether a value between two of theirs means something) -> the moved images."""
_OCTAVES = 0.2  # standard deviation of the binary logarithm of scale and stretch
_SHIFT = 1 / 8  # of the side: standard deviation of a shift by fractions, largest shift by whole pixels

# Halves of the symmetric CDF 9/7 filters, centre first. Upsampling and then downsampling is the identity.
_UPSAMPLE = (1.115087052457, 0.591271763114, -0.057543526229, -0.091271763114)
_DOWNSAMPLE = (0.602949018236, 0.266864118443, -0.078223266529, -0.016864118443, 0.026748757411)
_REACH = len(_DOWNSAMPLE) - 1  # of the halving, in fine pixels; a fine pixel is half a pixel


@dataclass(frozen=True)
class Augment:
    """Callable on stored values [B, C, H, W] that returns (images float32, augmentation condition [B, 9] or None).

    It draws from torch's global generator of the batch's device, which training seeds by position in the stream. With
    all settings 0 it draws nothing.
    """

    flip: bool = False
    jitter: float = 0.0
    crop: float = 0.0
    augment: float = 0.0
    upright: float = 0.0
    roll: str = ""
    """Axes, "x", "y" or "xy", along which each image is moved around its edges."""
    values: StoredValues = BYTES

    @classmethod
    def from_settings(cls, settings: Data) -> Augment:
        values, roll = settings.image_format.values, settings.wrapped if settings.roll else ""
        return cls(settings.flip, settings.jitter, settings.crop, settings.augment, settings.upright, roll, values)

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Augment each image of a batch on its own.

        Flip it with probability 1/2. Scale its brightness, contrast and saturation, in this order, by factors uniform
        in [1 - jitter, 1 + jitter]. Enlarge a square of it, with a side uniform in [1 - crop, 1], to the whole. Move it
        around its edges by a number of pixels uniform along each axis of `roll`. Apply each of EDM's changes with
        probability `augment`; the condition describes these alone.
        """
        x0, condition, _ = self.moving(pixels)
        return x0, condition

    def moving(self, pixels: Tensor) -> tuple[Tensor, Tensor | None, list[Move]]:
        """Return the result of a call, and the moves that it made, for other images of the same geometry."""
        moves = list[Move]()
        pixels = pixels.float() if pixels.dtype == torch.uint16 else pixels  # torch flips no uint16
        if self.flip:
            mirrored = draw_rows(len(pixels), lambda n: torch.rand(n, device=pixels.device)) < 0.5
            moves.append(lambda x, smooth: torch.where(mirrored.view(-1, 1, 1, 1), x.flip(-1), x))
            pixels = moves[-1](pixels, True)
        if self.jitter:
            pixels = self._jitter_colours(pixels)
        x0 = self.values.to_model(pixels)
        if self.crop:
            place = self._draw_crop(x0)
            moves.append(lambda x, smooth: _warp_other(x, *place, smooth))
            x0 = _warp(x0, *place)
        if self.roll:
            moves += self._draw_rolls(x0)
            for roll in moves[-len(self.roll) :]:
                x0 = roll(x0, True)
        if not self.augment:
            return x0, None, moves
        geometry = _draw_geometry(x0, self.augment, self.upright)
        moves.append(geometry.apply_to_other)
        return geometry.apply(x0), geometry.condition(), moves

    def _jitter_colours(self, pixels: Tensor) -> Tensor:
        draws = draw_rows(len(pixels), lambda n: torch.rand(3, n, 1, 1, 1, device=pixels.device), dim=1)
        brightness, contrast, saturation = 1 + self.jitter * (2 * draws - 1)
        x = pixels.float() * brightness
        x = torch.lerp(_grey(x).mean((2, 3), keepdim=True), x, contrast)
        if in_colour(pixels.shape[1]):
            x = torch.lerp(_grey(x), x, saturation)
        return self.values.rounded(x)

    def _draw_crop(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map of `_warp` of a random part of each image."""
        draws = draw_rows(len(x), lambda n: torch.rand(n, 3, device=x.device))
        side = 1 - self.crop * draws[:, 0]
        margins = _sides(x) * (1 - side)[:, None]
        linear = side[:, None, None] * torch.eye(2, device=x.device)
        return linear, (draws[:, 1:] - 0.5) * margins

    def _draw_rolls(self, x: Tensor) -> list[Move]:
        """Return the move around the edges along each axis of `roll`."""
        draws = draw_rows(len(x), lambda n: torch.rand(n, 2, device=x.device))
        return [partial(_rolled, draw, axis) for axis, draw in zip("xy", draws.unbind(1)) if axis in self.roll]


class Moving(Protocol):
    """An augmentation that returns its moves, such as `Augment`."""

    def __call__(self, stored: Tensor, /) -> tuple[Tensor, Tensor | None]: ...

    def moving(self, stored: Tensor, /) -> tuple[Tensor, Tensor | None, list[Move]]:
        """Return the result of a call, and the moves that it made."""


@dataclass(frozen=True)
class AugmentWithConditions:
    """An augmentation, and the conditions that are images: they move with their image, or are made of the result.

    Args:
        augment: the augmentation of the images.
        columns: facts on the conditions that are images.
        makes: whether conditions are made of the augmented images. False for latents, whose conditions come with them.
    """

    augment: Moving
    columns: tuple[ColumnFacts, ...]
    makes: bool = True

    def __call__(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the augmented images and their augmentation, without conditions that are images; see `Augment`."""
        return self.augment(pixels)

    def with_conditions(self, pixels: Tensor, conditions: Conditions) -> tuple[Tensor, Conditions]:
        """Return the augmented images, and the conditions with the augmentation and all of `Conditions.image`.

        What `hole` draws comes after the numbers of the augmentation.
        """
        x0, told, moves = self.augment.moving(pixels)
        image = conditions.image
        if image is not None and moves:
            image = torch.cat([self._moved(image[:, span], one, moves) for one, span in self._own_spans(image)], 1)
        complete = conditions._replace(augment=told, image=image)
        if not self.makes:
            return x0, complete

        def draws() -> Tensor:
            return draw_rows(len(x0), lambda n: torch.rand(n, 4, device=x0.device))

        return x0, with_made(self.columns, complete, x0, draws)

    def _own_spans(self, image: Tensor) -> list[tuple[ColumnFacts, slice]]:
        """Return the columns that the channels of an image are of: those that are not made, or all."""
        spans = image_spans(self.columns)
        if image.shape[1] == spans[-1][1].stop:
            return spans
        return image_spans([one for one in self.columns if not IMAGE_KINDS[one.kind].made])

    def _moved(self, image: Tensor, facts: ColumnFacts, moves: list[Move]) -> Tensor:
        kind = IMAGE_KINDS[facts.kind]
        # A condition that is made of the augmented image needs no moves.
        for move in () if kind.made and self.makes else moves:
            image = move(image, kind.smooth)
        return image


def _rolled(draw: Tensor, axis: str, x: Tensor, smooth: bool) -> Tensor:
    """Return images moved around their edges along an axis by a share of the side, [B]."""
    dim = 3 if axis == "x" else 2
    side = x.shape[dim]
    place = (torch.arange(side, device=x.device) + (draw * side).long()[:, None]) % side
    shape = (len(x), 1, 1, side) if axis == "x" else (len(x), 1, side, 1)
    return x.gather(dim, place.view(shape).expand_as(x))


def _grey(x: Tensor) -> Tensor:
    """Return the brightness, [B, C, H, W] -> [B, 1, H, W]."""
    first, *others = (weight * x[:, i : i + 1] for i, weight in enumerate(luma_weights(x.shape[1])))
    return sum(others, first)


class _Geometry(NamedTuple):
    """The geometric changes to each image, in the order of their application; zeros change nothing."""

    flip: Tensor
    """0 or 1 [B, 2]: left to right, top to bottom."""
    zoom: Tensor
    """[B], in standard deviations: above 0 enlarges."""
    angle: Tensor
    """[B], radians, clockwise as y goes downwards."""
    stretch: Tensor
    """[B, 2], in standard deviations: (s cos 2r, s sin 2r) for a stretch by s along the direction r, which shrinks
    across it by as much. So each stretch has one pair of numbers, where EDM's (s cos r, s sin r) has four."""
    shift: Tensor
    """[B, 2], to the right and down, as a fraction of the side."""

    def condition(self) -> Tensor:
        """Return the network's condition, float32 [B, 9]: 0 for changes not made, else of the order of 1."""
        turn = torch.stack([self.angle.cos() - 1, self.angle.sin()], dim=1)
        return torch.cat([self.flip, self.shift / _SHIFT, self.zoom[:, None], turn, self.stretch], dim=1)

    def apply(self, x: Tensor) -> Tensor:
        """Change images float32 [B, C, H, W] in [-1, 1]. Images without a change stay the same to the bit."""
        linear, shift, touched = self._place(x)
        return torch.where(touched, _warp(x, linear, shift), x)

    def apply_to_other(self, x: Tensor, smooth: bool) -> Tensor:
        """Change other images [B, C, H, W] in the same way; see `_warp_other`."""
        linear, shift, touched = self._place(x)
        return torch.where(touched, _warp_other(x, linear, shift, smooth), x)

    def _place(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the map of `_warp`, and which images it changes, [B, 1, 1, 1]."""
        # `warp` wants the place that each pixel comes from, hence the inverse of flip, zoom, turn, stretch and shift.
        unstretch = _inverse_stretch(self.stretch)
        cos, sin = self.angle.cos(), self.angle.sin()
        unturn = torch.stack([cos, sin, -sin, cos], dim=1).view(-1, 2, 2)
        unflip_unzoom = (1 - 2 * self.flip) * (-_OCTAVES * self.zoom).exp2()[:, None]
        linear = unflip_unzoom[:, :, None] * (unturn @ unstretch)
        shift = (linear @ (-self.shift * _sides(x))[:, :, None])[:, :, 0]
        # The filters of `_warp` are their own inverse only up to rounding.
        touched = (self.condition() != 0).any(dim=1)
        return linear, shift, touched.view(-1, 1, 1, 1)


def _draw_geometry(x: Tensor, p: float, upright: float) -> _Geometry:
    """Draw changes for images `x`, each with probability `p`.

    As in EDM, half of all images are flipped left to right whatever p is, if above 0. A flip top to bottom is a fair
    coin. Scale and stretch are 2^(0.2 n) with n normal; angles are uniform, and so is the direction of a stretch unless
    it is along the sides, which a share `upright` of them is. Shifts are normal with 1/8 of the side, or, as a change
    of their own, by whole pixels up to 1/8 of the side.
    """
    count, device = len(x), x.device
    done = (draw_rows(count, lambda n: torch.rand(7, n, device=device), dim=1) < p).float()
    done[0] = float(p > 0)
    even = draw_rows(count, lambda n: torch.rand(6, n, device=device), dim=1)
    normal = draw_rows(count, lambda n: torch.randn(4, n, device=device), dim=1)
    whole = ((2 * even[2:4].T - 1) * _SHIFT * _sides(x)).round() / _sides(x)
    direction = 2 * math.pi * even[5]  # twice the angle
    if upright:  # not drawn without, so that the numbers of other runs stay as they are
        direction *= draw_rows(count, lambda n: torch.rand(n, device=device)) >= upright
    return _Geometry(
        flip=(done[:2] * even[:2].round()).T,
        zoom=done[2] * normal[0],
        angle=done[3] * (2 * even[4] - 1) * math.pi,
        stretch=(done[4] * normal[1] * torch.stack([direction.cos(), direction.sin()])).T,
        shift=(done[5] * normal[2:] * _SHIFT).T + done[6][:, None] * whole,
    )


def _inverse_stretch(stretch: Tensor) -> Tensor:
    """Return the inverse of the stretch, [B, 2] -> [B, 2, 2]."""
    # A stretch that keeps the area is the exponential of a symmetric matrix without trace, which has this closed form.
    size = stretch.norm(dim=1)
    along, across = (stretch / size.clamp_min(1e-12)[:, None]).unbind(1)
    octaves = math.log(2) * _OCTAVES * size
    cosh, sinh = octaves.cosh(), octaves.sinh()
    rows = [cosh - sinh * along, -sinh * across, -sinh * across, cosh + sinh * along]
    return torch.stack(rows, dim=1).view(-1, 2, 2)


def _warp(x: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Map images so that the value at p is that of `x` at linear p + shift, with p in pixels from the centre.

    As in StyleGAN2-ADA and EDM (Karras et al. 2020, appendix B.2), images are upsampled twofold with a wavelet's
    low-pass filter, sampled bilinearly, and downsampled with the dual filter. The filters are symmetric, so that
    mirroring, shifts by whole pixels and quarter turns are exact, borders included. Images are continued beyond their
    borders by reflection in the outermost pixels. Shrinking is antialiased down to half the size.

    Args:
        x: float32 [B, C, H, W], H and W at least 2.
        linear: [B, 2, 2], on (x, y), y downwards.
        shift: [B, 2], in pixels (x, y).

    Returns:
        Like `x`, clamped to [-1, 1], as the filters overshoot at edges.
    """
    return _resampled(x, linear, shift).clamp_(-1, 1)


def _warp_other(x: Tensor, linear: Tensor, shift: Tensor, smooth: bool) -> Tensor:
    """Return `_warp` of images of any range, NaN where not known. Without `smooth`, a pixel has the nearest value."""
    if not smooth:
        return _nearest(x, linear, shift)
    unknown = x.isnan()
    # The mean, so that what is not known adds no value that is not there.
    whole = torch.where(unknown, x.nanmean((2, 3), keepdim=True).nan_to_num(), x)
    ends = whole.amin((2, 3), keepdim=True), whole.amax((2, 3), keepdim=True)
    moved = _resampled(whole, linear, shift).clamp(*ends)
    return moved.masked_fill(_nearest(unknown.float(), linear, shift) > 0.5, float("nan"))


def _nearest(x: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Return the nearest pixel at the places of `_warp`."""
    height, width = x.shape[2:]
    across, down = (torch.arange(side, device=x.device) - (side - 1) / 2 for side in (width, height))
    points = _points(x, across, down, linear, shift)
    return F.grid_sample(x, points, mode="nearest", align_corners=True)


def _resampled(x: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Return images [B, C, H, W] mapped as `_warp` does, without its limits of -1 and 1."""
    height, width = x.shape[2:]
    fine = _upsampling(height, x.device) @ x @ _upsampling(width, x.device).T
    points = _points(x, _fine(width, x.device), _fine(height, x.device), linear, shift)
    sampled = F.grid_sample(fine, points, align_corners=True)
    return _downsampling(height, x.device) @ sampled @ _downsampling(width, x.device).T


def _points(x: Tensor, across: Tensor, down: Tensor, linear: Tensor, shift: Tensor) -> Tensor:
    """Return the places for `grid_sample` of pixels at `across` and `down`, in pixels from the centre."""
    grid = torch.stack(torch.meshgrid(across, down, indexing="xy"), dim=-1)
    # Reflection is computed here, as grid_sample cannot do it on every device: `phase` counts periods, each once there
    # and back, and its fraction is folded to grid_sample's coordinates, where -1 and 1 are the outermost pixels. With
    # remainder() it would take longer than all the rest.
    last = _sides(x) - 1
    per_pixel = 1 / (2 * last)
    offset = (shift + last / 2) * per_pixel
    phase = torch.einsum("hwi,bji->bhwj", grid, linear * per_pixel[:, None]) + offset[:, None, None]
    return phase.sub_(phase.floor()).sub_(0.5).abs_().mul_(-4).add_(1)


def _sides(x: Tensor) -> Tensor:
    """Return (width, height) of images [B, C, H, W] as int64 [2] on their device."""
    return _cached_sides(x.shape[3], x.shape[2], x.device)


@lru_cache(maxsize=8)
def _cached_sides(width: int, height: int, device: torch.device) -> Tensor:
    # Cached, as copying it to the device anew could make the host wait.
    return torch.tensor([width, height], device=device)


def _fine(side: int, device: torch.device) -> Tensor:
    """Return the places, in pixels from the centre, of the fine pixels that downsampling a row reads."""
    return torch.arange(-_REACH, 2 * side - 1 + _REACH, device=device) / 2 - (side - 1) / 2


# The filters are matrices, as CUDA may compute a convolution in TF32.


@lru_cache(maxsize=8)
def _upsampling(side: int, device: torch.device) -> Tensor:
    """Return the matrix [2 side - 1, side] that upsamples a row, continued by reflection."""
    matrix = torch.zeros(2 * side - 1, side, dtype=torch.float64)
    for row in range(2 * side - 1):
        for pixel in range(-len(_UPSAMPLE), side + len(_UPSAMPLE)):
            distance = abs(row - 2 * pixel)
            if distance < len(_UPSAMPLE):
                reflected = pixel % (2 * side - 2)
                matrix[row, min(reflected, 2 * side - 2 - reflected)] += _UPSAMPLE[distance]
    return matrix.float().to(device)


@lru_cache(maxsize=8)
def _downsampling(side: int, device: torch.device) -> Tensor:
    """Return the matrix [side, 2 side - 1 + 2 reach] that downsamples a row of fine pixels."""
    matrix = torch.zeros(side, 2 * side - 1 + 2 * _REACH, dtype=torch.float64)
    taps = torch.tensor(_DOWNSAMPLE[:0:-1] + _DOWNSAMPLE, dtype=torch.float64)
    for pixel in range(side):
        matrix[pixel, 2 * pixel : 2 * pixel + len(taps)] = taps
    return matrix.float().to(device)
