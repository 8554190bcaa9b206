"""Decoding one image: the canonical resize, orientation, bit depth, transparency."""

import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hostile import png
from unfog.data import decode as decoding
from unfog.data.decode import ImageInfo, decode
from unfog.data.scan import read_size
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import open_bytes, open_image
from unfog.values.image_format import ImageFormat

WHITE = (255, 255, 255)
SMALL, SMALL_GREY = ImageFormat(3, 16, 16), ImageFormat(1, 16, 16)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> Callable[[], Image.Image]:
    data = BytesIO()
    image.save(data, kind, **options)
    return lambda: Image.open(BytesIO(data.getvalue()))


def decoded(
    opener: Callable[[], Image.Image], size: int, channels: int = 3, background: tuple[int, int, int] = WHITE
) -> tuple[np.ndarray, ImageInfo]:
    pixels, facts = decode(opener, ImageFormat(channels, size, size), background)
    assert pixels.shape == (channels, size, size)
    assert pixels.dtype == np.uint8
    return pixels.astype(int), facts


@cache
def photograph(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Noise with the 1/f spectrum of photographs: uint8 [H, W, 3]."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None, None], np.fft.rfftfreq(width)[None, :, None])
    frequency[0, 0] = 1
    noise = np.fft.rfft2(rng.normal(size=(height, width, 3)), axes=(0, 1)) / frequency
    x = np.fft.irfft2(noise, s=(height, width), axes=(0, 1))
    pixels: np.ndarray = np.clip((x - x.mean()) / x.std() * 45 + 128, 0, 255).round().astype(np.uint8)
    return pixels


def lanczos_square(pixels: np.ndarray, size: int) -> np.ndarray:
    """The centre square resized in floating point, straight from the kernel: [H, W, C] -> [C, size, size]."""
    short = min(pixels.shape[:2])

    def weights(length: int) -> np.ndarray:
        scale = short / size
        centre = (length - short) // 2 + (np.arange(size)[:, None] + 0.5) * scale
        x = (np.arange(length) + 0.5 - centre) / max(scale, 1)
        kernel = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
        normalised: np.ndarray = kernel / kernel.sum(1, keepdims=True)
        return normalised

    rows, columns = (weights(length) for length in pixels.shape[:2])
    square: np.ndarray = np.einsum("ih,hwc,jw->cij", rows, pixels.astype(float), columns, optimize=True)
    return square.clip(0, 255)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize(
    ("width", "height", "size"), [(1201, 897, 32), (900, 1200, 64), (2000, 1500, 64), (300, 203, 128), (40, 50, 64)]
)
@pytest.mark.slow
def test_resize_agrees_with_floating_point_antialiasing(kind: str, width: int, height: int, size: int) -> None:
    opener = saved(Image.fromarray(photograph(width, height)), kind, **({"quality": 95} if kind == "JPEG" else {}))
    pixels, facts = decoded(opener, size)
    error = pixels - lanczos_square(np.asarray(opener()), size)
    assert np.sqrt((error**2).mean()) < 0.6
    assert abs(error.mean()) < 0.25
    assert facts.actions == ["cropped", "upscaled" if min(width, height) < size else "resized"]


def test_the_reference_can_fail() -> None:
    """An aliased resize, or one off by a pixel of the original in eight, is told from the right one."""
    x = photograph(512, 512)
    expected = lanczos_square(x, 64)
    aliased = x[4::8, 4::8].transpose(2, 0, 1)
    shifted = lanczos_square(np.roll(x, 1, axis=1), 64)
    for wrong in (aliased, shifted):
        assert np.sqrt(((wrong - expected) ** 2).mean()) > 1.2


def test_an_image_of_the_right_size_is_not_touched() -> None:
    x = photograph(32, 45)
    pixels, facts = decoded(saved(Image.fromarray(x)), 32)
    assert np.array_equal(pixels, x[6:38].transpose(2, 0, 1))
    assert facts.actions == ["cropped"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone(orientation: int) -> None:
    upright = Image.fromarray(photograph(60, 40))
    undone = [
        None,
        *(Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM),
        *(Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_90, Image.Transpose.TRANSVERSE),
        Image.Transpose.ROTATE_270,
    ][orientation - 1]
    stored = upright if undone is None else upright.transpose(undone)
    tags = Image.Exif()
    tags[0x0112] = orientation
    pixels, facts = decoded(saved(stored, exif=tags), 20)
    expected, _ = decoded(saved(upright), 20)
    assert np.abs(pixels - expected).max() <= 1  # rounding after each direction, in another order
    assert (facts.width, facts.height) == (60, 40)
    assert read_size(saved(stored, exif=tags)) == (60, 40)
    assert ("rotated" in facts.actions) is (orientation != 1)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_not_cost_the_image() -> None:
    opener = saved(Image.fromarray(photograph(16, 16)), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01")
    assert decoded(opener, 16)[1].actions == []


def test_sixteen_bits_are_scaled_by_their_range() -> None:
    values = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    for kind in ("PNG", "TIFF"):
        pixels, facts = decoded(saved(Image.fromarray(values), kind), 16, channels=1)
        assert np.array_equal(pixels[0], np.arange(256).reshape(16, 16))
        assert facts.actions == ["sixteen_bit"]
    pixels, _ = decoded(saved(Image.fromarray(values.astype(np.int32)), "TIFF"), 16, channels=1)
    assert np.array_equal(pixels[0], np.arange(256).reshape(16, 16))


def test_sixteen_bits_are_rounded_to_the_nearest_level() -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    pixels, _ = decoded(saved(Image.fromarray(values), "PNG"), 256, channels=1)
    assert np.array_equal(pixels[0], np.rint(values / 257))


def test_sixteen_bit_colour_is_counted(tmp_path: Path) -> None:
    # Pillow cannot write one: 2 x 2 pixels, big-endian, no filter.
    values = (np.arange(12).reshape(2, 6) * 5000).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    (tmp_path / "rgb16.png").write_bytes(png(2, 2, 16, 2, rows))
    pixels, facts = decoded(partial(Image.open, tmp_path / "rgb16.png"), 2)
    assert facts.actions == ["sixteen_bit"]
    assert np.abs(pixels.transpose(1, 2, 0).reshape(2, 6) - values / 257).max() < 1


def test_a_turned_tiff_is_upright_and_counted_once(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    exif = Image.Exif()
    exif[0x112] = 6
    for suffix in ("tif", "png"):
        Image.fromarray(pixels).save(tmp_path / f"a.{suffix}", exif=exif)
    found = [decode(partial(open_image, tmp_path / f"a.{suffix}"), SMALL, WHITE) for suffix in ("tif", "png")]
    assert [facts.actions for _, facts in found] == [["rotated"], ["rotated"]]
    assert np.array_equal(found[0][0], found[1][0])


def test_twelve_bits_are_scaled_by_their_range(tmp_path: Path) -> None:
    values = (np.arange(256) * 16 + 15).reshape(16, 16)  # to 4,095, two of them in three bytes
    data = int("".join(f"{v:012b}" for v in values.ravel()), 2).to_bytes(384, "big")
    entries = [(256, 16), (257, 16), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, 16), (279, len(data))]
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    offset = struct.pack("<I", 8 + len(data))
    path = tmp_path / "scan.tif"
    path.write_bytes(b"II*\0" + offset + data + struct.pack("<H", len(entries)) + tags + bytes(4))
    pixels, facts = decode(lambda: open_image(path), SMALL_GREY, WHITE)
    assert facts.actions == ["sixteen_bit"]
    assert np.abs(pixels[0].astype(int) - np.arange(256).reshape(16, 16)).max() <= 1


def test_floating_point_is_used_where_its_range_is_known() -> None:
    x = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    for scale in (1, 255):
        pixels, facts = decoded(saved(Image.fromarray(x * np.float32(scale)), "TIFF"), 16, channels=1)
        assert np.array_equal(pixels[0], np.arange(256).reshape(16, 16))
        assert facts.actions == ["float"]
    pixels, _ = decoded(saved(Image.fromarray(x * 2 - 1), "TIFF"), 16, channels=1)
    assert np.array_equal(pixels[0], np.arange(256).reshape(16, 16))
    for wrong, reason in (
        (x * 1.3 - 0.2, "that is neither"),
        (x * 1000, "that is neither"),
        (x * np.float32("nan"), "with NaN"),
    ):
        with pytest.raises(ImageError, match=f"floating point {reason}"):
            decode(saved(Image.fromarray(wrong), "TIFF"), SMALL_GREY, WHITE)
    with pytest.raises(ImageError, match="beyond 16 bits"):
        decode(saved(Image.fromarray(np.array([[-1, 70000]], np.int32)), "TIFF"), ImageFormat(1, 4, 4), WHITE)


def test_hidden_colours_do_not_bleed_when_resized() -> None:
    """A black disc on transparent magenta: every pixel on white must be grey, however it is resized."""
    y, x = np.mgrid[:200, :200] - 100
    inside = (x**2 + y**2 < 60**2)[..., None]
    rgba = np.where(inside, [0, 0, 0, 255], [255, 0, 255, 0]).astype(np.uint8)
    for size in (32, 200, 256):
        pixels, facts = decoded(saved(Image.fromarray(rgba)), size)
        assert facts.grey
        assert pixels[0, 0, 0] == 255
        assert pixels[0, size // 2, size // 2] == 0
        assert "flattened" in facts.actions


def test_partial_transparency_mixes_with_the_background() -> None:
    rgba = np.full((8, 8, 4), (200, 100, 0, 64), np.uint8)
    pixels, _ = decoded(saved(Image.fromarray(rgba)), 8, background=(10, 20, 250))
    expected = np.array([200, 100, 0]) * 64 / 255 + np.array([10, 20, 250]) * 191 / 255
    assert np.abs(pixels[:, 0, 0] - expected).max() <= 1


@pytest.mark.parametrize("kind", ["index", "bytes"])
def test_palette_with_transparency(kind: str) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([255, 0, 255, 0, 0, 255])
    image.paste(0, (0, 0, 4, 8))
    pixels, facts = decoded(saved(image, transparency=0 if kind == "index" else bytes([0, 255])), 8)
    assert facts.actions == ["palette", "flattened"]
    assert (pixels[:, :, :4] == 255).all()
    assert (pixels[:, :, 4:] == np.array([0, 0, 255])[:, None, None]).all()


def test_one_bit_and_grey_with_a_transparent_level() -> None:
    x = np.eye(8, dtype=bool)
    pixels, facts = decoded(saved(Image.fromarray(x)), 8, channels=1)
    assert np.array_equal(pixels[0], x * 255)
    assert facts.mode == "1"
    grey = Image.fromarray(np.where(x, 7, 90).astype(np.uint8))
    pixels, _ = decoded(saved(grey, transparency=7), 8, channels=1)
    assert np.array_equal(pixels[0], np.where(x, 255, 90))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime")]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    opener = saved(frames[0], kind, save_all=True, append_images=frames[1:], **lossless)
    pixels, facts = decoded(opener, 8)
    assert (pixels == np.array([255, 0, 0])[:, None, None]).all()
    assert "first_frame" in facts.actions


def test_cmyk_jpeg_is_not_inverted() -> None:
    x = photograph(64, 64)
    pixels, facts = decoded(saved(Image.fromarray(x).convert("CMYK"), "JPEG", quality=95), 64)
    assert facts.mode == "CMYK"
    assert np.abs(pixels - x.transpose(2, 0, 1)).mean() < 4


def test_grey_is_seen_whatever_the_file_says() -> None:
    grey = photograph(32, 32)[..., 0]
    _, facts = decoded(saved(Image.fromarray(np.stack([grey] * 3, -1)), "JPEG"), 16)
    assert facts.grey
    coloured = np.stack([grey] * 3, -1)
    coloured[5, 5] = (255, 0, 0)
    assert not decoded(saved(Image.fromarray(coloured)), 32)[1].grey
    pixels, facts = decoded(saved(Image.fromarray(coloured)), 32, channels=1)
    assert facts.actions == ["rgb_to_grey"]
    assert pixels[0, 5, 5] == 76  # ITU-R BT.601


@pytest.mark.parametrize(("size", "long"), [((1, 5000), 64), ((30000, 3), 64), ((1, 1), 4)])
def test_extreme_shapes(size: tuple[int, int], long: int) -> None:
    pixels, facts = decoded(saved(Image.new("RGB", size, (1, 2, 3))), long)
    assert (pixels == np.array([1, 2, 3])[:, None, None]).all()
    assert "upscaled" in facts.actions


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF"])
def test_a_truncated_file_is_unusable_wherever_it_ends(kind: str) -> None:
    data = BytesIO()
    Image.fromarray(photograph(64, 64)).save(data, kind)
    whole = data.getvalue()
    for keep in (0.3, 0.6, 0.9):
        part = whole[: int(len(whole) * keep)]
        with pytest.raises(ImageError):
            decode(lambda part=part: Image.open(BytesIO(part)), ImageFormat(3, 32, 32), WHITE)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("progressive", "kind", "turns"), [(False, "JPEG", False), (True, "JPEG", True), (False, "ICO", True)]
)
@pytest.mark.slow
def test_what_takes_the_memory_of_a_large_image_takes_turns(progressive: bool, kind: str, turns: bool) -> None:
    """A progressive JPEG holds the coefficients of all pixels, and an icon may hold more pixels than it says."""
    data = BytesIO()
    Image.new("L", (5000, 5000)).save(data, kind, progressive=progressive)
    assert (decoding._large_image_slot(open_bytes(data.getvalue(), "")) is decoding._large_images) == turns


@pytest.mark.slow
def test_large_images_take_turns() -> None:
    """Thirty-two of them at once, as there may be threads, would need more memory than most machines have."""
    at_once, most, lock = 0, 0, threading.Lock()

    def opener() -> Image.Image:
        image = Image.new("L", (5000, 5000))
        load = image.load

        def slowly() -> object:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            time.sleep(0.02)
            with lock:
                at_once -= 1
            return load()

        image.load = slowly  # type: ignore[method-assign, assignment]
        return image

    with ThreadPoolExecutor(12) as pool:
        decoded = list(pool.map(lambda _: decode(opener, ImageFormat(1, 4, 4), WHITE)[0].shape, range(12)))
    assert decoded == [(1, 4, 4)] * 12
    assert 1 < most <= 4
