"""Embedded colour profiles: made by hand, and checked against colour science done by hand."""

import struct
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from test_data_decode import decoded, photograph, saved
from unfog.data.decode import to_srgb

BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])
D50, D65 = np.array([0.9642, 1, 0.8249]), np.array([0.95046, 1, 1.08906])
SRGB_PRIMARIES = [(0.64, 0.33), (0.30, 0.60), (0.15, 0.06)]
P3_PRIMARIES = [(0.68, 0.32), (0.265, 0.69), (0.15, 0.06)]
ADOBE_PRIMARIES = [(0.64, 0.33), (0.21, 0.71), (0.15, 0.06)]


def linear(x: np.ndarray) -> np.ndarray:
    """sRGB 0..255 to light 0..1 (IEC 61966-2-1)."""
    x = np.asarray(x) / 255
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)


def encoded(light: np.ndarray) -> np.ndarray:
    light = np.clip(light, 0, 1)
    return 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def to_xyz(primaries: Sequence[tuple[float, float]]) -> np.ndarray:
    """Matrix from linear RGB with white D65 to XYZ."""
    columns = np.array([[x / y, 1, (1 - x - y) / y] for x, y in primaries]).T
    matrix: np.ndarray = columns * np.linalg.solve(columns, D65)
    return matrix


def adapted(xyz: np.ndarray, white: np.ndarray, to: np.ndarray) -> np.ndarray:
    """XYZ columns under one white, as they look under another (Bradford)."""
    matrix: np.ndarray = np.linalg.inv(BRADFORD) @ np.diag(BRADFORD @ to / (BRADFORD @ white)) @ BRADFORD @ xyz
    return matrix


def fixed(values: np.ndarray) -> bytes:
    return b"".join(struct.pack(">i", round(float(value) * 65536)) for value in values)


def profile(space: bytes, tags: Mapping[bytes, bytes], kind: bytes = b"mntr", pcs: bytes = b"XYZ ") -> bytes:
    """An ICC file, version 2.4."""
    described = {b"desc": b"desc\0\0\0\0" + struct.pack(">I5s", 5, b"mine\0") + bytes(78), **tags}
    table, body, start = b"", b"", 132 + 12 * (len(described) + 1)
    for name, data in {**described, b"wtpt": b"XYZ \0\0\0\0" + fixed(D50)}.items():
        table += struct.pack(">4sII", name, start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = struct.pack(">I4xI4s4s4s6H4s", start + len(body), 0x02400000, kind, space, pcs, 2024, 1, 1, 0, 0, 0, b"acsp")
    return (head + bytes(28) + fixed(D50)).ljust(128, b"\0") + struct.pack(">I", len(described) + 1) + table + body


def curve(values: Sequence[int] | np.ndarray) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">I", len(values)) + np.asarray(values, ">u2").tobytes()


def gamma(power: float) -> bytes:
    return curve([round(power * 256)])


SRGB_CURVE = curve(np.round(65535 * linear(np.linspace(0, 255, 1024))))


def rgb_profile(primaries: Sequence[tuple[float, float]], tone: bytes = SRGB_CURVE) -> bytes:
    columns = adapted(to_xyz(primaries), D65, D50).T
    light = {f"{name}XYZ".encode(): b"XYZ \0\0\0\0" + fixed(column) for name, column in zip("rgb", columns)}
    return profile(b"RGB ", {**light, **{f"{name}TRC".encode(): tone for name in "rgb"}})


def grey_profile(power: float) -> bytes:
    return profile(b"GRAY", {b"kTRC": gamma(power)})


def cmyk_profile(corners: Mapping[tuple[int, ...], tuple[int, int, int]]) -> bytes:
    """Inks to Lab by a table of two levels an ink (ICC.1, lut8Type); `corners` in bytes, L 0..255, a and b + 128."""
    ramp = bytes(range(256))
    table = b"".join(bytes(corners[c, m, y, k]) for c in (0, 1) for m in (0, 1) for y in (0, 1) for k in (0, 1))
    lut = b"mft1\0\0\0\0\4\3\2\0" + fixed(np.eye(3).ravel()) + ramp * 4 + table + ramp * 3
    return profile(b"CMYK", {b"A2B0": lut}, b"prtr", b"Lab ")


def inks() -> bytes:
    """A press whose black is a dark grey, as in truth, and whose inks are grey but for magenta."""
    return cmyk_profile(
        {
            (c, m, y, k): (30 if k else 255 - 60 * (c + m + y), 128 + 60 * m * (not k), 128)
            for c in (0, 1)
            for m in (0, 1)
            for y in (0, 1)
            for k in (0, 1)
        }
    )


P3, SRGB = rgb_profile(P3_PRIMARIES), rgb_profile(SRGB_PRIMARIES)
PILLOW_SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def by_hand(x: np.ndarray, primaries: Sequence[tuple[float, float]], light: np.ndarray) -> np.ndarray:
    """RGB of these primaries, [..., 3] as light 0..1, to sRGB 0..255; what sRGB cannot show is cut off."""
    matrix = np.linalg.solve(to_xyz(SRGB_PRIMARIES), to_xyz(primaries))
    return encoded(light @ matrix.T)


def test_the_matrix_by_hand_is_the_published_one() -> None:
    matrix = np.linalg.solve(to_xyz(SRGB_PRIMARIES), to_xyz(P3_PRIMARIES))
    published = [[1.2249, -0.2247, 0], [-0.0420, 1.0419, 0], [-0.0197, -0.0786, 1.0979]]  # CSS Color 4
    assert np.abs(matrix - published).max() < 5e-4


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_wide_gamut_becomes_srgb(kind: str) -> None:
    lossless = {"PNG": {}, "TIFF": {}, "JPEG": {"quality": 95}, "WEBP": {"lossless": True}}[kind]
    opener = saved(
        Image.fromarray(noise(64, 64, 3) if kind != "JPEG" else photograph(64, 64)), kind, **lossless, icc_profile=P3
    )
    stored = np.asarray(opener())
    pixels, facts = decoded(opener, 64)
    assert facts.actions == ["srgb"]
    assert np.abs(pixels.transpose(1, 2, 0) - by_hand(stored, P3_PRIMARIES, linear(stored))).max() < 1
    assert np.abs(pixels.transpose(1, 2, 0) - stored).max() > 8


def test_adobe_rgb_becomes_srgb() -> None:
    x = noise(32, 32, 3)
    pixels, _ = decoded(saved(Image.fromarray(x), icc_profile=rgb_profile(ADOBE_PRIMARIES, gamma(2.19921875))), 32)
    expected = by_hand(x, ADOBE_PRIMARIES, (x / 255) ** 2.19921875)
    assert np.abs(pixels.transpose(1, 2, 0) - expected).max() < 1.5


@pytest.mark.slow
def test_resizing_before_converting_is_the_same_on_photographs() -> None:
    """Channels that go together, as in photographs. (Where colours leave sRGB, it clips less, for the better.)"""
    x = photograph(400, 400).astype(float)
    x = (0.75 * x.mean(2, keepdims=True) * 3**0.5 - 128 * 0.75 * (3**0.5 - 1) + 0.25 * x).clip(0, 255).astype(np.uint8)
    for primaries, tone in ((P3_PRIMARIES, SRGB_CURVE), (ADOBE_PRIMARIES, gamma(2.2))):
        wide = rgb_profile(primaries, tone)
        expected, _ = decoded(saved(to_srgb(Image.fromarray(x), wide)[0]), 64)
        pixels, facts = decoded(saved(Image.fromarray(x), icc_profile=wide), 64)
        assert facts.actions == ["srgb", "resized"]
        assert np.sqrt(((pixels - expected) ** 2).mean()) < 1  # each of the two rounds twice
        assert np.abs(pixels - decoded(saved(Image.fromarray(x)), 64)[0]).mean() > 1


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
@pytest.mark.parametrize("srgb", [SRGB, PILLOW_SRGB])
def test_a_profile_that_is_srgb_changes_nothing(srgb: bytes, mode: str) -> None:
    image = Image.fromarray(noise(16, 16, 3)).convert(mode)
    pixels, facts = decoded(saved(image, icc_profile=srgb), 16)
    assert np.array_equal(pixels, decoded(saved(image), 16)[0])
    assert "srgb" not in facts.actions


def test_greys_keep_their_tone_and_stay_grey() -> None:
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for power in (1.0, 1.8, 2.2):
        pixels, facts = decoded(saved(Image.fromarray(ramp), icc_profile=grey_profile(power)), 16, channels=1)
        assert facts.actions == ["srgb"]
        assert np.abs(pixels[0] - encoded((ramp / 255) ** power)).max() < 1.5
    neutral = Image.fromarray(np.stack([ramp] * 3, -1))
    pixels, facts = decoded(saved(neutral, icc_profile=P3), 16)
    assert facts.grey
    assert np.array_equal(pixels[0], ramp)
    sixteen = Image.fromarray(ramp.astype(np.uint16) * 257)
    pixels, facts = decoded(saved(sixteen, icc_profile=grey_profile(1.8)), 16, channels=1)
    assert facts.actions == ["sixteen_bit", "srgb"]
    assert np.abs(pixels[0] - encoded((ramp / 255) ** 1.8)).max() < 1.5


def test_a_press_profile_says_what_inks_look_like() -> None:
    """Paper, solid black, 20% of magenta (by hand: Lab of the table, D50): not what inverting the inks makes of it."""
    amounts = np.zeros((8, 24, 4), np.uint8)
    amounts[:, 8:16, 3], amounts[:, 16:, 1] = 255, 51
    opener = saved(Image.fromarray(amounts, "CMYK"), "TIFF", icc_profile=inks())
    pixels, facts = decoded(opener, 8)
    assert facts.actions == ["cmyk", "srgb", "cropped"]
    square = to_srgb(opener(), inks())[0]
    lightness, a = (255 - 12) / 255 * 100, 12.0
    f = (lightness + 16) / 116
    xyz = D50 * np.array([f + a / 500, f, f]) ** 3
    magenta = encoded(np.linalg.solve(to_xyz(SRGB_PRIMARIES), adapted(xyz, D50, D65)))
    found = np.asarray(square)[4, [4, 12, 20]]
    assert np.abs(found[0].astype(int) - 255).max() <= 1
    assert found[1].max() <= 1
    assert np.abs(found[2] - magenta).max() < 2.5
    assert np.abs(pixels[:, 4, 4] - found[1]).max() == 0  # the centre square is the black one
    assert np.abs(np.asarray(opener().convert("RGB"))[4, 20] - magenta).max() > 10


def test_the_background_is_srgb_whatever_lies_on_it() -> None:
    rgba = np.dstack([noise(16, 16, 3), np.where(np.arange(16) < 8, 0, 255) * np.ones((16, 1))]).astype(np.uint8)
    pixels, facts = decoded(saved(Image.fromarray(rgba), icc_profile=P3), 16, background=(255, 0, 40))
    assert facts.actions == ["srgb", "flattened"]
    assert (pixels[:, :, :8] == np.array([255, 0, 40])[:, None, None]).all()
    x = rgba[:, 8:, :3]
    assert np.abs(pixels[:, :, 8:].transpose(1, 2, 0) - by_hand(x, P3_PRIMARIES, linear(x))).max() < 1


BROKEN = {
    "cut": P3[:300],
    "noise": bytes(noise(600)),
    "nothing": b"\0",
    "of another kind of image": inks(),
    "huge": P3 + bytes(5_000_000),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_profile_does_not_cost_the_image(broken: bytes) -> None:
    x = photograph(16, 16)
    pixels, facts = decoded(saved(Image.fromarray(x), "TIFF", icc_profile=broken), 16)
    assert facts.actions == ["profile_ignored"]
    assert np.array_equal(pixels, x.transpose(2, 0, 1))
    inked = Image.fromarray(x).convert("CMYK")
    pixels, facts = decoded(saved(inked, "TIFF", icc_profile=P3), 16)
    assert facts.actions == ["cmyk", "profile_ignored"]
    assert np.array_equal(pixels, x.transpose(2, 0, 1))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(P3) - 1), st.integers(0, 255)), min_size=1, max_size=6), st.data())
def test_no_damage_to_a_profile_raises(flips: list[tuple[int, int]], data: st.DataObject) -> None:
    for whole, mode in ((P3, "RGB"), (inks(), "CMYK"), (grey_profile(2.0), "L")):
        damaged = bytearray(whole)
        for place, value in flips:
            damaged[place % len(damaged)] = value
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged
        converted, actions = to_srgb(Image.new(mode, (2, 2)), bytes(damaged))
        assert converted.mode == ("L" if mode == "L" else "RGB")
        assert actions in ([], ["srgb"], ["profile_ignored"])


@pytest.mark.slow
def test_threads_agree_with_one() -> None:
    def convert(i: int) -> bytes:
        # Few colours, so that littleCMS's memory of the last pixel matters; a profile each three share.
        image = Image.fromarray(noise(40, 40, 3, seed=i) // 128 * 127)
        return to_srgb(image, rgb_profile(P3_PRIMARIES, gamma(1.5 + i % 70 / 64)))[0].tobytes()

    expected = [convert(i) for i in range(210)]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            assert list(pool.map(convert, range(210))) == expected


@pytest.mark.slow
def test_pillow_without_littlecms_still_decodes() -> None:
    """In a process of its own, as Pillow decides when it is imported."""
    script = """
import sys
sys.modules["PIL._imagingcms"] = None
from PIL import Image
from unfog.data.decode import to_srgb
image = Image.new("RGB", (4, 4), "red")
converted, actions = to_srgb(image, sys.stdin.buffer.read())
assert actions == ["profile_ignored"], actions
assert converted.tobytes() == image.tobytes()
"""
    subprocess.run([sys.executable, "-c", script], input=P3, check=True, timeout=300)


def test_a_png_profile_that_does_not_unpack_is_noted() -> None:
    data = BytesIO()
    Image.fromarray(photograph(16, 16)).save(data, "PNG", icc_profile=P3)
    png = data.getvalue()
    start = png.index(b"iCCP") - 4
    (length,) = struct.unpack_from(">I", png, start)
    spoilt = b"iCCPmine\0\0" + b"\xff" * (length - 6)
    damaged = png[: start + 4] + spoilt + struct.pack(">I", zlib.crc32(spoilt)) + png[start + 12 + length :]
    pixels, facts = decoded(lambda: Image.open(BytesIO(damaged)), 16)
    assert facts.actions == ["profile_ignored"]
    assert np.array_equal(pixels, photograph(16, 16).transpose(2, 0, 1))
