"""Sources: layouts of folders, labels, mistakes in the path, and the built-in set."""

import hashlib
import os
import sys
import tarfile
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from unfog.data.prepare import prepare
from unfog.data.scan import Scan
from unfog.data.settings import Data
from unfog.data.sources import registry
from unfog.data.sources.base import ImageError, SourceLocation
from unfog.data.sources.builtin_fashion import FashionSource
from unfog.data.sources.folder import FolderSource
from unfog.data.sources.label_tables import strip_shard
from unfog.data.sources.labels import read_labels
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.text import sanitize, without_secrets


def put(path: Path, colour: str = "red") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), colour).save(path)
    return path


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    for i in range(5):
        put(tmp_path / f"animals/cats/{i}.png")
        put(tmp_path / f"animals/dogs/old/{i}.JPG")
    return tmp_path / "animals"


def test_parent_leaf_and_nested_folders_find_every_image(animals: Path) -> None:
    assert open_source(animals).names == sorted(
        [f"cats/{i}.png" for i in range(5)] + [f"dogs/old/{i}.JPG" for i in range(5)]
    )
    assert open_source(str(animals / "cats")).names == [f"{i}.png" for i in range(5)]
    assert len(open_source(animals.parent).names) == 10


def test_hidden_files_and_loops_of_links_are_left_out_and_others_counted(animals: Path) -> None:
    put(animals / ".thumbnails/x.png")
    put(animals / "cats/._0.png")
    put(animals / "__MACOSX/0.png")
    (animals / "cats/loop").symlink_to(animals)
    (animals / "self.png").symlink_to(animals / "self.png")
    (animals / "notes.txt").write_text("hello")
    source = open_source(animals)
    assert source.names == [*(f"cats/{i}.png" for i in range(5)), *(f"dogs/old/{i}.JPG" for i in range(5)), "self.png"]
    assert source.ignored == {".txt": 1, "hidden": 3}
    with pytest.raises(ImageError, match="a link that leads nowhere"):
        source.open(source.names.index("self.png"))


def test_links_to_folders_and_files_are_followed(animals: Path, tmp_path: Path) -> None:
    picked = tmp_path / "picked"
    picked.mkdir()
    (picked / "mine").symlink_to(animals / "cats")
    (picked / "one.png").symlink_to(animals / "cats/0.png")
    assert open_source(picked).names == [*(f"mine/{i}.png" for i in range(5)), "one.png"]


@pytest.mark.parametrize("backwards", [False, True])
def test_of_two_links_to_a_folder_the_first_by_name_counts_however_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    put(tmp_path / "elsewhere/deep/1.png")
    (photos := tmp_path / "photos").mkdir()
    for name in ("cats", "animals", "birds"):
        (photos / name).symlink_to(tmp_path / "elsewhere")
    listed = os.scandir  # whose order is the file system's

    def scandir(folder: Path) -> list[os.DirEntry[str]]:
        return sorted(listed(folder), key=lambda entry: entry.name, reverse=backwards)

    monkeypatch.setattr(os, "scandir", scandir)
    assert FolderSource(photos, "photos").names == ["animals/deep/1.png"]


def test_folders_that_link_to_each_other_are_looked_at_once(tmp_path: Path) -> None:
    names = [f"folder{i}" for i in range(9)]
    for name in names:
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "own.png")
        for other in names:
            (tmp_path / name / f"to-{other}").symlink_to(tmp_path / other)
    assert open_source(tmp_path).names == [f"{name}/own.png" for name in names]


def test_labels_are_the_top_folders_below_what_all_share(animals: Path) -> None:
    for folder in (animals, animals.parent):
        classes, labels = read_labels(open_source(folder), "auto")
        assert classes == ("cats", "dogs")
        assert labels is not None
        assert labels.tolist() == [0] * 5 + [1] * 5
    assert read_labels(open_source(animals), "none") == ((), None)
    assert read_labels(open_source(animals / "cats"), "auto") == ((), None)


def test_automatic_labels_need_a_layout_that_shows_them(tmp_path: Path) -> None:
    for i in range(4):
        put(tmp_path / f"split/train/{i}.png")
        put(tmp_path / f"split/test/{i}.png")
        put(tmp_path / f"mixed/a/{i}.png")
        put(tmp_path / f"mixed/b/{i}.png")
        put(tmp_path / f"few/{i}/x.png")
    put(tmp_path / "mixed/loose.png")
    for layout in ("split", "mixed", "few"):
        assert read_labels(open_source(tmp_path / layout), "auto") == ((), None), layout
    assert read_labels(open_source(tmp_path / "few"), "folders")[0] == ("0", "1", "2", "3")
    with pytest.raises(RequestError, match=r"loose\.png is in none"):
        read_labels(open_source(tmp_path / "mixed"), "folders")


LAYOUTS = {
    "flat": ["{i}.png"],
    "classes": ["cats/{i}.png", "dogs/{i}.png"],
    "deeper": ["a/cats/{i}.png", "a/dogs/x/{i}.png"],
    "mixed": ["a/{i}.png", "b/{i}.png", "{i}.png"],
    "split": ["train/{i}.png", "test/{i}.png"],
    "split of classes": ["train/cats/{i}.png", "train/dogs/{i}.png", "val/cats/{i}.png", "val/dogs/{i}.png"],
    "split of one class": ["train/cats/{i}.png", "val/cats/{i}.png"],
    "split, one side loose": ["train/cats/{i}.png", "train/dogs/{i}.png", "val/{i}.png"],
    "one split": ["train/cats/{i}.png", "train/dogs/{i}.png"],
    "below one more": ["set/Train/cats/{i}.png", "set/TEST/dogs/{i}.png"],
    "one class": ["cats/{i}.png"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache", ["memory", "none"])
def test_what_is_settled_gives_the_same_again(tmp_path: Path, layout: str, cache: Literal["memory", "none"]) -> None:
    for place in LAYOUTS[layout]:
        for i in range(4):
            put(tmp_path / place.format(i=i))
    for labels in ("auto", "folders", "none"):
        try:
            asked = prepare(open_source(tmp_path), Data(size=8, channels=3, cache=cache, labels=labels))
        except RequestError:
            assert (layout, labels) in {("flat", "folders"), ("mixed", "folders")}
            continue
        known = asked.train.fingerprint
        again = prepare(open_source(tmp_path), asked.settings, known=known)
        assert (again.settings, again.train.classes) == (asked.settings, asked.train.classes)
        assert again.train.fingerprint == known
    if layout in ("split of classes", "below one more"):
        for mode in ("auto", "folders"):
            assert read_labels(open_source(tmp_path), mode)[0] == ("cats", "dogs")


def test_a_shard_is_left_out_of_a_name_however_it_is_spelt() -> None:
    assert [strip_shard(name) for name in ("a.tar/b/1.png", "A.TAR/b.tar/1.png", "b/1.png", "x.target/1.png")] == [
        "b/1.png",
        "b.tar/1.png",
        "b/1.png",
        "x.target/1.png",
    ]


def test_a_source_that_knows_its_folders_is_not_asked_for_names(animals: Path) -> None:
    class Knows(FolderSource):
        folders = ["dogs", "cats"], np.repeat(np.array([1, 0], np.uint8), 5)

    source = Knows(animals, "animals")
    source.names = range(10)  # type: ignore[assignment]  # none of them is text
    classes, labels = read_labels(source, "auto")
    assert classes == ("cats", "dogs")
    assert labels is not None
    assert labels.dtype == np.int64
    assert labels.tolist() == [0] * 5 + [1] * 5


@pytest.mark.slow
def test_a_folder_and_archives_of_it_hold_out_the_same_images(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for kind in ("cats", "dogs"):
        for i in range(60):
            put(folder / kind / f"{i}.png")
    for name, below in (("inside", folder), ("whole", tmp_path)):
        with tarfile.open(tmp_path / f"{name}.TAR", "w") as tar, zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as zip_:
            for path in sorted(folder.rglob("*.png"), reverse=True):
                tar.add(path, path.relative_to(below))
                zip_.write(path, path.relative_to(below))
    for shard in range(3):
        with tarfile.open(tmp_path / f"part-{shard}.TAR", "w") as tar:
            for path in sorted(folder.rglob("*.png"))[shard::3]:
                tar.add(path, path.relative_to(folder))
    held = []
    for place in ("set", "inside.TAR", "whole.TAR", "inside.zip", "whole.zip", "part-{0..2}.TAR"):
        source = open_source(str(tmp_path / place))
        order, train = Scan.create(source, Data(held_out=0.2)).split_held_out()
        held.append({"/".join(source.names[i].split("/")[-2:]) for i in order[train:]})
    assert 10 < len(held[0]) < 40
    assert held == [held[0]] * 6


@pytest.mark.slow
def test_members_of_one_name_in_many_shards_are_held_out_each_for_itself(tmp_path: Path) -> None:
    put(tmp_path / "x.png")
    for shard in range(40):
        with tarfile.open(tmp_path / f"{shard:02}.tar", "w") as tar:
            for i in range(5):
                tar.add(tmp_path / "x.png", f"{i}.png")
    source = open_source(str(tmp_path / "*.tar"))
    order, train = Scan.create(source, Data(held_out=0.2)).split_held_out()
    members = [strip_shard(source.names[i]) for i in order[train:]]
    assert 20 < len(members) < 60
    assert max(Counter(members).values()) < 30  # and not all 40 of one name


def test_one_folder_of_images_can_be_made_one_class(tmp_path: Path) -> None:
    put(tmp_path / "cats/a.png")
    put(tmp_path / "cats/b.png")
    classes, labels = read_labels(open_source(tmp_path), "folders")
    assert classes == ("cats",)
    assert labels is not None
    assert labels.tolist() == [0, 0]


def test_messages_for_a_wrong_path_say_what_to_do(animals: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="did you mean fashion"):
        open_source("fashon")
    with pytest.raises(RequestError, match=f"did you mean {animals}"):
        open_source(str(animals.parent / "animal"))
    with pytest.raises(RequestError, match="is a file; give the folder"):
        open_source(animals / "cats/0.png")
    with pytest.raises(RequestError, match="neither a folder"):
        open_source(tmp_path / "no/such/thing")
    for wrong in ("\x1b[31m", "x" * 5000, "nul\0byte", "~nobody-of-that-name/photos"):
        with pytest.raises(RequestError, match=r"^[ -~]*is neither a folder"):
            open_source(wrong)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RequestError, match=r"0 images.*\.png .*0 other files"):
        open_source(empty)
    (empty / "a.txt").write_text("")
    (empty / "b.txt").write_text("")
    with pytest.raises(RequestError, match=r"\(2 other files: 2 \.txt\)"):
        open_source(empty)


@pytest.mark.skipif(sys.platform != "linux", reason="every name is text there")
def test_names_that_are_no_text_may_be_of_classes_but_not_of_the_source(tmp_path: Path) -> None:
    for name in (b"a\xff", b"a\xfe", b"two\nlines"):
        for i in range(4):
            put(tmp_path / "in" / os.fsdecode(name) / f"{i}.png")
    assert read_labels(open_source(tmp_path / "in"), "auto")[0] == ("a\\xfe", "a\\xff", "two\\nlines")
    spoilt = tmp_path / os.fsdecode(b"spoilt\xff")
    put(spoilt / "a.png")
    with pytest.raises(RequestError, match=r"spoilt\\xff is not valid UTF-8.*rename the folder"):
        open_source(spoilt)


@pytest.mark.slow
def test_fashion_is_ten_classes_of_a_thousand_and_loads_at_once() -> None:
    start = time.process_time()
    prepared = prepare(open_source("fashion"), Data())
    assert time.process_time() - start < 3  # measured 0.4 s
    train, held_out = prepared.train, prepared.held_out
    assert train.pixels.shape == (9000, 1, 28, 28)
    assert held_out.pixels.shape == (1000, 1, 28, 28)
    assert train.classes == FashionSource.classes
    assert train.labels is not None
    assert held_out.labels is not None
    assert np.bincount(train.labels).tolist() == [900] * 10
    assert np.bincount(held_out.labels).tolist() == [100] * 10
    assert train.names[0] == "tshirt_top/0000"
    assert held_out.names[0] == "tshirt_top/0900"
    assert prepared.settings == Data(size=28, channels=1, labels="folders")
    assert "1,000 held out" in prepared.report.line()
    both = np.concatenate([train.pixels, held_out.pixels]).reshape(10000, -1)
    for label in range(10):
        rows = np.concatenate([train.labels, held_out.labels]) == label
        assert len(np.unique(both[rows], axis=0)) == 1000
    # The known look of the set: means of Fashion-MNIST's 70,000 are 72.9 in all; trousers are dark, pullovers bright.
    assert both.mean() == pytest.approx(72.9, abs=1.5)
    means = [train.pixels[train.labels == label].mean() for label in range(10)]
    assert means[FashionSource.classes.index("sandal")] < 40 < 90 < means[FashionSource.classes.index("pullover")]


@pytest.mark.slow
def test_fashion_is_what_the_package_ships() -> None:
    digest = hashlib.sha256(FashionSource().tiles.tobytes()).hexdigest()
    assert digest == "857ec1da8e1a30302125760f72f6ceda7b3ebbd20c7589331271c6d207d88c91"


@pytest.mark.slow
def test_fashion_without_held_out_trains_on_all_and_takes_another_size() -> None:
    prepared = prepare(open_source("fashion"), Data(held_out=0, size=32, channels=3))
    assert prepared.train.pixels.shape == (10000, 3, 32, 32)
    assert len(prepared.held_out) == 0
    assert prepared.report.actions == {"upscaled": 10000, "grey_to_rgb": 10000}


OWN_SOURCE = """
import numpy as np
from PIL import Image
from unfog.data.sources.base import Source

class Stripes(Source):
    def __init__(self, location):
        super().__init__(location)
        self.names = [f"{i}" for i in range(int(location.paths[0]))]

    def open(self, i):
        return Image.fromarray(np.full((8, 8), i, np.uint8))

    def stamp(self):
        return f"stripes {len(self.names)}", 0
"""


def test_a_class_of_ones_own_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_sources.py").write_text(OWN_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    source = open_source("python:own_sources:Stripes:12")
    train = prepare(source, Data()).train
    assert train.pixels.shape == (12, 1, 8, 8)
    assert open_source(source.resolved).names == source.names
    for text in ("python:own_sources:Squares", "python:no_such_module:Stripes", "python:pathlib:Path", "python:"):
        with pytest.raises(RequestError, match=r"python:MODULE:CLASS|not a subclass"):
            open_source(text)


@pytest.mark.slow
def test_a_registered_source_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dots(FashionSource):
        @classmethod
        def match(cls, location: SourceLocation) -> SourceLocation | None:
            return location if location.form == "name" and location.name.startswith("dots:") else None

    monkeypatch.setattr(registry, "_registered", [])
    registry.register(Dots)
    assert isinstance(open_source("dots:12"), Dots)
    assert type(open_source("fashion")) is FashionSource


def test_what_is_printed_of_a_source_has_no_secrets_and_is_a_line() -> None:
    assert sanitize("s3://key:secret@host/a.tar?X-Signature=abc") == "s3://host/a.tar"
    assert sanitize("https://me:it's@host/a.tar") == "https://host/a.tar"
    assert sanitize("a\tb\nc\x1b[2J") == r"a\tb\nc\x1b[2J"


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://key:se/cret@bucket/a.tar", "s3://bucket/a.tar"),
        ("https://me:pa?ss@host.org/a.tar?x=1", "https://host.org/a.tar"),
        ("https://me:pa#ss@host/a.tar", "https://host/a.tar"),
        ("https://me:12/34@host/a.tar", "https://host/a.tar"),
        ("https://me:p@ss/w@host.org:8080/a", "https://host.org:8080/a"),
        ("https://me@mail.org:a/b@host.org/x", "https://host.org/x"),
        ("https://to/ken@host.org/a", "https://host.org/a"),
        ("no 'https://me:a/b@h.org/x', nor s3://u:p#q@b/y", "no 'https://h.org/x', nor s3://b/y"),
        ("https://me:pw@host.org/img@2x.png", "https://host.org/img@2x.png"),
        ("https:/me:pw@host/a.tar", "https:/host/a.tar"),
        ("/home/x/https:/me:pw@host.org/a.tar?sig=1", "/home/x/https:/host.org/a.tar"),
        ("s3:/key:se/cret@bucket/a.tar", "s3:/bucket/a.tar"),
        ("me:pw@host", "host"),
        ("me:a long word@host", "host"),
        ("no 'me:p@w:1@host.org:80/a.tar'", "no 'host.org:80/a.tar'"),
        ("https://me:pass word@host.org/a", "https://host.org/a"),
        ("https:/me:a long word@bucket/a", "https:/bucket/a"),
        # These have no credentials.
        ("https://host.org/img@2x.png", ""),
        ("https://host.org:8080/a@b", ""),
        ("http://localhost:8000/a@b", ""),
        ("http://[::1]:80/a@b", ""),
        ("s3://bucket/img@2x.png", ""),
        ("hf://datasets/me/set@main/x", ""),
        ("see https://host.org, or mail a@b.org", ""),
        ("see https://host.org:80/x or http://box:8080 or mail a@b.org", ""),
        ("photos/a@b", ""),
        ("photos/12:30@2x.png", ""),
        ("12:30@2x.png", ""),
        (r"C:\x@y", ""),
        ("C:/x@y", ""),
        ("D:x@y", ""),
        ("/usr/bin:/home@1/x", ""),
        ("warning: mail a@b.org", ""),
        ("box:80 refused a@b.org", ""),
        ("git@host.org:me/set", ""),
        ("hf:me/set@main", ""),
        ("hf:set@main", ""),
        ("python:module:Class:x@y", ""),
    ],
)
def test_credentials_that_hold_separators_are_not_shown(address: str, shown: str) -> None:
    assert without_secrets(address) == (shown or address)


def test_the_place_that_is_proposed_for_a_missing_one_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for wrong in ("nowhere/photos", "phots", f"{tmp_path}/phots"):
        with pytest.raises(RequestError, match="did you mean") as refused:
            open_source(wrong)
        proposed = str(refused.value).rpartition("did you mean ")[2].removesuffix("?")
        assert Path(proposed).is_dir()
    with pytest.raises(RequestError, match="leave the quotes out"):
        open_source(f"'{tmp_path}/photos'")
