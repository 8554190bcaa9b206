"""Copies: what the hash finds among many, what the closer look lets through, and how both scale."""

import time
from dataclasses import replace
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from unfog.checks.images import duplicate_checks
from unfog.checks.images.duplicate_checks import (  # the report is given pairs; the search is counted, and given hashes
    _candidate_pairs,
    _compare_thumbnails,
    _report_duplicates,
    check_duplicates,
    connected_groups,
    find_duplicates,
)
from unfog.checks.images.image_scan import ImageScan, perceptual_hash, thumbnails
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.builtin_fashion import FashionSource
from unfog.data.sources.registry import open_source

CLOTHES = FashionSource().tiles[:, None]


def saved(pixels: np.ndarray, quality: int) -> np.ndarray:
    """[1, H, W] after a round trip through JPEG."""
    data = BytesIO()
    Image.fromarray(pixels[0]).save(data, "JPEG", quality=quality)
    return np.asarray(Image.open(data))[None]


def as_prepared(train: np.ndarray, held_out: np.ndarray) -> Dataset:
    def images(pixels: np.ndarray, kind: str) -> ImageSet:
        return ImageSet(pixels, tuple(f"{kind}/{i}" for i in range(len(pixels))))

    ledger = prepare(open_source("fashion"), Data(cache="memory")).report
    settings = Data(size=train.shape[-1], channels=train.shape[1])
    return Dataset(settings, images(train, "train"), images(held_out, "held"), ledger)


def bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.array([bin(int(x ^ y)).count("1") for x, y in zip(a, b)])


@pytest.mark.parametrize("size", [9, 16, 28, 50, 64])
def test_thumbnails_are_means_of_cells(size: int) -> None:
    pixels = np.random.default_rng(size).integers(0, 256, (2, 3, size, size), np.uint8)
    cells = min(16, size)
    parts = list(pairwise(i * size // cells for i in range(cells + 1)))
    expected = [[pixels[:, :, a:b, c:d].mean((2, 3)) for c, d in parts] for a, b in parts]
    np.testing.assert_allclose(thumbnails(pixels), np.moveaxis(np.array(expected), (0, 1), (2, 3)), atol=1e-3)


@pytest.mark.slow
def test_a_hash_survives_what_leaves_the_picture_alone_and_tells_pictures_apart() -> None:
    images = CLOTHES[::20]
    one = perceptual_hash(thumbnails(images))
    again = perceptual_hash(thumbnails(np.stack([saved(image, 60) for image in images])))
    dimmed = perceptual_hash(thumbnails((images * 0.8 + 10).astype(np.uint8)))
    assert np.quantile(bits(one, again), 0.95) <= 3
    assert np.quantile(bits(one, dimmed), 0.95) <= 3
    assert np.median(bits(one, np.roll(one, 250))) > 12  # another kind of clothes


@pytest.mark.slow
def test_candidates_find_close_hashes_among_many() -> None:
    generator = np.random.default_rng(0)
    hashes = generator.integers(0, 2**64, 20_000, np.uint64, endpoint=False)
    flips = [sum(1 << int(b) for b in generator.choice(64, 6, replace=False)) for _ in range(200)]
    hashes[:200] = hashes[-200:] ^ np.array(flips, np.uint64)
    found = {tuple(pair) for pairs in _candidate_pairs(hashes) for pair in pairs.tolist()}
    planted = {(i, 19_800 + i) for i in range(200)}
    assert len(planted & found) >= 190
    assert all(bits(hashes[[a]], hashes[[b]])[0] <= 9 for a, b in found)


@pytest.mark.slow
def test_many_equal_hashes_take_no_longer() -> None:
    """What is alike by nature, as blank pages or passport photographs are, must not cost the square of its number."""
    started = time.process_time()
    pairs = sum(map(len, _candidate_pairs(np.zeros(20_000, np.uint64))))
    assert pairs <= 20 * 12 * 20_000
    assert time.process_time() - started < 10  # measured 0.5


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=20))
def test_groups_are_connected_components(pairs: list[tuple[int, int]]) -> None:
    group = {one: one for pair in pairs for one in pair}
    for a, b in pairs:
        group = {one: group[a] if which == group[b] else which for one, which in group.items()}
    sets = [[one for one in group if group[one] == which] for which in set(group.values())]
    found = connected_groups(np.array(pairs, np.int64).reshape(-1, 2))
    assert sorted(group.tolist() for group in found) == sorted(sorted(one) for one in sets)
    assert [len(group) for group in found] == sorted(map(len, found), reverse=True)


def rgb(*shape: int) -> np.ndarray:
    """Smooth random pictures, as photographs are at this size: uint8 [*shape, 3, 32, 32]."""
    coarse = np.random.default_rng(1).integers(0, 256, (*shape, 3, 6, 6), np.uint8).reshape(-1, 3, 6, 6)
    large = [Image.fromarray(x.transpose(1, 2, 0)).resize((32, 32), Image.Resampling.BICUBIC) for x in coarse]
    return np.stack([np.asarray(x).transpose(2, 0, 1) for x in large])


def test_a_changed_part_is_no_copy_and_noise_is() -> None:
    images = rgb(100)
    noisy = np.clip(images + np.random.default_rng(2).normal(0, 6, images.shape), 0, 255).astype(np.uint8)
    assert _compare_thumbnails(thumbnails(images), thumbnails(noisy)).duplicate.all()
    part = images.copy()
    part[:, :, 12:22, 12:22] = part[:, :, 12:22, 12:22] // 2 + 100  # as another face, or another skin
    look = _compare_thumbnails(thumbnails(images), thumbnails(part))
    assert look.duplicate.mean() <= 0.02
    other = _compare_thumbnails(thumbnails(images), thumbnails(np.roll(images, 1, 0)))
    assert not other.similar.any()


@pytest.mark.slow
def test_what_is_mostly_white_is_not_alike_for_that() -> None:
    """Letters on white: all agree in most pixels and in much of the hash, and are different pictures."""
    texts = [a + b for a in "ABDEFGHJKLMNPQRSTUWXZ" for b in "abdeghkmnpqrsuwxz"]
    images = []
    for text in texts:
        page = Image.new("L", (64, 64), "white")
        ImageDraw.Draw(page).text((32, 32), text, "black", ImageFont.load_default(20), anchor="mm")
        images.append(np.asarray(page)[None])
    pages = np.stack(images)
    copies = find_duplicates(ImageScan.create(as_prepared(pages, pages[:0])))
    assert not copies.equal
    assert len(copies.resaved) == 0
    assert len(copies.similar) <= 25  # of 71,253 pairs: "Pn" and "Ph"
    twice = np.concatenate([pages, [saved(page, 75) for page in pages[:20]]])
    copies = find_duplicates(ImageScan.create(as_prepared(twice, twice[:0])))
    assert copies.resaved.tolist() == [[i, i + len(pages)] for i in range(20)]


def test_what_shares_a_sky_is_not_alike_for_that() -> None:
    """One smooth background, and on each a faint texture of its own."""
    sky = np.tile(np.linspace(40, 250, 16), (16, 1)).T
    faint = np.random.default_rng(4).normal(0, 8, (100, 1, 16, 16))
    skies = (sky + faint).astype(np.float32)
    assert np.corrcoef(skies[0].ravel(), skies[1].ravel())[0, 1] > 0.97
    assert not _compare_thumbnails(skies, np.roll(skies, 1, 0)).similar.any()
    assert _compare_thumbnails(skies, skies + 5).duplicate.all()


@pytest.mark.slow
def test_copies_in_training_and_across_the_split_are_told_apart() -> None:
    images = CLOTHES[::10]
    train, held_out = images[:900].copy(), images[900:].copy()
    train[1], train[2] = train[0], train[0]
    train[10] = saved(train[20], 75)
    held_out[3] = train[40]
    held_out[[4, 5]] = saved(train[50], 75)
    train[60:65] = 255  # blank ones equal each other, and are not copies
    looked = ImageScan.create(as_prepared(train, held_out))
    found = {f.code: f for f in check_duplicates(looked)}
    assert found["data.duplicates"].facts["groups"] == [["train/0", "train/1", "train/2"]]
    assert found["data.duplicates"].facts["copies"] == 2
    assert found["data.near_duplicates"].facts["groups"] == [["train/10", "train/20"]]
    assert ["train/10", "train/20"] not in found["data.near_duplicates"].facts["alike_groups"]
    leak = found["data.leakage"].facts
    assert (leak["held_out"], leak["equal"], leak["copies"]) == (100, 1, 2)
    assert leak["pairs"] == [["train/40", "held/3"], ["train/50", "held/4"], ["train/50", "held/5"]]
    assert found["data.leakage"].severity == "warning"


@pytest.mark.slow
def test_names_listed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicate_checks, "MOST_NAMES", 5)
    train = CLOTHES[:40].copy()
    train[20:] = train[:20]
    looked = ImageScan.create(as_prepared(train, train[:0]))
    found = check_duplicates(looked)[0]
    assert found.facts["copies"] == 20
    assert sum(map(len, found.facts["groups"])) == 5


@pytest.mark.slow
def test_no_more_pairs_are_looked_at_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicate_checks, "_MOST_PAIRS", 10)
    trousers = CLOTHES[1000:2000]
    looked = ImageScan.create(as_prepared(trousers, trousers[:0]))
    copies = find_duplicates(looked)
    assert not copies.complete
    found = _report_duplicates(looked, replace(copies, similar=np.array([[0, 1]])))[1]
    assert "at least 1 of 1,000" in found.evidence
