"""Images given from Python as objects: lists, torch and Hugging Face datasets, generators; and what is refused."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from conftest import TRANSFORMER
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.image_objects import Storing
from unfog.data.sources.registry import open_source
from unfog.data.sources.stored_images import Report, StoredImages
from unfog.errors import RequestError
from unfog.files.cache_folder import CacheEntry, cache_folder, clear_cache, make_room, release

RGB = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), np.uint8)
PILS = [Image.fromarray(pixels) for pixels in RGB]
LABELS = [i % 3 for i in range(12)]


class Pairs(torch.utils.data.Dataset):  # ends no iteration by itself
    def __init__(self, labels: list[Any] | None = None):
        self.labels = labels or LABELS

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[torch.Tensor, Any]:
        return torch.from_numpy(RGB[i]).permute(2, 0, 1).float() / 255, self.labels[i]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(PILS, LABELS)


def stored(source: Any, labels: Any = None, said: list[str] | None = None) -> Any:
    return open_source(StoredImages.store(source, labels, Report(said.append) if said is not None else None))


def pixels(source: Any) -> np.ndarray:
    return np.stack([np.asarray(source.read_image(i)) for i in range(len(source.names))])


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["b", "a", "c", "d"])})
    return datasets.Dataset.from_dict({"img": PILS, "kind": LABELS}, features=features)


NUMBERED = ("0", "1", "2")
SOURCES = {
    "list": (lambda: PILS, ()),
    "tuple of pairs": (lambda: tuple(zip(PILS, LABELS)), NUMBERED),
    "dictionaries": (lambda: [{"image": a, "label": b} for a, b in zip(RGB, LABELS)], NUMBERED),
    "columns": (lambda: {"image": RGB, "label": LABELS}, NUMBERED),
    "generator": (lambda: (pair for pair in zip(RGB, np.array(LABELS))), NUMBERED),
    "tensors": (lambda: [torch.from_numpy(one).permute(2, 0, 1) for one in RGB], ()),
    "torch": (Pairs, NUMBERED),
    "subset": (lambda: torch.utils.data.Subset(Pairs(), range(12)), NUMBERED),
    "torch stream": (Stream, NUMBERED),
    "hugging face": (hugging_face, ("b", "a", "c", "d")),
    "hugging face stream": (lambda: hugging_face().rename_columns({"img": "image"}).to_iterable_dataset(), None),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_kind_of_object_gives_its_images_and_labels(name: str) -> None:
    make, classes = SOURCES[name]
    source = stored(make())
    assert np.array_equal(pixels(source), RGB)
    if classes is None:  # a column of any name, whose meaning nothing says
        return
    assert source.classes == classes
    assert source.labels is None if not classes else source.labels.tolist() == LABELS
    prepared = prepare(source, Data(cache="memory"))
    assert np.array_equal(prepared.train.pixels.transpose(0, 2, 3, 1), RGB)
    assert prepared.train.classes == classes[:3]  # without one that no image has
    assert prepared.report.found == 12
    assert "other file" not in prepared.report.line()


def test_the_same_images_are_the_same_file_however_they_come() -> None:
    path = StoredImages.store(list(zip(PILS, LABELS)))
    assert StoredImages.store(pair for pair in zip(RGB, LABELS)) == path
    assert StoredImages.store(PILS, np.array(LABELS)) == path
    assert StoredImages.store(PILS) != path
    assert StoredImages.store(list(zip(PILS, LABELS[::-1]))) != path
    assert {one.name.split("-")[0] for one in cache_folder().iterdir() if one.is_file()} == {"images"}


def test_images_of_any_size_and_mode_decode_as_their_files_do(tmp_path: Path) -> None:
    tall, exif = Image.fromarray(RGB[0]).resize((20, 40)), Image.Exif()
    exif[0x0112] = 6
    tall.save(tmp_path / "turned.jpg", exif=exif, quality=100)
    images = [
        Image.open(tmp_path / "turned.jpg"),
        Image.fromarray(RGB[1, ..., 0]),
        Image.fromarray(RGB[2]).convert("P"),
        Image.fromarray(np.dstack([RGB[3], RGB[4, ..., 0]])),
        Image.fromarray(RGB[5]).convert("CMYK"),
        Image.fromarray(RGB[6].astype(np.uint16)[..., 0] * 200),
        Image.fromarray(RGB[7, ..., 0].astype(np.float32) / 255),
        Image.fromarray(RGB[8]).convert("HSV"),
    ]
    given = prepare(stored(images), Data(size=16, channels=3, cache="memory")).train.pixels
    folder = tmp_path / "set"
    folder.mkdir()
    for i, image in enumerate(images):
        if image.mode == "HSV":
            image = image.convert("RGB")
        image.save(folder / f"{i}.{'tif' if image.mode in ('CMYK', 'F') else 'png'}", exif=image.getexif())
    expected = prepare(open_source(folder), Data(size=16, channels=3, cache="memory")).train.pixels
    assert given.shape == (8, 3, 16, 16)
    assert np.array_equal(given, expected)


def test_paths_and_the_bytes_of_files_are_kept_as_they_are(tmp_path: Path) -> None:
    content = []
    for i, image in enumerate(PILS):
        image.save(tmp_path / f"{i:02}.jpg")
        content.append((tmp_path / f"{i:02}.jpg").read_bytes())
    by_path = StoredImages.store(sorted(tmp_path.glob("*.jpg")))
    assert StoredImages.store(content) == by_path
    assert np.array_equal(pixels(open_source(by_path)), pixels(open_source(tmp_path)))


@pytest.mark.parametrize("low", [0, -1])
@pytest.mark.parametrize("together", [False, True])
def test_floating_point_of_a_known_range_is_converted_with_a_line_that_says_so(low: int, together: bool) -> None:
    floats = RGB.astype(np.float32) / 255 * (1 - low) + low
    said: list[str] = []
    assert np.array_equal(pixels(stored(floats if together else list(floats), said=said)), RGB)
    line = f"  images of floating point, from {low} to 1, are stored as uint8, from 0 to 255"
    assert said == [f"{line} (data={{'dtype': 'float32'}} keeps them)"]


def test_names_of_classes_come_with_a_dataset() -> None:
    pairs = Pairs()
    pairs.classes = ["cat", "dog", "owl", "yak"]  # as torchvision's have them
    source = stored(torch.utils.data.Subset(pairs, range(6)))
    assert (source.classes, source.labels.tolist()) == (("cat", "dog", "owl", "yak"), [0, 1, 2, 0, 1, 2])
    assert stored(zip(PILS, ["b", "a"] * 6)).classes == ("a", "b")
    assert stored(zip(PILS, [10, 9, 2] * 4)).classes == ("2", "9", "10")
    assert stored(zip(PILS, [3, "3", "x"] * 4)).classes == ("3", "x")


NORMALISED = (RGB / 255 - 0.5) / 0.25
REFUSED = [
    ([], "the list has no images"),
    (PILS[0], "a single image was given"),
    (lambda: PILS, "source is of type function, which gives no images; call it"),
    (3, "source is of type int, which gives no images; give a folder"),
    ([PILS[0], None], "image 1 is missing; give PIL images"),
    ([PILS[0], 7], "image 1 is of type int"),
    ([b"text"], "image 0 is 4 bytes of something else"),
    (["gone.png"], "image 0, gone.png, cannot be read: No such file"),
    ([RGB[:4]], "image 0 is a batch of shape 4x16x16x3; give single images, of a DataLoader its .dataset"),
    ([RGB[0].astype(np.complex64)], "image 0 is complex64; images are integers, booleans, or floating point"),
    ([np.zeros((16, 16, 9), np.uint8)], "image 0 has the shape 16x16x9"),
    ([np.zeros((0, 4), np.uint8)], "image 0 has the shape 0x4"),
    (list(NORMALISED), "one of the first 12 images has values from -2 to 2, and images are from 0 to 1, from -1 to 1"),
    (NORMALISED, "the array has values from -2 to 2"),
    ([np.full((4, 4), np.nan)], "image 0 holds NaN or infinity; leave it out"),
    ([*[np.zeros((4, 4))] * 40, np.full((4, 4), -1.0)], "image 40 has values from -1 to -1, but images before it are"),
    (list(zip(PILS, [0, None] * 6)), "image 1 has no label, and others have one"),
    (list(zip(PILS, [0.5] * 12)), "the label of image 0 is float64 of shape"),
    (list(zip(PILS, [torch.zeros(40)] * 12)), r"the label of image 0 is float32 of shape \(40,\)"),
    ({"train": PILS, "test": PILS}, "a dict of 'train', 'test' has no column of images; give one of its values"),
    ({"image": PILS, "label": [1]}, "there are 12 images and 1 labels"),
]


@pytest.mark.parametrize(("source", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_what_is_no_set_of_images_is_refused_and_leaves_no_file(source: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        StoredImages.store(source)
    assert not cache_folder().exists() or not [one for one in cache_folder().iterdir() if one.is_file()]


def test_errors_of_somebodys_dataset_name_the_image() -> None:
    def broken():
        yield PILS[0]
        raise OSError("the disk is on fire")

    with pytest.raises(RequestError, match=r"image 1 .*OSError: the disk is on fire"):
        StoredImages.store(broken())
    cut = BytesIO()
    PILS[0].save(cut, "PNG")
    with pytest.raises(RequestError, match="image 0 cannot be read: "):
        StoredImages.store([Image.open(BytesIO(cut.getvalue()[:200]))])
    for labels, said in ([LABELS, "own; give one"], [LABELS[:3], "12 images and 3 labels"]):
        with pytest.raises(RequestError, match=said):
            StoredImages.store(zip(PILS, LABELS) if labels is LABELS else PILS, labels)


def test_labels_of_a_damaged_file_are_refused() -> None:
    import zipfile

    path = StoredImages.store(zip(PILS, LABELS))
    for content in (
        b"{",
        b"[]",
        json.dumps({"classes": ["a"], "labels": [0]}).encode(),
        b'{"classes": [1], "labels": []}',
    ):
        other = path.with_name("other.images")
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
            for name in old.namelist():
                new.writestr(name, content if name == "labels.json" else old.read(name))
        with pytest.raises(RequestError, match=r"is damaged: .*; give the images again"):
            open_source(other)


def test_a_stream_is_stored_one_image_at_a_time() -> None:
    alive, most = set[int](), 0

    class Counted(np.ndarray):
        def __del__(self) -> None:
            alive.discard(id(self))

    def images():
        nonlocal most
        for i in range(200):
            one = np.full((8, 8), i, np.uint8).view(Counted)
            alive.add(id(one))
            most = max(most, len(alive))
            yield one
            del one

    seen: list[tuple[int, int | None]] = []
    StoredImages.store(images(), report=Report(progress=lambda done, total: seen.append((done, total))))
    assert most < 40  # the range of floating-point images is read from the first 32
    assert seen == [(i + 1, None) for i in range(200)]


@pytest.mark.slow
def test_a_run_on_objects_resumes_and_keeps_its_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"size": 8, "batch": 4, "lr": 1e-3, "network": TRANSFORMER, "preview": {"images": 1}}
    with pytest.raises(RequestError, match="colour is not a setting"):  # before the images are asked for
        unfog.train((1 / 0 for _ in PILS), colour="red")
    run = unfog.train(((image, f"kind {i % 3}") for i, image in enumerate(PILS)), steps=1, **settings)
    assert run.path == Path("runs/images")
    assert run.classes == ("kind 0", "kind 1", "kind 2")
    (entry,) = [one for one in CacheEntry.all() if one.kind == "images"]
    assert make_room(limit=0) is False
    assert [one.path for one in clear_cache()] == [entry.path]
    assert entry.in_use()
    assert unfog.resume(run.path, steps=2).checkpoint.step == 2
    run.path.rename("moved")
    (tmp_path / "moved" / "config.toml").rename(tmp_path / "config.toml")
    release(entry.path)
    assert clear_cache() == []
    (tmp_path / "config.toml").rename(tmp_path / "moved" / "config.toml")
    with pytest.raises(RequestError, match="the images of this run were in"):
        unfog.resume("moved", steps=3)
    again = unfog.resume("moved", steps=3, source=[(image, f"kind {i % 3}") for i, image in enumerate(PILS)])
    assert again.checkpoint.step == 3


@pytest.mark.parametrize("kind", ["f4", "f2", "f8", "i2", "u2", "u1", "i4", "list"])
def test_masked_values_are_unknown_and_never_their_numbers(kind: str) -> None:
    values = np.arange(10 * 8 * 8 * 2).reshape(10, 8, 8, 2) % 251
    masked = np.ma.array(values.astype("f4" if kind == "list" else kind), mask=values > 240)
    source = list(masked) if kind == "list" else masked
    without, data = (Data(dtype="float32", unknown=unknown, cache="memory") for unknown in ("none", "nan"))
    path = str(StoredImages.store(source, storing=Storing.of(data)))
    skipped = prepare(open_source(path), without).report.skipped
    assert len(skipped) == sum((values > 240).any((1, 2, 3))) > 0
    assert "NaN" in skipped[0].reason
    train = prepare(open_source(path), data).train
    images = np.asarray(train.pixels[: len(train)])[np.argsort(train.names)]
    assert (np.isnan(images) == (values > 240).transpose(0, 3, 1, 2)).all()
    assert (np.nan_to_num(images) == np.where(values > 240, 0, values).transpose(0, 3, 1, 2)).all()


def test_an_array_without_masked_values_is_as_without_a_mask() -> None:
    values = np.random.default_rng(0).integers(0, 255, (5, 8, 8, 3), np.uint8)
    assert StoredImages.store(np.ma.array(values)) == StoredImages.store(values)


class Computed:
    """An array as those of Dask and JAX: with the protocol of NumPy, and computed when it is read."""

    def __init__(self, values: np.ndarray, nbytes: int) -> None:
        self.values, self.nbytes, self.shape, self.dtype = values, nbytes, values.shape, values.dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.values, dtype)


def test_an_array_that_is_computed_is_read_where_memory_suffices() -> None:
    values = np.random.default_rng(0).normal(size=(5, 8, 8, 2)).astype("f4")
    assert StoredImages.store(Computed(values, values.nbytes)) == StoredImages.store(values)
    with pytest.raises(RequestError, match=r"the Computed has 1,000\.0 GB.*FILE\.zarr:VARIABLE"):
        StoredImages.store(Computed(values, 10**12))


VALUES = np.random.default_rng(1).normal(size=(6, 8, 10, 4)).astype("f4")  # of which no two axes are alike


class Exported:
    """An array with the protocol of DLPack alone."""

    def __init__(self, values: np.ndarray) -> None:
        self._tensor = torch.from_numpy(values)
        self.__dlpack_device__ = self._tensor.__dlpack_device__

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)


class Distant(Exported):
    """One in the memory of a GPU."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("unsupported device")


class Fields(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(VALUES[i]).permute(2, 0, 1), i % 2


def of_package(name: str, function: str) -> Any:
    """Return VALUES as an array of a package. Skips the test without it."""
    return getattr(pytest.importorskip(name), function)(VALUES)


def chunked() -> Any:
    pytest.importorskip("dask.array")
    array = pytest.importorskip("xarray").DataArray(VALUES, dims=("time", "y", "x", "band")).chunk(time=2)
    return array.transpose("band", "x", "time", "y")


OF_PACKAGES = {
    "dask": lambda: of_package("dask.array", "from_array"),
    "jax": lambda: of_package("jax.numpy", "asarray"),
    "list of jax": lambda: list(of_package("jax.numpy", "asarray")),
    "xarray of dask": chunked,
    "dlpack": lambda: Exported(VALUES),
    "list of dlpack": lambda: [Exported(image) for image in VALUES],
    "torch": Fields,
    "sparse": lambda: torch.from_numpy(VALUES).to_sparse(),
}


@pytest.mark.parametrize("make", OF_PACKAGES.values(), ids=OF_PACKAGES)
def test_arrays_of_any_package_keep_their_values(make: Any) -> None:
    source = open_source(StoredImages.store(make(), storing=Storing.of(Data())))
    assert np.array_equal(np.stack([source.read(i) for i in range(6)]), VALUES)


def test_an_array_out_of_reach_is_refused_and_half_precision_is_read() -> None:
    with pytest.raises(RequestError, match=r"the Distant .*unsupported device; copy it to the memory of the host"):
        StoredImages.store(Distant(VALUES))
    half = VALUES.astype(pytest.importorskip("ml_dtypes").bfloat16)
    source = open_source(StoredImages.store(half, storing=Storing(keeps=True)))
    assert np.array_equal(source.read(3), half[3].astype("f4"))
