"""Images deeper than 8 bits: one range for a set, in files, arrays and objects; order of axes; remedies; pages."""

import io
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from hostile import chunk, png
from unfog.checks.images.image_checks import check_images
from unfog.config.requests.pack import PackRequest
from unfog.config.schema import Config
from unfog.config.spec_strings import parse_value
from unfog.config.toml import update
from unfog.data import cache
from unfog.data.dataset import Dataset
from unfog.data.packs.pack import Pack
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.image_objects import Storing
from unfog.data.sources.registry import open_source
from unfog.data.sources.stored_images import Report, StoredImages
from unfog.errors import RequestError
from unfog.inference.evaluate import load_both
from unfog.pipeline.pack import pack
from unfog.pipeline.skipped_images import data_json, describe_changes
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.serve.run_files import decode_picture

RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)
RNG = np.random.default_rng(0)
TWELVE = RNG.integers(0, 4096, (12, 16, 16)).astype(np.uint16)
TWELVE[:, 0, :2] = 0, 4095
EXPECTED = np.rint(TWELVE * (255 / 4095)).astype(np.uint8)
MEMORY = Data(cache="memory", size=16)


def png16(values: np.ndarray, *chunks: bytes) -> bytes:
    """A PNG of 16 bits, [H, W, C] with C = 1 to 4, as Pillow writes none with colours."""
    height, width, channels = values.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    others = b"".join(chunk(one[:4], one[4:]) for one in chunks)
    return png(width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], rows, before=others)


def tiff16(values: np.ndarray, order: str = "<") -> bytes:
    """An uncompressed TIFF of 16-bit colours [H, W, 3], in this order of bytes."""
    height, width, _ = values.shape
    data = values.astype(f"{order}u2").tobytes()
    entries = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, 8 + len(data)), (259, 3, 1, 1), (262, 3, 1, 2)]
    entries += [(273, 4, 1, 8), (277, 3, 1, 3), (278, 3, 1, height), (279, 4, 1, len(data))]
    tags = b""
    for tag, kind, count, value in entries:
        packed = struct.pack(f"{order}HH", value, 0) if kind == 3 and count == 1 else struct.pack(f"{order}I", value)
        tags += struct.pack(f"{order}HHI", tag, kind, count) + packed
    bits = struct.pack(f"{order}HHH", 16, 16, 16)
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8 + len(data) + 6)
    return start + data + bits + struct.pack(f"{order}H", len(entries)) + tags + bytes(4)


def folder(path: Path, files: dict[str, bytes | Image.Image | np.ndarray]) -> Path:
    path.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (path / name).write_bytes(content)
        else:
            (content if isinstance(content, Image.Image) else Image.fromarray(content)).save(path / name)
    return path


def stored(source: Any, said: list[str] | None = None, value_range: tuple[float, ...] = ()) -> Path:
    return StoredImages.store(
        source, None, Report(said.append if said is not None else lambda _: None), Storing(tuple(value_range))
    )


def prepared(source: Any, **settings: Any) -> Dataset:
    return prepare(open_source(source), replace(MEMORY, **settings))


def tiffs(values: np.ndarray, kind: Any) -> dict[str, Any]:
    return {f"{i:02}.tif": image.astype(kind) for i, image in enumerate(values)}


# Every kind of file, array and object that integers of 12 bits come in.
KINDS: dict[str, Callable[[Path], Any]] = {
    "png": lambda path: folder(path / "s", {f"{i:02}.png": image for i, image in enumerate(TWELVE)}),
    "tiff": lambda path: folder(path / "s", tiffs(TWELVE, np.uint16)),
    "32-bit tiff": lambda path: folder(path / "s", tiffs(TWELVE, np.int32)),
    "big-endian tiff": lambda path: folder(
        path / "s",
        {
            f"{i:02}.tif": Image.frombytes("I;16B", (16, 16), image.astype(">u2").tobytes())
            for i, image in enumerate(TWELVE)
        },
    ),
    "npy": lambda path: (np.save(path / "a.npy", TWELVE), path / "a.npy")[1],
    "big-endian npz": lambda path: (np.savez(path / "a.npz", x=TWELVE.astype(">u2")), path / "a.npz")[1],
    "array": lambda path: stored(TWELVE),
    "array of int64": lambda path: stored(TWELVE.astype(np.int64)[..., None]),
    "list": lambda path: stored(list(TWELVE)),
    "tensors": lambda path: stored([torch.from_numpy(one.astype(np.int32))[None] for one in TWELVE]),
    "Pillow": lambda path: stored([Image.fromarray(one) for one in TWELVE]),
    "Pillow, 32 bits": lambda path: stored([Image.fromarray(one.astype(np.int32)) for one in TWELVE]),
    "Pillow, big-endian": lambda path: stored(
        [Image.frombytes("I;16B", (16, 16), one.astype(">u2").tobytes()) for one in TWELVE]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_twelve_bits_keep_their_levels_in_every_kind_of_source(tmp_path: Path, kind: str) -> None:
    made = prepared(KINDS[kind](tmp_path))
    assert np.array_equal(made.train.pixels[:, 0], EXPECTED)
    assert made.settings.range == (0, 4095)
    assert "use 0 to 4095 (12 bits)" in made.report.line()


@pytest.mark.parametrize(
    ("form", "channels"),
    [("png", 2), ("png", 3), ("png", 4), ("tiff", 3), ("big-endian tiff", 3), ("npy", 3), ("npy", 4)],
)
def test_colours_of_twelve_bits_keep_their_levels(tmp_path: Path, form: str, channels: int) -> None:
    colours = RNG.integers(0, 4096, (6, 16, 16, channels)).astype(np.uint16)
    colours[:, 0, 0] = 4095
    if channels in (2, 4):
        colours[..., -1] = 65535 if form == "png" else 4095  # opaque
    if form == "npy":
        np.save(tmp_path / "a.npy", colours)
        place = tmp_path / "a.npy"
    elif form == "png":
        place = folder(tmp_path / "s", {f"{i}.png": png16(image) for i, image in enumerate(colours)})
    else:
        order = ">" if form.startswith("big") else "<"
        place = folder(tmp_path / "s", {f"{i}.tif": tiff16(image, order) for i, image in enumerate(colours)})
    made = prepared(place)
    opaque = colours[..., : 1 if channels == 2 else 3]
    assert np.array_equal(made.train.pixels.transpose(0, 2, 3, 1), np.rint(opaque * (255 / 4095)).astype(np.uint8))
    assert made.settings.range == (0, 4095)


def test_full_sixteen_bits_and_eight_bits_are_as_they_were(tmp_path: Path) -> None:
    full = RNG.integers(0, 65536, (6, 16, 16, 3)).astype(np.uint16)
    grey = prepared(folder(tmp_path / "grey", {f"{i}.png": image[..., 0] for i, image in enumerate(full)}))
    assert np.array_equal(grey.train.pixels[:, 0], np.rint(full[..., 0] / 257))
    # Of colours, Pillow keeps the high byte.
    colours = prepared(folder(tmp_path / "colours", {f"{i}.png": png16(image) for i, image in enumerate(full)}))
    assert np.array_equal(colours.train.pixels.transpose(0, 2, 3, 1), full >> 8)
    eight = prepared(folder(tmp_path / "eight", {f"{i:02}.png": image // 16 for i, image in enumerate(EXPECTED)}))
    assert np.array_equal(eight.train.pixels[:, 0], EXPECTED // 16)
    for made in (grey, colours, eight):
        assert made.settings.range == ()
        assert "bits)" not in made.report.line()


def test_pixels_of_sixteen_bits_in_all_are_not_deep(tmp_path: Path) -> None:
    colours = RNG.integers(0, 256, (16, 16, 3), np.uint8) & 0xF8
    red, green, blue = (colours[::-1, :, k].astype(np.uint16) >> 3 for k in range(3))
    data = (red << 11 | green << 6 | blue).astype("<u2").tobytes()
    masks = struct.pack("<III", 0xF800, 0x7E0, 0x1F)
    head = struct.pack("<IiiHHIIiiII", 40, 16, 16, 1, 16, 3, len(data), 0, 0, 0, 0) + masks
    bmp = b"BM" + struct.pack("<IHHI", 14 + len(head) + len(data), 0, 0, 14 + len(head)) + head + data
    made = prepared(folder(tmp_path / "s", {f"{i}.bmp": bmp for i in range(4)}))
    assert not made.report.has_deep_images
    assert np.abs(made.train.pixels[0].transpose(1, 2, 0).astype(int) - colours).max() <= 8


@pytest.mark.slow
def test_the_range_of_a_set_of_floats_is_that_of_most_images(tmp_path: Path) -> None:
    x = RNG.random((12, 16, 16)).astype(np.float32)
    x[0, 0, 0], x[1, 0, 0] = 1.0004, -0.0001  # a resize overshoots
    made = prepared(folder(tmp_path / "unit", tiffs(x, np.float32)))
    assert np.array_equal(made.train.pixels[:, 0], np.rint(x * np.float32(255)).clip(0, 255).astype(np.uint8))
    assert "from 0 to 1" in made.report.line()
    bytes_, signed = RNG.random((12, 16, 16)) * 255, RNG.random((12, 16, 16)) * 2 - 1
    bytes_[0] /= 255  # a dark frame
    dark = prepared(folder(tmp_path / "bytes", tiffs(bytes_, np.float32)))
    assert dark.train.pixels[0].max() <= 1
    assert dark.settings.range == (0, 255)
    both = prepared(folder(tmp_path / "signed", tiffs(signed, np.float32)))
    assert abs(float(both.train.pixels.mean()) - 127.5) < 5
    x[3, 0, 0], x[4, 5, 5] = 1.3, np.nan
    for place in (folder(tmp_path / "wrong", tiffs(x, np.float32)), tmp_path / "wrong.npy"):
        if place.suffix:
            np.save(place, x)
        wrong = prepared(place)
        names = {file.name.removesuffix(".tif")[-2:]: file.reason for file in wrong.report.skipped}
        assert names.keys() == {"03", "04"}  # each is named, and the others are as bright as before
        assert "NaN" in names["04"]
        assert "0 to 1" in names["03"]
        assert abs(float(wrong.train.pixels.mean()) - 127.5) < 5


def test_overshoots_of_most_images_are_no_range_of_bytes(tmp_path: Path) -> None:
    x = RNG.random((12, 16, 16)) * 1.1 - 0.05
    for make in (lambda: prepared(folder(tmp_path / "s", tiffs(x, np.float32))), lambda: stored(x)):
        with pytest.raises(RequestError, match=r"values from -0\.0\S+ to 1\.0"):
            make()


@pytest.mark.slow
def test_an_unknown_range_is_refused_and_its_remedy_works(tmp_path: Path) -> None:
    for k, (low, high, kind) in enumerate([(0, 4095, "f4"), (-1024, 3071, "i2"), (-3, 2.5, "f8"), (0, 70000, "i4")]):
        x = (RNG.random((8, 16, 16)) * (high - low) + low).astype(kind)
        x[:, 0, :2] = low, high
        np.save(tmp_path / f"{k}.npy", x)
        with pytest.raises(RequestError, match=r"--data\.range") as refused:
            prepared(tmp_path / f"{k}.npy", dtype="uint8")  # else arrays keep such values
        said = re.search(r"--data.range (\S+) (\S+),", str(refused.value))
        assert said is not None
        given = parse_value(tuple[float, ...], said.groups())
        made = prepared(tmp_path / f"{k}.npy", range=given)
        scaled = (x.astype(float) - low) * 255 / (high - low)
        assert np.abs(made.train.pixels[:, 0] - scaled).max() <= 1
        python = eval(re.search(r"data=(\{.*\})", str(refused.value))[1])  # type: ignore[index]
        assert update(Data(), python, "data").range == given
        again = prepared(stored(x, value_range=given), range=given) if kind != "f8" else made
        assert np.array_equal(again.train.pixels, made.train.pixels)
        listed = prepared(stored(list(x), value_range=given), range=given)
        assert np.array_equal(listed.train.pixels, made.train.pixels)


def test_values_beyond_a_given_range_are_named(tmp_path: Path) -> None:
    place = folder(tmp_path / "s", {f"{i:02}.png": image for i, image in enumerate(TWELVE)})
    made = prepared(place, range=(0, 5000))
    assert made.train.pixels.max() == round(4095 / 5000 * 255)
    Image.fromarray(np.full((16, 16), 5001, np.uint16)).save(place / "hot.png")
    made = prepared(place, range=(0, 5000))
    assert [(file.name, "0 to 5000" in file.reason) for file in made.report.skipped] == [("hot.png", True)]
    for wrong in ((1.0,), (5, 5), (9, 0), (0, 1, 2)):
        with pytest.raises(RequestError, match="range"):
            Data(range=wrong)
    assert update(Data(range=(0, 1)), {"range": "auto"}, "data").range == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["integers", "floats", "colours"])
def test_a_range_narrower_than_the_values_is_refused_or_cuts_them_and_is_said(tmp_path: Path, kind: str) -> None:
    files: dict[str, Any] = {f"{i:02}.png": image for i, image in enumerate(TWELVE)}
    if kind == "floats":
        files = tiffs(TWELVE, np.float32)
    elif kind == "colours":
        files = {name: png16(np.repeat(image[..., None], 3, -1)) for name, image in files.items()}
    place = folder(tmp_path / "s", files)
    with pytest.raises(RequestError, match=r"12 of 12 images .*from 0 to 4095; give .*--data\.clip") as refused:
        prepared(place, range=(0, 1000))
    low, high = map(float, re.findall(r"--data\.range (\S+) (\S+),", str(refused.value))[0])
    assert prepared(place, range=(low, high)).report.skipped == ()
    expected = np.rint(np.minimum(TWELVE, 1000) * (255 / 1000))
    for where in ("memory", "disk", "none"):
        made = prepared(place, range=(0, 1000), clip=True, cache=where)
        assert np.array_equal(made.train.pixels[:][:, 0], expected)
        assert "are beyond data.range" in "".join(made.warnings)
        again = prepare(open_source(place), made.settings, known=made.train.fingerprint)
        assert (again.train.fingerprint, again.settings.clip) == (made.train.fingerprint, True)
        if where != "none":
            assert "12 cut at the ends of the range of values" in made.report.line()
    few = prepared(place, range=(0, 4090), clip=True)
    assert few.warnings == ()
    assert "cut at the ends" in few.report.line()
    out = pack(PackRequest(str(place), tmp_path / "pack", Data(size=16, range=(0, 1000), clip=True)))
    assert np.array_equal(Pack.open(out).images.pixels[:, 0], expected)
    assert Pack.open(out).settings["clip"]


def test_a_run_from_before_floats_had_one_range_is_refused_with_that_reason(tmp_path: Path) -> None:
    values = np.random.default_rng(1).random((12, 16, 16)).astype(np.float32)
    values[:3] = values[:3] * 2 - 1  # the earlier version read these from -1 to 1
    place = folder(tmp_path / "s", {f"{i:02}.tif": image for i, image in enumerate(values)})
    now = prepare(open_source(place), MEMORY, known="as an earlier version read them")
    assert "read each image by its own range" in "".join(now.warnings)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data.json").write_bytes(data_json(now))
    said = describe_changes(RunFolder(tmp_path / "run"), now)
    assert "floating point is from 0 to 1, one range for the set" in said
    assert "resume with that version" in said
    new = prepare(open_source(place), MEMORY)
    assert new.warnings == ()
    again = prepare(open_source(place), new.settings, known=new.train.fingerprint)
    assert (again.warnings, again.train.fingerprint) == ((), new.train.fingerprint)


def test_a_run_that_began_with_images_left_out_goes_on_without_them(tmp_path: Path) -> None:
    place = folder(tmp_path / "s", {f"{i:02}.png": image for i, image in enumerate([*TWELVE // 8, *TWELVE[:3]])})
    made = prepare(open_source(place), replace(MEMORY, range=(0, 1000)), known="a run")
    assert len(made.report.skipped) == 3


def test_a_set_of_integers_and_floats_has_a_range_for_each(tmp_path: Path) -> None:
    x = RNG.random((6, 16, 16)).astype(np.float32)
    files: dict[str, Any] = {f"{i}.tif": image for i, image in enumerate(x)}
    files |= {f"deep {i}.png": image for i, image in enumerate(TWELVE[:6])}
    place = folder(tmp_path / "s", files)
    made = prepared(place)
    assert made.settings.range == (0, 4095, 0, 1)
    assert np.array_equal(made.train.pixels[:6, 0], np.rint(x * np.float32(255)))
    assert np.array_equal(made.train.pixels[6:, 0], EXPECTED[:6])
    again = prepare(open_source(place), replace(MEMORY, range=made.settings.range), known="a run")
    assert again.train.fingerprint == made.train.fingerprint


@pytest.mark.parametrize(
    ("most", "asked", "said"),
    [
        (10_000, {}, "--data.range 0 10000"),
        (40_000, {"dtype": "uint16"}, "--data.range 0 40000"),
        (4_000, {}, ""),
        (60_000, {"dtype": "uint16"}, ""),
    ],
)
def test_integers_that_use_little_of_their_bits_are_said(tmp_path: Path, most: int, asked: Any, said: str) -> None:
    values = (TWELVE.astype(float) * most / 4095).round().astype(np.uint16)
    place = folder(tmp_path / "s", {f"{i:02}.png": image for i, image in enumerate(values)})
    lines = prepare(open_source(place), replace(MEMORY, **asked)).warnings
    assert [line.endswith(said) and f"integers up to {most:,}" in line for line in lines] == [True] * bool(said)


def test_the_range_that_is_advised_keeps_that_of_floats(tmp_path: Path) -> None:
    files: dict[str, Any] = {f"{i}.tif": RNG.random((16, 16), np.float32) for i in range(6)}
    files |= {f"deep {i}.png": (image * 2.4).astype(np.uint16) for i, image in enumerate(TWELVE[:6])}
    place = folder(tmp_path / "s", files)
    (line,) = prepared(place).warnings
    assert line.endswith(
        "integers up to 9,828, which use 60% of the range 0 to 16383; if that is the sensor's largest "
        "value, give --data.range 0 9828 0 1"
    )
    advised = prepare(open_source(place), replace(MEMORY, range=(0, 9828, 0, 1)))
    assert (advised.train.pixels[:].max((1, 2, 3)) > 250).all()
    assert not advised.warnings


@pytest.mark.parametrize("where", ["memory", "disk", "none"])
def test_a_resume_has_the_range_that_the_run_began_with(tmp_path: Path, where: str) -> None:
    place = folder(tmp_path / "s", {f"{i:02}.png": image for i, image in enumerate(TWELVE)})
    asked = replace(MEMORY, cache=where)  # type: ignore[arg-type]
    begun = prepare(open_source(place), asked)
    again = prepare(open_source(place), begun.settings, known=begun.train.fingerprint)
    assert again.train.fingerprint == begun.train.fingerprint
    assert np.array_equal(again.train.pixels[:][:, 0], EXPECTED)
    # A run from before there was this setting has the range of the type, and a new run is not given its pixels.
    known = f"unread:{0}" if where == "none" else "a run"
    old = prepare(open_source(place), asked, known=known)
    assert old.settings.range == ()
    assert np.array_equal(old.train.pixels[:][:, 0], np.rint(TWELVE / 257))
    new = prepare(open_source(place), asked)
    assert np.array_equal(new.train.pixels[:][:, 0], EXPECTED)
    if where == "disk":
        packs = [path for path in cache.cache_folder().iterdir() if Pack.is_at(path)]
        assert sorted(Pack.open(path).settings["range"] for path in packs) == [(), (0, 4095)]


def test_booleans_are_black_and_white(tmp_path: Path) -> None:
    masks = RNG.random((8, 16, 16)) > 0.5
    np.save(tmp_path / "a.npy", masks)
    for place in (tmp_path / "a.npy", stored(masks), stored(list(masks))):
        assert np.array_equal(prepared(place).train.pixels[:, 0], masks * np.uint8(255))


def in_mode(mode: str) -> Image.Image:
    """The ramp in one of Pillow's modes."""
    if mode.startswith("I;16"):
        raw = (RAMP.astype(np.uint16) * 257).astype(">u2" if mode == "I;16B" else "<u2")
        return Image.frombytes(mode, (16, 16), raw.tobytes())
    if mode in ("I", "F"):
        return Image.fromarray(RAMP.astype(np.int32) * 257 if mode == "I" else RAMP.astype(np.float32) / 255)
    if mode == "LAB":
        rgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        return ImageCms.profileToProfile(Image.fromarray(RAMP).convert("RGB"), rgb, lab, outputMode="LAB")  # type: ignore[return-value]
    if mode == "1":
        return Image.fromarray(RAMP > 127)
    way = {"La": ("LA",), "RGBa": ("RGBA",), "HSV": ("RGB",), "PA": ("P",), "RGBX": ("RGB",)}.get(mode, ())
    image = Image.fromarray(RAMP)
    for step in (*way, mode):
        image = image.convert(step)
    return image


@pytest.mark.parametrize("mode", Image.MODES)
def test_every_mode_of_pillow_has_the_right_picture(tmp_path: Path, mode: str) -> None:
    image = in_mode(mode)
    assert image.mode == mode
    expected = np.where(RAMP > 127, 255, 0) if mode == "1" else RAMP
    places = [stored([image] * 4)]
    for suffix in ("png", "tif", "jpg"):
        path = tmp_path / suffix
        try:
            places.append(folder(path, {f"{i}.{suffix}": image for i in range(4)}))
        except (OSError, KeyError):  # no file of that kind has that mode
            continue
    for place in places:
        pixels = prepared(place, channels=1).train.pixels[:, 0]
        assert np.abs(pixels.astype(int) - expected).max() <= (6 if place.name == "jpg" else 2)


def test_a_mode_that_is_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.fromarray(RAMP)
    monkeypatch.setattr(type(image), "mode", "X;9", raising=False)
    with pytest.raises(RequestError, match="image 0 has Pillow's mode X;9"):
        stored([image])


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "L16", "RGB16", "L12", "RGB12"])
def test_a_transparent_colour_is_flattened_in_every_depth(tmp_path: Path, mode: str) -> None:
    clear = RAMP == 200
    if mode[-2:] in ("16", "12"):
        deep = (
            np.rint(RAMP[..., None] * (4095 / 255)).astype(np.uint16)
            if mode.endswith("12")
            else RAMP.astype(np.uint16) * 257
        )
        deep, channels = deep.reshape(16, 16, 1).repeat(3, -1), 3 if mode.startswith("RGB") else 1
        content: Any = png16(deep[..., :channels], b"tRNS" + struct.pack(">H", int(deep[clear][0, 0])) * channels)
    else:
        file = io.BytesIO()
        image = Image.fromarray(RAMP).convert(mode)
        image.save(file, "PNG", transparency=(200, 200, 200) if mode == "RGB" else 200)
        content = file.getvalue()
    made = prepared(folder(tmp_path / "s", {f"{i}.png": content for i in range(4)}), background="black", channels=1)
    assert np.array_equal(made.train.pixels[0, 0], np.where(clear, 0, RAMP))
    assert made.report.actions["flattened"] == 4


def test_the_order_of_axes_is_one_rule_for_whole_arrays_and_for_lists() -> None:
    x = np.zeros((8, 3, 16, 3), np.uint8)
    x[:, 0] = 250
    for source, first in ((torch.from_numpy(x), True), (x, False)):
        said: list[str] = []
        whole, listed = stored(source, said), stored(list(source))
        pixels = [open_source(place).read_image(0) for place in (whole, listed)]
        assert pixels[0].size == pixels[1].size == ((3, 16) if first else (16, 3))
        assert np.array_equal(*map(np.asarray, pixels))  # type: ignore[call-overload]
        assert len(said) == 1
        assert ("[N, C, H, W]" if first else "[N, H, W, C]") in said[0]
    for shape in ((8, 1, 16, 1), (8, 4, 16, 3)):
        said = []
        image = open_source(stored(torch.zeros(shape), said)).read_image(0)
        assert image.size == (shape[3], 16)
        assert any("channels first or last" in line for line in said)


def test_a_file_whose_axes_could_be_meant_otherwise_has_a_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((8, 3, 16, 3), np.uint8))
    (warning,) = prepared(tmp_path / "a.npy").warnings
    assert "[N, H, W, C]" in warning
    np.save(tmp_path / "b.npy", np.zeros((8, 3, 16, 16), np.uint8))
    assert prepared(tmp_path / "b.npy").warnings == ()


@pytest.mark.parametrize("shape", [(32, 24, 3), (3, 32, 24), (32, 24), (4, 32, 24), (32, 24, 1)])
def test_a_single_image_is_not_a_set_and_the_remedies_work(shape: tuple[int, ...]) -> None:
    x = RNG.integers(0, 256, shape, np.uint8)
    for source in (x, torch.from_numpy(x)):
        with pytest.raises(RequestError, match=r"x\[None\]") as refused:
            stored(source)
        for remedy in re.findall(r"x\[[^]]*\]", str(refused.value)):
            made = open_source(stored(eval(remedy, {"x": source})))
            assert made.read_image(0).size in ((24, 32), (3, 24), (1, 24))
            assert len(made.names) in (1, shape[0])


def broken(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[3, 0, 0], x[7, 1, 1], x[7, 2, 2], x[9, 0, 0] = np.nan, np.inf, -np.inf, np.nan
    return x


@pytest.mark.parametrize("low", [0, -1])
def test_images_with_nan_are_named_and_each_remedy_works(low: int) -> None:
    x = broken(RNG.random((12, 16, 16, 3)) * (1 - low) + low)
    with pytest.raises(RequestError, match="images 3, 7, 9 of the array hold NaN or infinity") as refused:
        stored(x)
    remedies = re.findall(r"x = (.+?\))(?:\]|$)", str(refused.value)) + re.findall(
        r"x = (x\[.+?\)\])", str(refused.value)
    )
    assert len(remedies) >= 2
    for remedy in {
        one if one.startswith("np.") else f"x[{one.removeprefix('x[').removesuffix(']')}]" for one in remedies
    }:
        pixels = prepared(stored(eval(remedy, {"x": x, "np": np}))).train.pixels
        assert len(pixels) in (9, 12)
        assert abs(float(pixels[:3].mean()) - 127.5) < 5
    with pytest.raises(RequestError, match="image 3 holds NaN") as refused:
        stored(list(x))
    remedy = re.search(r"x = (np.*\))", str(refused.value))
    assert remedy is not None
    assert len(prepared(stored([eval(remedy[1], {"x": one, "np": np}) for one in x])).train.pixels) == 12


def test_images_beyond_the_range_of_the_others_are_named_and_the_remedy_works() -> None:
    x = RNG.random((12, 16, 16))
    x[5, 0, 0] = 1.3
    for source, said in ((x, "images 5 of the array have values beyond 0 to 1"), (list(x), "image 5 has values")):
        with pytest.raises(RequestError, match=said) as refused:
            stored(source)
        remedy = re.search(r"x = (x.clip\(.*\))", str(refused.value))
        assert remedy is not None
        cut = eval(remedy[1], {"x": x})
        assert abs(float(prepared(stored(cut)).train.pixels.mean()) - 127.5) < 5


@pytest.mark.slow
def test_tables_and_arrays_of_objects_are_read_by_their_images(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    images = [np.array(image) for image in RNG.integers(0, 256, (8, 16, 16, 3), np.uint8)]
    paths = []
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
        paths.append(str(tmp_path / f"{i}.png"))
    objects = np.empty(8, object)
    objects[:] = images
    sources = {
        "Series of paths": pandas.Series(paths),
        "Series of arrays": pandas.Series(images),
        "array of objects": objects,
        "array of texts": np.array(paths),
        "frame": pandas.DataFrame({"image": paths, "label": ["a", "b"] * 4}),
        "frame of files": pandas.DataFrame({"label": ["a", "b"] * 4, "path": paths}),
    }
    for name, source in sources.items():
        opened = open_source(stored(source))
        assert np.array_equal(np.stack([np.asarray(opened.read_image(i)) for i in range(8)]), np.stack(images)), name
        assert opened.classes == (("a", "b") if "frame" in name else ()), name


def test_unused_pages_are_counted(tmp_path: Path) -> None:
    pages = [Image.fromarray(RNG.integers(0, 256, (16, 16), np.uint8)) for _ in range(20)]
    place = tmp_path / "s"
    place.mkdir()
    pages[0].save(place / "a.tif", save_all=True, append_images=pages[1:])
    pages[0].save(place / "b.gif", save_all=True, append_images=pages[1:10])
    pages[0].save(place / "c.webp", save_all=True, append_images=pages[1:5], lossless=True)
    pages[0].save(place / "d.png")
    # ImageJ writes one header above 4 GB, with the pixels of all images behind it.
    text = "ImageJ=1.53k\nimages=200\nslices=200\n"
    pages[0].save(place / "e.tif", tiffinfo={270: text})
    for where in ("memory", "disk"):
        report = prepared(place, cache=where).report
        assert report.unused_pages == 19 + 9 + 4 + 199
        assert report.actions["first_frame"] == 4
        assert "4 cut to the first frame (231 of 235 pages are not used)" in report.line()


def findings(place: Any, **settings: Any) -> dict[str, Any]:
    made = prepared(place, **settings)
    return {finding.code: finding for finding in check_images(made, replace(Config(), data=made.settings))}


def test_the_doctor_gives_the_range_of_deep_files_and_a_factor_for_eight_bits(tmp_path: Path) -> None:
    place = folder(tmp_path / "deep", {f"{i:02}.png": image for i, image in enumerate(TWELVE)})
    assert findings(place)["data.range"].severity == "fine"
    wrong = findings(place, range=(0, 65535))["data.range"]  # as a run has it from before the range was found
    assert "--data.range" in wrong.remedy
    assert "multiply" not in wrong.remedy
    low = EXPECTED // 8
    five = findings(folder(tmp_path / "five", {f"{i:02}.png": image for i, image in enumerate(low)}))["data.range"]
    code = re.search(r"save again: (.*)$", five.remedy)
    assert code is not None
    bright = low.copy()
    bright[0, 0, 0] = 200  # one that a resize hides
    for x in (low[1], bright[0]):
        saved = np.asarray(eval(code[1], {"x": x, "Image": Image}))
        assert np.array_equal(saved, np.minimum(x.astype(int) * 8, 255))  # nothing wraps


@pytest.mark.slow
def test_a_constant_channel_is_found(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (12, 16, 16, 3), np.uint8)
    assert findings(stored(x))["data.channels"].severity == "fine"
    x[..., 2] = 0
    found = findings(stored(x))["data.channels"]
    assert (found.severity, "the blue channel is 0 in all images" in found.evidence) == ("warning", True)
    x[..., 1] = 255
    found = findings(stored(x))["data.channels"]
    assert "the green channel is 255 in all images" in found.evidence
    code = re.search(r"store it alone: (.*)$", found.remedy)
    assert code is not None
    assert np.array_equal(np.asarray(eval(code[1], {"x": x[0], "Image": Image})), x[0, ..., 0])


def test_evaluation_scales_integers_of_both_sets_by_the_range_of_the_reference(tmp_path: Path) -> None:
    dark = TWELVE // 8  # a copy of 12 bits that happens to use 9
    real = folder(tmp_path / "real", {f"{i:02}.png": image for i, image in enumerate(TWELVE)})
    made = folder(tmp_path / "made", {f"{i:02}.png": image for i, image in enumerate(dark)})
    full = folder(tmp_path / "full", {f"{i:02}.png": image * 16 for i, image in enumerate(TWELVE)})
    with StopSignals() as stop:
        samples, reference = load_both(str(made), str(real), 0, stop)
        assert np.array_equal(reference.pixels[:][:, 0], EXPECTED)
        assert np.array_equal(samples.pixels[:][:, 0], np.rint(dark * (255 / 4095)))
        samples, _ = load_both(str(made), str(full), 0, stop)
        assert np.array_equal(samples.pixels[:][:, 0], np.rint(dark / 257))
        samples, _ = load_both(str(full), str(real), 0, stop)  # brighter than the reference can be
        assert np.array_equal(samples.pixels[:][:, 0], np.rint(np.minimum(TWELVE * 16, 4095) * (255 / 4095)))


def test_a_picture_of_sixteen_bits_is_shown_with_its_levels() -> None:
    for values in (RAMP.astype(np.uint16) * 257, RAMP.astype(np.float32) / 255):
        file = io.BytesIO()
        Image.fromarray(values).save(file, "PNG" if values.dtype == np.uint16 else "TIFF")
        shown = np.asarray(decode_picture(file.getvalue(), "the upload"))
        assert np.array_equal(shown[..., 0], RAMP)


@pytest.mark.parametrize("colours", [255, 1000])
def test_opacity_of_floating_point_is_from_zero_to_one_whatever_the_colours_are(tmp_path: Path, colours: int) -> None:
    x = np.concatenate([RNG.random((6, 16, 16, 3)) * colours, np.ones((6, 16, 16, 1))], -1).astype(np.float32)
    x[:, 0, 0, :3] = colours
    expected = np.rint(x[..., :3] * (255 / colours))
    np.save(tmp_path / "a.npy", x)
    range = (0.0, 1000.0) if colours == 1000 else ()
    first = torch.from_numpy(x).permute(0, 3, 1, 2)
    for source in (tmp_path / "a.npy", x, list(x), first, list(first)):
        place = source if isinstance(source, Path) else stored(source, value_range=range)
        pixels = prepared(place, range=range).train.pixels.transpose(0, 2, 3, 1)
        assert np.abs(pixels - expected).max() <= 1


def test_a_set_of_nan_alone_is_refused_for_that(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((6, 16, 16, 3), np.nan, np.float32))
    with pytest.raises(RequestError, match="NaN"):
        prepared(tmp_path / "a.npy")


def test_transparency_is_not_counted_as_cut_values(tmp_path: Path) -> None:
    x = np.full((12, 16, 16, 4), 1000, np.uint16)
    x[..., 3] = 65535
    x[:, 0, 0, 0] = 4096
    np.save(tmp_path / "x.npy", x)
    assert not [line for line in prepared(tmp_path / "x.npy", range=(0, 4095), clip=True).warnings if "beyond" in line]


def test_bright_images_after_dark_ones_are_not_to_be_cut() -> None:
    x = RNG.random((60, 16, 16)) * 255
    x[:40] /= 255
    for source in (x, list(x)):
        with pytest.raises(RequestError, match="values of black and white") as refused:
            stored(source)
        low, high = re.findall(r"'range': \(([\d.-]+), ([\d.-]+)\)", str(refused.value))[0]
        made = prepared(stored(source, value_range=(float(low), float(high))))
        assert made.report.used == 60
        assert made.train.pixels.max() > 250
