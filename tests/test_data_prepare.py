"""Preparation: ledger, choices, split, cache. Real files in every mode that people have."""

import hashlib
import json
import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from unfog.data import cache
from unfog.data import prepare as preparing
from unfog.data.images import Prepared
from unfog.data.ledger import Ledger, Skipped
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources import open_source
from unfog.data.stream import ImageStream
from unfog.errors import RequestError

MEMORY = Data(size=16, cache="memory")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("UNFOG_CACHE", str(folder))
    return folder


def run(folder: Path, settings: Data = MEMORY) -> Prepared:
    return prepare(open_source(folder), settings)


def fill(folder: Path, n: int, size: tuple[int, int] = (20, 20), mode: str = "RGB", suffix: str = ".png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(n):
        pixels = rng.integers(0, 256, (*size[::-1], 3), np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / f"{i:04}{suffix}")
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """A folder with one file of each kind."""
    folder = tmp_path / "zoo"
    folder.mkdir()
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    rgb = np.stack([ramp, ramp.T, 255 - ramp], -1)
    alpha = np.where(np.arange(16) < 8, 0, 255).astype(np.uint8) * np.ones((16, 1), np.uint8)
    Image.fromarray(ramp).save(folder / "l.png")
    Image.fromarray(np.stack([ramp, alpha], -1)).save(folder / "la.png")
    Image.fromarray(rgb).quantize(64).save(folder / "p.gif")
    Image.fromarray(np.dstack([rgb, alpha])).save(folder / "rgba.png")
    Image.fromarray(np.dstack([rgb, np.full((16, 16), 255, np.uint8)])).save(folder / "rgba_opaque.png")
    Image.fromarray(rgb).convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    Image.fromarray(ramp.astype(np.uint16) * 257).save(folder / "sixteen.png")
    Image.fromarray(np.pad(rgb, ((0, 16), (0, 0), (0, 0)))).save(folder / "rotated.jpg", exif=exif(6), quality=95)
    Image.new("RGB", (1, 5000), (9, 90, 200)).save(folder / "thin.png")
    (folder / "empty.png").write_bytes(b"")
    whole = BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(whole, "JPEG")
    (folder / "truncated.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    Image.fromarray(rgb).save(folder / "really_a.jpeg", "PNG")
    Image.fromarray(rgb).save(folder / "misnamed.png", "JPEG", quality=95)
    (folder / "text.jpg").write_text("not an image at all")
    (folder / "notes.txt").write_text("notes")
    Image.new("1", (20000, 10000)).save(folder / "bomb.png")
    Image.new("1", (10000, 10000)).save(folder / "bomblet.png")
    return folder


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def test_every_kind_of_file_is_used_or_named_and_none_is_changed(zoo: Path, recwarn: pytest.WarningsRecorder) -> None:
    before = hashes(zoo)
    prepared = run(zoo)
    ledger = prepared.ledger
    assert hashes(zoo) == before
    assert ledger.found == 16
    assert ledger.used == len(prepared.train) == 11
    assert ledger.skipped == (
        Skipped("bomb.png", "over 89 megapixels"),
        Skipped("bomblet.png", "over 89 megapixels"),
        Skipped("empty.png", "empty"),
        Skipped("text.jpg", "not an image"),
        Skipped("truncated.jpg", "truncated"),
    )
    assert ledger.other_files == 1
    assert ledger.modes == {"L": 1, "LA": 1, "P": 1, "RGBA": 2, "CMYK": 1, "I;16": 1, "RGB": 4}
    assert ledger.actions == {
        "flattened": 2,
        "palette": 1,
        "cmyk": 1,
        "sixteen_bit": 1,
        "rotated": 1,
        "cropped": 2,
        "upscaled": 1,
        "grey_to_rgb": 3,
    }
    assert ledger.sides == {
        "shortest_min": 1,
        "shortest_median": 16,
        "shortest_max": 16,
        "longest_min": 16,
        "longest_median": 16,
        "longest_max": 5000,
    }
    assert prepared.settings.channels == 3
    assert not [warning for warning in recwarn if "Decompression" in str(warning.category)]
    line = ledger.line()
    assert line.startswith("16 images; 11 used: 1 upscaled to 16x16, 2 centre-cropped, 2 flattened on white, ")
    assert line.endswith(
        "; 5 skipped (2 over 89 megapixels: bomb.png, bomblet.png; 1 empty: empty.png; 1 not an image: text.jpg; "
        "1 truncated: truncated.jpg); 1 other file ignored"
    )


def test_every_kind_of_file_gives_the_pixels_a_viewer_shows(zoo: Path) -> None:
    train = run(zoo).train
    pixels = dict(zip(train.names, train.pixels.astype(int)))
    ramp = np.arange(256).reshape(16, 16)
    rgb = np.stack([ramp, ramp.T, 255 - ramp])
    left = np.arange(16) < 8
    for name, expected, tolerance in (
        ("l.png", np.stack([ramp] * 3), 0),
        ("la.png", np.where(left, 255, np.stack([ramp] * 3)), 0),
        ("rgba.png", np.where(left, 255, rgb), 0),  # what hides under alpha 0 is gone
        ("rgba_opaque.png", rgb, 0),
        ("really_a.jpeg", rgb, 0),
        ("sixteen.png", np.stack([ramp] * 3), 0),
        ("thin.png", np.array([9, 90, 200])[:, None, None] * np.ones((3, 16, 16)), 0),
    ):
        assert np.abs(pixels[name] - expected).max() <= tolerance, name
    for name in ("misnamed.png", "cmyk.jpg"):  # JPEG: close on average; inverted ink would be off by a hundred
        assert np.abs(pixels[name] - rgb).mean() < 14, name
    assert np.abs(pixels["p.gif"] - rgb).mean() < 14
    # 16 wide, 32 high, to be turned clockwise: the ramp is then on the right, half of it within the centre square.
    turned = np.rot90(np.pad(rgb, ((0, 0), (0, 16), (0, 0))), -1, axes=(1, 2))[:, :, 8:24]
    assert np.abs(pixels["rotated.jpg"] - turned).mean() < 14


def test_background_and_forced_grey(zoo: Path) -> None:
    prepared = run(zoo, Data(size=16, channels=1, background="#000000", cache="memory"))
    pixels = dict(zip(prepared.train.names, prepared.train.pixels))
    assert prepared.train.pixels.shape == (11, 1, 16, 16)
    assert (pixels["la.png"][0, :, :8] == 0).all()
    assert prepared.ledger.actions["rgb_to_grey"] == 8
    assert "2 flattened on #000000" in prepared.ledger.line()
    with pytest.raises(RequestError, match="background = 'snow-ish' is not a colour"):
        run(zoo, Data(background="snow-ish"))


@pytest.mark.parametrize("n", [1, 7, 99])
def test_few_images_are_all_trained_on(tmp_path: Path, n: int) -> None:
    prepared = run(fill(tmp_path / "few", n))
    assert (len(prepared.train), len(prepared.held_out)) == (n, 0)
    assert not prepared.held_out
    assert ImageStream(prepared.train, 0).batch(0, 32).pixels.shape == (32, 3, 16, 16)
    assert f"{n} used: {n} resized to 16x16" in prepared.ledger.line()


def test_nothing_usable_is_a_request_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "b.png").write_bytes(b"PNG?")
    for where in ("memory", "disk"):
        with pytest.raises(RequestError, match=r"none of the 2 images in .*: 1 empty, 1 not an image"):
            run(tmp_path, Data(cache=where))
    assert not list(cache.cache_folder().iterdir())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(28, 28)] * 3, 28),
        ([(30, 30)] * 3, 32),  # cannot be halved twice
        ([(64, 64)] * 3, 64),
        ([(256, 256)] * 3, 64),
        ([(40, 60)] * 3, 32),
        ([(63, 900)] * 2 + [(200, 200)], 32),
        ([(64, 900)] * 2 + [(20, 20)], 64),
    ],
)
def test_automatic_size(tmp_path: Path, sizes: list[tuple[int, int]], expected: int) -> None:
    for i, size in enumerate(sizes):
        Image.new("RGB", size, "red").save(tmp_path / f"{i}.png")
    assert run(tmp_path, Data()).settings.size == expected


def test_automatic_channels_take_grey_rgb_files_for_grey(tmp_path: Path) -> None:
    folder = fill(tmp_path / "grey", 150, mode="L")
    for path in list(folder.iterdir())[:100]:
        Image.open(path).convert("RGB").save(path.with_suffix(".jpg"))
        path.unlink()
    prepared = run(folder)
    assert prepared.settings.channels == 1
    assert prepared.train.pixels.shape[1] == 1


def test_one_image_in_colour_among_many_grey_makes_all_rgb(tmp_path: Path) -> None:
    folder = fill(tmp_path / "grey", 300, mode="L")
    Image.new("RGB", (20, 20), "red").save(folder / "0299.png")  # not one of the 64 looked at first
    calls: list[tuple[int, int]] = []
    prepared = prepare(open_source(folder), MEMORY, lambda done, total: calls.append((done, total)))
    assert prepared.settings.channels == 3
    red = next(
        pixels
        for part in (prepared.train, prepared.held_out)
        for name, pixels in zip(part.names, part.pixels)
        if name == "0299.png"
    )
    assert (red == np.array([255, 0, 0])[:, None, None]).all()
    assert prepared.ledger.actions["grey_to_rgb"] == 299
    assert calls[-1] == (300, 300)


def test_held_out_stays_when_images_are_added(tmp_path: Path) -> None:
    folder = fill(tmp_path / "many", 400)
    first = run(folder, Data(size=4, held_out=0.1, cache="memory"))
    assert 20 <= len(first.held_out) <= 60
    assert not set(first.train.names) & set(first.held_out.names)
    Image.new("RGB", (20, 20), "blue").save(folder / "extra.png")
    (folder / "0001.png").unlink()
    second = run(folder, Data(size=4, held_out=0.1, cache="memory"))
    gone = {"0001.png", "extra.png"}
    assert set(first.held_out.names) - gone == set(second.held_out.names) - gone
    assert len(run(folder, Data(size=4, held_out=0, cache="memory")).held_out) == 0


def test_held_out_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "MAX_HELD_OUT", 10)
    folder = fill(tmp_path / "many", 200)
    prepared = run(folder, Data(size=4, held_out=0.5, cache="memory"))
    assert (len(prepared.train), len(prepared.held_out)) == (190, 10)
    assert prepared.ledger.held_out == 10


def test_rows_names_and_labels_stay_together_when_images_are_skipped(tmp_path: Path) -> None:
    for kind, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        fill(tmp_path / kind, 0)
        for i in range(150):
            path = tmp_path / kind / f"{i:03}.png"
            path.write_bytes(b"") if i % 7 == 0 else Image.new("RGB", (8, 8), colour).save(path)
    for where in ("memory", "disk"):
        prepared = run(tmp_path, Data(held_out=0.2, cache=where))
        assert prepared.ledger.class_counts == {"blue": 128, "red": 128}
        for part in (prepared.train, prepared.held_out):
            assert part.labels is not None
            assert (part.pixels[:, 0] == np.where(part.labels == 1, 255, 0)[:, None, None]).all()
            assert [name.split("/")[0] for name in part.names] == [part.classes[label] for label in part.labels]


def test_a_folder_is_decoded_once_and_again_when_a_file_changes(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "set", 120)
    asked = Data(cache="disk")
    in_memory, first = run(folder, Data(cache="memory")), run(folder, asked)
    assert np.array_equal(in_memory.train.pixels, first.train.pixels)
    assert in_memory.train.fingerprint == first.train.fingerprint
    assert in_memory.ledger == first.ledger
    assert not list(cache_folder.glob("*.partial"))

    with monkeypatch.context() as patched:
        patched.setattr(preparing, "decode_all", None)
        for settings in (asked, first.settings, Data(cache="disk", flip=True), Data(cache="auto")):
            again = run(folder, settings)  # as asked, as settled, and when only what comes after decoding differs
            assert again.settings.flip is settings.flip
            assert again.settings.size == 20
            assert np.array_equal(again.train.pixels, first.train.pixels)
            assert (again.train.names, again.train.fingerprint) == (first.train.names, first.train.fingerprint)
            assert again.ledger == first.ledger
            assert np.array_equal(again.held_out.pixels, first.held_out.pixels)
        with pytest.raises(TypeError):
            run(folder, Data(cache="disk", size=8))

    changed = folder / first.train.names[3]
    Image.new("RGB", (20, 20), "red").save(changed)
    second = run(folder, asked)
    assert second.train.fingerprint != first.train.fingerprint
    assert second.held_out.fingerprint == first.held_out.fingerprint
    assert (second.train.pixels[3] == np.array([255, 0, 0])[:, None, None]).all()
    assert (first.train.pixels[3] != second.train.pixels[3]).any()


def test_a_damaged_cache_entry_is_made_again(tmp_path: Path, cache_folder: Path) -> None:
    folder = fill(tmp_path / "set", 20)
    asked = Data(cache="disk", size=16)
    good = run(folder, asked).train.pixels.copy()
    for path in cache_folder.glob("*.pixels"):
        os.truncate(path, 100)
    assert np.array_equal(run(folder, asked).train.pixels, good)
    for path in cache_folder.glob("*.json"):
        path.write_text("{")
    assert np.array_equal(run(folder, asked).train.pixels, good)


def test_a_cache_that_cannot_be_written_is_explained_or_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "set", 20)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(RequestError, match=r"cannot be written .*set UNFOG_CACHE"):
        run(folder, Data(cache="disk"))
    monkeypatch.setattr(preparing, "MEMORY_FILE_BYTES", 0)
    assert len(run(folder, Data(cache="auto")).train) == 20


def test_no_room_for_the_cache_is_found_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfog.data.cache.shutil.disk_usage", lambda folder: type("", (), {"free": 1000}))
    with pytest.raises(RequestError, match=r"has no room for 0\.0 GB"):
        run(fill(tmp_path / "set", 20), Data(cache="disk"))


def test_an_interrupted_preparation_leaves_nothing_and_old_leftovers_are_removed(
    tmp_path: Path, cache_folder: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    leftover = cache_folder / "1-1.partial"
    leftover.write_bytes(b"x")
    os.utime(leftover, (0, 0))
    with pytest.raises(KeyboardInterrupt):
        prepare(open_source(fill(tmp_path / "set", 50)), Data(cache="disk"), interrupt)
    assert not list(cache_folder.iterdir())


def test_large_sets_go_to_disk_by_themselves(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "set", 20)
    run(folder, Data())
    assert not list(cache_folder.iterdir())
    monkeypatch.setattr(preparing, "MEMORY_PIXEL_BYTES", 1000)
    run(folder, Data())
    assert list(cache_folder.glob("*.pixels"))


def test_ledger_survives_json_and_odd_file_names(tmp_path: Path) -> None:
    fill(tmp_path / "set", 3)
    odd = os.fsencode(tmp_path / "set") + b"/bad\xff.png"
    with open(odd, "wb"):
        pass
    ledger = run(tmp_path / "set").ledger
    assert Ledger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger
    assert "1 empty: bad?.png" in ledger.line()


def test_a_lot_of_trouble_is_summed_up(tmp_path: Path) -> None:
    folder = fill(tmp_path / "set", 1)
    for i in range(9):
        (folder / f"x{i}.png").write_bytes(b"")
    assert "9 skipped (9 empty: x0.png, x1.png, x2.png, ...)" in run(folder).ledger.line()


@pytest.mark.parametrize(
    "wrong", [{"size": 3}, {"size": -1}, {"channels": 2}, {"jitter": 1.5}, {"held_out": 0.9}, {"jitter": float("nan")}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Data(**wrong)  # type: ignore[arg-type]
