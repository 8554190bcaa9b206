"""Preparation: ledger, choices, split, cache. Real files in every mode that people have."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from test_training import CPU
from unfog.config.schema import Config
from unfog.data import cache
from unfog.data import prepare as preparing
from unfog.data import scan as survey
from unfog.data.data_report import DataReport
from unfog.data.dataset import Dataset
from unfog.data.packs import pack_writer as packing
from unfog.data.prepare import prepare, scan_source
from unfog.data.settings import Data
from unfog.data.sources.folder import FolderSource
from unfog.data.sources.registry import open_source
from unfog.data.stream import ImageStream
from unfog.errors import RequestError, RunError
from unfog.pipeline.build import build_held_out_set
from unfog.training.settings import Evaluate

MEMORY = Data(size=16, cache="memory")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("UNFOG_CACHE", str(folder))
    return folder


def run(folder: Path, settings: Data = MEMORY) -> Dataset:
    return prepare(open_source(folder), settings)


def fill(folder: Path, n: int, size: tuple[int, int] = (20, 20), mode: str = "RGB", suffix: str = ".png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for i in range(n):
        pixels = rng.integers(0, 256, (*size[::-1], 3), np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / f"{i:04}{suffix}")
    return folder


def test_the_line_sums_everything_up(tmp_path: Path) -> None:
    folder = fill(tmp_path / "set", 3)
    Image.new("RGBA", (40, 16), (0, 0, 0, 0)).save(folder / "clear.png")
    (folder / "b.png").write_bytes(b"")
    (folder / "notes.txt").write_text("notes")
    assert run(folder).report.line() == (
        "5 images; 4 used: 3 resized to 16x16, 1 centre-cropped, 1 flattened on white; "
        "1 skipped (1 empty: b.png); 1 other file ignored"
    )
    assert run(folder).report.actions == {"resized": 3, "cropped": 1, "flattened": 1}
    sides = run(folder).report.sides
    assert [sides[f"shortest_{which}"] for which in ("min", "median", "max")] == [16, 20, 20]
    assert [sides[f"longest_{which}"] for which in ("min", "median", "max")] == [20, 20, 40]


@pytest.mark.parametrize("n", [1, 7, 99])
def test_few_images_are_all_trained_on(tmp_path: Path, n: int) -> None:
    prepared = run(fill(tmp_path / "few", n))
    assert (len(prepared.train), len(prepared.held_out)) == (n, 0)
    assert not prepared.held_out
    assert ImageStream(prepared.train, 0).batch(0, 32).pixels.shape == (32, 3, 16, 16)
    assert f"{n} used: {n} resized to 16x16" in prepared.report.line()


def test_nothing_usable_is_a_request_error_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "b.png").write_bytes(b"PNG?")
    for where in ("memory", "disk"):
        with pytest.raises(RequestError, match=r"none of 2 images in .*: 1 empty, 1 not an image"):
            run(tmp_path, Data(cache=where))
    assert not list(cache.cache_folder().glob("[!.]*"))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(28, 28)] * 3, 28),
        ([(30, 30)] * 3, 32),  # cannot be halved twice
        ([(64, 64)] * 3, 64),
        ([(256, 256)] * 3, 64),
        ([(40, 60)] * 3, "40x60"),
        ([(40, 44)] * 3, 32),
        ([(63, 900)] * 2 + [(200, 200)], 32),
        ([(64, 900)] * 2 + [(20, 20)], 64),
    ],
)
def test_automatic_size(tmp_path: Path, sizes: list[tuple[int, int]], expected: int | str) -> None:
    for i, size in enumerate(sizes):
        Image.new("RGB", size, "red").save(tmp_path / f"{i}.png")
    assert run(tmp_path, Data()).settings.size == expected


@pytest.mark.slow
def test_automatic_channels_take_grey_rgb_files_for_grey(tmp_path: Path) -> None:
    folder = fill(tmp_path / "grey", 150, mode="L")
    for path in list(folder.iterdir())[:100]:
        Image.open(path).convert("RGB").save(path.with_suffix(".jpg"))
        path.unlink()
    prepared = run(folder)
    assert prepared.settings.channels == 1
    assert prepared.train.pixels.shape[1] == 1


@pytest.mark.slow
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
    assert prepared.report.actions["grey_to_rgb"] == 299
    assert calls[-1] == (300, 300)


@pytest.mark.slow
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


@pytest.mark.slow
def test_held_out_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_MAX_HELD_OUT", 10)
    folder = fill(tmp_path / "many", 200)
    prepared = run(folder, Data(size=4, held_out=0.5, cache="memory"))
    assert (len(prepared.train), len(prepared.held_out)) == (190, 10)
    assert prepared.report.held_out == 10


@pytest.mark.slow
def test_rows_names_and_labels_stay_together_when_images_are_skipped(tmp_path: Path) -> None:
    for kind, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
        fill(tmp_path / kind, 0)
        for i in range(150):
            path = tmp_path / kind / f"{i:03}.png"
            path.write_bytes(b"") if i % 7 == 0 else Image.new("RGB", (8, 8), colour).save(path)
    for where in ("memory", "disk"):
        prepared = run(tmp_path, Data(held_out=0.2, cache=where))
        assert prepared.report.class_counts == {"blue": 128, "red": 128}
        for part in (prepared.train, prepared.held_out):
            assert part.labels is not None
            assert (part.pixels[:, 0] == np.where(part.labels == 1, 255, 0)[:, None, None]).all()
            assert [name.split("/")[0] for name in part.names] == [part.classes[label] for label in part.labels]


@pytest.mark.slow
def test_the_ledger_tells_of_each_image_in_the_order_of_the_sets(tmp_path: Path) -> None:
    folder = fill(tmp_path / "set", 200, size=(16, 16))
    for i in range(0, 200, 3):
        Image.new("RGB", (32, 16), "red").save(folder / f"{i:04}.png")
    for i in range(0, 200, 20):
        (folder / f"{i:04}.png").write_bytes(b"")
    for where in ("memory", "disk", "disk"):
        prepared = run(folder, Data(size=16, held_out=0.3, cache=where))
        names = [*prepared.train.names, *prepared.held_out.names]
        assert len(prepared.held_out) > 30
        assert len(names) == len(prepared.report.treatment) == 190
        for name, which in zip(names, prepared.report.treatment, strict=True):
            assert prepared.report.phrases(which) == (["centre-cropped"] if int(name[:4]) % 3 == 0 else [])
        assert [one.name for one in prepared.report.skipped] == [f"{i:04}.png" for i in range(0, 200, 20)]


@pytest.mark.slow
def test_a_folder_is_decoded_once_and_again_when_a_file_changes(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "set", 120)
    asked = Data(cache="disk")
    in_memory, first = run(folder, Data(cache="memory")), run(folder, asked)
    assert np.array_equal(in_memory.train.pixels, first.train.pixels)
    assert in_memory.train.fingerprint == first.train.fingerprint
    assert in_memory.report == first.report
    assert not list(cache_folder.glob("*.partial"))

    with monkeypatch.context() as patched:
        patched.setattr(packing, "decode_all", None)
        for settings in (asked, first.settings, Data(cache="disk", flip=True), Data(cache="auto")):
            again = run(folder, settings)  # as asked, as settled, and when only what comes after decoding differs
            assert again.settings.flip is settings.flip
            assert again.settings.size == 20
            assert np.array_equal(again.train.pixels, first.train.pixels)
            assert (again.train.names, again.train.fingerprint) == (first.train.names, first.train.fingerprint)
            assert again.report == first.report
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


def test_what_changes_while_it_is_decoded_is_not_found_again(tmp_path: Path) -> None:
    """Else what was decoded of one state would be served for the other, should that come back, as with rsync."""
    folder = fill(tmp_path / "set", 20)
    path, asked = folder / "0000.png", Data(cache="disk", size=16, channels=3)
    before, status = path.read_bytes(), path.stat()

    class Changed(FolderSource):
        def stamp(self) -> tuple[str, int]:
            stamp = super().stamp()
            Image.new("RGB", (20, 20), "red").save(path)
            return stamp

    red = prepare(Changed(folder, "set"), asked)
    assert (red.train.pixels[0] == np.array([255, 0, 0])[:, None, None]).all()
    path.write_bytes(before)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert np.array_equal(run(folder, asked).train.pixels, run(folder, replace(asked, cache="memory")).train.pixels)


def test_a_damaged_cache_entry_is_made_again(tmp_path: Path, cache_folder: Path) -> None:
    folder = fill(tmp_path / "set", 20)
    asked = Data(cache="disk", size=16)
    good = run(folder, asked).train.pixels.copy()
    for path in cache_folder.glob("*/pixels.u8"):
        os.truncate(path, 100)
    assert np.array_equal(run(folder, asked).train.pixels, good)
    for path in [*cache_folder.glob("*/pack.json"), *cache_folder.glob("*.json")]:
        path.write_text("{")
    assert np.array_equal(run(folder, asked).train.pixels, good)


def test_an_entry_that_another_process_has_made_meanwhile_is_used(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for it and its making; to remove it would take it from whoever maps it."""
    source, settings = open_source(fill(tmp_path / "set", 20)), Data(cache="disk", size=16)
    found = scan_source(source, settings)
    other = cache.make(found[0].resolve(), found[1])
    before = (other.path / "pixels.u8").stat().st_ino
    monkeypatch.setattr(packing, "decode_all", None)
    assert cache.make(found[0].resolve(), found[1]).path == other.path
    assert (other.path / "pixels.u8").stat().st_ino == before


@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_source_that_goes_away_while_it_is_read_is_no_smaller_set(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, where: str
) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 16)
    monkeypatch.setattr("unfog.data.outages.PATIENCE", 0.0)
    folder = fill(tmp_path / "set", 120)
    source = folder if kind == "folder" else Path(shutil.make_archive(str(folder), "zip", folder))

    def change(done: int, total: int) -> None:
        if kind == "zip":
            os.utime(source)
        elif source.exists():
            source.rename(tmp_path / "away")

    asked = Data(size=16, cache=where)
    with pytest.raises(RunError, match=r"changed while they were read|cannot be reached"):
        prepare(open_source(source), asked, change)
    if kind == "folder":
        (tmp_path / "away").rename(source)  # as it was, to the time of change
    assert run(source, asked).report.used == 120


@pytest.mark.parametrize(
    "text",
    [
        '{"see": "bad"}',
        '{"see": "../cache/good"}',
        '{"see": 5}',
        '{"see": "\\u0000"}',
        "[" * 99999,
        "",
        "null",
        '{"a": 1}',
    ],
)
def test_a_cache_entry_that_leads_nowhere_is_none(cache_folder: Path, tmp_path: Path, text: str) -> None:
    run(fill(tmp_path / "set", 20), Data(cache="disk", size=16))
    (made,) = cache_folder.glob("[!.]*/")
    made.rename(cache_folder / "good")
    (cache_folder / "asked.json").write_text('{"see": "good"}')
    (cache_folder / "bad.json").write_text(text)
    (cache_folder / "loop.json").write_text('{"see": "bad"}')
    assert cache.load("good") is not None
    assert cache.load("asked") is not None
    assert cache.load("bad") is None
    assert cache.load("loop") is None


def test_a_cache_that_cannot_be_written_is_explained_or_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "set", 20)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(RequestError, match=r"cannot be written .*set UNFOG_CACHE"):
        run(folder, Data(cache="disk"))
    monkeypatch.setattr(preparing, "_MEMORY_FILE_BYTES", 0)
    assert len(run(folder, Data(cache="auto")).train) == 20


def test_no_room_for_the_cache_is_found_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfog.data.packs.pack_writer.shutil.disk_usage", lambda folder: type("", (), {"free": 1000}))
    with pytest.raises(RequestError, match=r"lacks space for 1\.1 MB"):
        run(fill(tmp_path / "set", 20), Data(cache="disk"))


def test_what_is_interrupted_before_anything_is_done_leaves_nothing_and_old_leftovers_are_removed(
    tmp_path: Path, cache_folder: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    leftover, recent = (cache_folder / (letter * 32) / "journal.jsonl" for letter in "ab")
    for journal in (leftover, recent):
        journal.parent.mkdir()
        journal.write_text('{"format": 1, "key": "k", "stamp": "s"}\n')
    latents = cache_folder / f"latents-{'c' * 32}.partial/latents.f16"
    latents.parent.mkdir()
    array = cache_folder / f"array-{'d' * 32}.77.partial"
    for empty in (latents, array):
        empty.touch()
    for abandoned in (leftover, latents, array):
        os.utime(abandoned, (0, 0))
    with pytest.raises(KeyboardInterrupt):
        prepare(open_source(fill(tmp_path / "set", 50)), Data(cache="disk"), interrupt)
    assert list(cache_folder.glob("[!.]*")) == [recent.parent]


@pytest.mark.parametrize("name", ["diary", "a" * 32, f"latents-{'c' * 32}.partial", f"array-{'d' * 32}.7.partial"])
@pytest.mark.parametrize("header", ['{"day": 1}', '{"format": 1, "key": "k", "stamp": "s"}'])
def test_a_cache_in_a_folder_of_other_things_leaves_them_alone(
    tmp_path: Path, cache_folder: Path, name: str, header: str
) -> None:
    files = {"journal.jsonl": f"{header}\n", "thesis.tex": "mine", "latents.f16": ""}
    (cache_folder / name).mkdir()
    for file, text in files.items():
        (cache_folder / name / file).write_text(text)
        os.utime(cache_folder / name / file, (0, 0))
    run(fill(tmp_path / "set", 4), Data(size=8, cache="disk"))
    assert {path.name: path.read_text() for path in (cache_folder / name).iterdir()} == files


@pytest.mark.slow
def test_an_interrupted_preparation_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 16)
    folder, calls = fill(tmp_path / "set", 120), []
    asked = Data(size=16, cache="disk")

    def interrupt(done: int, total: int) -> None:
        calls.append(done)
        if done >= 80 and len(calls) < 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(open_source(folder), asked, interrupt)
    calls = [0] * 1000
    found = prepare(open_source(folder), asked, interrupt)
    assert 64 < calls[1000] <= 80
    in_memory = run(folder, replace(asked, cache="memory"))
    assert np.array_equal(found.train.pixels, in_memory.train.pixels)
    assert found.report == in_memory.report


def test_large_sets_go_to_disk_by_themselves(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "set", 20)
    run(folder, Data())
    assert not list(cache_folder.iterdir())
    monkeypatch.setattr(preparing, "_MEMORY_PIXEL_BYTES", 1000)
    run(folder, Data())
    assert list(cache_folder.glob("*/pack.json"))


def test_ledger_survives_json_and_odd_file_names(tmp_path: Path) -> None:
    fill(tmp_path / "set", 3)
    odd = os.fsencode(tmp_path / "set") + b"/bad\xff.png"
    with open(odd, "wb"):
        pass
    ledger = run(tmp_path / "set").report
    assert DataReport.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger
    assert "1 empty: bad\\xff.png" in ledger.line()


def test_a_lot_of_trouble_is_summed_up(tmp_path: Path) -> None:
    folder = fill(tmp_path / "set", 1)
    for i in range(9):
        (folder / f"x{i}.png").write_bytes(b"")
    assert "9 skipped (9 empty: x0.png, x1.png, x2.png, ...)" in run(folder).report.line()


@pytest.mark.parametrize(
    "wrong", [{"size": 3}, {"size": -1}, {"channels": 65}, {"jitter": 1.5}, {"held_out": 0.9}, {"jitter": float("nan")}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Data(**wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_held_out_images_that_are_measured_are_spread_over_all(tmp_path):
    prepared = run(fill(tmp_path / "set", 300), Data(size=16, cache="memory", held_out=0.2))
    config = replace(Config(), data=prepared.settings, evaluate=Evaluate(images=4))
    held_out, n = build_held_out_set(prepared, config, CPU), len(prepared.held_out)
    assert n > 40
    wanted = prepared.held_out.pixels[[0, (n - 1) // 3, 2 * (n - 1) // 3, n - 1]]
    assert torch.equal(held_out.x0, torch.from_numpy(wanted) / 127.5 - 1)


def test_an_entry_is_of_these_settings(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for i in range(20):
        Image.new("RGBA", (16, 16), (0, 0, 0, 0)).save(folder / f"{i}.png")
    asked = Data(size=16, cache="disk", channels=3)
    for colour, value in (("white", 255), ("black", 0), ("white", 255)):
        assert (run(folder, replace(asked, background=colour)).train.pixels[0] == value).all()
    assert run(folder, replace(asked, channels=1)).train.pixels.shape[1] == 1


def test_a_tilde_in_the_name_of_the_cache_is_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UNFOG_CACHE", "~/fast")
    assert cache.cache_folder() == tmp_path / "fast"


def test_an_entry_is_of_this_version_of_pillow(tmp_path, monkeypatch):
    source, asked = open_source(fill(tmp_path / "set", 1)), Data(size=16)
    before = scan_source(source, asked)[1]
    assert scan_source(source, asked)[1] == before
    monkeypatch.setattr("PIL.__version__", "0.0")
    assert scan_source(source, asked)[1] != before


@pytest.mark.slow
def test_an_entry_is_of_this_share_held_out(tmp_path):
    folder = fill(tmp_path / "set", 200)
    counts = [len(run(folder, Data(size=16, cache="disk", held_out=share)).held_out) for share in (0, 0.3, 0.1)]
    assert counts[0] == 0
    assert counts[1] > counts[2] > 0
