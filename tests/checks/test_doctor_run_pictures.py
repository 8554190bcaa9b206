"""Drawn pictures against training images, and against the data as a whole: what is planted is found, and no more."""

import numpy as np
import pytest
import torch

from unfog.checks.run.sample_checks import (  # each check is given pictures that no run has to draw
    _check_blank,
    _check_color_cast,
    _check_detail,
    _check_saturation,
    _color_statistics,
    _comparison_figure,
)
from unfog.inference.memorization import (  # each check is given pictures that no run has to draw
    COPY,
    Nearness,
    _find_nearest,
    _pixel_features,
    check_memorization,
)

# Copies.


def blobs(count, seed, size=16):
    """Pictures of three random waves each, uint8 [N, 3, S, S]."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] / size * 2 * np.pi
    waves = np.zeros((count, 3, size, size))
    for _ in range(3):
        a, b, phase = random.uniform(-2, 2, (3, count, 1, 1))
        waves += random.normal(0, 35, (count, 3, 1, 1)) * np.sin(a * x + b * y + 3 * phase)[:, None]
    return (128 + waves).clip(0, 255).astype(np.uint8)


def test_the_nearest_are_those_of_brute_force_mirrored_or_not():
    bank, queries = blobs(300, 0), blobs(5, 1)
    queries[0] = bank[17][:, :, ::-1]
    queries[1] = bank[250]
    found = _find_nearest(torch.from_numpy(queries), bank)
    plain, mirrored = (_pixel_features(torch.from_numpy(b.copy())).double() for b in (bank, bank[..., ::-1]))
    wanted = _pixel_features(torch.from_numpy(queries)).double()
    both = torch.minimum(*((wanted[:, None] - b[None]).square().mean(2).sqrt() for b in (plain, mirrored)))
    assert torch.equal(found.image[:, :10], both.argsort(1)[:, :10])
    assert torch.allclose(found.distance.double(), both.sort(1).values[:, : found.distance.shape[1]], atol=1e-3)
    assert found.image[0, 0] == 17
    assert found.image[1, 0] == 250
    assert found.distance[:2, 0].max() < 1e-3
    itself = _find_nearest(torch.from_numpy(bank[:5]), bank, rows=range(5))
    assert not (itself.image == torch.arange(5)[:, None]).any()
    assert itself.distance.isfinite().all()


def test_the_nearest_are_found_across_chunks(monkeypatch):
    bank, queries = blobs(100, 0), torch.from_numpy(blobs(4, 1))
    whole = _find_nearest(queries, bank)
    monkeypatch.setattr("unfog.inference.memorization.CHUNK", 7)
    parts = _find_nearest(queries, bank)
    assert torch.equal(whole.image, parts.image)
    assert torch.allclose(whole.distance, parts.distance)


def verdict(drawn, bank, unseen=None):
    found = _find_nearest(torch.from_numpy(drawn), bank)
    if unseen is None:
        rows = range(min(len(bank), 256))
        usual = _find_nearest(torch.from_numpy(bank[: len(rows)]), bank, rows=rows)
    else:
        usual = _find_nearest(torch.from_numpy(unseen), bank)
    pictures = drawn.transpose(0, 2, 3, 1)
    matches = bank[found.image[:, 0].numpy()].transpose(0, 2, 3, 1)
    return check_memorization(pictures, matches, Nearness(found, usual, "others", len(bank)))


@pytest.mark.parametrize("count", [20, 140, 1000])
@pytest.mark.slow
def test_copies_are_told_from_fresh_pictures_of_the_same_kind(count):
    bank = blobs(count, 0)
    random = np.random.default_rng(9)
    copies = bank[random.choice(count, 64)] + random.normal(0, 8, (64, 3, 16, 16))
    assert verdict(copies.clip(0, 255).astype(np.uint8), bank).severity == "warning"
    assert verdict(copies[..., ::-1].clip(0, 255).astype(np.uint8), bank).severity == "warning"
    for seed in range(1, 7):
        assert verdict(blobs(64, seed), bank).severity == "fine"
        assert verdict(blobs(64, seed), bank, blobs(60, 100 + seed)).severity == "fine"


@pytest.mark.slow
def test_near_duplicates_in_the_data_are_not_held_against_the_network():
    twice = np.concatenate([blobs(200, 0), (blobs(200, 0) * 0.98).astype(np.uint8)])
    like_the_data = np.concatenate([blobs(32, 3), (twice[:32] * 0.97).astype(np.uint8)])
    assert verdict(like_the_data, twice).severity == "fine"
    copied = verdict(twice[100:164], twice)
    assert copied.facts["unseen_with_relatives"] > 0.9
    assert copied.severity == "warning", "these are copies whatever relatives others have"


def of_a_kind(count, kinds, seed, noise=12.0):
    """Pictures of so many kinds, each a pattern with its own noise: an unseen one is near to others of its kind."""
    patterns = np.random.default_rng(1).integers(0, 255, (kinds, 1, 8, 8)).repeat(2, 2).repeat(2, 3)
    random = np.random.default_rng(seed)
    pixels = patterns[random.integers(0, kinds, count)] + random.normal(0, noise, (count, 1, 16, 16))
    return pixels.clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize(("count", "kinds"), [(300, 150), (1000, 600), (600, 300)])
@pytest.mark.slow
def test_copies_are_found_among_pictures_with_near_relatives(count, kinds):
    bank, random = of_a_kind(count, kinds, 0), np.random.default_rng(5)
    assert verdict(bank[random.choice(count, 64)], bank).severity == "warning"
    some = np.concatenate([bank[random.choice(count, 20)], of_a_kind(44, kinds, 6)])
    assert verdict(some, bank).severity == "warning"
    for seed in range(10, 15):
        fresh = verdict(of_a_kind(64, kinds, seed), bank, of_a_kind(50, kinds, 100 + seed))
        assert fresh.severity == "fine"
        assert "copy a training image" not in fresh.evidence
        assert verdict(of_a_kind(64, kinds, seed), bank).severity == "fine"
        # A network leaves out the noise of a photograph, which brings it nearer to all of them.
        assert verdict(of_a_kind(64, kinds, seed, 2.0), bank, of_a_kind(50, kinds, 200 + seed)).severity == "fine"


def test_pictures_that_are_all_alike_are_no_copies_of_each_other():
    bank = np.full((200, 3, 16, 16), 120, np.uint8) + np.random.default_rng(0).integers(0, 3, (200, 3, 1, 1)).astype(
        np.uint8
    )
    alike = verdict(bank[:64], bank)
    assert alike.severity == "fine"
    limit = f"{alike.facts['limit']:.2g}"
    assert (
        f": your images are alike among themselves, so copies would lie below {limit} in place of 0.5" in alike.evidence
    )
    assert "; copies would lie below 0.5 (60 searched)" in verdict(blobs(32, 3), blobs(60, 0)).evidence


@pytest.mark.slow
def test_a_few_copies_among_many_are_a_hint():
    bank = blobs(2000, 0)
    mixed = np.concatenate([blobs(60, 5), bank[:4]])
    found = verdict(mixed, bank, blobs(256, 6))
    assert (found.severity, found.facts["copies"]) == ("hint", 4)
    assert found.figures[0].image is not None
    assert COPY == 0.5


# Drawn pictures against data.


def solid(count, seed, spread=60, shift=(0, 0, 0)):
    random = np.random.default_rng(seed)
    colours = random.normal(120, spread, (count, 1, 1, 3)) + random.normal(0, 2, (count, 16, 16, 3)) + shift
    return colours.clip(0, 255).astype(np.uint8)


def tinted(drawn, data, labels=(None, None)):
    return _check_color_cast(
        _color_statistics(drawn, labels[0]), _color_statistics(data, labels[1]), _comparison_figure(drawn, data)
    )


@pytest.mark.slow
def test_solid_colours_are_within_tolerance_and_tinted_ones_are_not():
    data = solid(300, 0, spread=30)
    severities = [tinted(solid(64, seed, spread=30), data).severity for seed in range(1, 41)]
    assert severities.count("warning") == 0
    assert severities.count("hint") <= 1
    for seed in range(1, 11):
        found = tinted(solid(64, seed, spread=30, shift=(30, 0, 0)), data)
        assert found.severity == "warning"
        assert "in red" in found.evidence
        dark = tinted(solid(64, seed, spread=20, shift=(-35, -35, -35)), data)
        assert dark.severity == "warning"
        assert dark.facts["brightness"][0] < -20


def test_a_faint_tint_shows_among_pictures_of_all_brightnesses():
    random = np.random.default_rng(4)

    def grey(count, shift=(0, 0, 0)):
        level = random.uniform(20, 235, (count, 1, 1, 1)) + random.normal(0, 3, (count, 8, 8, 3)) + shift
        return level.clip(0, 255).astype(np.uint8)

    assert tinted(grey(64), grey(300)).severity in ("fine", "hint")
    assert tinted(grey(64, (0, 15, 0)), grey(300)).severity == "warning"


def test_classes_of_other_sizes_are_no_tint():
    random = np.random.default_rng(0)

    def of_classes(labels):
        pixels = np.where(labels[:, None, None, None] == 0, 40, 200) + random.normal(0, 10, (len(labels), 16, 16, 3))
        return pixels.clip(0, 255).astype(np.uint8)

    rare, balanced = (random.random(2000) < 0.05).astype(np.int64), np.arange(64) % 2
    found = tinted(of_classes(balanced), of_classes(rare), (balanced, rare))
    assert found.severity == "fine"
    assert found.facts["brightness"][1] < 2, "what varies between the classes is not an error"


def test_noise_blank_and_clipped_pictures_are_found():
    data = blobs(200, 0).transpose(0, 2, 3, 1)
    fresh, random = blobs(64, 1).transpose(0, 2, 3, 1), np.random.default_rng(0)
    shown = _comparison_figure(fresh, data)
    assert _check_blank(_color_statistics(fresh), _color_statistics(data), shown).severity == "fine"
    noise = (fresh + random.normal(0, 40, fresh.shape)).clip(0, 255).astype(np.uint8)
    assert "noise" in _check_blank(_color_statistics(noise), _color_statistics(data), shown).evidence
    assert (
        _check_blank(_color_statistics(np.full_like(fresh, 90)), _color_statistics(data), shown).severity == "warning"
    )
    assert (
        _check_blank(_color_statistics(np.full_like(fresh, 90)), _color_statistics(data), shown, "wait").severity
        == "hint"
    )
    harsh = np.where(fresh > 128, 255, 0).astype(np.uint8)
    assert _check_saturation(_color_statistics(harsh), _color_statistics(data)).severity == "warning"
    assert _check_saturation(_color_statistics(fresh), _color_statistics(data)).severity == "fine"
    assert _check_saturation(_color_statistics(harsh), _color_statistics(harsh[:32])).severity == "fine"


def detail_finding(drawn, data, unready=""):
    mine, theirs = (x.transpose(0, 2, 3, 1) for x in (drawn, data))
    return _check_detail(_color_statistics(mine), _color_statistics(theirs), unready)


@pytest.mark.slow
def test_smooth_and_grainy_pictures_are_found_by_their_spectrum():
    random = np.random.default_rng(3)

    def grained(count, seed, amount):
        images = blobs(count, seed) + random.normal(0, amount, (count, 3, 16, 16))
        return images.clip(0, 255).astype(np.uint8)

    data = grained(500, 0, 12)
    for seed in range(1, 5):
        alike = detail_finding(grained(64, seed, 12), data)
        assert alike.severity == "fine"
        assert 0.85 < alike.facts["ratio"] < 1.15
    smooth, grainy = detail_finding(grained(64, 5, 8), data), detail_finding(grained(64, 6, 18), data)
    assert smooth.severity == grainy.severity == "hint"
    assert "too smooth" in smooth.evidence
    assert "larger network" in smooth.remedy
    assert "grainy" in grainy.evidence
    assert "<svg" in smooth.figures[0].svg
    assert detail_finding(grained(64, 5, 8), data, "train longer first").remedy == "train longer first"


def test_detail_counts_every_class_alike():
    """Of a class with much detail and one with little; as many of both are drawn, whatever the data has."""
    random = np.random.default_rng(4)
    rough, plain = (
        (128 + random.normal(0, amount, (300, 16, 16, 1))).clip(0, 255).astype(np.uint8) for amount in (30, 4)
    )
    data, labels = np.concatenate([rough[:30], plain[:270]]), np.repeat([0, 1], [30, 270])
    drawn, own = np.concatenate([rough[100:130], plain[270:]]), np.repeat([0, 1], [30, 30])
    counted = [_color_statistics(x, y) for x, y in ((drawn, own), (data, labels))]
    assert _check_detail(*counted).severity == "fine"
    unlabelled = [_color_statistics(x) for x in (drawn, data)]
    assert _check_detail(*unlabelled).severity == "hint"


def test_flat_pictures_and_flat_data_have_a_finding_too():
    flat = np.full((20, 1, 16, 16), 100, np.uint8)
    assert detail_finding(flat, flat).severity == "fine"
    assert "too smooth" in detail_finding(flat, blobs(20, 0)[:, :1]).evidence
