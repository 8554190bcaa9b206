"""Whatever lies in a person's folder: each file is used, converted or quarantined, by name; none is changed."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

import forked
from conftest import TRANSFORMER
from hostile import chunk, png, snapshot
from test_data_profiles import P3, PILLOW_SRGB, grey_profile, inks
from unfog.data.augmentation import Augment
from unfog.data.dataset import Dataset
from unfog.data.decode import decode
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_files import open_bytes, open_image
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.process.run_folder import RunFolder
from unfog.runs.session import write_data_report
from unfog.values.image_format import ImageFormat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="most of these files cannot exist there"),
]

MEMORY = Data(size=16, cache="memory")
RAMP = np.arange(256, dtype=np.uint8).reshape(16, 16)
RGB = np.stack([RAMP, RAMP.T, 255 - RAMP], -1)
HALF = np.where(np.arange(16) < 8, 0, 255).astype(np.uint8) * np.ones((16, 1), np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)

USED: tuple[str, ...] = ()
GREY, FLAT, FIRST, PALETTE = (
    "made RGB from grey",
    "flattened on white",
    "cut to the first frame",
    "converted from a palette",
)
INK, PALETTE, FLOAT = "converted from CMYK", "converted from a palette", "converted from floating point"
BEYOND = "values beyond 0 to 1, the range of the set (--data.range)"
SIXTEEN = "reduced from 16 bit"
SRGB, NO_PROFILE = "converted to sRGB", "with an unusable colour profile ignored"
UPRIGHT, SMALLER, LARGER, CROPPED = "rotated by EXIF", "resized to 16x16", "upscaled to 16x16", "centre-cropped"
TOO_LARGE = "over 89 megapixels, the most that is read: save it smaller"


def encoded(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options: object) -> bytes:
    data = BytesIO()
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(data, kind, **options)
    return data.getvalue()


def plain_png(before: bytes = b"", after: bytes = b"") -> bytes:
    return png(16, 16, 8, 2, b"".join(b"\0" + row.tobytes() for row in RGB), before=before, after=after)


def tiff(width: int, height: int, samples: int = 1) -> bytes:
    """A TIFF that claims this size and holds four bytes."""
    tags = [
        (256, width),
        (257, height),
        (258, 8),
        (259, 1),
        (262, 1),
        (273, 8),
        (277, samples),
        (278, height),
        (279, 4),
    ]
    return (
        b"II*\0"
        + struct.pack("<I", 12)
        + b"data"
        + struct.pack("<H", len(tags))
        + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        + bytes(4)
    )


def frames(kind: str, **options: object) -> bytes:
    rest = [Image.new("RGB", (16, 16), colour) for colour in ("blue", "lime")]
    return encoded(RGB, kind, save_all=True, append_images=rest, **options)


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def sideways(orientation: int) -> bytes:
    """RGB, stored so that the EXIF orientation is what puts it upright (the table of EXIF 2.32, 4.6.4)."""
    transposed = RGB.swapaxes(0, 1)
    stored = {
        1: RGB,
        2: RGB[:, ::-1],
        3: RGB[::-1, ::-1],
        4: RGB[::-1],
        5: transposed,
        6: transposed[::-1],
        7: transposed[::-1, ::-1],
        8: transposed[:, ::-1],
    }[orientation]
    return encoded(np.ascontiguousarray(stored), exif=exif(orientation))


def ink(marker: bool, **options: object) -> bytes:
    """A CMYK JPEG; inks are stored inverted, as Adobe began and all stand-alone files do, marked or not."""
    data = encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG", quality=95, **options)
    start = data.index(b"\xff\xee")
    return data if marker else data[:start] + data[start + 16 :]


def many_scans(between: bytes = b"") -> bytes:
    """A progressive JPEG with its last scan 200 times."""
    data = encoded(NOISE, "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + (between + data[last:-2]) * 200 + data[-2:]


NOT_SCANS = encoded(NOISE, "JPEG", progressive=True, comment=b"\xff\xda" * 200) + b"\xff\xda" * 200


def palette() -> bytes:
    image = Image.fromarray(RAMP // 128, "P")
    image.putpalette([255, 0, 255, 0, 0, 255])
    return encoded(image, transparency=0)


def contents() -> dict[str, tuple[bytes, tuple[str, ...] | str]]:
    """Name -> (what is in the file, what is to be said of it: how it was converted, or why it is quarantined)."""
    floats = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    infinite, undefined = floats.copy(), floats.copy()
    infinite[3, 3], undefined[3, 3] = np.inf, np.nan
    sixteen = RAMP.astype(np.uint16) * 257
    rgb16 = b"".join(b"\0" + row.astype(">u2").tobytes() for row in RGB.astype(np.uint16) * 257)
    hidden = np.dstack([np.where(HALF[..., None] > 0, RGB, (255, 0, 255)).astype(np.uint8), HALF])
    bomb = b"Comment\0\0" + zlib.compress(bytes(20_000_000))
    jpeg, whole = encoded(NOISE, "JPEG"), encoded(NOISE)
    gif, huge_jpeg = bytearray(encoded(RAMP, "GIF")), bytearray(jpeg)
    gif[6:10] = struct.pack("<HH", 60000, 60000)
    size_at = huge_jpeg.index(b"\xff\xc0") + 5
    huge_jpeg[size_at : size_at + 4] = struct.pack(">HH", 60000, 60000)
    huge = png(60000, 60000, 1, 0, bytes(100))
    return {
        "plain.png": (encoded(RGB), USED),
        "plain.webp": (encoded(RGB, "WEBP", lossless=True), USED),
        "plain.bmp": (encoded(RGB, "BMP"), USED),
        "plain.tif": (encoded(RGB, "TIFF", compression="tiff_lzw"), USED),
        "a jpeg.png": (encoded(RGB, "JPEG", quality=95), USED),
        "a png.jpeg": (encoded(RGB), USED),
        "UPPER.PNG": (encoded(RGB), USED),
        "larger.png": (encoded(NOISE), (SMALLER,)),
        # Not images, or not whole.
        "empty.png": (b"", "empty"),
        "text.png": (b"not an image at all, but a note that somebody named badly", "not an image"),
        "zeros.png": (bytes(5000), "not an image"),
        "script.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\nshowpage\n", "not an image"),
        "phone.heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC, to be converted to JPEG or PNG first"),
        "cut.jpg": (jpeg[: len(jpeg) // 2], "truncated"),
        "cut.png": (whole[: len(whole) // 2], "truncated"),
        "cut at the end.png": (whole[:-30], "truncated"),
        "cut in the header.png": (whole[:20], "truncated"),
        "spoilt header.png": (whole[:20] + b"?" + whole[21:], "damaged at its beginning"),
        # Other kinds of pixels.
        "grey.png": (encoded(RAMP), (GREY,)),
        "grey 16.png": (encoded(sixteen), (SIXTEEN, GREY)),
        "grey 16.tif": (encoded(sixteen, "TIFF"), (SIXTEEN, GREY)),
        "rgb 16.png": (png(16, 16, 16, 2, rgb16), (SIXTEEN,)),
        "float 1.tif": (encoded(floats, "TIFF"), (FLOAT, GREY)),
        "float 1 too.tif": (encoded(floats, "TIFF"), (FLOAT, GREY)),
        "float 255.tif": (encoded(floats * np.float32(255), "TIFF"), BEYOND),
        "float infinite.tif": (encoded(infinite, "TIFF"), "floating point with NaN or infinity in it"),
        "float undefined.tif": (
            encoded(undefined, "TIFF"),
            "floating point with NaN in it (--data.unknown nan: unknown pixels)",
        ),
        "float range.tif": (encoded(floats * 1000 - 1, "TIFF"), BEYOND),
        "palette.gif": (encoded(Image.fromarray(RGB).quantize(64), "GIF"), (PALETTE,)),
        "palette transparent.png": (palette(), (FLAT, PALETTE)),
        "hidden.png": (encoded(hidden), (FLAT,)),
        "opaque.png": (encoded(np.dstack([RGB, np.full((16, 16), 255, np.uint8)])), USED),
        "grey alpha.png": (encoded(np.stack([RAMP, HALF], -1)), (FLAT, GREY)),
        "animated.gif": (frames("GIF"), (FIRST, PALETTE)),
        "animated.webp": (frames("WEBP", lossless=True), (FIRST,)),
        "animated.apng": (frames("PNG"), (FIRST,)),
        "ink.jpg": (ink(marker=True), (INK,)),
        "ink unmarked.jpg": (ink(marker=False), (INK,)),
        **{f"exif {n}.png": (sideways(n), (UPRIGHT,) if n > 1 else USED) for n in range(1, 9)},
        "broken exif.jpg": (encoded(RGB, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01"), USED),
        # Colour profiles.
        "p3.png": (encoded(RGB, icc_profile=P3), (SRGB,)),
        "p3 transparent.png": (encoded(hidden, icc_profile=P3), (FLAT, SRGB)),
        "srgb.png": (encoded(RGB, icc_profile=PILLOW_SRGB), USED),
        "grey of srgb.png": (encoded(RAMP, icc_profile=PILLOW_SRGB), (GREY,)),
        "grey of gamma 1.8.png": (encoded(RAMP, icc_profile=grey_profile(1.8)), (SRGB, GREY)),
        "ink of a press.jpg": (ink(marker=True, icc_profile=inks()), (INK, SRGB)),
        "profile broken.png": (encoded(RGB, icc_profile=P3[:200]), (NO_PROFILE,)),
        "profile of ink.png": (encoded(RGB, icc_profile=inks()), (NO_PROFILE,)),
        # Shapes and bombs.
        "one pixel.png": (encoded(RGB[:1, 7:8]), (LARGER,)),
        "thin.png": (encoded(np.full((5000, 1, 3), (9, 90, 200), np.uint8)), (LARGER, CROPPED)),
        "bomb.png": (huge, TOO_LARGE),
        "bomb of 100 megapixels.png": (encoded(Image.new("1", (10000, 10000))), TOO_LARGE),
        "bomb.tif": (tiff(60000, 60000), TOO_LARGE),
        "bomb.gif": (bytes(gif), TOO_LARGE),
        "bomb.jpg": (bytes(huge_jpeg), TOO_LARGE),
        "many scans.jpg": (many_scans(), "a JPEG of over 100 scans"),
        "many scans after comments.jpg": (many_scans(b"\xff\xfe\0\4\xff\xd9"), "a JPEG of over 100 scans"),
        "scans in a comment and behind.jpg": (NOT_SCANS, (SMALLER,)),
        "bomb in a text.png": (plain_png(before=chunk(b"zTXt", bomb)), USED),
        "bomb in a profile.png": (plain_png(before=chunk(b"iCCP", bomb)), (NO_PROFILE,)),
        "bomb in both.png": (plain_png(before=chunk(b"zTXt", bomb) + chunk(b"iCCP", bomb)), (NO_PROFILE,)),
        "bomb behind.png": (plain_png(after=chunk(b"zTXt", bomb)), USED),
        # Names.
        "grüße 写真 🐈.png": (encoded(RGB), USED),
        "two\nlines.png": (encoded(RGB), USED),
        "\x1b[31mred\x07.png": (encoded(RGB), USED),
        "right\u202eto left.png": (b"", "empty"),
        "not text \udcff.png": (encoded(RGB), USED),
        " .png": (encoded(RGB), USED),
        "-rf.png": (encoded(RGB), USED),
        "[bold]markup[/bold] {braces} %s.png": (encoded(RGB), USED),
        "x" * 251 + ".png": (encoded(RGB), USED),
        "folder.png/inside.png": (encoded(RGB), USED),
        "a class\nof \x1b[31mits own/x.png": (encoded(RGB), USED),
    }


@pytest.fixture
def corpus(tmp_path: Path) -> tuple[Path, dict[str, tuple[str, ...] | str]]:
    """The folder, and what is to be said of each file."""
    folder, expected = tmp_path / "corpus", {}
    for name, (data, said) in contents().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if sys.platform == "darwin" and "\udcff" in name:
            continue  # there every name is text
        path.write_bytes(data)
        expected[name] = said
    (folder / "dangling.png").symlink_to(folder / "nowhere.png")
    (folder / "circle.png").symlink_to(folder / "circle.png")
    (folder / "up").symlink_to(folder)
    (folder / "linked.png").symlink_to(folder / "plain.png")
    os.mkfifo(folder / "pipe.png")
    for name in (".DS_Store", "._plain.png", "Thumbs.db", "notes.txt", "no suffix"):
        (folder / name).write_bytes(encoded(RGB))
    expected |= {"dangling.png": "a link that leads nowhere", "circle.png": "a link that leads nowhere"}
    return folder, {**expected, "linked.png": USED, "pipe.png": "not a regular file"}


def run(folder: Path, data: Data = MEMORY) -> Dataset:
    return prepare(open_source(folder), data)


def files_of(record: Path) -> dict[str, dict[str, object]]:
    listed = json.loads(record.read_bytes())["files"]
    assert len({file["name"] for file in listed}) == len(listed)
    return {file["name"]: file for file in listed}


def recorded(folder: Path, prepared: Dataset) -> dict[str, dict[str, object]]:
    folder.mkdir(exist_ok=True)
    write_data_report(RunFolder(folder), prepared, Augment(), seed=0)
    return files_of(folder / "data.json")


def test_every_file_is_accounted_for_and_none_is_changed(
    corpus: tuple[Path, dict[str, tuple[str, ...] | str]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    folder, expected = corpus
    before = snapshot(folder)
    started = time.perf_counter()
    prepared = run(folder)
    assert time.perf_counter() - started < 60  # measured 0.5 s
    files = recorded(tmp_path / "run", prepared)
    assert snapshot(folder) == before
    assert set(files) == {name.replace("\udcff", "\\xff") for name in expected}
    for name, said in expected.items():
        file = files[name.replace("\udcff", "\\xff")]
        quarantined = isinstance(said, str)
        converted, reason = ([], said) if quarantined else (sorted(said), None)
        found = {**file, "converted": sorted(file.pop("converted"))}  # type: ignore[call-overload]
        status = "quarantined" if quarantined else "used"
        assert found == {"name": file["name"], "status": status, "converted": converted, "reason": reason}
    ledger = prepared.report
    used = [name for name, said in expected.items() if not isinstance(said, str)]
    assert sorted(prepared.train.names) == sorted(used)
    assert (ledger.found, ledger.used) == (len(expected), len(used))
    assert ledger.ignored == {"hidden": 2, ".db": 1, ".txt": 1, "without suffix": 1}
    assert "5 other files ignored" in ledger.line()
    assert ledger.line().isprintable()
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_a_file_too_large_may_be_the_first_and_have_a_mask_of_its_name(tmp_path: Path) -> None:
    good = encoded(NOISE)
    for number, (name, (data, said)) in enumerate(contents().items()):
        if said == TOO_LARGE:
            names = [f"{top}/0{Path(name).suffix}" for top in ("a", "masks")]
            for top, file in zip(("a", "masks"), names):
                (tmp_path / f"{number}" / top).mkdir(parents=True)
                (tmp_path / f"{number}" / file).write_bytes(data)
                for i in range(1, 10):
                    (tmp_path / f"{number}" / top / f"{i}.png").write_bytes(good)
            report = run(tmp_path / f"{number}").report
            assert (name, list(report.class_counts), [file.name for file in report.skipped]) == (
                name,
                ["a", "masks"],
                names,
            )


def test_what_is_used_is_what_a_viewer_shows(corpus: tuple[Path, dict[str, tuple[str, ...] | str]]) -> None:
    train = run(corpus[0]).train
    pixels = dict(zip(train.names, train.pixels.transpose(0, 2, 3, 1).astype(int)))
    grey, shown = np.stack([RAMP] * 3, -1), np.where(HALF[..., None] > 0, RGB, 255)
    exact = {name: RGB for name in pixels if name.startswith(("plain", "exif", "bomb", "profile"))}
    exact |= dict.fromkeys(
        ("a png.jpeg", "rgb 16.png", "opaque.png", "animated.webp", "animated.apng", "srgb.png"), RGB
    )
    exact |= {name: grey for name in pixels if name.startswith(("grey 16", "grey of srgb", "float"))} | {
        "grey.png": grey
    }
    exact |= {"hidden.png": shown, "grey alpha.png": np.where(HALF[..., None] > 0, grey, 255)}
    exact |= {"thin.png": np.full_like(RGB, (9, 90, 200)), "one pixel.png": np.full_like(RGB, RGB[0, 7])}
    exact["palette transparent.png"] = np.where(RAMP[..., None] < 128, 255, (0, 0, 255))
    assert len(exact) > 25
    for name, expected in exact.items():
        assert np.abs(pixels[name] - expected).max() <= 1, name
    for name in ("a jpeg.png", "palette.gif", "animated.gif", "ink.jpg", "ink unmarked.jpg"):
        assert np.abs(pixels[name] - RGB).mean() < 14, name  # inverted ink would be off by a hundred
    assert np.abs(pixels["ink.jpg"] - pixels["ink unmarked.jpg"]).max() == 0


def test_background_and_forced_grey(corpus: tuple[Path, dict[str, tuple[str, ...] | str]]) -> None:
    prepared = run(corpus[0], Data(size=16, channels=1, background="#000000", cache="memory"))
    pixels = dict(zip(prepared.train.names, prepared.train.pixels))
    assert pixels["hidden.png"].shape == (1, 16, 16)
    assert (pixels["grey alpha.png"][0, :, :8] == 0).all()
    assert "flattened on #000000" in prepared.report.line()
    assert "made grey" in prepared.report.line()
    with pytest.raises(RequestError, match="background = 'snow-ish' is not a colour"):
        run(corpus[0], Data(background="snow-ish"))


def deep(folder: Path, levels: int, name: str) -> None:
    """A picture at the bottom of so many folders; by steps, as the path may be longer than the system takes."""
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    with open(os.open("deep.png", os.O_WRONLY | os.O_CREAT, dir_fd=here), "wb") as file:
        file.write(encoded(RGB))
    os.close(here)


@pytest.fixture
def deep_folder() -> Iterator[Path]:
    """Not one of pytest's, which it could not remove: Python's own removal recurses."""
    folder = Path(tempfile.mkdtemp(prefix="unfog-deep-"))
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="where the longest path is shorter, there are none")
def test_folders_deeper_than_python_recurses(deep_folder: Path) -> None:
    deep(deep_folder / "in", 1500, "d")
    prepared = run(deep_folder)
    assert prepared.train.names == ("in/" + "d/" * 1500 + "deep.png",)
    assert np.array_equal(prepared.train.pixels[0].transpose(1, 2, 0), RGB)


def test_folders_beyond_the_longest_path_are_named(deep_folder: Path) -> None:
    deep(deep_folder / "in", 30, "n" * 200)
    (deep_folder / "a.png").write_bytes(encoded(RGB))
    ledger = run(deep_folder).report
    assert (ledger.used, len(ledger.skipped)) == (1, 1)
    assert ledger.skipped[0].name.startswith("in/nnn")
    assert ledger.skipped[0].reason == "a folder whose path is too long"


FLAGS = [
    *("--network", TRANSFORMER, "--precision", "fp32", "--device", "cpu", "--batch", "32", "--size", "16"),
    *("--sampler.steps", "2", "--preview.images", "2", "--preview.every", "-1", "--evaluate.every", "-1"),
]


def train(folder: Path, out: Path, *flags: str, steps: int = 3, status: int = 0) -> str:
    """Train by the real command; what it said."""
    done = forked.run(["train", folder, *FLAGS, *flags, "--steps", steps, "--out", out])
    said: str = done.stdout + done.stderr
    assert done.returncode == status, said
    assert "Traceback" not in said
    return said


def test_the_command_trains_on_the_corpus_and_shows_nothing_of_pillow(
    corpus: tuple[Path, dict[str, tuple[str, ...] | str]], tmp_path: Path
) -> None:
    folder, expected = corpus
    fax = encoded(Image.fromarray(NOISE).convert("1"), "TIFF", compression="group4")
    for i in range(60):  # of whose errors libtiff would write to stderr itself
        (folder / f"damaged {i}.tif").write_bytes(fax[: 100 + 5 * i] + b"?!" + fax[102 + 5 * i :])
    # Of which Pillow would log an error, which Python puts on stderr.
    (folder / "damaged 60.tif").write_bytes(tiff(16, 16, samples=198))
    before = snapshot(folder)
    said = train(folder, tmp_path / "run")
    assert snapshot(folder) == before
    assert f"{len(expected) + 61} images; " in said
    for noise in ("Warning", "Fax4Decode", "samples per pixel"):
        assert noise not in said
    assert "\x1b" not in said
    assert all(line.isprintable() for line in said.splitlines())
    assert "two\\nlines.png" not in said  # it is used; of what is quarantined, three of a kind are named
    assert "right\\u202eto left.png" in said


@pytest.mark.parametrize("n", [0, 1, 7, 99])
def test_few_images_and_a_batch_of_32(tmp_path: Path, n: int) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "notes.txt").write_text("notes")
    for i in range(n):
        (folder / f"{i}.png").write_bytes(encoded(np.roll(RGB, i, axis=1)))
    said = train(folder, tmp_path / "run", status=0 if n else 2)
    if n:
        assert f"{n} image{'s' * (n > 1)}; {n} used: as they are (16x16); 1 other file ignored" in said
        assert (tmp_path / "run/checkpoints/00000003").is_dir()
    else:
        assert "found 0 images" in said
        assert "1 other file: 1 .txt" in said
        assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_files_may_go_while_training(tmp_path: Path) -> None:
    """Once decoded, they are not looked at again, whether what was decoded is in memory or in a mapped file."""
    for where in ("memory", "disk"):
        folder, out = tmp_path / where, tmp_path / f"run-{where}"
        folder.mkdir()
        for i in range(40):
            (folder / f"{i}.png").write_bytes(encoded(np.roll(RGB, i, axis=1)))
        vandal = threading.Thread(target=remove_when_training, args=(folder, out))
        vandal.start()
        try:
            said = train(folder, out, "--data.cache", where, steps=40)
        finally:
            vandal.join()
        assert not folder.exists()
        assert "finished at step 40" in said


def remove_when_training(folder: Path, out: Path) -> None:
    """Remove the images as soon as the run has written its configuration: then they are decoded."""
    for _ in range(300):
        if (out / "config.toml").exists():
            shutil.rmtree(folder)
            return
        time.sleep(0.1)


def test_files_may_change_while_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed, cut, replaced by text or by another picture: each is used or named, and the cache is not misled."""
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "busy"
    folder.mkdir()
    names = [f"{i:03}.png" for i in range(200)]
    whole, other = encoded(NOISE), encoded(255 - NOISE)
    for name in names:
        (folder / name).write_bytes(whole)
    states = (None, whole[:9000], b"text", other, whole)
    stop = threading.Event()

    def vandalise() -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            path, state = folder / names[rng.integers(200)], states[rng.integers(5)]
            path.unlink(missing_ok=True) if state is None else path.write_bytes(state)

    settings = Data(size=64, channels=3, cache="disk", held_out=0)
    vandal = threading.Thread(target=vandalise)
    vandal.start()
    try:
        seen = [run(folder, settings) for _ in range(4)]
    finally:
        stop.set()
        vandal.join()
    pictures = {NOISE.transpose(2, 0, 1).tobytes(), (255 - NOISE).transpose(2, 0, 1).tobytes()}
    reasons = {"no longer there", "truncated", "empty", "not an image", "damaged at its beginning"}
    for prepared in seen:
        ledger = prepared.report
        gone = {one.name for one in ledger.skipped}
        assert ledger.found == ledger.used + len(gone)
        assert not gone & set(prepared.train.names)
        assert {pixels.tobytes() for pixels in prepared.train.pixels} <= pictures
        assert {one.reason for one in ledger.skipped} <= reasons
    assert any(prepared.report.skipped for prepared in seen)
    calm, again = run(folder, settings), run(folder, replace(settings, cache="memory"))
    assert np.array_equal(calm.train.pixels, again.train.pixels)
    assert calm.report == again.report


# Modules are imported while they still may be.
AS_NOBODY = """
import os, sys
from PIL import Image
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import locate, open_source
Image.init()
locate("fashion")  # imports every kind of source, while the interpreter's own files can be read
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
print(*prepare(open_source(sys.argv[1]), Data(cache="memory")).report.skipped, sep="|")
"""


def test_what_may_not_be_read_is_named() -> None:
    """By another user where we are root, whom nothing is forbidden."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "closed"
        (folder / "locked").mkdir(parents=True)
        for name in ("open.png", "secret.png", "locked/inside.png"):
            (folder / name).write_bytes(encoded(RGB))
        os.chmod(top, 0o755)
        (folder / "secret.png").chmod(0)
        (folder / "locked").chmod(0)
        done = subprocess.run([sys.executable, "-c", AS_NOBODY, folder], capture_output=True, text=True, timeout=300)
        (folder / "locked").chmod(0o755)
    assert done.stdout == (
        "SkippedFile(name='locked/', reason='a folder not permitted to be read')|"
        "SkippedFile(name='secret.png', reason='not permitted to be read')\n"
    ), done.stderr


VALID = {
    "PNG": encoded(NOISE),
    "PNG palette": palette(),
    "PNG 16 bit": encoded(RAMP.astype(np.uint16) * 257),
    "APNG": frames("PNG"),
    "JPEG": encoded(NOISE, "JPEG", exif=exif(6), icc_profile=P3),
    "JPEG progressive": encoded(NOISE, "JPEG", progressive=True),
    "JPEG ink": ink(marker=True),
    "GIF": frames("GIF"),
    "WebP": frames("WEBP"),
    "TIFF": encoded(NOISE, "TIFF", compression="tiff_lzw", icc_profile=P3),
    "TIFF deflated": encoded(NOISE, "TIFF", compression="tiff_adobe_deflate"),
    "TIFF fax": encoded(Image.fromarray(NOISE).convert("1"), "TIFF", compression="group4"),
    "TIFF float": encoded(NOISE[..., 0].astype(np.float32), "TIFF"),
    "BMP": encoded(NOISE, "BMP"),
    "PPM": encoded(NOISE, "PPM"),
    "TGA": encoded(NOISE, "TGA"),
    "ICO": encoded(NOISE, "ICO"),
    "JPEG2000": encoded(NOISE, "JPEG2000"),
    "AVIF": encoded(NOISE, "AVIF"),
}


@pytest.mark.parametrize("kind", VALID)
@pytest.mark.filterwarnings("ignore")  # as `prepare` does
@settings(max_examples=60, deadline=20_000)
@example(flips=[(0, 0)], keep=0.5)
@given(flips=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8), keep=st.floats(0, 1) | st.just(1.0))
def test_a_damaged_image_is_decoded_or_unusable(kind: str, flips: list[tuple[float, int]], keep: float) -> None:
    data = bytearray(VALID[kind])
    for place, value in flips:
        data[int(place**3 * (len(data) - 1))] = value  # more of them in the header
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        file.write(data[: int(keep * len(data))])
        file.flush()
        try:
            pixels, _ = decode(lambda: open_image(Path(file.name)), ImageFormat(3, 16, 16), (255, 255, 255))
        except ImageError as unusable:
            pixels, reason = np.zeros((3, 16, 16), np.uint8), str(unusable)
        else:
            reason = "none"
    assert (pixels.shape, pixels.dtype) == ((3, 16, 16), np.uint8)
    assert 0 < len(reason) < 140
    assert reason.isprintable()


def _tiff_of_strips(count: int) -> bytes:
    """A grey TIFF of one row a strip, all of them the same bytes."""
    tags = [(256, 8), (257, count), (258, 8), (259, 1), (262, 1), (273, -1), (277, 1), (278, 1), (279, -1)]
    start = 8 + 2 + 12 * len(tags) + 4
    data = struct.pack(f"<{count}I", *[start] * count) + struct.pack(f"<{count}I", *[8] * count)
    places = {273: start, 279: start + 4 * count}
    entries = (struct.pack("<HHII", tag, 4, count if v < 0 else 1, places[tag] if v < 0 else v) for tag, v in tags)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + b"".join(entries) + bytes(4) + data


def _slow_files() -> dict[str, tuple[bytes, str]]:
    """Files of a few megabytes that Pillow alone works on for seconds a megabyte, and part of the reason."""
    many, (png, jpeg, gif) = 3 * 10**6, (encoded(NOISE, kind) for kind in ("PNG", "JPEG", "GIF"))
    exif = b"\xff\xe1\x80\x06Exif\0\0" + bytes(2**15 - 2)
    profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**6)))
    image = gif.index(b",", 13 + 3 * 2 ** ((gif[10] & 7) + 1))
    return {
        "a PPM with a long comment": (b"P6\n#" + b"a" * many + b"\n2 2\n255\n" + bytes(12), "pieces"),
        "a PPM as text with many comments": (b"P3\n2 2\n255\n" + b"#\n" * (many // 2) + b"1 " * 12, "PPM as text"),
        "a float map behind blanks": (b"Pf\n2 2\n" + b" " * many + b"1.0\n" + bytes(16), "pieces"),
        "a PNG of empty chunks": (png[:33] + chunk(b"abCd") * (many // 12) + png[33:], "chunks"),
        "a PNG of empty chunks behind": (png[:-12] + chunk(b"abCd") * (many // 12) + png[-12:], "chunks"),
        "a PNG of many profiles": (png[:33] + profile * 1000 + png[33:], "colour profiles"),
        "a JPEG of empty comments": (jpeg[:2] + b"\xff\xfe\0\2" * (many // 4) + jpeg[2:], "pieces"),
        "a JPEG of fill bytes": (jpeg[:2] + b"\xff" * many + jpeg[2:], "pieces"),
        "a JPEG of much Exif": (jpeg[:2] + exif * 5 + jpeg[2:], "Exif"),
        "a GIF of comments": (gif[:image] + b"!\xfe\1a\0" * (many // 5) + gif[image:], "pieces"),
        "a TIFF of many strips": (_tiff_of_strips(many // 8), "strips"),
    }


SLOW = _slow_files()


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("opener", [open_image, None])
def test_no_head_keeps_the_decoder_busy(name: str, opener: Any, tmp_path: Path) -> None:
    data, reason = SLOW[name]
    (tmp_path / "a.png").write_bytes(data)
    since = time.process_time()
    with pytest.raises(ImageError, match=reason):
        decode(
            lambda: open_image(tmp_path / "a.png") if opener else open_bytes(data, "a.png"),
            ImageFormat(3, 16, 16),
            (0, 0, 0),
        )
    assert time.process_time() - since < 3


def test_usual_large_files_are_within_the_limits() -> None:
    """A TIFF of one strip a row, a PNG of thousands of small chunks, and a PPM of 10 bits."""
    data = _tiff_of_strips(9000)
    rows = b"".join(b"\0" + NOISE.tobytes()[: 3 * 64] for _ in range(64))
    small = zlib.compress(rows * 20, 0)
    parts = b"".join(chunk(b"IDAT", small[i : i + 64]) for i in range(0, len(small), 64))
    small_chunks = png(64, 1280, 8, 2, b"")[:33] + parts + chunk(b"IEND")
    ppm = b"P6\n200 200\n1023\n" + bytes(200 * 200 * 6)
    for content in (data, small_chunks, ppm, encoded(NOISE, "PPM")):
        pixels, _ = decode(lambda: open_bytes(content, "a.png"), ImageFormat(3, 16, 16), (0, 0, 0))  # noqa: B023
        assert pixels.shape == (3, 16, 16)
