"""Packs: the same images, names, order and fingerprints as their source; whole however often killed; never trusted."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from forked import Forked
from hostile import npy, peak_memory, places, put
from unfog.config.requests.pack import PackRequest
from unfog.config.schema import Config
from unfog.data.augmentation import Augment
from unfog.data.dataset import Dataset
from unfog.data.packs import pack_writer as packing
from unfog.data.packs.pack import Pack, PackSource
from unfog.data.packs.pack_writer import BusyError, remove_work_files, write_pack
from unfog.data.prepare import prepare, scan_source
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.data.stream import ImageStream
from unfog.errors import RequestError, RunError
from unfog.pipeline.contact_sheet import contact_sheet
from unfog.pipeline.pack import pack

pytestmark = pytest.mark.slow

ASKED = Data(size=16)


def fill(folder: Path, n: int, mode: str = "RGB", classes: int = 2) -> Path:
    """n pictures of noise in folders, of which some are wide, some damaged."""
    rng = np.random.default_rng(0)
    for i in range(n):
        path = folder / f"class {i % classes}" / f"{i:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i % 37 == 5:
            path.write_bytes(b"no image")
            continue
        pixels = rng.integers(0, 256, (20, 20 + 4 * (i % 3), 3), np.uint8)
        Image.fromarray(pixels).convert(mode).save(path, compress_level=1)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("photos"), 230)


@pytest.fixture(scope="module")
def made(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(photos, tmp_path_factory.mktemp("packs") / "made")


def packed(source: Path, out: Path, asked: Data = ASKED, progress: Callable[[int, int], None] | None = None) -> Path:
    scan, key = scan_source(open_source(source), asked)
    write_pack(scan.resolve(), out, key, "give another folder", progress)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def assert_same(one: Dataset, other: Dataset) -> None:
    for a, b in ((one.train, other.train), (one.held_out, other.held_out)):
        assert np.array_equal(a.pixels[:], b.pixels[:])
        assert list(a.names) == list(b.names)
        assert a.classes == b.classes
        assert (a.labels is None) == (b.labels is None)
        assert a.labels is None or np.array_equal(a.labels, b.labels)
        assert a.fingerprint == b.fingerprint
        assert np.array_equal(a.sides, b.sides)
        assert np.array_equal(a.grey, b.grey)


def test_a_pack_is_its_folder(photos: Path, made: Path) -> None:
    folder = prepare(open_source(photos), replace(ASKED, cache="memory"))
    from_pack = prepare(open_source(made), Data())
    assert_same(folder, from_pack)
    assert replace(from_pack.report, source=folder.report.source) == folder.report
    assert from_pack.settings == replace(folder.settings, cache="auto")
    assert not np.asarray(from_pack.train.pixels).flags.writeable
    a, b = (ImageStream(one.train, 3).batch(1000, 40) for one in (folder, from_pack))
    assert np.array_equal(a.pixels, b.pixels)
    assert a.conditions.label is not None
    assert np.array_equal(a.conditions.label, b.conditions.label)
    assert folder.train.fingerprint == replace(from_pack.train, known_fingerprint="").fingerprint


def test_statistics_are_those_of_the_pixels(made: Path) -> None:
    pack_ = Pack.open(made)
    pixels = np.asarray(pack_.images.pixels).astype(np.float64)
    assert pack_.manifest["statistics"]["mean"] == pytest.approx(pixels.mean((0, 2, 3)), abs=1e-3)
    assert pack_.manifest["statistics"]["std"] == pytest.approx(pixels.std((0, 2, 3)), abs=1e-3)


KILLED = """
import sys
import unfog.data.decode_pool as bulk
from pathlib import Path
from unfog.data.packs.pack_writer import write_pack
from unfog.data.prepare import scan_source
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
bulk._CHUNK = 16
scan, key = scan_source(open_source(sys.argv[1]), Data(size=16))
print("ready", flush=True)
write_pack(scan.resolve(), Path(sys.argv[2]), key, "")
"""


def lines_of(journal: Path) -> int:
    """Count the lines of a journal; 0 before it is there, and once the finished pack has none."""
    try:
        return len(journal.read_bytes().splitlines())
    except FileNotFoundError:
        return 0


def test_killed_again_and_again_it_comes_out_the_same(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 16)
    whole = contents(packed(photos, tmp_path / "whole"))
    assert sorted(whole) == sorted([*Pack.open(tmp_path / "whole").manifest["files"], "pack.json"])
    out, journal, kills = tmp_path / "out", tmp_path / "out/journal.jsonl", 0
    rng, lines = np.random.default_rng(1), 0
    while not (out / "pack.json").exists():
        process = Forked([photos, out], KILLED, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        wanted = lines + rng.integers(2, 6)
        while process.poll() is None and lines_of(journal) < wanted:
            time.sleep(0.0003)
        process.kill()
        assert process.wait() in (0, -signal.SIGKILL)
        kills += process.returncode != 0
        lines = lines_of(journal)
        assert kills < 50
    assert kills >= 2
    remove_work_files(out)
    assert contents(out) == whole


@pytest.mark.parametrize("kind", ["cut journal", "cut pixels", "cut facts", "garbage behind"])
def test_what_a_crash_leaves_behind_is_put_right(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 16)
    whole, out = contents(packed(photos, tmp_path / "whole")), tmp_path / "out"
    interrupted(photos, out, 100)
    sizes = {path.name: path.stat().st_size for path in out.iterdir()}
    if kind == "cut journal":
        os.truncate(out / "journal.jsonl", sizes["journal.jsonl"] - 7)
    elif kind == "garbage behind":  # data that reached the disk before its line in the journal did
        for path in out.iterdir():
            with path.open("ab") as file:
                file.write(b"{}" * 999)
        interrupted(photos, out, 150)
    else:  # the disk lost what it had promised to hold: there is nothing to go on from
        name = {"cut pixels": "pixels.u8", "cut facts": "facts.bin"}[kind]
        os.truncate(out / name, sizes[name] - 1)
    seen: list[int] = []
    packed(photos, out, progress=lambda done, total: seen.append(done))
    assert contents(out) == whole
    assert (seen[0] > 32) == (kind in ("cut journal", "garbage behind"))


def interrupted(source: Path, out: Path, at: int, asked: Data = ASKED) -> None:
    def stop(done: int, total: int) -> None:
        if done >= at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(source, out, asked, stop)


def test_what_was_begun_of_other_images_or_settings_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 16)
    photos, config = fill(tmp_path / "photos", 60), Config()
    for change, said in (("none", "continuing at image 32"), ("settings", "the settings"), ("images", "the images")):
        out = tmp_path / change
        interrupted(photos, out, 48)
        if change == "images":
            Image.new("RGB", (20, 20), "red").save(photos / "class 0/0000.png")
        asked = replace(config, source=str(photos), data=replace(ASKED, size=8 if change == "settings" else 16))
        if change != "none":
            before = contents(out)
            with pytest.raises(RequestError, match=f"unfinished pack, 32 images .* with {said}"):
                pack(PackRequest(asked.source, out, asked.data))
            assert contents(out) == before
            continue
        pack(PackRequest(asked.source, out, asked.data))
        assert said in capsys.readouterr().err
        assert_same(
            prepare(open_source(out), Data()), prepare(open_source(photos), Pack.open(out).resolve_settings(Data()))
        )


def test_an_image_in_colour_that_turns_up_late_makes_all_rgb_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 16)
    photos = fill(tmp_path / "photos", 90, "L", classes=1)
    Image.new("RGB", (20, 20), "red").save(photos / "class 0/0071.png")  # not one of those looked at first
    whole = packed(photos, tmp_path / "whole")
    assert Pack.open(whole).images.pixels.shape[1] == 3
    seen: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        seen.append((done, (tmp_path / "out/journal.jsonl").read_text().count('"channels": 3')))
        if seen[-1][1] and done >= 48:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(photos, tmp_path / "out", progress=stop)
    again: list[int] = []
    packed(photos, tmp_path / "out", progress=lambda done, total: again.append(done))
    assert contents(tmp_path / "out") == contents(whole)
    assert again[0] > 32


def test_another_folder_is_left_alone(photos: Path, made: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="is not a pack; give another folder"):
        packed(photos, tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}
    config = replace(Config(), source=str(photos), data=replace(ASKED, size=8))
    before = contents(made)
    with pytest.raises(RequestError, match=r"is already a pack of"):
        pack(PackRequest(config.source, made, config.data))
    with pytest.raises(RequestError, match=r"data\.flip .*during training"):
        pack(PackRequest(config.source, tmp_path / "mirrored", replace(ASKED, flip=True)))
    assert not (tmp_path / "mirrored").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"cannot be written \(.*\); give another folder"):
        packed(photos, tmp_path / "file/pack")
    assert contents(made) == before


def test_a_finished_pack_is_not_made_again(
    photos: Path, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packing, "decode_all", None)
    assert pack(PackRequest(str(photos), made, ASKED)) == made
    assert "is already complete" in capsys.readouterr().err


def test_a_pack_that_another_process_finishes_at_that_moment_stays(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the folder and the lock."""
    out, lock, before = tmp_path / "out", packing.locked, []

    @contextmanager
    def late(folder: Path) -> Iterator[None]:
        monkeypatch.setattr(packing, "locked", lock)
        before.append(contents(packed(photos, out)))
        with lock(folder):
            yield

    monkeypatch.setattr(packing, "locked", late)
    assert packed(photos, out, progress=lambda done, total: pytest.fail("it is decoded")) == out
    assert [contents(out)] == before
    (tmp_path / "other").mkdir()
    out = tmp_path / "other/out"
    monkeypatch.setattr(packing, "locked", late)
    with pytest.raises(RequestError, match="replaced by another pack"):
        packed(photos, out, replace(ASKED, size=8))
    assert contents(out)["pixels.u8"] == before[0]["pixels.u8"]


def test_no_room_is_found_before_decoding_and_a_full_disk_is_gone_on_from(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 16)
    with monkeypatch.context() as patched:
        patched.setattr("unfog.data.packs.pack_writer.shutil.disk_usage", lambda folder: type("", (), {"free": 1000}))
        with pytest.raises(RequestError, match=r"lacks space for 1.3 MB .*give another folder"):
            packed(photos, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))  # the system refuses to write more into one file
    try:
        with pytest.raises(RunError, match=os.strerror(errno.EFBIG)):
            packed(photos, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    seen: list[int] = []
    packed(photos, tmp_path / "out", progress=lambda done, total: seen.append(done))
    assert seen[0] > 48
    assert contents(tmp_path / "out") == contents(packed(photos, tmp_path / "whole"))


def test_two_do_not_make_the_same_pack(photos: Path, tmp_path: Path) -> None:
    def other(done: int, total: int) -> None:
        with pytest.raises(BusyError, match="another process is packing"):
            packed(photos, tmp_path / "out")

    packed(photos, tmp_path / "out", progress=other)
    assert Pack.verify(tmp_path / "out") == []


def test_the_command_stops_on_a_signal_and_goes_on(photos: Path, tmp_path: Path) -> None:
    """With pictures large enough that it is at work when the signal comes, and that a chunk holds 21 of them."""
    for i in range(600):
        path = tmp_path / f"large/{i}.png"
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(tmp_path / "one.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 600, 3), np.uint8)).save(tmp_path / "one.png")
    words = ["pack", tmp_path / "large", tmp_path / "out", "--size", "1024"]
    process = Forked(words, stderr=subprocess.PIPE)
    while not (tmp_path / "out/journal.jsonl").exists() or (tmp_path / "out/journal.jsonl").read_text().count("\n") < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.terminate()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 3
    assert "images are saved; repeat the command to continue" in said
    again = Forked(words, stderr=subprocess.PIPE)
    assert again.stderr is not None
    assert any("continuing at image" in line for line in iter(again.stderr.readline, ""))
    again.kill()
    again.communicate()


# Settings that a pack was not made with


def test_a_smaller_size_is_made_from_the_pack_and_a_larger_one_refused(made: Path, photos: Path) -> None:
    small = prepare(open_source(made), Data(size=8, cache="memory"))
    kept = prepare(open_source(made), Data())
    assert small.train.pixels.shape[1:] == (3, 8, 8)
    assert list(small.train.names) == list(kept.train.names)  # the pack's split stays
    assert small.train.classes == kept.train.classes
    direct = prepare(open_source(photos), Data(size=8, cache="memory"))
    by_name = dict(zip(direct.train.names, direct.train.pixels[:].astype(int)))
    difference = [np.abs(by_name[name] - pixels).mean() for name, pixels in zip(small.train.names, small.train.pixels)]
    assert np.mean(difference) < 12  # of noise that was resized twice
    with pytest.raises(RequestError, match=r"size = 32.*16x16.*pack the originals"):
        prepare(open_source(made), Data(size=32))
    grey = prepare(open_source(made), Data(channels=1, cache="memory"))
    assert grey.train.pixels.shape[1:] == (1, 16, 16)


def test_labels_and_held_out_images_can_be_done_without(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "decode_all", None)
    source = open_source(made)
    whole = Pack.open(made).images
    none = prepare(source, Data(labels="none"))
    assert (none.train.labels, none.train.classes, none.settings.labels) == (None, (), "none")
    every = prepare(source, Data(held_out=0))
    assert (len(every.train), len(every.held_out), every.settings.held_out) == (len(whole), 0, 0.0)
    assert "held out" not in every.report.line()
    fingerprints = {one.train.fingerprint for one in (none, every, prepare(source, Data()))}
    assert len(fingerprints) == 3


def test_another_share_held_out_is_split_by_name(made: Path, photos: Path) -> None:
    asked = Data(size=16, held_out=0.3, cache="memory")
    again, direct = prepare(open_source(made), asked), prepare(open_source(photos), asked)
    assert len(again.held_out) > 40
    assert sorted(again.held_out.names) == sorted(direct.held_out.names)


# Packs that are none


def test_any_byte_changed_is_found_by_verifying(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 100)  # so that there are several
    out = packed(photos, tmp_path / "out")
    assert Pack.verify(out) == []
    for path in sorted(out.iterdir()):
        before = path.read_bytes()
        place = len(before) * 2 // 3
        path.write_bytes(before[:place] + bytes([before[place] ^ 1]) + before[place + 1 :])
        if path.name == "pack.json":
            with pytest.raises(RequestError, match=r"is a damaged pack \(.*\); pack the originals again"):
                Pack.verify(out)
        else:
            (trouble,) = Pack.verify(out)
            assert path.name in trouble
        path.write_bytes(before)
    assert Pack.verify(out) == []


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("labels.npy", np.array(["x"], object)),
        ("names.npy", np.zeros(3, np.int64)),
        ("treatment.npy", np.zeros(10**6, np.float64)),
        ("sides.npy", np.zeros((5, 2), np.int32)),
        ("grey.npy", None),
    ],
)
def test_forged_arrays_are_refused(made: Path, tmp_path: Path, name: str, array: np.ndarray | None) -> None:
    forged = copied(made, tmp_path / "forged")
    if array is None:  # a header that asks for a petabyte
        (forged / name).write_bytes(npy("(1000000000000000, 2)", "<i4"))
    else:
        np.save(forged / name, array, allow_pickle=True)
    manifest = json.loads((forged / "pack.json").read_text())
    manifest["files"][name]["bytes"] = (forged / name).stat().st_size
    (forged / "pack.json").write_bytes(Pack.seal({k: v for k, v in manifest.items() if k != "digest"}))
    with pytest.raises(RequestError, match="damaged pack"):
        Pack.open(forged)


def test_labels_and_treatments_that_there_are_not_are_refused_when_met(made: Path, tmp_path: Path) -> None:
    forged = copied(made, tmp_path / "forged")
    n = len(Pack.open(made).images)
    np.save(forged / "labels.npy", np.full(n, 7, np.int64))
    with pytest.raises(RequestError, match=r"labels\.npy"):
        contact_sheet(prepare(PackSource(forged, "forged"), Data()), Augment.from_settings(Data()), 0)
    np.save(forged / "treatment.npy", np.full(n, -3, np.int32))
    prepared = prepare(PackSource(forged, "forged"), Data())
    with pytest.raises(RequestError, match=r"labels\.npy"):
        ImageStream(prepared.train, 0).batch(0, 4)
    with pytest.raises(RequestError, match=r"treatment\.npy"):
        prepared.report.treatment_of(slice(3))


@pytest.mark.parametrize("cache", ["memory", "none", "disk"])
@pytest.mark.parametrize("label", [-1, 2, 2**40])
def test_such_labels_are_refused_at_another_size_too(made: Path, tmp_path: Path, cache: Any, label: int) -> None:
    forged = copied(made, tmp_path / "forged")
    labels = np.load(forged / "labels.npy")
    labels[3] = label
    np.save(forged / "labels.npy", labels)
    with pytest.raises(RequestError, match="a label that is not one of its 2 classes"):
        prepare(PackSource(forged, "forged"), Data(size=8, cache=cache))


@pytest.mark.parametrize(
    "change",
    [
        *({"done": value} for value in ("x", None, 10**9, -1, 2.5, 2**70)),
        *({"rows": value} for value in ("x", 10**9, -1)),
        *({"reasons": value} for value in (3, {"x": "a"}, {"3": 4}, {"999": "a"}, {"9" * 5000: "a"})),
        *({"treatments": value} for value in ([1], [[1]], "x", {})),
        *({"sums": value} for value in (None, [[1], [1]], [[1, 2, 3]], [["a"] * 3, [1] * 3])),
        *({"modes": value} for value in (7, {"RGB": "x"})),
        {"sha256": 3},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_damaged_journal_begins_anew(
    begun: tuple[Path, Path, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
) -> None:
    monkeypatch.setattr("unfog.data.decode_pool._CHUNK", 16)
    source, stopped, whole = begun
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    header, *lines = (out / "journal.jsonl").read_text().splitlines()
    for damaged in range(len(lines)):  # the last one counts for what is done, the others for their reasons
        now = [json.dumps(json.loads(line) | change) if i == damaged else line for i, line in enumerate(lines)]
        (out / "journal.jsonl").write_text("\n".join([header, *now, ""]))
        assert contents(packed(source, out)) == whole
        shutil.rmtree(out)
        shutil.copytree(stopped, out)


@pytest.mark.parametrize(
    "theirs",
    [
        {"journal.jsonl": '{"day": 1, "text": "dear diary"}\n', "facts.bin": "mine", "notes.txt": "mine"},
        {"facts.bin": "mine"},
        {"pixels.u8": "mine"},
    ],
    ids=lambda theirs: min(theirs),
)
def test_a_folder_that_holds_something_else_is_left_as_it_is(
    photos: Path, tmp_path: Path, theirs: dict[str, str]
) -> None:
    (out := tmp_path / "out").mkdir()
    for name, text in theirs.items():
        (out / name).write_text(text)
    with pytest.raises(RequestError, match="is not a pack"):
        packed(photos, out)
    assert {path.name: path.read_text() for path in out.iterdir()} == theirs


def test_nothing_of_anybody_else_is_among_the_files_of_a_pack_in_the_making(
    begun: tuple[Path, Path, dict[str, bytes]], tmp_path: Path
) -> None:
    source, stopped, _ = begun
    out = shutil.copytree(stopped, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="is not a pack"):
        packed(source, out)
    (out / "notes.txt").rename(out / ".hidden")  # as file systems and desktops leave
    packed(source, out)


def test_photos_beside_a_journal_are_no_unfinished_pack(photos: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "journal.jsonl").write_text('{"day": 1, "text": "dear diary"}\n')
    assert len(open_source(folder).names) == 230


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, bytes]]:
    """(images, what is left of an attempt to pack them, the files of the pack)."""
    folder = tmp_path_factory.mktemp("begun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("unfog.data.decode_pool._CHUNK", 16)
        source = fill(folder / "photos", 40)
        interrupted(source, folder / "stopped", 32)
        return source, folder / "stopped", contents(packed(source, folder / "whole"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_forged_manifest_opens_whole_or_not_at_all(
    made: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    manifest = json.loads((made / "pack.json").read_text())
    del manifest["digest"]
    for _ in range(data.draw(st.integers(1, 2))):
        manifest = put(manifest, data.draw(st.sampled_from(places(manifest))), data.draw(JSON))
    forged = tmp_path_factory.getbasetemp() / "forged"
    if not forged.exists():
        copied(made, forged)
    sealed = Pack.seal(manifest) if isinstance(manifest, dict) else json.dumps(manifest).encode()
    (forged / "pack.json").write_bytes(sealed)
    try:
        pack_ = Pack.open(forged)
    except RequestError:
        return
    prepared = pack_.dataset(Data(), "forged")
    for part in (prepared.train, prepared.held_out):
        assert len(part.names) == len(part) == len(part.sides) == len(part.grey)
        assert part.labels is None or len(part.labels) == len(part)
        assert isinstance(part.fingerprint, str)
    assert isinstance(prepared.report.line(), str)


def copied(made: Path, folder: Path) -> Path:
    folder.mkdir()
    for name, content in contents(made).items():
        (folder / name).write_bytes(content)
    return folder


# Start-up


def sparse(folder: Path, made: Path, n: int) -> Path:
    """A pack of n black images in files with holes: it takes no room, and its arrays are read as zeros."""
    folder.mkdir()
    manifest = json.loads((made / "pack.json").read_text())
    del manifest["digest"]
    _, channels, size, _ = manifest["shape"]
    kinds = {"labels": ((n,), "<i8"), "treatment": ((n,), "<i4"), "sides": ((n, 2), "<i4"), "grey": ((n,), "|b1")}
    for name, (shape, kind) in {**kinds, "names": ((n + 1,), "<i8")}.items():
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.dtype(kind), shape).flush()
    (folder / "names.bin").touch()
    (folder / "chunks.json").write_text("[]")
    with (folder / "pixels.u8").open("wb") as file:
        file.truncate(n * channels * size**2)
    for name, file in manifest["files"].items():
        file["bytes"] = (folder / name).stat().st_size
    counts = [n] + [0] * (len(manifest["ledger"]["treatments"]) - 1)
    manifest["ledger"] |= {"used": n, "held_out": 1000, "found": n, "known_counts": counts}
    manifest |= {"shape": [n, channels, size, size], "train": n - 1000}
    (folder / "pack.json").write_bytes(Pack.seal(manifest))
    return folder


def test_starting_up_does_not_grow_with_the_pack(made: Path, tmp_path: Path) -> None:
    """Measured: 2 ms and no memory for ten million images as for ten thousand; the rest is for a busy machine."""
    seconds = {}
    for n in (10_000, 10_000_000):
        folder = sparse(tmp_path / str(n), made, n)
        before, started = peak_memory(), time.process_time()
        prepared = prepare(open_source(folder), Data())
        assert prepared.train.names[n // 2] == ""
        assert prepared.train.fingerprint
        seconds[n] = time.process_time() - started
        # What this takes is the disk's business: the system reads a megabyte and more around each image.
        assert ImageStream(prepared.train, 0).batch(0, 64).pixels.shape == (64, 3, 16, 16)
        assert peak_memory() - before < 20 * 2**20
    assert seconds[10_000_000] < 1
