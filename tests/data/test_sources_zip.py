"""Zip archives as sources: read in place, by the rules of folders, and however hostile."""

import io
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from image_bytes import random_png as png
from unfog.config.validate import check_source
from unfog.data.sources import zip_archive as zips
from unfog.data.sources.base import ImageError
from unfog.data.sources.labels import read_labels
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError


def put(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


ANIMALS = {f"{kind}/{i}.png": png(i) for kind in ("dogs", "cats") for i in range(4)}


def test_a_zip_is_what_its_folder_would_be(tmp_path: Path) -> None:
    clutter = {"__MACOSX/cats/._0.png": b"x", "cats/.hidden.png": b"x", "notes.txt": b"x", "README": b"x"}
    path = put(tmp_path / "animals.zip", ANIMALS | clutter)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "animals")
    check_source(str(path))
    zipped, folder = open_source(path), open_source(tmp_path / "animals")
    assert zipped.names == folder.names == sorted(ANIMALS)
    # A hidden folder is one thing to a folder, and in an archive there are only its files.
    assert zipped.ignored == folder.ignored == {"hidden": 2, ".txt": 1, "without suffix": 1}
    ours, theirs = read_labels(zipped, "auto"), read_labels(folder, "auto")
    assert ours[0] == theirs[0] == ("cats", "dogs")
    assert np.array_equal(ours[1], theirs[1])
    for i in range(8):
        assert np.array_equal(np.asarray(zipped.open(i)), np.asarray(folder.open(i)))
    assert zipped.resolved == str(path.resolve())


def test_names_as_other_programs_write_them(tmp_path: Path) -> None:
    put(
        tmp_path / "a.zip",
        {"./cats\\b.png": png(0), "/cats/a.png": png(1), "käse/ü.png": png(2)},
        zipfile.ZIP_STORED,
    )
    source = open_source(tmp_path / "a.zip")
    assert source.names == ["cats/a.png", "cats/b.png", "käse/ü.png"]
    assert np.array_equal(np.asarray(source.open(1)), np.asarray(Image.open(io.BytesIO(png(0)))))


def test_a_member_without_a_name_is_no_image(tmp_path: Path) -> None:
    path = put(tmp_path / "a.zip", {"a.png": png(0), "bcdef": b"text"}, zipfile.ZIP_STORED)
    path.write_bytes(path.read_bytes().replace(b"bcdef", b"\0cdef"))  # which ends the name
    source = open_source(path)
    assert source.names == ["a.png"]
    assert source.ignored == {"without suffix": 1}


@pytest.mark.slow
def test_threads_share_an_archive(tmp_path: Path) -> None:
    images = {f"{i}.png": png(i) for i in range(100)}
    source = open_source(put(tmp_path / "many.zip", images))

    def right(i: int) -> bool:
        return np.array_equal(np.asarray(source.open(i)), np.asarray(Image.open(io.BytesIO(images[source.names[i]]))))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, list(range(100)) * 5))


def test_its_stamp_changes_with_it(tmp_path: Path) -> None:
    path = put(tmp_path / "a.zip", ANIMALS)
    source = open_source(path)
    before = source.stamp()
    assert before == source.stamp() == open_source(path).stamp()
    assert before[1] == path.stat().st_size
    put(path, ANIMALS | {"cats/more.png": png(9)})
    assert source.stamp() != before
    with pytest.raises(ImageError, match="changed meanwhile"):
        source.open(0)


def test_archives_and_folders_of_one_size_and_time_that_hold_other_images_are_others(tmp_path: Path) -> None:
    stamps = []
    for k in range(2):
        # PPM, as of one side all are of one size; and one image in a hundred is another.
        images = {f"{i:03}.ppm": b"P6 9 9 255\n" + bytes([k * (i == 42)]) * 243 for i in range(100)}
        path = put(tmp_path / f"{k}.zip", images, zipfile.ZIP_STORED)
        folder = tmp_path / f"{k}"
        folder.mkdir()
        for name, data in images.items():
            (folder / name).write_bytes(data)
        for one in (path, *folder.iterdir()):
            os.utime(one, (10**9, 10**9))
        stamps += [open_source(path).stamp(), open_source(folder).stamp()]
        assert stamps[-2:] == [open_source(path).stamp(), open_source(folder).stamp()]
    assert len(set(stamps)) == 4


def test_members_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zips, "MAX_FILE_BYTES", 100_000)
    path = tmp_path / "hostile.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("whole.png", png(0))
        archive.writestr("bomb.png", bytes(10**7))
        archive.writestr("bz2.png", png(1), zipfile.ZIP_BZIP2)
        archive.writestr("secret.png", png(2))
        archive.writestr("lies.png", bytes(10**6))
        archive.writestr("text.png", b"no picture")
        archive.writestr("empty.png", b"")
        archive.writestr("flipped.png", png(3))
        archive.writestr("moved.png", png(4))
        archive.writestr("nonsense.png", png(5))
    data = bytearray(path.read_bytes())

    def entry(name: bytes) -> int:
        """Where its entry in the table of contents begins."""
        return data.rindex(name) - 46

    data[entry(b"secret.png") + 8] |= 1
    struct.pack_into("<I", data, entry(b"lies.png") + 24, 1000)  # unpacks to a thousand times that
    struct.pack_into("<I", data, entry(b"flipped.png") + 16, 12345)  # the checksum
    struct.pack_into("<I", data, entry(b"moved.png") + 42, data.index(b"bomb.png"))  # where it is
    data[data.index(b"nonsense.png") + 12 : data.index(b"nonsense.png") + 22] = b"\xff" * 10
    path.write_bytes(data)
    source = open_source(path)
    assert {tuple(one) for one in source.unreadable} == {
        ("bomb.png", "over 0 MB"),
        ("bz2.png", "packed by method 12, not deflate"),
        ("secret.png", "encrypted"),
    }
    said = {}
    for i, name in enumerate(source.names):
        try:
            source.open(i).load()
        except ImageError as unusable:
            said[name] = str(unusable)
    assert said == {
        "empty.png": "empty",
        "flipped.png": "damaged (its checksum is another)",
        "lies.png": "not as long as its archive says",
        "moved.png": "not where its archive says",
        "nonsense.png": "damaged (it does not unpack)",
        "text.png": "not an image",
    }


def test_a_directory_of_any_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with path.open("wb") as file:
        file.truncate(600 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, 600 * 2**20, 0, 0))
    with pytest.raises(RequestError, match="its directory has over 512 MB"):
        open_source(path)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.slow
def test_a_lying_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """A quarter of a gigabyte of zeros that says it is a kilobyte."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"".join(packer.compress(bytes(2**24)) for _ in range(16)) + packer.flush()
    path = put(tmp_path / "bomb.zip", {"bomb.png": bytes(len(packed))}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    data[38 : 38 + len(packed)] = packed
    directory = data.rindex(b"bomb.png") - 46
    struct.pack_into("<H", data, directory + 10, zipfile.ZIP_DEFLATED)
    struct.pack_into("<I", data, directory + 24, 1024)
    path.write_bytes(data)
    assert opened_in_little(path) == "not as long as its archive says|True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.slow
def test_a_bomb_that_begins_like_no_image_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.png", bytes(2**27))
    assert opened_in_little(tmp_path / "bomb.zip") == "not an image|True\n"


def test_of_members_that_overlap_one_is_kept(tmp_path: Path) -> None:
    """As in a bomb: a directory of many entries for the same bytes, or for bytes that hold the next member."""
    image = png(0)
    for first in (0, 60):  # where the header of each member begins behind that of the one before
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("whole.png", image)
            for k in range(50):
                archive.writestr(f"{k:02}.png", image)
            for k, info in enumerate(archive.infolist()[1:]):
                start, end = archive.infolist()[1].header_offset, archive.infolist()[-1].header_offset
                info.header_offset = start + k * first
                info.compress_size = end - info.header_offset
        (tmp_path / "bomb.zip").write_bytes(file.getvalue())
        source = open_source(tmp_path / "bomb.zip")
        assert len(source.names) == 2
        assert "whole.png" in source.names
        assert {one.reason for one in source.unreadable} == {"overlapping another member of its archive"}
        assert len(source.unreadable) == 49


@pytest.mark.parametrize(("field", "value"), [(20, 9000), (42, 0)])
def test_a_damaged_entry_costs_at_most_two_images(tmp_path: Path, field: int, value: int) -> None:
    """It claims the bytes of many others, or the place of another."""
    path = put(tmp_path / "a.zip", {f"{i:02}.png": png(i) for i in range(20)}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, data.rindex(b"05.png") - 46 + field, value)
    path.write_bytes(data)
    assert len(open_source(path).names) >= 18


def opened_in_little(path: Path) -> str:
    """What is said of the first image of an archive, and whether that took little memory."""
    code = """
import sys
from unfog.data.sources.base import ImageError
from unfog.data.sources.registry import open_source
source = open_source(sys.argv[1])
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
try:
    source.open(0)
except ImageError as error:
    print(error, peak() - before < 50_000, sep="|")
"""
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "suffix", ["png", "jpg", "webp", "gif", "tif", "bmp", "avif", "jp2", "ppm", "ico", "tga", "dib"]
)
def test_large_members_take_turns_and_are_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(zips, "_LARGE_BYTES", 0)
    members = {}
    for i in range(8):
        Image.open(io.BytesIO(png(i))).save(file := io.BytesIO(), Image.registered_extensions()[f".{suffix}"])
        members[f"{i}.{suffix}"] = file.getvalue()
    source = open_source(put(tmp_path / "a.zip", members))
    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(lambda i: source.open(i).size, range(8)))
    assert sizes == [(16, 16)] * 8


def test_archives_that_are_none_are_refused(tmp_path: Path) -> None:
    path = put(tmp_path / "a.zip", ANIMALS)
    whole = path.read_bytes()
    (tmp_path / "bad.zip").write_bytes(b"PK\3\4")
    with pytest.raises(RequestError, match="is not a complete zip archive"):
        open_source(tmp_path / "bad.zip")
    (tmp_path / "bad.zip").write_bytes(whole[100:])  # its table of contents is there, and what it tells of partly not
    source = open_source(tmp_path / "bad.zip")
    assert len(source.names) == 8
    with pytest.raises(ImageError, match=r"cannot be read|not where its archive says"):
        source.open(source.names.index("dogs/0.png"))
    put(tmp_path / "empty.zip", {"a.txt": b""})
    with pytest.raises(RequestError, match=r"0 images.*empty\.zip .*1 \.txt"):
        open_source(tmp_path / "empty.zip")
    (tmp_path / "photos.tar.gz").write_bytes(b"")
    with pytest.raises(RequestError, match=r"photos\.tar\.gz .*plain \.tar"):
        open_source(tmp_path / "photos.tar.gz")
    (tmp_path / "photos.rar").write_bytes(b"")
    with pytest.raises(RequestError, match=r"make it a \.zip"):
        open_source(tmp_path / "photos.rar")


@pytest.mark.slow
def test_every_cut_and_flip_of_an_archive_is_said_in_a_line(tmp_path: Path) -> None:
    whole = put(tmp_path / "a.zip", {"a.png": png(0), "b/c.png": png(1)}).read_bytes()
    dice, said, opened = np.random.default_rng(0), [], 0
    for _ in range(300):
        data = bytearray(whole)
        for place in dice.integers(0, len(data), dice.integers(1, 6)):
            data[place] = dice.integers(0, 256)
        if dice.random() < 0.3:
            del data[dice.integers(0, len(data)) :]
        (tmp_path / "bad.zip").write_bytes(data)
        try:
            source = open_source(tmp_path / "bad.zip")
        except RequestError as error:
            said.append(str(error))
            continue
        for i in range(len(source.names)):
            try:
                source.open(i)
                opened += 1
            except ImageError as unusable:
                said.append(str(unusable))
    assert opened > 50
    assert len(said) > 100
    assert all(line and "\n" not in line and len(line) < 400 for line in said)
