"""Arrays and Hugging Face datasets as sources: the images, their labels, and what is refused."""

import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import FEW_PICTURES, TRANSFORMER
from hostile import npy
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources import arrays
from unfog.data.sources.arrays import ArraySource
from unfog.data.sources.base import ImageError
from unfog.data.sources.registry import open_source
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder

RGB = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), np.uint8)
GREY = RGB[..., 0].copy()
ASKED = Data(cache="memory")


def opened(source: object, n: int = 12) -> np.ndarray:
    return np.stack([np.asarray(source.read_image(i)) for i in range(n)])  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (RGB, RGB),
        (RGB.transpose(0, 3, 1, 2), RGB),
        (np.ascontiguousarray(RGB.transpose(0, 3, 1, 2)), RGB),
        (GREY, GREY),
        (GREY[..., None], GREY),
        (GREY[:, None], GREY),
        (RGB[:, ::2], RGB[:, ::2]),
        (np.asfortranarray(RGB), RGB),
    ],
)
def test_every_layout_in_files_and_in_memory(tmp_path: Path, array: np.ndarray, expected: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", array)
    np.savez_compressed(tmp_path / "b.npz", images=array)
    files = [tmp_path / "a.npy", tmp_path / "a.npz", tmp_path / "b.npz", ArraySource.store(array)]
    assert ArraySource.store(torch.from_numpy(np.ascontiguousarray(array))) == files[-1]
    for source in map(open_source, files):
        assert np.array_equal(opened(source), expected)
        assert list(source.names[:2]) == ["00000000", "00000001"]
        prepared = prepare(source, ASKED)
        assert len(prepared.train) == 12
        assert prepared.train.labels is None


def test_a_npy_file_is_mapped(tmp_path: Path) -> None:
    np.lib.format.open_memmap(tmp_path / "large.npy", "w+", np.uint8, (10**7, 32, 32, 3)).flush()  # 30 GB of holes
    source = open_source(tmp_path / "large.npy")
    assert len(source.names) == 10**7
    assert source.read_image(10**7 - 1).size == (32, 32)


@pytest.mark.parametrize("labels", [[5, 5, 7] * 4, ["cat", "dog", "cat"] * 4])
@pytest.mark.parametrize("name", ["y", "labels"])
def test_labels_become_classes(tmp_path: Path, labels: list[object], name: str) -> None:
    np.savez(tmp_path / "a.npz", **{"x": RGB, name: np.array(labels)})
    for source in (open_source(tmp_path / "a.npz"), open_source(ArraySource.store(RGB, labels))):
        prepared = prepare(source, ASKED)
        assert prepared.train.classes == tuple(map(str, sorted(set(labels), key=str)))
        assert prepared.train.labels is not None
        assert [prepared.train.classes[i] for i in prepared.train.labels] == [str(label) for label in labels]
        assert prepare(source, Data(cache="memory", labels="none")).train.labels is None


@pytest.mark.parametrize(
    ("array", "labels", "said"),
    [
        (RGB.astype(np.complex64), None, "complex64, and images are integers, floating point or booleans"),
        (RGB[0, 0], None, r"shape 16x3; images are \[N, H, W\]"),
        (RGB[..., [0] * 9], None, "shape 12x16x16x9, .* --data.axes NCHW"),
        (RGB[:0], None, "shape 0x16x16x3"),
        (RGB, np.zeros(11, np.int64), "give a whole number or a text for each of the 12 images"),
        (RGB, np.zeros((12, 10)), "labels of .* are 10 values for each image"),
    ],
)
def test_what_is_no_array_of_images_is_refused(
    tmp_path: Path, array: np.ndarray, labels: np.ndarray | None, said: str
) -> None:
    np.savez(tmp_path / "a.npz", x=array, **({} if labels is None else {"y": labels}))
    for make in (lambda: open_source(tmp_path / "a.npz"), lambda: ArraySource.store(array, labels)):
        with pytest.raises(RequestError, match=said):
            make()


def test_a_file_of_another_kind_is_to_have_its_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", x=np.zeros((2, 4, 4), np.uint8))
    (tmp_path / "c.npz").rename(tmp_path / "c.npy")
    with pytest.raises(RequestError, match=r"c\.npy cannot be read.*by another name"):
        open_source(tmp_path / "c.npy")


def test_room_is_not_made_for_what_is_not_there(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy("(300000, 64, 64, 3)"))  # which the system would promise
    with pytest.raises(RequestError, match="x is cut off"):
        open_source(tmp_path / "a.npz")


def test_another_array_is_another_file() -> None:
    assert ArraySource.store(RGB) == ArraySource.store(RGB.copy())
    assert (
        len(
            {
                ArraySource.store(RGB),
                ArraySource.store(255 - RGB),
                ArraySource.store(RGB, [0, 1] * 6),
                ArraySource.store(RGB, [1, 0] * 6),
                ArraySource.store(RGB[:6]),
            }
        )
        == 5
    )


def test_classes_of_numbers_are_in_their_order() -> None:
    assert open_source(ArraySource.store(RGB, [10, 2, 2] * 4)).classes == ("2", "10")


@pytest.mark.slow
def test_an_array_is_trained_on_and_a_run_of_it_resumed(tmp_path: Path) -> None:
    settings = {"steps": 1, "batch": 4, "network": TRANSFORMER, "precision": "fp32"} | FEW_PICTURES
    run = unfog.train(RGB, labels=[0, 1] * 6, out=tmp_path / "run", **settings)
    assert run.classes == ("0", "1")
    assert unfog.resume(tmp_path / "run", steps=2).checkpoint.step == 2


# Hugging Face datasets


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="the extra `hf` is not installed")


def dataset(datasets: Any, n: int = 12, label: object = None, **columns: list[object]) -> Any:
    pictures = [Image.fromarray(one) for one in RGB[:n]]
    features = {"picture": datasets.Image()}
    if label is not None:
        columns["kind"] = [i % 3 for i in range(n)]
        features["kind"] = label
    for name, values in columns.items():
        kind = "int64" if isinstance(values[0], int) else "string"
        features.setdefault(name, datasets.Value(kind))
    return datasets.Dataset.from_dict({"picture": pictures, **columns}, features=datasets.Features(features))


def saved(one: Any, folder: Path) -> Path:
    one.save_to_disk(str(folder))
    return folder


def as_parquet(one: Any, folder: Path) -> Path:
    folder.mkdir()
    half = len(one) // 2
    one.select(range(half)).to_parquet(str(folder / "a.parquet"))
    one.select(range(half, len(one))).to_parquet(str(folder / "b.parquet"))
    return folder


@pytest.mark.parametrize("how", [saved, as_parquet])
@pytest.mark.slow
def test_a_dataset_with_its_classes(datasets: Any, tmp_path: Path, how: Callable[[Any, Path], Path]) -> None:
    from unfog.data.sources.huggingface import HuggingFaceSource, is_parquet

    names = ["cat", "dog", "owl"]
    place = how(dataset(datasets, label=datasets.ClassLabel(names=names)), tmp_path / "set")
    source = HuggingFaceSource(str(place), "set")
    assert is_parquet(place) == (how is as_parquet)
    assert np.array_equal(opened(source), RGB)
    assert source.classes == ("cat", "dog", "owl")
    assert source.labels is not None
    assert source.labels.tolist() == [0, 1, 2] * 4
    prepared = prepare(source, ASKED)
    assert np.array_equal(prepared.train.pixels.transpose(0, 2, 3, 1), RGB)  # type: ignore[attr-defined]
    assert prepared.train.classes == ("cat", "dog", "owl")
    assert source.stamp() == HuggingFaceSource(str(place), "set").stamp()
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda i: np.asarray(source.read_image(i % 12)), range(500)))
    assert all(np.array_equal(image, RGB[i % 12]) for i, image in enumerate(images))


@pytest.mark.parametrize("how", ["up", "absolute", "link", "linked state", "split", "twice", "no list"])
def test_a_saved_dataset_stays_inside_its_folder(datasets: Any, tmp_path: Path, how: str) -> None:
    from unfog.data.sources.huggingface import HuggingFaceSource

    other, folder = saved(dataset(datasets), tmp_path / "other"), tmp_path / "set"
    if how == "split":
        datasets.DatasetDict({"train": dataset(datasets)}).save_to_disk(str(folder))
        (folder / "dataset_dict.json").write_text('{"splits": ["../other"]}')
    else:
        saved(dataset(datasets), folder)
    assert len(HuggingFaceSource(str(other), "other").names) == 12
    theirs, state = next(other.glob("*.arrow")), folder / "state.json"
    if how in ("up", "absolute", "twice"):
        name = {"up": f"../other/{theirs.name}", "absolute": str(theirs), "twice": theirs.name}[how]
        known = json.loads(state.read_text())
        known["_data_files"] = [{"filename": name}] * (1 + (how == "twice"))
        state.write_text(json.dumps(known))
    elif how == "no list":
        state.write_text("[" * 100_000)
    elif how != "split":
        mine, target = (state, other / "state.json") if how == "linked state" else (folder / theirs.name, theirs)
        mine.unlink()
        mine.symlink_to(target)
    with pytest.raises(RequestError, match=r"save_to_disk .*save it anew"):
        HuggingFaceSource(str(folder), "set")


def test_a_saved_dataset_with_damaged_offsets_is_refused(datasets: Any, tmp_path: Path) -> None:
    """They would have memory read that is not the dataset's: the process would end, or images hold what was there."""
    from unfog.data.sources.huggingface import HuggingFaceSource

    folder = saved(dataset(datasets), tmp_path / "set")
    sizes = [
        len(one["bytes"]) for one in dataset(datasets).cast_column("picture", datasets.Image(decode=False))["picture"]
    ]
    offsets = np.cumsum([0, *sizes]).astype("<i4")
    file = next(folder.glob("*.arrow"))
    whole = file.read_bytes()
    assert offsets.tobytes() in whole
    damaged = offsets.copy()
    damaged[3:5] = 2**30, 2**30 + 9000
    file.write_bytes(whole.replace(offsets.tobytes(), damaged.tobytes()))
    with pytest.raises(RequestError, match=r"set cannot be loaded \(ArrowInvalid"):
        HuggingFaceSource(str(folder), "set")


def test_other_columns_that_may_be_labels(datasets: Any, tmp_path: Path) -> None:
    from unfog.data.sources.huggingface import HuggingFaceSource

    words = [["b", "a"][i % 2] for i in range(12)]
    text = HuggingFaceSource(
        str(saved(dataset(datasets, label_text=words, label=None, labels=words), tmp_path / "a")), "a"
    )
    assert text.classes == ("a", "b")
    assert text.labels is not None
    assert text.labels.tolist() == [1, 0] * 6
    plain = HuggingFaceSource(str(saved(dataset(datasets, other=list(range(12))), tmp_path / "b")), "b")
    assert (plain.classes, plain.labels) == ((), None)
    unknown = dataset(datasets, label=datasets.ClassLabel(names=["x", "y", "z"]))
    unknown = unknown.map(lambda row: {"kind": -1}, features=unknown.features)
    assert HuggingFaceSource(str(saved(unknown, tmp_path / "c")), "c").labels is None  # -1 is how a test set hides them


@pytest.mark.slow
def test_a_column_that_lacks_values_is_said_to_be_left_out(datasets: Any, tmp_path: Path) -> None:
    from unfog.data.sources.huggingface import HuggingFaceSource

    def left_out(one: Any, name: str) -> str:
        source = HuggingFaceSource(str(saved(one, tmp_path / name)), name)
        assert (source.classes, source.labels) == ((), None)
        assert prepare(source, ASKED).warnings == (source.label_warning,)
        assert prepare(source, replace(ASKED, labels="none")).warnings == ()
        return source.label_warning

    kinds = dataset(datasets, label=datasets.ClassLabel(names=["x", "y", "z"]))
    some = kinds.map(
        lambda row, i: {"kind": None if i in (3, 5) else i % 3}, with_indices=True, features=kinds.features
    )
    assert left_out(some, "a").startswith("column kind is ignored: 2 of 12 images have no value in it; fill it")
    words = dataset(datasets, label=None, labels=["b", None, *["a"] * 10])
    assert left_out(words, "b").startswith("column labels is ignored: 1 of 12 images have no value in it")
    hidden = kinds.map(lambda row: {"kind": -1}, features=kinds.features)
    assert left_out(hidden, "c").startswith("column kind is ignored: 12 of 12 images")
    several = dataset(datasets, 6).add_column("label", [[1, 2]] * 6)
    assert "its values are list" in left_out(several, "d")


def test_true_and_false_are_classes(datasets: Any, tmp_path: Path) -> None:
    from unfog.data.sources.huggingface import HuggingFaceSource

    one = dataset(datasets).add_column("label", [i % 3 == 0 for i in range(12)])
    source = HuggingFaceSource(str(saved(one, tmp_path / "a")), "a")
    assert (source.classes, source.label_warning) == (("false", "true"), "")
    assert source.labels is not None
    assert source.labels.tolist() == [1, 0, 0] * 4


def test_of_several_splits_train_is_taken_or_the_one_asked_for(datasets: Any, tmp_path: Path) -> None:
    from unfog.data.sources.huggingface import HuggingFaceSource

    splits = datasets.DatasetDict({"test": dataset(datasets, 3), "train": dataset(datasets, 5)})
    place = str(saved(splits, tmp_path / "set"))
    assert len(HuggingFaceSource(place, "set").names) == 5
    assert "split train of" in HuggingFaceSource(place, "set").name
    assert len(HuggingFaceSource(f"{place}:test", "set").names) == 3
    with pytest.raises(RequestError, match=r"has no split 'val'; it has t\w+, t\w+"):
        HuggingFaceSource(f"{place}:val", "set")
    assert len(open_source(place).names) == 5  # known by its dataset_dict.json
    with pytest.raises(RequestError, match="has no splits, and so no 'test'"):
        HuggingFaceSource(f"{saved(dataset(datasets), tmp_path / 'flat')}:test", "flat")
    assert len(open_source(saved(dataset(datasets), tmp_path / "one")).names) == 12


def test_images_that_are_damaged_or_missing_are_named(datasets: Any, tmp_path: Path) -> None:
    from unfog.data.sources.huggingface import HuggingFaceSource

    png = BytesIO()
    Image.fromarray(RGB[0]).save(png, "PNG")
    rows = [{"bytes": png.getvalue(), "path": None}, {"bytes": b"no image", "path": "x.png"}, None]
    one = datasets.Dataset.from_dict({"image": rows}, features=datasets.Features({"image": datasets.Image()}))
    source = HuggingFaceSource(str(saved(one, tmp_path / "set")), "set")
    assert np.array_equal(np.asarray(source.read_image(0)), RGB[0])
    with pytest.raises(ImageError, match="not an image"):
        source.read_image(1)
    with pytest.raises(ImageError, match="empty"):
        source.read_image(2)
    assert "2 skipped" in prepare(source, ASKED).report.line()


def test_what_is_no_dataset_of_images_is_refused(datasets: Any, tmp_path: Path) -> None:
    from unfog.data.sources.huggingface import HuggingFaceSource

    place = saved(datasets.Dataset.from_dict({"text": ["a"]}), tmp_path / "text")
    with pytest.raises(RequestError, match=r"no column of images: text \(string\); cast one"):
        HuggingFaceSource(str(place), "text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="neither a saved dataset nor parquet files"):
        HuggingFaceSource(str(tmp_path / "empty"), "empty")
    (place / "state.json").write_text("{")
    with pytest.raises(RequestError, match="text is not what save_to_disk writes") as error:
        HuggingFaceSource(str(place), "text")
    assert "\n" not in str(error.value)


def test_the_split_is_found_again_by_what_the_source_resolves_to(
    datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = datasets.DatasetDict({"train": dataset(datasets, 5), "test": dataset(datasets, 3)})
    for folder in ("set", "a:b"):
        place = saved(splits, tmp_path / folder)
        monkeypatch.chdir(tmp_path)
        source = open_source(f"hf:{folder}:test")
        assert source.resolved == f"hf:{place}:test"
        monkeypatch.chdir("/")
        again = open_source(source.resolved)
        assert (len(again.names), again.stamp(), again.resolved) == (3, source.stamp(), source.resolved)
        assert open_source(place).resolved == f"hf:{place}:train"
        assert len(open_source(open_source(place).resolved).names) == 5


@pytest.mark.parametrize("encoding", ["dictionary", "DELTA_BYTE_ARRAY", "rows"])
@pytest.mark.slow
def test_a_parquet_file_that_repeats_an_image_a_million_times_is_not_unpacked(
    datasets: Any, tmp_path: Path, encoding: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = b"\x89PNG\r\n\x1a\n" + bytes(4_000_000)
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(80, np.int32)), pa.array([image], pa.binary()))
    if encoding == "rows":
        column = pa.array([None] * 20_000_000, pa.binary())
    table = pa.table({"image": column if encoding == "dictionary" else column.cast(pa.binary())})
    given = {} if encoding != "DELTA_BYTE_ARRAY" else {"use_dictionary": False, "column_encoding": {"image": encoding}}
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", **given)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    with pytest.raises(RequestError, match="would unpack to over 268 MB"):
        open_source(str(tmp_path / "a.parquet"))
    assert not list((cache_folder() / "hf").rglob("*.arrow"))


@pytest.mark.parametrize("how", ["prefixes", "fixed"])
@pytest.mark.slow
def test_a_parquet_file_that_is_small_by_another_encoding_is_not_unpacked(
    datasets: Any, tmp_path: Path, how: str
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = bytes(8_000_000)
    kind = pa.binary() if how == "prefixes" else pa.binary(len(image))
    table = pa.table({"image": pa.array([image] * 40, kind)})
    more = {"use_dictionary": False, "column_encoding": {"image": "DELTA_BYTE_ARRAY"}} if how == "prefixes" else {}
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", **more)
    usual = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(pool)
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    with pytest.raises(RequestError, match="would unpack to over 268 MB"):
        open_source(str(tmp_path / "a.parquet"))
    pa.set_memory_pool(usual)
    assert pool.max_memory() <= 100_000_000


def test_a_saved_dataset_of_compressed_batches_is_not_read(datasets: Any, tmp_path: Path) -> None:
    import pyarrow as pa

    datasets.Dataset.from_dict({"image": [b"", b""]}).save_to_disk(tmp_path / "set")
    (file,) = (tmp_path / "set").glob("*.arrow")
    for content, options in (
        (pa.array([bytes(1000)] * 9), {"compression": "zstd"}),
        (pa.array([bytes(1000)] * 9).dictionary_encode(), {}),
    ):
        table = pa.table({"image": content})
        with pa.ipc.new_stream(str(file), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as stream:
            stream.write_table(table)
        with pytest.raises(RequestError, match="compressed, or repeat"):
            open_source(str(tmp_path / "set"))


def test_a_parquet_file_is_the_same_wherever_and_whenever_it_is_read(datasets: Any, tmp_path: Path) -> None:
    dataset(datasets).to_parquet(str(tmp_path / "a.parquet"))
    stamp = open_source(tmp_path / "a.parquet").stamp()
    kept = Path(os.environ["UNFOG_CACHE"]) / "hf"
    assert any(kept.rglob("*.arrow")), "what is made of it is in the program's own cache"
    shutil.rmtree(kept)
    assert open_source(tmp_path / "a.parquet").stamp() == stamp
    os.utime(tmp_path / "a.parquet", (1, 1))
    assert open_source(tmp_path / "a.parquet").stamp() != stamp


def test_images_that_are_files_beside_a_parquet_file_are_part_of_its_state(datasets: Any, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    for i in range(3):
        Image.fromarray(RGB[i]).save(tmp_path / f"{i}.bmp")
    rows = [{"bytes": None, "path": f"{i}.bmp"} for i in range(3)]
    parquet.write_table(pyarrow.table({"image": rows}), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    before = source.stamp()
    Image.fromarray(RGB[5]).save(tmp_path / "1.bmp")
    assert source.stamp() != before
    assert (
        prepare(open_source(tmp_path / "a.parquet"), Data()).train.pixels[1].tolist()
        == RGB[5].transpose(2, 0, 1).tolist()
    )


def test_a_row_opens_no_file_outside_its_dataset(datasets: Any, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    (tmp_path / "set").mkdir()
    for name in ("secret.png", "set/own.png"):
        Image.fromarray(RGB[0]).save(tmp_path / name)
    (tmp_path / "set/link.png").symlink_to(tmp_path / "secret.png")
    paths = ["own.png", str(tmp_path / "set/own.png"), str(tmp_path / "secret.png"), "../secret.png", "link.png"]
    rows = [{"bytes": None, "path": path} for path in paths]
    parquet.write_table(pyarrow.table({"image": rows}), tmp_path / "set/a.parquet")
    source = open_source(tmp_path / "set/a.parquet")
    assert np.array_equal(opened(source, 2), RGB[[0, 0]])
    for i in range(2, 5):
        with pytest.raises(ImageError, match="leads out of its dataset"):
            source.read_image(i)


# What a file's size and time of change do not tell


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_files_of_one_size_and_time_that_hold_other_images_are_others(tmp_path: Path, suffix: str) -> None:
    other = RGB.copy()
    other[7, 3, 3] ^= 1
    for name, images in (("a", RGB), ("b", other)):
        path = tmp_path / f"{name}.{suffix}"
        np.save(path, images) if suffix == "npy" else np.savez(path, images=images)
        os.utime(path, (10**9, 10**9))
    a, b = (prepare(open_source(tmp_path / f"{name}.{suffix}"), Data(cache="disk")) for name in "ab")
    assert a.train.fingerprint != b.train.fingerprint
    assert np.array_equal(b.train.pixels[np.arange(12)], other.transpose(0, 3, 1, 2))


def test_a_large_file_is_sampled_throughout(tmp_path: Path) -> None:
    images = np.zeros((2000, 32, 32, 3), np.uint8)  # 6 MB
    stamps = set()
    for first in (None, 0, 500, 1000, 1900):
        one = images.copy()
        if first is not None:
            one[first : first + 100] = 9
        np.save(tmp_path / "a.npy", one)
        os.utime(tmp_path / "a.npy", (10**9, 10**9))
        stamps.add(open_source(tmp_path / "a.npy").stamp()[0])
    assert len(stamps) == 5


def test_a_mapped_file_that_changes_meanwhile_is_another_state(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", RGB)
    source = open_source(tmp_path / "a.npy")
    before = source.stamp()
    assert before == source.stamp()
    np.lib.format.open_memmap(tmp_path / "a.npy", "r+")[3] = 0
    assert source.stamp() != before


@pytest.mark.slow
def test_every_flip_of_an_array_file_is_said_in_a_line(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", images=RGB[:2, :4, :4])
    np.save(tmp_path / "a.npy", RGB[:2, :4, :4])
    dice, said = random.Random(0), list[str]()
    for name in ("a.npz", "a.npy"):
        whole = (tmp_path / name).read_bytes()
        for at in range(min(len(whole), 200) if name == "a.npy" else len(whole)):
            data = bytearray(whole)
            data[at] = dice.randrange(256)
            (tmp_path / f"bad-{name}").write_bytes(data)
            try:
                open_source(tmp_path / f"bad-{name}")
            except RequestError as error:
                said.append(str(error))
    assert len(said) > 100
    assert not any("\n" in one for one in said)


@pytest.mark.parametrize("what", ["encrypted", "method 99", "garbled", "no end of the header"])
def test_what_the_readers_raise_is_said_in_a_line(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, images=RGB)
    data = bytearray(path.read_bytes())
    directory = data.rfind(b"PK\1\2")
    if what == "encrypted":
        data[directory + 8] |= 1
        data[6] |= 1
    elif what == "method 99":
        data[directory + 10] = data[8] = 99
    elif what == "garbled":
        data[60:400] = b"\xff" * 340
    else:
        path, data = tmp_path / "a.npy", bytearray(npy("(2, 4, 4").replace(b"}", b" "))
    path.write_bytes(data)
    with pytest.raises(RequestError, match=r"a\.np[yz] (cannot be read|is not an \.npz file)"):
        open_source(path)


def test_an_npz_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((2000, 32, 32, 3), np.uint8))
    assert len(open_source(tmp_path / "a.npz").names) == 2000
    monkeypatch.setattr(arrays, "free_memory", lambda: 10**7)
    with pytest.raises(RequestError, match=r"a\.npz unpacks to 0\.0 GB.*\.npy"):
        open_source(tmp_path / "a.npz")


def test_a_store_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(RequestError, match="No space left"):
        ArraySource.store(RGB)
    assert not list(Path(os.environ["UNFOG_CACHE"]).glob("*.partial"))
