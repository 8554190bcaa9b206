"""Augmentation of batches: flips, colour, crops, EDM's geometry, and the warp below them, against plain computation."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.data.augmentation import (  # the geometry is given, and not drawn
    Augment,
    _draw_geometry,
    _Geometry,
    _inverse_stretch,
    _warp,
)
from unfog.data.settings import Data
from unfog.device.sharded_rng import seed_generators
from unfog.errors import RequestError
from unfog.values.condition_format import AUGMENT_INPUTS
from unfog.values.image_format import BYTES


def photos(n: int = 4, channels: int = 3, height: int = 16, width: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=generator)


def smooth(x: Tensor, y: Tensor) -> Tensor:
    """A picture known at every point, [...] -> [...], without detail near the resolution."""
    return 0.4 * torch.sin(0.35 * x + 0.2) + 0.4 * torch.cos(0.3 * y - 0.25 * x)


def points(height: int, width: int) -> tuple[Tensor, Tensor]:
    """(x, y) of each pixel, from the centre."""
    x, y = torch.arange(width) - (width - 1) / 2, torch.arange(height) - (height - 1) / 2
    return x.expand(height, width), y[:, None].expand(height, width)


def nothing(n: int) -> _Geometry:
    return _Geometry(torch.zeros(n, 2), torch.zeros(n), torch.zeros(n), torch.zeros(n, 2), torch.zeros(n, 2))


def matrix(a: float, b: float, c: float, d: float) -> Tensor:
    return torch.tensor([[[a, b], [c, d]]], dtype=torch.float32)


# Flip and colour.


def test_augmentation_off_is_the_identity_and_draws_nothing() -> None:
    pixels = photos()
    state = torch.get_rng_state()
    x0, condition = Augment.from_settings(Data())(pixels)
    assert torch.equal(x0, BYTES.to_model(pixels))
    assert condition is None
    assert torch.equal(torch.get_rng_state(), state)


def test_flip_mirrors_about_half_each_image_whole() -> None:
    pixels = photos(400, 3, 4, 6)
    torch.manual_seed(0)
    flipped, _ = Augment(flip=True)(pixels)
    mirrored = (flipped == BYTES.to_model(pixels.flip(-1))).flatten(1).all(1)
    kept = (flipped == BYTES.to_model(pixels)).flatten(1).all(1)
    assert bool((mirrored ^ kept).all())
    assert 150 < int(mirrored.sum()) < 250


def coloured(pixels: Tensor, jitter: float) -> Tensor:
    return (Augment(jitter=jitter)(pixels)[0] + 1) * 127.5


def test_jitter_is_slight_its_own_for_each_image_and_leaves_grey_grey() -> None:
    torch.manual_seed(1)
    image = torch.randint(60, 180, (1, 3, 8, 8), dtype=torch.uint8).expand(64, -1, -1, -1)
    jittered = coloured(image, 0.1)
    assert len({bytes(one.numpy()) for one in jittered}) == 64
    change = (jittered - image.float()).abs()
    assert 1 < change.mean() < 18
    brightness = jittered.mean((1, 2, 3)) / image.float().mean((1, 2, 3))
    assert brightness.min() > 0.89
    assert brightness.max() < 1.11
    grey = photos(16, 1, 8, 8)
    as_rgb = coloured(grey.expand(-1, 3, -1, -1), 0.2)
    assert (as_rgb - as_rgb[:, :1]).abs().max() <= 1.001  # luma weights add up to 1 but for rounding
    assert coloured(grey, 0.2).shape == grey.shape


def test_jitter_is_brightness_then_contrast_then_saturation() -> None:
    pixels = photos(8)
    torch.manual_seed(4)
    jittered = coloured(pixels, 0.3)
    torch.manual_seed(4)
    factors = (0.7 + 0.6 * torch.rand(3, 8)).T.tolist()
    for image, got, (brightness, contrast, saturation) in zip(pixels.double(), jittered, factors):
        luma = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)[:, None, None]
        x = image * brightness
        middle = (luma * x).sum(0).mean()
        x = middle + contrast * (x - middle)
        grey = (luma * x).sum(0, keepdim=True)
        x = grey + saturation * (x - grey)
        assert (got - x.clamp(0, 255)).abs().max() <= 0.501


def test_jitter_keeps_within_eight_bits() -> None:
    torch.manual_seed(2)
    white, black = torch.full((32, 3, 4, 4), 255, dtype=torch.uint8), torch.zeros(32, 3, 4, 4, dtype=torch.uint8)
    assert int(coloured(white, 0.3).min()) >= 178
    assert int(coloured(white, 0.3).max()) == 255
    assert int(coloured(black, 0.3).max()) == 0


# Crop.


def test_a_crop_is_a_square_of_the_image_enlarged() -> None:
    x, y = points(32, 32)
    n = 64
    picture = ((smooth(x, y) + 1) * 127.5).round().to(torch.uint8)
    torch.manual_seed(5)
    cropped, condition = Augment(crop=0.4)(picture.expand(n, 1, 32, 32))
    assert condition is None
    torch.manual_seed(5)
    draws = torch.rand(n, 3)
    side = (32 * (1 - 0.4 * draws[:, 0])).view(-1, 1, 1)
    left, top = draws[:, 1].view(-1, 1, 1) * (32 - side), draws[:, 2].view(-1, 1, 1) * (32 - side)
    # An outer edge of the result is one of the square: pixel i covers i to i + 1.
    from_x, from_y = left + (x + 16) * side / 32 - 16, top + (y + 16) * side / 32 - 16
    error = (cropped[:, 0] - smooth(from_x, from_y)).abs()
    assert error[:, 2:-2, 2:-2].max() < 0.02
    assert error.max() < 0.15  # beyond the outermost pixels' centres there is only their reflection
    assert side.min() >= 32 * 0.6
    assert len({bytes(one.numpy()) for one in cropped}) == n


# The _warp.


@pytest.mark.parametrize(("height", "width"), [(4, 4), (16, 16), (7, 12)])
def test_what_needs_no_interpolation_is_exact(height: int, width: int) -> None:
    x = BYTES.to_model(photos(3, 2, height, width))
    still = torch.zeros(3, 2)

    def every(*numbers: float) -> Tensor:
        return matrix(*numbers).expand(3, 2, 2)

    same = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(_warp(x, every(1, 0, 0, 1), still), x, **same)
    torch.testing.assert_close(_warp(x, every(-1, 0, 0, 1), still), x.flip(3), **same)
    torch.testing.assert_close(_warp(x, every(1, 0, 0, -1), still), x.flip(2), **same)
    right_and_up = F.pad(x, (3, 0, 0, 2), mode="reflect")[:, :, 2:, :-3]
    torch.testing.assert_close(_warp(x, every(1, 0, 0, 1), torch.tensor([[-3.0, 2]] * 3)), right_and_up, **same)
    if height == width:
        torch.testing.assert_close(_warp(x, every(0, 1, -1, 0), still), x.rot90(-1, (2, 3)), **same)  # clockwise


def test_far_out_an_image_goes_on_as_its_reflections() -> None:
    x = BYTES.to_model(photos(1, 1, 5, 5))
    period = torch.cat([x, x.flip(3)[..., 1:4]], dim=3)
    for shift in (-23, 8, 100):
        expected = period[..., (torch.arange(5) + shift) % 8]
        torch.testing.assert_close(
            _warp(x, matrix(1, 0, 0, 1), torch.tensor([[shift, 0.0]])), expected, rtol=0, atol=1e-5
        )


def test_each_image_has_its_own_map_and_each_channel_the_same() -> None:
    x = BYTES.to_model(photos(2, 3))
    linear = torch.cat([matrix(0.8, 0.1, -0.2, 1.1), matrix(1.2, 0.3, 0.1, 0.9)])
    shift = torch.tensor([[1.5, -0.3], [0.2, 4.1]])
    both = _warp(x, linear, shift)
    for i in range(2):
        for c in range(3):
            alone = _warp(x[i : i + 1, c : c + 1], linear[i : i + 1], shift[i : i + 1])
            torch.testing.assert_close(both[i : i + 1, c : c + 1], alone, rtol=0, atol=1e-6)


def test_a_known_picture_lands_where_it_should_and_sharper_than_by_plain_interpolation() -> None:
    side = 32
    x, y = points(side, side)
    angle = 0.5
    linear = matrix(math.cos(angle), math.sin(angle), -math.sin(angle), math.cos(angle)) * 0.7
    shift = torch.tensor([[0.7, -1.3]])

    def mapped(frequency: float) -> Tensor:
        from_x, from_y = (linear[0] @ torch.stack([x, y]).flatten(1) + shift.T).view(2, side, side)
        return smooth(frequency * from_x, frequency * from_y)

    for frequency, most in ((1.0, 0.012), (3.0, 0.1)):
        picture = smooth(frequency * x, frequency * y)[None, None]
        ours = (_warp(picture, linear, shift)[0, 0] - mapped(frequency))[3:-3, 3:-3].abs().mean()
        grid = F.affine_grid(
            torch.cat([linear, 2 / side * shift[:, :, None]], 2), [1, 1, side, side], align_corners=False
        )
        plain = F.grid_sample(picture, grid, align_corners=False)[0, 0]
        naive = (plain - mapped(frequency))[3:-3, 3:-3].abs().mean()
        print(frequency, ours, naive)
        assert ours < most
        assert ours < 0.6 * naive


# EDM's geometry.


def test_no_chance_is_no_change_and_tells_nothing() -> None:
    x = BYTES.to_model(photos(16))
    torch.manual_seed(0)
    geometry = _draw_geometry(x, 0.0, 0.0)
    assert torch.equal(geometry.apply(x), x)
    assert torch.equal(geometry.condition(), torch.zeros(16, AUGMENT_INPUTS))


def test_images_that_nothing_is_done_to_stay_as_they_are_and_the_others_are_told() -> None:
    pixels = photos(300, 3, 8, 8)
    torch.manual_seed(0)
    x0, condition = Augment(augment=0.1)(pixels)
    assert condition is not None
    assert condition.shape == (300, AUGMENT_INPUTS)
    untouched = (condition == 0).all(1)
    assert 0.2 < untouched.float().mean() < 0.36  # 0.5 0.95 0.9^5 = 0.28, and small shifts round to none
    same = (x0 == BYTES.to_model(pixels)).flatten(1).all(1)
    assert torch.equal(same, untouched)
    assert x0.abs().max() <= 1


def test_chances_and_spreads_are_those_of_edm_and_whole_shifts_come_on_top() -> None:
    torch.manual_seed(0)
    n, p = 40_000, 0.25
    geometry = _draw_geometry(torch.empty(n, 1, 32, 64), p, 0.0)
    condition = geometry.condition()

    def share(rows: Tensor) -> float:
        return (rows != 0).float().mean().item()

    # EDM's x-flip is told and a fair coin at any p, its y-flip a fair coin with probability p.
    assert [share(geometry.flip[:, i]) for i in range(2)] == pytest.approx([1 / 2, p / 2], abs=0.01)
    assert share(_draw_geometry(torch.empty(n, 1, 4, 4), 0.001, 0.0).flip[:, 0]) == pytest.approx(1 / 2, abs=0.01)
    for part in (geometry.zoom, geometry.angle, geometry.stretch[:, 0]):
        assert share(part) == pytest.approx(p, abs=0.01)
    assert geometry.zoom[geometry.zoom != 0].std().item() == pytest.approx(1, abs=0.03)
    assert geometry.stretch.norm(dim=1)[geometry.stretch[:, 0] != 0].square().mean().item() == pytest.approx(
        1, abs=0.05
    )
    angles = geometry.angle[geometry.angle != 0] / math.pi
    assert angles.var().item() == pytest.approx(1 / 3, abs=0.01)
    assert angles.abs().max() <= 1
    assert torch.equal(condition[:, :2], geometry.flip)
    assert torch.equal(condition[:, 2:4], geometry.shift * 8)
    assert torch.equal(condition[:, 4], geometry.zoom)
    torch.testing.assert_close(condition[:, 5], geometry.angle.cos() - 1)
    torch.testing.assert_close(condition[:, 6], geometry.angle.sin())
    assert torch.equal(condition[:, 7:], geometry.stretch)
    # Shifts: p(1 - p) are whole pixels alone, of at most an eighth of the side.
    for axis, side in ((0, 64), (1, 32)):
        shift = geometry.shift[:, axis]
        whole = (shift * side == (shift * side).round()) & (shift != 0)
        assert shift[whole].abs().max() == 1 / 8
        rounds_to_0 = 1 / (2 * side / 8)
        assert whole.float().mean().item() == pytest.approx(p * (1 - p) * (1 - rounds_to_0), abs=0.01)
        assert shift[~whole].std().item() == pytest.approx(0.125 * (p * (1 + p / 3) / (1 - p + p * p)) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"flip": [1.0, 0]}, lambda x: x.flip(3)),
        ({"flip": [0.0, 1]}, lambda x: x.flip(2)),
        ({"shift": [3 / 16, -1 / 16]}, lambda x: F.pad(x, (3, 0, 0, 1), mode="reflect")[:, :, 1:, :-3]),
        ({"angle": math.pi / 2}, lambda x: x.rot90(-1, (2, 3))),
        ({"angle": math.pi}, lambda x: x.flip(2, 3)),
        # Flipped first, then turned: the other order gives the other diagonal.
        ({"flip": [1.0, 0], "angle": math.pi / 2}, lambda x: x.flip(3).rot90(-1, (2, 3))),
        # Shifts are last: to the right, whatever the turn.
        (
            {"angle": math.pi / 2, "shift": [2 / 16, 0.0]},
            lambda x: F.pad(x.rot90(-1, (2, 3)), (2, 0, 0, 0), mode="reflect")[..., :-2],
        ),
    ],
)
def test_exact_changes(change, expected) -> None:
    x = BYTES.to_model(photos())
    geometry = nothing(4)._replace(**{k: torch.tensor([v] * 4) for k, v in change.items()})
    torch.testing.assert_close(geometry.apply(x), expected(x), rtol=0, atol=1e-5)


def test_zoom_is_that_of_interpolate() -> None:
    side = 16
    x, y = points(side, side)
    picture = smooth(x, y)[None, None]
    # Larger by 2^(0.2 * 5) = 2, and the middle of it.
    larger = F.interpolate(picture, scale_factor=2, mode="bicubic", align_corners=False)[..., 8:-8, 8:-8]
    got = nothing(1)._replace(zoom=torch.tensor([5.0])).apply(picture)
    assert (got - larger).abs().max() < 0.02
    # Smaller by 2: the middle is the whole.
    wide = smooth(*points(2 * side, 2 * side))[None, None]
    smaller = F.interpolate(wide, scale_factor=0.5, mode="bicubic", antialias=True)
    got = nothing(1)._replace(zoom=torch.tensor([-5.0])).apply(wide)
    assert (got[..., 8:-8, 8:-8] - smaller)[..., 1:-1, 1:-1].abs().max() < 0.03


@pytest.mark.parametrize("direction", [0.0, 0.6, math.pi / 2, 2.5])
def test_stretch_is_along_its_direction_and_shrinks_across(direction: float) -> None:
    x, y = points(32, 32)
    s = 1.5
    stretch = torch.tensor([[s * math.cos(2 * direction), s * math.sin(2 * direction)]])
    got = nothing(1)._replace(stretch=stretch).apply(smooth(x, y)[None, None])[0, 0]
    along = math.cos(direction) * x + math.sin(direction) * y
    across = -math.sin(direction) * x + math.cos(direction) * y
    along, across = along / 2 ** (0.2 * s), across * 2 ** (0.2 * s)
    from_x = math.cos(direction) * along - math.sin(direction) * across
    from_y = math.sin(direction) * along + math.cos(direction) * across
    inside = (from_x.abs() < 14) & (from_y.abs() < 14)
    assert inside.sum() > 600
    assert (got - smooth(from_x, from_y))[inside].abs().max() < 0.02


def test_all_changes_together_are_made_in_their_order() -> None:
    x, y = points(48, 48)
    geometry = _Geometry(
        torch.tensor([[1.0, 0]]),
        torch.tensor([1.0]),
        torch.tensor([0.7]),
        torch.tensor([[0.8, -0.5]]),
        torch.tensor([[0.05, -0.08]]),
    )
    got = geometry.apply(smooth(x, y)[None, None])[0, 0]
    a, b = 0.2 * math.log(2) * 0.8, 0.2 * math.log(2) * -0.5
    forward = torch.linalg.matrix_exp(torch.tensor([[a, b], [b, -a]]))
    forward = forward @ torch.tensor([[math.cos(0.7), -math.sin(0.7)], [math.sin(0.7), math.cos(0.7)]])
    forward = forward @ torch.diag(torch.tensor([-1.0, 1.0])) * 2**0.2
    moved = torch.stack([x - 0.05 * 48, y + 0.08 * 48]).flatten(1)
    from_x, from_y = (torch.linalg.inv(forward) @ moved).view(2, 48, 48)
    inside = (from_x.abs() < 22) & (from_y.abs() < 22)
    assert inside.sum() > 1000
    assert (got - smooth(from_x, from_y))[inside].abs().max() < 0.02


def test_a_solid_colour_stays_what_it_is() -> None:
    torch.manual_seed(0)
    levels = torch.linspace(-0.98, 0.98, 64).view(-1, 1, 1, 1)
    solid = levels.expand(64, 3, 16, 16)
    changed = _draw_geometry(solid, 1.0, 0.0).apply(solid)
    assert (changed - solid).abs().max() < 1e-5


@pytest.mark.parametrize("augment", [Augment(True, 0.2, 0.2, 0.3), Augment(augment=0.5), Augment(crop=0.1)])
def test_augmentation_is_a_function_of_the_position(augment: Augment) -> None:
    pixels = photos(6)
    made = []
    for position in (640, 640, 646):
        seed_generators(7, position)
        made.append((*augment(pixels), torch.rand(1)))
        torch.rand(5)
    for first, again, elsewhere in zip(*made):
        if first is not None:
            assert torch.equal(first, again)
            assert not torch.equal(first, elsewhere)
    assert torch.equal(pixels, photos(6))


@pytest.mark.parametrize("settings", [{"crop": -0.1}, {"crop": 0.6}, {"augment": 1.5}, {"augment": math.nan}])
def test_what_is_no_chance_or_fraction_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(settings))):
        Data(**settings)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_stretches_is_along_the_sides(share: float) -> None:
    """EDM's aniso_rotate_prob is 0.5: else the direction is 0, and a negative stretch is one along the other side."""
    x = torch.zeros(20_000, 1, 4, 4)
    torch.manual_seed(3)
    geometry = _draw_geometry(x, 1.0, share)
    along = (geometry.stretch[:, 1] == 0).double().mean().item()
    assert along == pytest.approx(share, abs=0.015)
    assert geometry.stretch.square().sum(1).mean().item() == pytest.approx(1, abs=0.05)
    torch.manual_seed(3)
    other = _draw_geometry(x, 1.0, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(geometry._replace(stretch=other.stretch), other))


def test_stretches_are_distributed_as_those_of_edm() -> None:
    """Its steps: a turn, a scale of 2^w and 2^-w, and the turn back; no turn in 1 - aniso_rotate_prob of them."""
    count, generator = 40_000, torch.Generator().manual_seed(5)
    w = 0.2 * torch.randn(count, generator=generator)
    turns = torch.rand(count, generator=generator) < 0.5
    r = (2 * torch.rand(count, generator=generator) - 1) * math.pi * turns
    turn = torch.stack([r.cos(), -r.sin(), r.sin(), r.cos()], 1).view(-1, 2, 2)
    theirs = turn @ torch.diag_embed(torch.stack([(-w).exp2(), w.exp2()], 1)) @ turn.mT
    torch.manual_seed(5)
    ours = _inverse_stretch(_draw_geometry(torch.zeros(count, 1, 4, 4), 1.0, 0.5).stretch)
    at = torch.linspace(0.05, 0.95, 13)  # two samples differ by up to 0.007 there, a share of 0.4 by 0.016
    for part in (lambda m: m[:, 0, 0], lambda m: m[:, 1, 1], lambda m: m[:, 0, 1], lambda m: m[:, 0, 0] - m[:, 1, 1]):
        torch.testing.assert_close(part(ours).quantile(at), part(theirs).quantile(at), rtol=0, atol=0.01)
    torch.testing.assert_close(torch.linalg.det(ours), torch.ones(count), rtol=0, atol=1e-4)
