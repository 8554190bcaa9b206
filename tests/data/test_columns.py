"""Columns of a source: each value stays with its image everywhere, and a set with other values is another set."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hostile import npy
from unfog.config.schema import Config
from unfog.data import decode_pool
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.decode import decode
from unfog.data.packs.latent_cache import EncodeJob, LatentArrays
from unfog.data.packs.pack import Pack, PackSource
from unfog.data.packs.pack_writer import Journal, write_pack
from unfog.data.prepare import prepare, scan_source
from unfog.data.settings import Data
from unfog.data.sources.base import ImageError, Source
from unfog.data.sources.labels import apply_label_table, read_columns
from unfog.errors import RequestError
from unfog.pipeline import load_data
from unfog.pipeline.pack import check_same_pack, packed_before
from unfog.pipeline.skipped_images import DATA_FILE, data_json, describe_changes
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.values.columns import MOST_COLUMNS, Column, check_columns, of_labels
from unfog.values.image_format import ImageFormat

ASKED = Data(size=8, channels=3, held_out=0.2, range=(0.0, 65535.0))
N, BAD = 330, frozenset([3, 4, 150, 329])
PLACES = ("memory", "disk", "none")


class Numbered(Source):
    """Image i is of the colour (i % 256, i // 256, 0), and each column is a function of i. Some images are damaged."""

    def __init__(self, shift: int = 0, numbers: tuple[int, ...] = tuple(range(N)), side: int = 8) -> None:
        self.name = self.resolved = "numbered"
        self.side, self._numbers = side, numbers
        self.names = [f"{'ab'[i % 2]}/{i:04}.png" for i in numbers]
        values = np.roll(np.array(numbers), shift)
        self.columns = {
            "number": Column("number", "number", values.astype(np.float32)),
            "both": Column("both", "vector", np.stack([values, -values]).T),  # not contiguous
            "many": Column("many", "flag", values > 100),
        }

    def read(self, i: int) -> np.ndarray:
        number = self._numbers[i]
        if number in BAD:
            raise ImageError("damaged")
        colour = np.array([number % 256, number // 256, 0], np.uint8)
        return np.broadcast_to(colour, (self.side, self.side, 3))

    def stamp(self) -> tuple[str, int]:
        return "numbered", 1


def check(images: ImageSet, labelled: bool = True) -> None:
    """The columns of each image are those of its content, however the images are asked for."""
    rows = np.random.default_rng(0).permutation(len(images))
    taken = images.take(rows)
    number = taken.pixels[:, 0, 0, 0] + 256 * taken.pixels[:, 1, 0, 0].astype(int)
    assert list(taken.columns) == ["class"] * labelled + ["both", "many", "number"]
    assert taken.columns["number"].values.tolist() == number.tolist()
    assert taken.columns["both"].values.tolist() == np.stack([number, -number], 1).tolist()
    assert taken.columns["many"].values.tolist() == (number > 100).tolist()
    assert [int(Path(images.names[row]).stem) for row in taken.rows] == number.tolist()
    if labelled:
        assert taken.labels is not None
        assert [images.classes[label] for label in taken.labels] == ["ab"[one % 2] for one in number]


def packed(source: Source, out: Path, asked: Data = ASKED) -> Pack:
    scan, key = scan_source(source, asked)
    return write_pack(scan.resolve(), out, key, "give another folder")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(Numbered(), tmp_path_factory.mktemp("columns") / "made").path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("cache", PLACES)
@pytest.mark.parametrize("labels", ["auto", "none"])
def test_values_stay_with_their_images_in_each_place(cache: Any, labels: str) -> None:
    asked = replace(ASKED, cache=cache, labels=labels)
    for _ in range(2):  # decoded, and where it can be, from the cache
        dataset = prepare(Numbered(), asked)
        for images in (dataset.train, dataset.held_out):
            assert len(images) > 40
            check(images, labels == "auto")
            check(images.subset(slice(5, 30)), labels == "auto")


@pytest.mark.slow
def test_values_stay_with_their_images_in_a_pack(made: Path) -> None:
    names = {path.name for path in made.iterdir()}
    assert {"labels.npy", "column-0.npy", "column-1.npy", "column-2.npy"} <= names
    assert Pack.verify(made) == []
    for asked in (Data(), Data(labels="none"), Data(held_out=0), Data(size=4), Data(size=4, cache="none")):
        dataset = prepare(PackSource(made, "made"), asked)
        check(dataset.train, asked.labels == "auto")
        if asked.held_out:
            check(dataset.held_out, asked.labels == "auto")
    # A pack of the pack, of another size.
    check(packed(PackSource(made, "made"), made.parent / "again", Data(size=4)).images)


@pytest.mark.parametrize("cache", PLACES)
def test_values_stay_with_their_images_below_a_table_of_labels(cache: Any, tmp_path: Path) -> None:
    rows = [f"{'ab'[i % 2]}/{i:04}.png,{'ab'[i % 2]}" for i in reversed(range(N)) if i % 7 != 3]
    (tmp_path / "t.csv").write_text("file,label\n" + "\n".join(rows))
    dataset = prepare(Numbered(), replace(ASKED, cache=cache, labels=str(tmp_path / "t.csv")))
    assert len(dataset.train) + len(dataset.held_out) < 290
    check(dataset.train)
    check(dataset.held_out)


def test_latents_have_the_columns_of_the_images_that_were_encoded() -> None:
    images = prepare(Numbered(), replace(ASKED, cache="none")).train
    job = EncodeJob([images], (3, 8, 8), 1, lambda pixels: pixels.astype(np.float32), 16)
    stored = job.encode_all(lambda done, total: None)
    (latents,) = LatentArrays(stored.latents[:, 0], stored.rows).image_sets([images], "k")
    number = latents.pixels[:, 0, 0, 0].astype(int) + 256 * latents.pixels[:, 1, 0, 0].astype(int)
    assert latents.columns["number"].values.tolist() == number.tolist()
    assert not BAD & set(number.tolist())


def fingerprints(dataset: Dataset) -> tuple[str, str]:
    return dataset.train.fingerprint, dataset.held_out.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("cache", PLACES)
def test_a_column_shifted_by_one_row_makes_another_set(cache: Any) -> None:
    asked = replace(ASKED, cache=cache)
    whole = fingerprints(prepare(Numbered(), asked))
    assert fingerprints(prepare(Numbered(), asked)) == whole
    for shifted in fingerprints(prepare(Numbered(shift=1), asked)):  # the stamp of the source is the same
        assert shifted not in whole
    check(prepare(Numbered(), asked).train)  # not the cached images of the shifted set


@pytest.mark.parametrize("cache", PLACES)
def test_a_resume_says_which_columns_differ(cache: Any, tmp_path: Path) -> None:
    asked, folder = replace(ASKED, cache=cache), RunFolder(tmp_path)
    (tmp_path / DATA_FILE).write_bytes(data_json(prepare(Numbered(), asked)))
    assert "columns" not in describe_changes(folder, prepare(Numbered(), asked))
    other = Numbered()
    other.columns = other.columns | {"number": Numbered(shift=1).columns["number"]}
    assert "columns with other values: number" in describe_changes(folder, prepare(other, asked))


@pytest.mark.slow
def test_memory_cache_and_pack_have_one_fingerprint(made: Path) -> None:
    memory, disk = (fingerprints(prepare(Numbered(), replace(ASKED, cache=cache))) for cache in ("memory", "disk"))
    assert memory == disk == tuple(Pack.open(made).manifest["fingerprints"])


def test_a_fingerprint_names_each_fact_of_a_column_and_of_labels_alone_is_as_ever() -> None:
    pixels, values = np.zeros((4, 1, 8, 8), np.uint8), np.arange(4)
    labels = np.array([0, 1, 1, 0])

    def of(**columns: Column) -> str:
        return ImageSet(pixels, "abcd", of_labels(labels, ("x", "y")) | columns).fingerprint

    expected = hashlib.sha256(repr((pixels.shape, ("x", "y"))).encode() + pixels.tobytes() + labels.tobytes())
    assert of() == expected.hexdigest()
    column = Column("age", "number", values)
    changes: list[dict[str, Any]] = [
        {"name": "size"},
        {"kind": "other"},
        {"values": values[::-1]},
        {"values": values.astype(np.float64)},
        {"values": values[:, None]},
        {"categories": ("old", "young")},
    ]
    several = [of(), of(age=column), *(of(age=replace(column, **change)) for change in changes)]
    assert len(set(several)) == len(several)


def test_an_interrupted_pack_goes_on_with_its_own_columns_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_pool, "_CHUNK", 64)

    def stop(done: int, total: int) -> None:
        if done > 200:
            raise KeyboardInterrupt

    scan, key = scan_source(Numbered(), ASKED)
    scan, out = scan.resolve(), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write_pack(scan, out, key, "", stop)
    assert 100 < Journal.read(out).done < N
    other, other_key = scan_source(Numbered(shift=1), ASKED)
    with pytest.raises(RequestError, match="with the columns in another state"):
        packed_before(out, other.resolve(), other_key)
    assert packed_before(out, scan, key) > 100
    check(write_pack(scan, out, key, "").images)
    check_same_pack(Pack.open(out), scan_source(Numbered(), ASKED)[0])
    with pytest.raises(RequestError, match="already a pack"):
        check_same_pack(Pack.open(out), other)


def test_a_pack_of_labels_alone_has_the_files_and_keys_of_before(tmp_path: Path) -> None:
    source = Numbered()
    source.columns = {}
    pack = packed(source, tmp_path / "out")
    assert not [path for path in pack.path.iterdir() if path.name.startswith("column")]
    assert not [key for key in pack.manifest if key.startswith("column")]


@pytest.mark.parametrize(
    "values",
    [
        np.arange(5.0, dtype=np.float32),
        np.arange(400.0),
        np.array([object()] * 400, object),
        "a header that asks for a petabyte",
        None,
    ],
)
def test_forged_columns_are_refused(made: Path, tmp_path: Path, values: Any) -> None:
    forged = copied(made, tmp_path / "forged")
    if isinstance(values, np.ndarray):
        np.save(forged / "column-2.npy", values, allow_pickle=True)
    elif values:
        (forged / "column-2.npy").write_bytes(npy("(1000000000000000,)", "<f4"))
    else:
        (forged / "column-2.npy").unlink()
    seal(forged, {})
    with pytest.raises(RequestError, match="damaged pack"):
        Pack.open(forged)


FACTS = {"name": "number", "kind": "number", "categories": [], "dtype": "<f4", "shape": []}


@pytest.mark.parametrize(
    "columns",
    [
        {"name": "number"},
        [7],
        [{}],
        [FACTS | {"name": "../number"}],
        [FACTS | {"name": ""}],
        [FACTS | {"name": 3}],
        [FACTS | {"name": "class", "kind": "class"}],
        [FACTS | {"dtype": "|O"}],
        [FACTS | {"dtype": ["<f4"]}],
        [FACTS | {"shape": [2**60]}],
        [FACTS | {"shape": [-1]}],
        [FACTS | {"shape": "2"}],
        [FACTS | {"categories": "ab"}],
        [FACTS | {"categories": [1]}],
        [FACTS, FACTS],
        [FACTS | {"name": f"{k:05}"} for k in range(10_000)],
    ],
    ids=str,
)
def test_forged_facts_of_columns_are_refused(made: Path, tmp_path: Path, columns: Any) -> None:
    forged = copied(made, tmp_path / "forged")
    seal(forged, {"columns": columns})
    with pytest.raises(RequestError, match="damaged pack"):
        Pack.open(forged)


def copied(made: Path, out: Path) -> Path:
    out.mkdir()
    for path in made.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    return out


def seal(folder: Path, changes: dict[str, Any]) -> None:
    """Write a manifest that vouches for the files as they are."""
    manifest = json.loads((folder / "pack.json").read_text()) | changes
    del manifest["digest"]
    for name, file in list(manifest["files"].items()):
        if (folder / name).exists():
            file["bytes"] = (folder / name).stat().st_size
        else:
            del manifest["files"][name]
    (folder / "pack.json").write_bytes(Pack.seal(manifest))


@pytest.mark.parametrize(
    ("name", "column", "said"),
    [
        ("age", Column("age", "number", np.arange(5)), "5 values for 6 images"),
        ("age", Column("age", "number", np.array(3)), "one value for 6 images"),
        ("age", Column("size", "number", np.arange(6)), "the same name"),
        ("age", Column("age", "number", np.array(list("abcdef"))), "numbers or booleans"),
        ("age", Column("age", "number", np.array([None] * 6)), "numbers or booleans"),
        ("age", Column("age", "number", [[1], [2, 3]] * 3), "different lengths"),  # type: ignore[arg-type]
        ("age", Column("age", "number", np.zeros((6, 0))), "empty values"),
        ("a/b", Column("a/b", "number", np.arange(6)), "a name has"),
        (" a", Column(" a", "number", np.arange(6)), "a name has"),
        ("a\n", Column("a\n", "number", np.arange(6)), "a name has"),
        ("a=b", Column("a=b", "number", np.arange(6)), "a name has"),
        ("x" * 101, Column("x" * 101, "number", np.arange(6)), "a name has"),
        ("age", Column("age", "class", np.arange(6), tuple("abcdef")), "labels are the one column"),
        ("class", Column("class", "number", np.arange(6)), "labels are the one column"),
        ("class", Column("class", "class", np.arange(6.0), tuple("abcdef")), "whole numbers"),
        ("class", Column("class", "class", np.arange(6) + 1, tuple("abcdef")), "not one of its 6 classes"),
    ],
)
def test_a_column_that_does_not_fit_is_refused(name: str, column: Column, said: str) -> None:
    source = Numbered(numbers=tuple(range(6)))
    source.columns = {name: column}
    with pytest.raises(RequestError, match=said):
        prepare(source, Data(size=8))


def test_too_many_columns_are_refused() -> None:
    columns = {str(k): Column(str(k), "number", np.zeros(1)) for k in range(MOST_COLUMNS + 1)}
    with pytest.raises(RequestError, match=r"one column \[N, K\]"):
        check_columns(columns, 1, "it")


def test_labels_may_be_a_column() -> None:
    source = Numbered(numbers=tuple(range(20, 40)))
    source.columns = source.columns | {"class": Column("class", "class", np.arange(20) % 2, ("a", "b"))}
    for mode in ("auto", "folders"):
        assert read_columns(source, mode)["class"].values.tolist() == [0, 1] * 10
        check(prepare(source, replace(ASKED, labels=mode)).train)
    assert "class" not in read_columns(source, "none")
    assert apply_label_table(source, "auto") is source


def test_categories_are_printable_everywhere(tmp_path: Path) -> None:
    source = Numbered(numbers=tuple(range(20, 40)))
    source.columns = {"stain": Column("stain", "category", np.arange(20) % 2, ("a\n", "b\x1b"))}
    assert prepare(source, ASKED).train.columns["stain"].categories == ("a\\n", "b\\x1b")
    folder = packed(source, tmp_path / "out").path
    facts = json.loads((folder / "pack.json").read_text())["columns"]
    seal(folder, {"columns": [facts[0] | {"categories": ["a\n", "b"]}]})
    assert Pack.open(folder).images.columns["stain"].categories == ("a\\n", "b")


def test_a_set_without_images_has_a_fingerprint_too() -> None:
    source = Numbered(numbers=tuple(range(20, 40)))
    held_out = prepare(source, ASKED).held_out  # of fewer than 100 images none is held out
    assert len(held_out) == 0
    assert held_out.columns["both"].values.shape == (0, 2)
    assert len(held_out.fingerprint) == 64


def test_labels_of_another_number_are_refused() -> None:
    source = Numbered(numbers=tuple(range(20)))
    source.classes, source.labels = ("a", "b"), np.zeros(19, np.int64)
    with pytest.raises(RequestError, match="19 labels for 20 images"):
        prepare(source, ASKED)


def test_values_of_the_other_byte_order_are_the_same_set() -> None:
    column = Column("age", "number", np.arange(3.0))
    swapped = replace(column, values=column.values.astype(">f8"))
    one, other = (check_columns({"age": each}, 3, "it")["age"].values for each in (column, swapped))
    assert one.dtype == other.dtype
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.uint16, np.int32, np.float32])
@pytest.mark.parametrize("channels", [(), (1,), (3,), (4,)])
@pytest.mark.parametrize("size", ["12x8", "8x12", 8, 24])
def test_an_array_is_decoded_as_the_same_image_of_pillow(dtype: Any, channels: tuple[int, ...], size: Any) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2 if dtype == np.bool_ else 200, (8, 12, *channels)).astype(dtype)
    if dtype == np.float32:
        values /= 255
    source = Numbered()
    source.read = lambda i: values  # type: ignore[method-assign, assignment, return-value]
    for wanted in (1, 3):
        format = ImageFormat.of(wanted, size)
        direct, info = decode(lambda: source.read(0), format, (255, 255, 255))
        through, expected = decode(lambda: source.read_image(0), format, (255, 255, 255))
        assert np.array_equal(direct, through)
        assert info == expected


def test_an_array_that_has_the_format_is_not_passed_through_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Image, "fromarray", fail)
    check(prepare(Numbered(), replace(ASKED, cache="memory")).train)


@pytest.mark.parametrize("array", [np.zeros((8, 8, 2), np.uint8), np.zeros(8, np.uint8), np.zeros((8, 8, 3), complex)])
def test_an_array_that_is_no_image_is_left_out_with_the_reason(array: Any) -> None:
    with pytest.raises(ImageError, match="an array of"):
        decode(lambda: array, ImageFormat.of(3, 8), (255, 255, 255))


def test_an_unknown_kind_is_refused_before_an_image_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Numbered()
    monkeypatch.setattr(source, "read", lambda i: pytest.fail("an image was read"))
    monkeypatch.setattr(load_data, "open_source", lambda *_: source)
    with pytest.raises(RequestError, match=r"column 'many'.*is unknown"):
        load_data.load_images(Config(source="numbered", data=ASKED), StopSignals())
