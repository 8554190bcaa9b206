"""The shuffled stream and its permutation."""

import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unfog.data import stream as streams
from unfog.data.dataset import ImageSet, evenly_spaced
from unfog.data.permutation import epoch_keys, permute
from unfog.data.stream import DeviceStream, ImageStream
from unfog.errors import RequestError


def images(n: int, labelled: bool = True) -> ImageSet:
    """n images of 1x4x4 whose first pixels spell their number."""
    pixels = np.zeros((n, 1, 4, 4), np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = np.arange(n) % 256, np.arange(n) // 256
    labels = np.arange(n, dtype=np.int64) % 3 if labelled else None
    return ImageSet.labelled(pixels, labels, tuple(map(str, range(n))), ("a", "b", "c") if labelled else ())


def shuffle(n: int, seed: int, epoch: int) -> np.ndarray:
    return permute(np.arange(n), n, epoch_keys(seed, np.array([epoch])))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**50))
def test_every_shuffle_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(shuffle(n, seed, epoch)), np.arange(n))


def test_small_orders_are_all_reached_about_equally_often() -> None:
    n, draws = 4, 24000
    keys = np.repeat(epoch_keys(0, np.arange(draws)), n)
    orders = permute(np.tile(np.arange(n), draws), n, keys).reshape(draws, n)
    counts = Counter(map(bytes, orders.astype(np.uint8)))
    assert len(counts) == 24
    assert max(abs(count - 1000) for count in counts.values()) < 200  # 6 standard deviations


@pytest.mark.slow
def test_places_and_neighbours_are_uniform() -> None:
    """Chi-squared over its degrees of freedom is 1 within a few times sqrt(2 / freedom)."""
    n = 200
    orders = np.stack([shuffle(n, seed, 7) for seed in range(4000)])
    places = np.stack([np.bincount(orders[:, j], minlength=n) for j in range(n)])
    assert ((places - 20) ** 2 / 20).sum() / (n - 1) ** 2 == pytest.approx(1, abs=0.04)
    steps = np.bincount((np.diff(orders, axis=1) % n).ravel(), minlength=n)[1:]
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() / (n - 2) == pytest.approx(1, abs=0.5)


def test_epochs_and_seeds_are_unrelated() -> None:
    n = 100_000
    orders = [shuffle(n, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**64, 0), (-1, 0))]
    correlation = np.corrcoef([np.arange(n), *orders])
    assert np.abs(correlation - np.eye(6)).max() < 6 / np.sqrt(n)


def test_each_image_comes_once_an_epoch_whatever_the_batch() -> None:
    stream = ImageStream(images(50), seed=3)
    whole = stream.index(0, 150)
    for epoch in range(3):
        assert sorted(whole[50 * epoch : 50 * epoch + 50]) == list(range(50))
    assert whole[:50].tolist() != whole[50:100].tolist()
    for size in (1, 7, 64):
        pieces = [stream.batch(first, size).index.numpy() for first in range(0, 150, size)]
        assert np.array_equal(np.concatenate(pieces)[:150], whole)


def test_a_batch_holds_the_images_it_names() -> None:
    batch = ImageStream(images(700), seed=0).batch(650, 100)
    number = batch.pixels[:, 0, 0, 0].long() + 256 * batch.pixels[:, 0, 0, 1].long()
    assert batch.first == 650
    assert batch.pixels.dtype == torch.uint8
    assert batch.pixels.shape == (100, 1, 4, 4)
    assert torch.equal(number, batch.index)
    assert batch.conditions.label is not None
    assert torch.equal(batch.conditions.label, batch.index % 3)
    assert ImageStream(images(5, labelled=False), 0).batch(0, 2).conditions.label is None


@pytest.mark.parametrize("n", [1, 7, 99])
def test_sets_smaller_than_a_batch_work(n: int) -> None:
    counts = np.bincount(ImageStream(images(n), seed=1).batch(0, 32 * n).index.numpy(), minlength=n)
    assert counts.tolist() == [32] * n


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(RequestError, match="no images"):
        ImageStream(images(0), 0)


def test_changing_a_batch_does_not_change_the_set() -> None:
    data = images(8)
    before = data.pixels.copy()
    ImageStream(data, 0).batch(0, 8).pixels.zero_()
    assert np.array_equal(data.pixels, before)


def test_seeking_far_costs_nothing() -> None:
    stream = ImageStream(images(9000), seed=0)
    stream.batch(0, 64)
    for position in (10**9, 10**12, 10**15):
        seconds = []
        for _ in range(50):
            start = time.perf_counter()
            stream.batch(position, 64)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 2e-3  # measured 8e-5


def test_fingerprint_sees_pixels_labels_and_order() -> None:
    base = images(6)
    assert base.labels is not None
    swapped = ImageSet.labelled(base.pixels[::-1], base.labels, base.names, base.classes)
    relabelled = ImageSet.labelled(base.pixels, base.labels[::-1], base.names, base.classes)
    assert images(6).fingerprint == base.fingerprint
    assert len({base.fingerprint, swapped.fingerprint, relabelled.fingerprint, images(7).fingerprint}) == 4


@given(st.integers(0, 10**9), st.integers(0, 300))
def test_what_is_spread_has_both_ends_and_gaps_that_differ_by_one_at_most(n: int, most: int) -> None:
    rows = evenly_spaced(n, most)
    assert len(rows) == min(n, most)
    assert rows.dtype == np.int64
    if len(rows):
        assert rows[0] == 0
    if len(rows) > 1:
        gaps = np.diff(rows)
        assert rows[-1] == n - 1
        assert gaps.min() >= 1
        assert gaps.max() - gaps.min() <= 1
    if n <= most:
        assert rows.tolist() == list(range(n))


def test_what_is_spread_is_rounded_to_the_nearest() -> None:
    assert evenly_spaced(100, 8).tolist() == [0, 14, 28, 42, 57, 71, 85, 99]


@pytest.mark.parametrize("labelled", [True, False])
def test_images_on_a_device_are_those_of_the_stream(labelled, monkeypatch):
    """Over epochs, in and between the parts that rows and pixels are copied in, and back again as after a resume."""
    monkeypatch.setattr(streams, "_WINDOW", 20)
    monkeypatch.setattr(streams, "_CHUNK", 300)
    stream = ImageStream(images(50, labelled), 3)
    kept = DeviceStream(stream, torch.device("cpu"))
    for first, size in ((0, 8), (8, 8), (16, 8), (48, 5), (130, 25), (7, 1), (2**60, 4)):
        mine, theirs = kept.batch(first, size), stream.batch(first, size)
        assert torch.equal(mine.pixels, theirs.pixels)
        assert torch.equal(mine.index, theirs.index)
        assert mine.first == theirs.first
        assert (mine.conditions.label is None) == (theirs.conditions.label is None) == (not labelled)
        assert not labelled or torch.equal(mine.conditions.label, theirs.conditions.label)


def test_only_a_gpu_keeps_images_and_only_few():
    stream = ImageStream(images(50), 0)
    assert DeviceStream.open(stream, torch.device("cpu"), 10**12) is stream
    assert DeviceStream.open(stream, torch.device("cuda"), 1000) is stream  # of which 800 bytes are too much
    assert DeviceStream.fits(50, 1000)
    assert not DeviceStream.fits(51, 1000)
