"""data.json and the contact sheet: every file by name, the pixels that training sees, quickly."""

import json
import os
import shutil
import sys
import time
from collections import Counter
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import TRANSFORMER
from unfog.config.schema import Config
from unfog.data.augmentation import Augment
from unfog.data.data_report import ACTIONS, COMMON_ACTIONS, DataReport, SkippedFile
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.packs.pack_writer import write_pack
from unfog.data.prepare import prepare, scan_source
from unfog.data.scan import Scan
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.pipeline import contact_sheet as sheet_module
from unfog.pipeline import skipped_images as data_record
from unfog.pipeline.contact_sheet import contact_sheet
from unfog.pipeline.load_data import load_images
from unfog.pipeline.skipped_images import FailureReporter, data_json, describe_changes
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.reporting.log_settings import Log
from unfog.reporting.recorder import Recorder
from unfog.reporting.records import read_events
from unfog.runs.session import write_data_report

TREATMENTS = (("resized",), ("flattened", "resized"), ("rotated",), ())


def prepared(
    train: int, held_out: int = 0, classes: int = 0, size: int = 16, treatment: tuple[int, ...] = ()
) -> Dataset:
    """As `prepare` returns it: image i is all of one colour that tells i (up to 65,536)."""
    n = train + held_out
    number = np.arange(n)
    colours = np.stack([number % 256, number // 256, np.full(n, 7)], 1).astype(np.uint8)
    pixels = colours.repeat(size * size, axis=1).reshape(n, 3, size, size)
    names = tuple(f"{i:07}.png" for i in range(n))
    found = tuple(f"class {i}" for i in range(classes))
    labels = number % classes if classes else None

    def part(rows: slice) -> ImageSet:
        return ImageSet.labelled(pixels[rows], None if labels is None else labels[rows], names[rows], found)

    ledger = DataReport(
        source="x",
        found=n + 1,
        used=n,
        held_out=held_out,
        size=size,
        channels=3,
        background="white",
        class_counts={},
        sides={},
        modes={},
        treatments=TREATMENTS,
        treatment=treatment or (0,) * n,
        skipped=(SkippedFile("bad.png", "empty"),),
        ignored={},
    )
    return Dataset(Data(size=size, channels=3), part(slice(train)), part(slice(train, None)), ledger)


def files(prepared: Dataset) -> list[dict[str, object]]:
    listed: list[dict[str, object]] = json.loads(data_json(prepared))["files"]
    return listed


def shown(sheet: np.ndarray) -> list[int]:
    """Numbers of the images on a sheet of `prepared` images without augmentation, row by row."""
    colours = sheet.reshape(-1, 3)[(sheet.reshape(-1, 3)[:, 2] == 7)].astype(int)
    numbers = colours[:, 0] + 256 * colours[:, 1]
    return list(dict.fromkeys(numbers.tolist()))


def test_every_file_has_a_line() -> None:
    said = json.loads(data_json(prepared(3, 1, treatment=(0, 1, 3, 2))))
    assert said["files"] == [
        {"name": "0000000.png", "status": "used", "converted": ["resized to 16x16"], "reason": None},
        {
            "name": "0000001.png",
            "status": "used",
            "converted": ["resized to 16x16", "flattened on white"],
            "reason": None,
        },
        {"name": "0000002.png", "status": "used", "converted": [], "reason": None},
        {"name": "0000003.png", "status": "held out", "converted": ["rotated by EXIF"], "reason": None},
        {"name": "bad.png", "status": "quarantined", "converted": [], "reason": "empty"},
    ]
    assert (said["found"], said["used"], said["held_out"], said["quarantined"], said["unlisted"]) == (5, 4, 1, 1, 0)
    assert said["actions"] == {"resized": 2, "flattened": 1, "rotated": 1}
    assert said["summary"].startswith("5 images; 4 used: 2 resized to 16x16, 1 flattened on white")


def test_of_very_many_files_only_the_unusual_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_record, "_MAX_LISTED", 5)
    assert len(files(prepared(3, 1))) == 5
    many = prepared(5, 1, treatment=(0, 0, 1, 3, 0, 2))
    assert [file["name"] for file in files(many)] == ["0000002.png", "0000005.png", "bad.png"]
    assert json.loads(data_json(many))["unlisted"] == 4


@pytest.mark.skipif(sys.platform != "linux", reason="every name is text there")
def test_names_that_are_no_text_do_not_spoil_the_file(tmp_path: Path) -> None:
    data = BytesIO()
    Image.new("RGB", (16, 16)).save(data, "PNG")
    names = [b"a\xff.png", b"a\xfe.png", "a\nb \u202e.png".encode()]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(data.getvalue())
    (tmp_path / os.fsdecode(b"empty\xff.png")).write_bytes(b"")
    said = files(prepare(open_source(tmp_path), Data(cache="memory")))
    assert {file["name"] for file in said} == {"a\\xff.png", "a\\xfe.png", "a\nb \u202e.png", "empty\\xff.png"}


@pytest.mark.slow
def test_the_sheet_begins_with_the_unusual_and_spreads_over_classes() -> None:
    n = 3000
    unusual = {7: 1, 1900: 1, 44: 2}
    treatment = tuple(unusual.get(i, 0) for i in range(n))
    numbers = shown(contact_sheet(prepared(n, classes=10, treatment=treatment), Augment(), seed=0))
    assert set(numbers[:2]) == {7, 1900}
    assert numbers[2] == 44
    assert Counter(number % 10 for number in numbers[3:]) == dict.fromkeys(range(10), 6)


@pytest.mark.slow
def test_the_sheet_without_classes_and_of_few_images() -> None:
    whole = contact_sheet(prepared(500), Augment(), seed=0)
    assert whole.shape == (8 * 130 - 2, 8 * 130 - 2, 3)  # 16 pixels, enlarged to 128; no captions
    assert len(shown(whole)) == 64
    assert shown(contact_sheet(prepared(1), Augment(), seed=0)) == [0]
    assert len(shown(contact_sheet(prepared(20, size=512), Augment(), seed=0))) == 8
    assert len(shown(contact_sheet(prepared(300, classes=200), Augment(), seed=0))) == 64


@pytest.mark.parametrize(("classes", "each"), [(1, 60), (2, 24), (4, 12), (6, 10)])
def test_the_sheet_has_whole_rows_of_each_class(classes: int, each: int) -> None:
    numbers = shown(contact_sheet(prepared(500, classes=classes), Augment(), seed=0))
    assert Counter(number % classes for number in numbers) == dict.fromkeys(range(classes), each)


@pytest.mark.slow
def test_of_large_images_with_many_conversions_one_of_each_is_shown() -> None:
    kinds = [(action,) for action in ACTIONS if action not in COMMON_ACTIONS]
    images = prepared(30, size=512, treatment=(*range(len(kinds)), *[len(kinds)] * (30 - len(kinds))))
    images = replace(images, report=replace(images.report, treatments=(*kinds, ())))
    assert len(kinds) > 8
    assert shown(contact_sheet(images, Augment(), seed=0)) == list(range(len(kinds)))


def test_the_sheet_is_augmented_and_repeatable_and_leaves_the_random_numbers_alone() -> None:
    images, augment = prepared(100, classes=3), Augment(flip=True, jitter=0.3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sheet = contact_sheet(images, augment, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(10)
    assert np.array_equal(contact_sheet(images, augment, seed=1), sheet)
    assert not np.array_equal(contact_sheet(images, augment, seed=2), sheet)
    plain = contact_sheet(images, Augment(), seed=1)
    assert sheet.shape == plain.shape
    assert not np.array_equal(sheet, plain)


def test_both_files_are_written_or_the_disk_s_refusal_is_raised(tmp_path: Path) -> None:
    write_data_report(RunFolder(tmp_path), prepared(20), Augment(), seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["contact-sheet.png", "data.json"]
    with Image.open(tmp_path / "contact-sheet.png") as image:
        assert np.array_equal(np.asarray(image), contact_sheet(prepared(20), Augment(), seed=0))
    with pytest.raises(OSError, match="No such file"):
        write_data_report(RunFolder(tmp_path / "gone"), prepared(20), Augment(), seed=0)


@pytest.mark.slow
def test_it_is_quick(tmp_path: Path) -> None:
    """Measured: 0.08 s for 10,000 images, 0.3 s for a million; the rest is for a slow machine."""
    for n, limit in ((10_000, 1.5), (1_000_000, 4.0)):
        images = prepared(n, classes=10, size=4)
        started = time.process_time()
        write_data_report(RunFolder(tmp_path), images, Augment(flip=True), seed=0)
        assert time.process_time() - started < limit


# What is said of images while a run begins and goes on.


def pictures(folder: Path, n: int) -> Path:
    folder.mkdir()
    for i in range(n):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i:03}.png")
    return folder


def said(source: Path, data: Data, capsys: pytest.CaptureFixture[str]) -> str:
    load_images(replace(Config(), source=str(source), data=data), StopSignals())
    return " ".join(capsys.readouterr().err.split())


def test_why_nothing_is_held_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Data(size=8, cache="memory", held_out=0.0001)
    assert "fewer than 100 images" in said(pictures(tmp_path / "few", 20), asked, capsys)
    assert "none of the 140 images fell below that share" in said(pictures(tmp_path / "more", 140), asked, capsys)


def test_a_background_that_a_pack_does_not_have_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scan, key = scan_source(open_source(pictures(tmp_path / "set", 20)), Data(size=8))
    made = write_pack(scan.resolve(), tmp_path / "pack", key, "").path
    assert "background = black changes nothing" in said(made, Data(background="black"), capsys)
    assert "background" not in said(made, Data(), capsys)


def test_clipping_that_a_pack_was_made_without_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = pictures(tmp_path / "set", 20)
    for clip in (False, True):
        scan, key = scan_source(open_source(folder), Data(size=8, clip=clip))
        made = write_pack(scan.resolve(), tmp_path / f"pack-{clip}", key, "").path
        assert ("data.clip changes nothing" in said(made, Data(clip=True), capsys)) != clip
        assert "data.clip" not in said(made, Data(), capsys)


@pytest.mark.slow
def test_damaged_images_are_told_of_once_also_those_held_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pictures(tmp_path / "set", 120)
    asked = Data(size=8, channels=3, cache="none", held_out=0.2)
    names = open_source(folder).names
    order, train = Scan.create(open_source(folder), Data(held_out=0.2)).split_held_out()
    bad = {names[order[0]], names[order[train]]}
    for name in bad:
        (folder / name).write_bytes(b"")
    unfog.train(
        folder,
        out=tmp_path / "run",
        steps=14,
        batch=8,
        sampler={"steps": 2},
        network=TRANSFORMER,
        device="cpu",
        precision="fp32",
        data=asked,
        log={"every": 5},
        evaluate={"every": 10, "images": 8, "levels": 2},
        preview={"every": 0, "images": 2},
    )
    told = capsys.readouterr().err
    for name in bad:
        assert told.count(f"{name} cannot be used: empty; the next image replaces it") == 1


@pytest.mark.slow
def test_a_picture_that_stands_in_is_shown_with_its_own_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in range(2):
        (tmp_path / f"set/{kind}").mkdir(parents=True)
        for i in range(20):
            Image.new("RGB", (8, 8), (200 * kind, 0, 0)).save(tmp_path / f"set/{kind}/{i:02}.png")
    for i in range(10, 20):  # the first of the other class stands in for all of them
        (tmp_path / f"set/0/{i}.png").write_bytes(b"")
    fly = prepare(open_source(tmp_path / "set"), Data(size=8, channels=3, cache="none"))
    monkeypatch.setattr(
        sheet_module, "grid", lambda pixels, row_names: [str(int(one[0, 0, 0] > 99)) for one in pixels] == row_names
    )
    assert contact_sheet(fly, Augment(), 0) is True


def fill(folder: Path, count: int) -> None:
    folder.mkdir()
    for i in range(count):
        Image.fromarray(np.full((16, 16, 3), 5 * i, np.uint8)).save(folder / f"{i:02}.png")


def test_a_burst_of_missing_images_is_one_warning_and_an_event_each(tmp_path, capfd):
    fill(tmp_path / "set", 20)
    settings = Data(size=16, channels=3, held_out=0, cache="none")
    dataset = prepare(open_source(tmp_path / "set"), settings)
    dataset.train.take(np.arange(20))
    for path in sorted((tmp_path / "set").iterdir())[:7]:
        path.unlink()
    dataset.train.take(np.arange(20))
    folder = RunFolder(tmp_path / "run")
    with Recorder(folder.path, Log(), 10) as recorder:
        FailureReporter(folder, dataset).report(recorder, 1)
    said = [line for line in capfd.readouterr().err.splitlines() if "cannot be used" in line]
    assert len(said) == 1
    assert "7 images cannot be used: no longer there" in said[0]
    kinds = [row["kind"] for row in read_events(folder.events)]
    assert (kinds.count("quarantined"), kinds.count("warning")) == (7, 1)


def test_a_resume_says_which_images_are_gone_and_new(tmp_path):
    fill(tmp_path / "set", 20)
    folder = RunFolder(tmp_path)
    before = prepare(open_source(tmp_path / "set"), Data(size=16))
    (tmp_path / "data.json").write_bytes(data_json(before))
    assert "names are the same" in describe_changes(folder, before)
    gone, kept = sorted((tmp_path / "set").iterdir())[:2]
    gone.unlink()
    shutil.copy(kept, tmp_path / "set/zzz.png")
    said = describe_changes(folder, prepare(open_source(tmp_path / "set"), Data(size=16)))
    assert f"1 of 20 are gone, such as {gone.name}" in said
    assert "1 are new, such as zzz.png" in said
    (tmp_path / "data.json").unlink()
    assert describe_changes(folder, before) == ""


@pytest.mark.slow
def test_a_resume_says_what_else_differs_where_the_names_are_the_same(tmp_path):
    (tmp_path / "set").mkdir()
    for name in ("cat", "dog"):
        fill(tmp_path / "set" / name, 10)
    folder, source = RunFolder(tmp_path), tmp_path / "set"

    def looked_at():
        return prepare(open_source(source), Data(size=16))

    (tmp_path / "data.json").write_bytes(data_json(looked_at()))
    one, other = sorted((source / "cat").iterdir())[:2]
    one.write_bytes(other.read_bytes())
    assert "content of images, or the class of some, differs" in describe_changes(folder, looked_at())
    Image.new("L", (40, 20), 7).save(one)
    said = describe_changes(folder, looked_at())
    assert "modes: " in said
    assert "L 0 -> 1" in said
    assert "longest_max" in said
    one.write_bytes(b"")
    said = describe_changes(folder, looked_at())
    assert "1 were " in said
    assert f"quarantined now, such as cat/{one.name}" in said
    assert "images of a class: cat 10 -> 9" in said
    stored = json.loads((tmp_path / "data.json").read_text())
    (tmp_path / "data.json").write_text(json.dumps(stored | {"unlisted": 5, "files": []}))
    assert "images of a class: cat 10 -> 9" in describe_changes(folder, looked_at()), "also of very many files"
    (tmp_path / "data.json").write_text(json.dumps(stored | {"files": [3]}))
    assert describe_changes(folder, looked_at()) == ""
