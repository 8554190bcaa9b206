"""Tar shards as sources: what each program writes, the index that is built once, hostile archives, order."""

import io
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from image_bytes import random_png as png
from unfog.config.presets import preset
from unfog.config.validate import check_source
from unfog.data.sources import storage
from unfog.data.sources.base import ImageError, Source
from unfog.data.sources.labels import read_labels
from unfog.data.sources.registry import expand_braces, open_source
from unfog.data.sources.storage import BlockReader, open_storage
from unfog.data.webdataset import index_entry as shard_files
from unfog.data.webdataset import index_entry as shard_piece
from unfog.data.webdataset import shard_index
from unfog.data.webdataset.tar import DamagedTarError, TarMember
from unfog.errors import RequestError
from unfog.pipeline.load_data import load_images
from unfog.process.signals import StopSignals


def shard(path: Path, files: list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def pictures(numbers: range) -> list[tuple[str, bytes]]:
    return [(f"{i:06}.png", png(i)) for i in numbers]


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """Three uneven shards of 3, 1 and 5 images."""
    for k, numbers in enumerate([range(3), range(3, 4), range(4, 9)]):
        shard(tmp_path / f"sets/a-{k:03}.tar", pictures(numbers))
    return tmp_path / "sets"


def right(source: Source, i: int, number: int) -> bool:
    return np.array_equal(np.asarray(source.open(i)), np.asarray(Image.open(io.BytesIO(png(number)))))


# What is written, and how


def test_folder_pattern_braces_and_single_files(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*(f"a-000.tar/{i:06}.png" for i in range(3)), "a-001.tar/000003.png"]
    names += [f"a-002.tar/{i:06}.png" for i in range(4, 9)]
    (sets / "README.md").write_text("about them")
    for text in (sets, f"{sets}/a-{{000..002}}.tar", f"{sets}/a-*.tar", f"{sets}/a-{{002,000,001}}.tar"):
        check_source(str(text))
        source = open_source(text)
        assert list(source.names) == names
        assert source.names[2:5] == names[2:5]
        assert source.names[-1] == names[-1]
        assert source.names[np.int64(3)] == names[3]
        assert source.resolved == str(text)
        assert all(right(source, i, i) for i in range(9))
        assert read_labels(source, "auto") == ((), None)
    with pytest.raises(IndexError):
        source.names[9]
    monkeypatch.chdir(sets)
    assert open_source("a-{000..001}.tar").resolved == str(sets / "a-{000..001}.tar")
    one = open_source("a-001.tar")
    assert list(one.names) == ["a-001.tar/000003.png"]
    assert one.resolved == str(sets / "a-001.tar")


def test_braces_are_expanded_as_by_a_shell() -> None:
    patterns = ["a-{000..003}.tar", "{x,y}/a-{8..11}.tar", "{b,a}{1..0}", "a{0..01}", "no{}", "{one}", "a-{1,2}{x,}"]
    lines = "\n".join(f"echo {pattern}" for pattern in patterns)
    said = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True).stdout
    assert [expand_braces(pattern) for pattern in patterns] == [line.split() for line in said.splitlines()]
    for pattern in ("{0..99999999}", "{0..999}" * 3):
        with pytest.raises(RequestError, match="matches over 1,000,000 files"):
            expand_braces(pattern)


def test_wrong_patterns_say_what_is_wrong(sets: Path) -> None:
    with pytest.raises(RequestError, match=r"2 of the 5 files .*a-003.tar, a-004.tar"):
        check_source(f"{sets}/a-{{000..004}}.tar")
    with pytest.raises(RequestError, match="neither a folder nor a built-in set"):
        check_source(f"{sets}/b-*.tar")
    (sets / "x.jpg").write_bytes(b"")
    with pytest.raises(RequestError, match=r"x\.jpg, but only \.tar shards"):
        check_source(f"{sets}/*.jpg")
    assert len(open_source(sets).names) == 1  # with an image beside the shards it is a folder of images


def test_a_path_that_looks_like_a_pattern_is_a_path(tmp_path: Path) -> None:
    shard(tmp_path / "a{0..1}[x].tar", pictures(range(2)))
    assert len(open_source(tmp_path / "a{0..1}[x].tar").names) == 2


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_reads_as_tarfile_reads_it(tmp_path: Path, format: int) -> None:
    long = "/".join(["folder" * 5] * 4) + "/last"  # over what fits, but in two parts
    names = ["a.png", f"{'b' * 99}.png"[-100:], f"{long}.png"]
    if format != tarfile.USTAR_FORMAT:
        names += [f"{'c' * 300}.png", "käse/ü.png", f"{long * 3}.png"]
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=format) as archive:
        for i, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(png(i)), 1.5 if format == tarfile.PAX_FORMAT else 1
            archive.addfile(info, io.BytesIO(png(i)))
            folder = tarfile.TarInfo(f"folder{i}")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
            link = tarfile.TarInfo(f"link{i}.png")
            link.type, link.linkname = (tarfile.SYMTYPE, tarfile.LNKTYPE)[i % 2], "/etc/" + "x" * 90
            archive.addfile(link)
    with tarfile.open(path) as archive:
        theirs = [(m.name, m.offset_data, m.size, m.isreg()) for m in archive if not m.isdir()]
    found = TarMember.iterate(BlockReader(open_storage(str(path)), str(path), path.stat().st_size, 4096))
    assert [(m.name.decode(), m.start, m.size, m.regular) for m in found] == theirs
    source = open_source(path)
    assert [name.removeprefix("a.tar/") for name in source.names] == names
    assert source.ignored == {}
    assert [tuple(one) for one in source.unreadable] == [
        (f"a.tar/link{i}.png", "a link or sparse file in a shard") for i in range(len(names))
    ]
    assert all(right(source, i, i) for i in range(len(names)))


@pytest.mark.parametrize("format", ["gnu", "pax", "ustar", "v7"])
@pytest.mark.skipif(not shutil.which("tar"), reason="no tar here")
def test_what_the_command_tar_writes(tmp_path: Path, format: str) -> None:
    for i in range(6):
        path = tmp_path / f"in/{('cats', 'dogs')[i % 2]}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))
    (tmp_path / "in/.hidden.png").write_bytes(b"")
    done = subprocess.run(["tar", f"--format={format}", "-cf", "a.tar", "-C", "in", "."], cwd=tmp_path, check=False)
    if done.returncode:
        pytest.skip("another tar than GNU's")
    source = open_source(tmp_path / "a.tar")
    assert sorted(source.names) == [f"a.tar/{('cats', 'dogs')[i % 2]}/{i}.png" for i in (0, 2, 4, 1, 3, 5)]
    assert source.ignored == {"hidden": 1}
    classes, labels = read_labels(source, "folders")
    assert classes == ("cats", "dogs")
    assert labels is not None
    for i, name in enumerate(source.names):
        number = int(name[-5])
        assert right(source, i, number)
        assert labels[i] == number % 2


def test_sizes_beyond_octal_and_pax_sizes(tmp_path: Path) -> None:
    """A member of 9 GB (sparse on disk) in both spellings, and what stands behind it is found."""
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("large.png")
        info.size = 9 * 2**30
        head = info.tobuf(format)
        path = tmp_path / f"{format}.tar"
        with path.open("wb") as file:
            file.write(head)
            file.seek(info.size, os.SEEK_CUR)
            small = tarfile.TarInfo("small.png")
            small.size = len(png(1))
            file.write(small.tobuf(format) + png(1).ljust(1024, b"\0") + bytes(1024))
        source = open_source(path)
        assert list(source.names) == [f"{format}.tar/small.png"]
        assert right(source, 0, 1)
        assert [one.reason for one in source.unreadable] == ["over 512 MB"]


# Labels


def test_labels_of_cls_json_and_txt(tmp_path: Path) -> None:
    files = [
        *pictures(range(8)),
        ("000000.cls", b"10\n"),
        ("000001.cls", b"9"),
        ("000002.json", json.dumps({"label": 9, "width": 3}).encode()),
        ("000003.json", json.dumps({"class": "10"}).encode()),
        ("000004.json", b'{"cls": 10.0}'),
        ("000005.cls", b"09"),
        ("000005.json", b'{"label": 10}'),
        ("000006.txt", b"a caption"),
        ("000007.json", b'{"label": [1, 2]}'),
    ]
    random.Random(0).shuffle(files)  # as `tar` may have them
    source = open_source(shard(tmp_path / "a.tar", files))
    assert source.classes == ("9", "10")
    labels = dict(zip([name[-10:-4] for name in source.names], source.labels.tolist()))
    assert labels == {"000000": 1, "000001": 0, "000002": 0, "000003": 1, "000004": 1, "000005": 0}
    assert [tuple(one) for one in source.unreadable] == [
        (f"a.tar/00000{i}.png", "without a label, as others have") for i in (6, 7)
    ]
    assert source.ignored == {".json": 1}
    assert read_labels(source, "none") == ((), None)
    for i, name in enumerate(source.names):
        assert right(source, i, int(name[-10:-4]))


def test_texts_are_labels_unless_they_are_captions(tmp_path: Path) -> None:
    kinds = [(f"{i:06}.txt", ("cat", "dog")[i % 2].encode()) for i in range(8)]
    source = open_source(shard(tmp_path / "kinds.tar", [*pictures(range(8)), *kinds]))
    assert source.classes == ("cat", "dog")
    every_one, long = (b"picture %d" % i for i in range(8)), (b"long " * 20 + b"ab"[i % 2 :] for i in range(8))
    for said in (every_one, long, [b"two\nlines"] * 8):
        captions = [(f"{i:06}.txt", text) for i, text in enumerate(said)]
        source = open_source(shard(tmp_path / "captions.tar", [*pictures(range(8)), *captions]))
        assert source.classes == ()
        assert source.labels is None
        assert len(source.names) == 8


def test_a_cls_counts_more_than_a_json_and_that_more_than_a_txt(tmp_path: Path) -> None:
    labels = [("000000.cls", b"1"), ("000000.json", b'{"label": 2}'), ("000000.txt", b"3")]
    for files in itertools.permutations(labels):
        assert open_source(shard(tmp_path / "a.tar", [*files, *pictures(range(1))])).classes == ("1",)
    for files in itertools.permutations(labels[1:]):
        assert open_source(shard(tmp_path / "a.tar", [*files, *pictures(range(1))])).classes == ("2",)


def test_the_last_of_a_name_counts_for_labels_as_for_images(tmp_path: Path) -> None:
    files = [(f"{i}.{kind}", data) for i in range(4) for kind, data in (("png", png(i)), ("cls", b"%d" % (i % 2)))]
    later = [("0.png", png(9)), ("0.cls", b"1"), ("1.cls", b"")]
    source = open_source(shard(tmp_path / "a.tar", [*files, *later]))
    labels = {name[6]: source.classes[label] for name, label in zip(source.names, source.labels)}
    assert labels == {"2": "0", "3": "1", "0": "1"}
    assert right(source, list(source.names).index("a.tar/0.png"), 9)
    assert ("a.tar/1.png", "without a label, as others have") in [tuple(one) for one in source.unreadable]


def test_labels_of_names_with_dots(tmp_path: Path) -> None:
    files = [
        (f"v1.{i:03}.{kind}", data) for i in range(6) for kind, data in (("png", png(i)), ("cls", b"%d" % (i % 3)))
    ]
    files += [("x.left.png", png(7)), ("x.right.png", png(8)), ("x.cls", b"2")]
    source = open_source(shard(tmp_path / "a.tar", files))
    assert source.classes == ("0", "1", "2")
    assert source.labels.tolist() == [0, 1, 2, 0, 1, 2, 2, 2]
    assert (source.unreadable, source.ignored) == ([], {})
    kinds = [(f"{i}.txt", b"ab"[i % 2 : i % 2 + 1]) for i in range(8)]
    said = [(f"{i}.said.txt", b"long " * 30) for i in range(8)]
    numbered = [(f"{i}.png", png(i)) for i in range(8)]
    source = open_source(shard(tmp_path / "b.tar", [*numbered, *kinds, *said]))
    assert source.classes == ("a", "b"), "captions that go with no image of their own do not count"


def test_classes_are_the_same_over_all_shards(tmp_path: Path) -> None:
    for k, kind in enumerate((b"zebra", b"ant", b"zebra")):
        shard(tmp_path / f"s/{k}.tar", [("a.png", png(k)), ("a.cls", kind)])
    source = open_source(tmp_path / "s")
    assert source.classes == ("ant", "zebra")
    assert source.labels.tolist() == [1, 0, 1]
    assert list(source.names) == ["0.tar/a.png", "1.tar/a.png", "2.tar/a.png"]


def test_folders_in_shards_are_classes_and_shards_are_not(tmp_path: Path) -> None:
    for k in range(3):
        files = [(f"{kind}/{k}{i}.png", png(i)) for i in range(2) for kind in ("cats", "dogs")]
        shard(tmp_path / f"s/{k}.tar", files)
    classes, labels = read_labels(open_source(tmp_path / "s"), "auto")
    assert classes == ("cats", "dogs")
    assert labels is not None
    assert labels.tolist() == [0, 1] * 6


def test_what_goes_with_a_picture_is_no_picture(tmp_path: Path) -> None:
    files = [
        ("1.jpg", png(1)),
        ("1.seg.png", png(2)),
        ("2.left.png", png(3)),
        ("2.right.png", png(4)),
    ]
    source = open_source(shard(tmp_path / "a.tar", files))
    assert [name[6:] for name in source.names] == ["1.jpg", "2.left.png", "2.right.png"]
    assert source.ignored == {".seg.png": 1}


def test_numbered_pictures_of_one_name_are_pictures(tmp_path: Path) -> None:
    names = ["IMG.png", "IMG.0.png", "IMG.1.png", "IMG.1.mask.png", "v1.000.jpg", "v1.001.jpg", "IMG.2.mask.png"]
    names += ["b.png", "b.2024-05-01.png", "b.seg.v2.png"]
    source = open_source(shard(tmp_path / "a.tar", [(name, png(i)) for i, name in enumerate(names)]))
    left_out = {"IMG.1.mask.png", "b.seg.v2.png"}
    assert [name[6:] for name in source.names] == [name for name in names if name not in left_out]
    assert source.ignored == {".mask.png": 1, ".seg.v2.png": 1}


def test_folders_are_kept_in_the_index(tmp_path: Path) -> None:
    where = ["", "cats", "cats/wild", "dogs", "käse\udcff"]
    for k in range(3):
        shard(
            tmp_path / f"s/{k}.tar",
            [(f"{where[(i + k) % 5]}/{i}.png", png(i)) for i in range(7)],
            tarfile.GNU_FORMAT,
        )
    for _ in range(2):  # as it is built, and as it is found
        source = open_source(tmp_path / "s")
        names, codes = source.folders
        assert sorted(names) == sorted(where)
        assert [names[code] for code in codes] == [name.partition("/")[2].rpartition("/")[0] for name in source.names]
    shard(tmp_path / "labelled.tar", [("a/1.png", png(1)), ("a/1.cls", b"1")])
    assert open_source(tmp_path / "labelled.tar").folders is None


def test_very_many_folders_are_read_from_the_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_index, "_MAX_FOLDERS", 3)
    source = open_source(shard(tmp_path / "a.tar", [(f"{i % 4}/{i}.png", png(i)) for i in range(16)]))
    assert source.folders is None
    assert read_labels(source, "auto")[0] == ("0", "1", "2", "3")


# The index


def test_a_table_beside_each_shard_does_not_make_them_a_table(sets: Path) -> None:
    for k in range(3):  # as img2dataset writes them
        (sets / f"a-{k:03}.parquet").write_bytes(b"PAR1")
        (sets / f"a-{k:03}_stats.json").write_text("{}")
    assert len(open_source(sets).names) == 9


def test_an_index_is_built_once_and_again_for_what_changed(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone_through: list[str] = []
    build = shard_piece.IndexEntry.build

    def noted(where, path, *others):
        gone_through.append(os.path.basename(path))
        return build(where, path, *others)

    monkeypatch.setattr(shard_piece.IndexEntry, "build", staticmethod(noted))
    first = open_source(sets)
    assert sorted(gone_through) == ["a-000.tar", "a-001.tar", "a-002.tar"]
    again = open_source(sets)
    assert len(gone_through) == 3
    assert again.stamp() == first.stamp()
    shard(sets / "a-003.tar", pictures(range(9, 11)))
    shard(sets / "a-001.tar", pictures(range(20, 22)))
    grown = open_source(sets)
    assert sorted(gone_through[3:]) == ["a-001.tar", "a-003.tar"]
    assert again.stamp() != grown.stamp()
    assert [name[-10:-4] for name in grown.names] == [f"{i:06}" for i in (0, 1, 2, 20, 21, 4, 5, 6, 7, 8, 9, 10)]
    assert right(grown, 3, 20)
    with pytest.raises(ImageError, match="changed meanwhile"):
        first.open(3)


def test_an_index_is_built_anew_for_a_shard_of_the_same_size_and_time(tmp_path: Path) -> None:
    for kind in (b"cat", b"dog"):
        path = shard(tmp_path / "a.tar", [("1.png", png(1)), ("1.cls", kind)])
        os.utime(path, (10**9, 10**9))
        assert open_source(path).classes == (kind.decode(),)


def test_opening_reads_no_row(sets: Path) -> None:
    open_source(sets)
    source = open_source(sets)
    for array in (source.index.rows, source.index.name_bytes):
        base = array
        while base is not None and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap), "mapped, not read"
        assert not array.flags.writeable


@pytest.mark.slow
def test_a_damaged_index_is_built_anew(sets: Path) -> None:
    open_source(sets)
    folder = Path(os.environ["UNFOG_CACHE"]) / "shards"
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(kept) == 3 + 4
    dice = random.Random(0)
    for path in sorted(kept):
        for damaged in (b"", kept[path][:-1], b"{}", b"\x80\x04K\x01."):
            path.write_bytes(damaged)
            if path.name.endswith(".npz"):  # which is only looked at when the set's index is not there
                next(folder.glob("*.json")).write_bytes(b"")
            assert all(right(open_source(sets), i, i) for i in range(9)), path.name
    for _ in range(60):
        path = dice.choice(sorted(folder.glob("*.rows")) + sorted(folder.glob("*.npz")))
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        source = open_source(sets)
        for i in range(len(source.names)):
            try:
                source.open(i)
            except (ImageError, IndexError):
                continue


@pytest.mark.parametrize("labelled", [True, False])
def test_codes_out_of_range_are_built_anew(tmp_path: Path, labelled: bool) -> None:
    files = [(f"{'ab'[i % 2]}/{i}.png", png(i)) for i in range(8)]
    files += [(f"{'ab'[i % 2]}/{i}.cls", b"%d" % (i % 2)) for i in range(8)] * labelled
    path = shard(tmp_path / "a.tar", files)
    classes, labels = read_labels(open_source(path), "auto")
    wanted = labels.copy()  # of what may be mapped
    file = next((Path(os.environ["UNFOG_CACHE"]) / "shards").glob("*.codes"))
    for value in (2, -1, 2**40):
        codes = np.fromfile(file, np.int64)
        codes[3] = value
        codes.tofile(file)
        found = read_labels(open_source(path), "auto")
        assert found[0] == classes
        assert np.array_equal(found[1], wanted)


@pytest.mark.slow
def test_every_flip_of_a_piece_ends(tmp_path: Path) -> None:
    shard(tmp_path / "a.tar", [("a.png", png(0)), ("b.png", png(1)), ("a.cls", b"1")])
    open_source(tmp_path / "a.tar")
    file = next((Path(os.environ["UNFOG_CACHE"]) / "shards").glob("*.npz"))
    whole, dice = file.read_bytes(), random.Random(0)
    for at in range(0, len(whole), 3):
        data = bytearray(whole)
        data[at] = dice.randrange(256)
        file.write_bytes(data)
        shard_files.IndexEntry.load(file, 10**6)


def test_what_a_killed_process_left_is_swept(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(os.environ["UNFOG_CACHE"]) / "shards"
    folder.mkdir(parents=True)
    then = time.time_ns()
    left = (f"{'0' * 32}.rows.7-{then}.partial", f"{'1' * 32}.piece.npz.7-{then}.partial")
    others = (f"{'0' * 32}.names.8-{then}.partial", "train-000.tar.partial")  # of one at work, and of somebody else
    for name, age in (*((name, 2 * 86400) for name in left), (others[0], 60), (others[1], 2 * 86400)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age,) * 2)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(shard_index, "_folder_codes", fail)
    with pytest.raises(MemoryError):
        open_source(sets)
    assert sorted(path.name for path in folder.glob("*.partial")) == sorted(others)


@pytest.mark.parametrize("forged", ["label 5", "start 1000000000", "start -5", "size 1000000000", "name 9", "name -1"])
def test_a_forged_piece_is_not_believed(sets: Path, forged: str) -> None:
    open_source(sets)
    folder = Path(os.environ["UNFOG_CACHE"]) / "shards"
    field, value = forged.split()
    for path in folder.glob("*.npz"):
        with np.load(path, allow_pickle=False) as arrays:
            found = dict(arrays)
        found["rows"][field][0] = int(value)
        np.savez(path, **found)
    next(folder.glob("*.json")).unlink()
    source = open_source(sets)
    assert len(source.names) == 9
    assert all(right(source, i, i) for i in range(9))


def test_an_index_needs_no_pickle(sets: Path) -> None:
    open_source(sets)
    for path in (Path(os.environ["UNFOG_CACHE"]) / "shards").glob("*.npz"):
        with np.load(path, allow_pickle=False) as arrays:
            assert {name: arrays[name].dtype.hasobject for name in arrays} == dict.fromkeys(
                ("rows", "names", "info"), False
            )


def test_building_reports_and_stops(sets: Path) -> None:
    calls: list[tuple[int, int]] = []
    open_source(sets, lambda done, total: calls.append((done, total)))
    assert calls
    assert all(0 <= done <= total for done, total in calls)
    assert calls[-1][1] >= 1


def test_building_stops_at_once_and_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(4):
        shard(tmp_path / f"s/{k}.tar", pictures(range(k, k + 1)))
    slow = threading.Event()

    def read(self, path, start, size):
        if path.endswith(("2.tar", "3.tar")):
            slow.wait(0.05)
        return original(self, path, start, size)

    local = type(open_storage(str(tmp_path)))
    original = local.read
    monkeypatch.setattr(local, "read", read)
    monkeypatch.setattr(shard_piece, "_REPORT_EVERY", 1)
    monkeypatch.setattr(shard_index, "_POLL", 0.01)

    def stop(done: int, total: int) -> None:
        if list((Path(os.environ["UNFOG_CACHE"]) / "shards").glob("*.npz")):
            raise KeyboardInterrupt

    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        open_source(tmp_path / "s", stop)
    assert time.perf_counter() - began < 60
    done = len(list((Path(os.environ["UNFOG_CACHE"]) / "shards").glob("*.npz")))
    assert 1 <= done < 4
    assert not list((Path(os.environ["UNFOG_CACHE"]) / "shards").glob("*.json"))
    assert len(open_source(tmp_path / "s").names) == 4


def test_a_cache_that_cannot_be_written_is_said(sets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "file/cache"))
    with pytest.raises(RequestError, match="index of the shards is kept; set UNFOG_CACHE"):
        open_source(sets)


# Damage


def test_a_truncated_shard_gives_what_is_whole(sets: Path) -> None:
    path = sets / "a-002.tar"
    whole = path.read_bytes()
    source = open_source(sets)
    _, start, size = source.index.place(6)  # the third of the shard
    path.write_bytes(whole[: start + size // 2])
    cut = open_source(sets)
    assert [name[-10:-4] for name in cut.names] == [f"{i:06}" for i in range(6)]
    assert all(right(cut, i, i) for i in range(6))
    assert [tuple(one) for one in cut.unreadable] == [
        ("a-002.tar", "a shard that ends too early"),
        ("a-002.tar/000006.png", "in a shard that ends before it does"),
    ]
    path.write_bytes(whole[: start + 512 * -(-size // 512)])  # just behind a member: only the end mark is missing
    cut = open_source(sets)
    assert len(cut.names) == 7
    assert [tuple(one) for one in cut.unreadable] == [("a-002.tar", "a shard that ends too early")]
    header = bytearray(whole)
    header[start - 512 + 130] ^= 1  # in the length of the third
    path.write_bytes(header)
    cut = open_source(sets)
    assert len(cut.names) == 6
    assert [tuple(one) for one in cut.unreadable] == [("a-002.tar", "a shard damaged from here on")]
    path.write_bytes(b"<html>not found</html>" * 100)
    assert [tuple(one) for one in open_source(sets).unreadable] == [("a-002.tar", "a shard that is not a tar file")]


def test_archives_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(RequestError, match=r"0 images.*not a tar file: a\.tar"):
        open_source(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "b.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
    with pytest.raises(RequestError, match=r"b\.tar is compressed .*gzip"):
        open_source(tmp_path / "b.tar")
    shard(tmp_path / "c.tar", [("a.txt", b"")])
    with pytest.raises(RequestError, match=r"found 0 images.*c\.tar \(1 other file: 1 \.txt\)"):
        open_source(tmp_path / "c.tar")


def test_a_shard_that_goes_on_behind_its_end_is_named(tmp_path: Path) -> None:
    one, other = (shard(tmp_path / f"in/{i}.tar", pictures(range(i, i + 5))).read_bytes() for i in (0, 5))
    with tarfile.open(tmp_path / "in/0.tar") as archive:
        third, end = archive.getmembers()[3].offset, archive.offset
    whole = one[:end]
    broken = {
        "two archives": one + other,
        "made at its full size": one[:third] + bytes(200_000),
        "rubbish": whole + bytes(1024) + b"x",
        "behind one empty block": whole + bytes(512) + b"x" * 512,
    }
    sound = {
        "as written": one,
        "no padding": whole + bytes(1024),
        "one block": whole + bytes(512),
        "padding of a whole record": whole + bytes(1024 + 10240),
    }
    for name, data in (broken | sound).items():
        path = tmp_path / f"{name}.tar"
        path.write_bytes(data)
        source = open_source(path)
        assert len(source.names) == (3 if "full" in name else 5)
        said = [(path.name, "a shard that ends before its file does")] if name in broken else []
        assert [tuple(one) for one in source.unreadable] == said, name


def test_members_without_end_are_not_all_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_MAX_MEMBERS", 4)
    source = open_source(shard(tmp_path / "a.tar", pictures(range(9))))
    assert len(source.names) == 4
    assert [tuple(one) for one in source.unreadable] == [("a.tar", "a shard of over 4 members")]


def test_doubles_empty_and_hostile_names(tmp_path: Path) -> None:
    files = [
        ("a.png", png(0)),
        ("../../escape.png", png(1)),
        ("/root.png", png(2)),
        ("a.png", png(3)),
        ("empty.png", b""),
        ("bad\udcff.png", png(4)),
        ("__MACOSX/a.png", b""),
    ]
    source = open_source(shard(tmp_path / "a.tar", files, tarfile.GNU_FORMAT))
    assert list(source.names) == ["a.tar/root.png", "a.tar/a.png", "a.tar/empty.png", "a.tar/bad\udcff.png"]
    assert right(source, 1, 3)
    assert [tuple(one) for one in source.unreadable] == [("a.tar/a.png", "replaced by a later member of its name")]
    assert source.ignored == {"hidden": 2}
    with pytest.raises(ImageError, match="empty"):
        source.open(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar"], "nothing is unpacked"


@pytest.mark.slow
def test_every_cut_and_flip_of_a_shard_ends(tmp_path: Path) -> None:
    long = [(f"{'n' * 150}.png", png(0)), ("b.png", png(1)), ("b.json", b'{"label": 1}')]
    dice, said = random.Random(0), 0
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        whole = shard(tmp_path / "whole.tar", long, format).read_bytes()
        headers = [at for at in range(0, len(whole), 512) if whole[at + 257 : at + 262] == b"ustar"]
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(dice.randrange(1, 4)):
                data[dice.choice(headers) + dice.randrange(1024)] = dice.randrange(256)
            if dice.random() < 0.5:  # with the sum put right, so that what was written is believed
                for at in headers:
                    header = data[at : at + 512]
                    header[148:156] = b" " * 8
                    data[at + 148 : at + 156] = b"%06o\0 " % sum(header)
            path = tmp_path / "bad.tar"
            path.write_bytes(data)
            try:
                found = list(TarMember.iterate(BlockReader(open_storage(str(path)), str(path), len(data), 4096)))
            except DamagedTarError:
                said += 1
                continue
            assert all(member.start <= len(data) for member in found[:-1])
    assert said > 50


# Many files, many threads


@pytest.mark.slow
def test_few_files_are_open_at_once_and_threads_may_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_MAX_OPEN_FILES", 3)
    for k in range(20):
        shard(tmp_path / f"s/{k:02}.tar", pictures(range(5 * k, 5 * k + 5)))
    source = open_source(tmp_path / "s")
    places = np.random.default_rng(0).integers(0, 100, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda i: right(source, i, i), places))
    if os.path.isdir("/proc/self/fd"):
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        assert sum(os.readlink(link).endswith(".tar") for link in links if os.path.islink(link)) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such limits")
@pytest.mark.slow
def test_more_shards_than_a_process_may_open_are_read(tmp_path: Path) -> None:
    for k in range(100):
        shard(tmp_path / f"in/{k:03}.tar", pictures(range(k, k + 1)))
    script = """
import sys
from unfog.data.sources.registry import open_source
source = open_source(sys.argv[1])
print(sum(source.open(i).size == (16, 16) for i in range(100)))
"""
    limited = ["bash", "-c", 'ulimit -n 40 && exec "$@"', "bash", sys.executable, "-c", script, str(tmp_path / "in")]
    assert subprocess.run(limited, capture_output=True, text=True, check=True).stdout == "100\n"


def test_order_is_of_the_data_alone(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = list(open_source(sets).names)
    for threads in (1, 5):
        monkeypatch.setattr(shard_index, "_THREADS", threads)
        monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / f"cache{threads}"))
        assert list(open_source(sets).names) == wanted
    moved = tmp_path / "elsewhere"
    shutil.copytree(sets, moved)
    assert list(open_source(moved).names) == wanted
    assert open_source(moved).stamp() == open_source(sets).stamp()


def test_shards_of_one_size_and_time_that_hold_other_images_are_others(tmp_path: Path) -> None:
    stamps = set()
    for k in range(2):
        for i in range(3):
            path = shard(
                tmp_path / f"{k}/{i}.tar", [(f"{j}.ppm", b"P6 9 9 255\n" + bytes([k]) * 243) for j in range(40)]
            )
            os.utime(path, (10**9, 10**9))
        stamps.add(open_source(tmp_path / f"{k}").stamp()[0])
    assert len(stamps) == 2


def test_shards_of_a_split_are_all_used_and_that_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for k, name in enumerate(("train-000", "train-001", "val")):
        shard(tmp_path / f"s/{name}.tar", pictures(range(2 * k, 2 * k + 2)))
    config = replace(preset("default"), source=str(tmp_path / "s"))
    with StopSignals() as stop:
        prepared, facts = load_images(config, stop)
    assert len(prepared.train) == 6
    assert "all of train, val is used" in capfd.readouterr().err
    assert facts.source == str(tmp_path / "s")
