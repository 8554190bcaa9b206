from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.evaluation import pixel_metrics as sliced  # levels of the pyramid have closed forms
from unfog.evaluation.features import open_features
from unfog.evaluation.metrics import compare_features
from unfog.evaluation.pixel_metrics import (  # distances by level, of which the metric is the mean
    _sliced_wasserstein,
    compare_pixels,
)


@pytest.fixture(scope="module")
def clothes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tensor, Tensor]:
    """Two sets of 1,000 real pictures, [1000, 1, 28, 28]."""
    patch = pytest.MonkeyPatch()
    patch.setenv("UNFOG_CACHE", str(tmp_path_factory.mktemp("cache")))
    pixels = prepare(open_source("fashion"), Data(held_out=0.0)).train.pixels
    patch.undo()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))[:2000].numpy()
    both = torch.from_numpy(pixels.take(order, axis=0))
    return both[:1000], both[1000:]


def as_pixels(x: Tensor) -> Tensor:
    return x.round().clamp(0, 255).byte()


def blurred(x: Tensor) -> Tensor:
    row = torch.tensor([0.05, 0.9, 0.05])
    return as_pixels(F.conv2d(x.float(), torch.outer(row, row)[None, None], padding=1))


def grainy(x: Tensor) -> Tensor:
    return as_pixels(x + 4 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))


def paler(x: Tensor) -> Tensor:
    return as_pixels(x.float() * 0.85)


def of_few_kinds(x: Tensor) -> Tensor:
    return x[torch.arange(len(x)) % 30]


@pytest.mark.slow
def test_real_pictures_are_nearer_than_slightly_worse_ones(clothes):
    """By patches; a grain of 4 of 256 is below what they see."""
    one, other = clothes
    floor = compare_pixels(["sliced"], one, other)[0].value
    for worse in (blurred, of_few_kinds):
        assert compare_pixels(["sliced"], one, worse(other))[0].value > 2 * floor
    assert set(_sliced_wasserstein(one[:50], one[:50]).values()) == {0}


@pytest.mark.parametrize("worse", [blurred, grainy, paler, of_few_kinds])
@pytest.mark.slow
def test_texture_tells_real_pictures_from_slightly_worse_ones(clothes, worse: Callable[[Tensor], Tensor]):
    """Without a network, by the intervals of 1,000 pictures alone."""
    one, other = clothes
    features = open_features("texture")
    floor = compare_features(["kid"], features(one), features(other))[0]
    found = compare_features(["kid"], features(one), features(worse(other)))[0]
    assert floor.low < 0 < floor.high
    assert found.low > floor.high


@pytest.mark.slow
@pytest.mark.parametrize("dead", [[2], [0, 1, 2]])
def test_a_channel_that_does_not_vary_is_scaled_by_the_rounding_of_levels(dead):
    generator = torch.Generator().manual_seed(0)
    real = torch.randint(0, 256, (60, 3, 16, 16), dtype=torch.uint8, generator=generator)
    real[:, dead] = 0
    near, far = real.clone(), real.clone()
    near[:, dead] = 1
    far[:, dead] = torch.randint(0, 60, (60, len(dead), 16, 16), dtype=torch.uint8, generator=generator)
    same, close, wrong = (compare_pixels(["sliced"], real, fake) for fake in (real, near, far))
    assert {found.value for found in same} == {0.0}
    assert 0 < close[0].value < wrong[0].value < 1e6
    assert "constant" in wrong[0].note
    live = torch.randint(0, 256, (60, 3, 16, 16), dtype=torch.uint8, generator=generator)
    assert "constant" not in compare_pixels(["sliced"], live, live)[0].note


@pytest.mark.slow
def test_levels_go_down_to_eight_pixels_and_see_their_own_scale():
    """A grain of single pixels is in the finest level alone; a shift of brightness in the last alone."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randint(60, 190, (60, 3, 8, 8), generator=generator).float()
    x = as_pixels(F.interpolate(coarse, scale_factor=8, mode="bilinear"))
    plain = as_pixels(x + 8 * torch.randn(x.shape, generator=generator))
    grain = as_pixels(x + 12 * torch.randn(x.shape, generator=generator))
    found, bright = _sliced_wasserstein(plain, grain), _sliced_wasserstein(plain, as_pixels(plain + 20.0))
    assert list(found) == [64, 32, 16, 8]
    assert found[64] > 5 * found[16]
    assert bright[8] > 5 * bright[64]


@pytest.mark.parametrize("side", range(7, 140))
def test_any_size_has_levels_of_the_sides_that_are_told(side):
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (2, 1, side, side + 3), dtype=torch.uint8, generator=generator)
    for level in sliced._sides(side):
        assert min(sliced._level(pictures.float(), level).shape[2:]) == level
    assert set(_sliced_wasserstein(pictures, pictures).values()) == {0.0}


def test_the_last_level_is_what_is_left_and_the_others_what_is_lost():
    """The pyramid of Burt & Adelson: spreading each level over the one before and adding gives the picture again."""
    x = torch.randint(0, 256, (2, 3, 64, 64), generator=torch.Generator().manual_seed(0)).float()
    rebuilt = sliced._level(x, 8)
    for side in (16, 32, 64):
        spread = torch.zeros(2, 3, side, side)
        spread[:, :, ::2, ::2] = rebuilt
        rebuilt = sliced._level(x, side) + 4 * sliced._smooth(spread)
    assert torch.allclose(rebuilt, x, atol=1e-3)


def test_memory_is_bounded_whatever_the_number_of_pictures(monkeypatch):
    monkeypatch.setattr(sliced, "_PATCHES", 100)
    x = torch.zeros(40, 3, 8, 8, dtype=torch.uint8)
    assert len(sliced._patches(x, 8, torch.Generator())) == 80
    found = compare_pixels(["sliced"], x.repeat(5, 1, 1, 1), x)
    assert [(one.metric, one.n, one.n_reference) for one in found] == [("sliced", 40, 200), ("sliced_8", 40, 200)]


@pytest.mark.parametrize(
    ("names", "shape", "match"),
    [
        (["fid"], (5, 3, 8, 8), "give one of sliced"),
        (["sliced"], (5, 1, 8, 8), "one shape"),
        (["sliced"], (5, 3, 6, 6), "one shape"),
    ],
)
def test_what_cannot_be_compared_is_refused(names, shape, match, tmp_path: Path):
    with pytest.raises(RequestError, match=match):
        compare_pixels(names, torch.zeros(5, 3, *shape[2:]).byte(), torch.zeros(shape).byte())
