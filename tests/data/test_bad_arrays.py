"""Faults of files of arrays in every format: refused with the value, the rule and a remedy, in bounded memory."""

import json
import os
import pickle
import re
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command import exit_status
from conftest import TRANSFORMER
from scientific_files import AXES, WRITERS, h5py, tifffile, write_dicom
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source

VALUES = (np.random.default_rng(0).random((6, 10, 12, 3)) * 4000 + 1).astype(np.float32)
METADATA = {".zarray", ".zattrs", "zarr.json"}
FLOATS = [kind for kind in WRITERS if kind != "dicom"]
COMPLEX = [kind for kind in FLOATS if kind not in ("fits", "netcdf3")]  # which have no type for them
pytestmark = pytest.mark.slow
MEMORY = 300_000  # kB beyond what the command needs anyway; what is refused claims or unpacks to far more


def written(kind: str, place: Path, values: np.ndarray = VALUES) -> str:
    return WRITERS[kind](place, values.astype(np.uint16) if kind == "dicom" else values)


def refused(source: str, kind: str, capsys: Any, *words: object) -> str:
    """Try to train on a source, and return what is said. It must be refused as a request that is wrong."""
    few = ("--network", TRANSFORMER, "--batch", 2, "--steps", 1, "--device", "cpu", "--data.dtype", "float32")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert exit_status("train", source, "--out", "run", "--data.axes", AXES.get(kind, "auto"), *few, *words) == 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY
    said = str(capsys.readouterr().err)
    assert "Traceback" not in said
    assert said.count("\nunfog: ") + said.startswith("unfog: ") == 1
    assert not Path("run").exists()
    return said


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(place: Path) -> list[Path]:
    return [path for path in sorted(place.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("big", [False, True], ids=["little-endian", "big-endian"])
@pytest.mark.parametrize("kind", WRITERS)
def test_images_that_are_wider_than_tall_keep_their_channels_in_every_format(kind: str, big: bool, here: Path) -> None:
    values = VALUES.astype(np.uint16 if kind == "dicom" else np.float32)
    source = open_source(
        written(kind, here, values.astype(">f4") if big and kind != "dicom" else values), axes=AXES.get(kind, "auto")
    )
    assert len(source.names) == 6
    assert all(np.array_equal(source.read(i), values[i]) for i in (5, 0, 3))


def with_infinity() -> np.ndarray:
    values = VALUES.copy()
    values[:, 2, 3, 1] = np.inf
    return values


def with_constant_channel() -> np.ndarray:
    values = VALUES.copy()
    values[..., 1] = 7
    return values


WRONG_VALUES: dict[str, tuple[Any, list[str], str]] = {
    "complex": (VALUES.astype(np.complex64), COMPLEX, "complex"),
    "infinite": (with_infinity(), FLOATS, "6 with infinity in it; replace them"),
    "constant channel": (with_constant_channel(), list(WRITERS), "channel 1 has the value 7 .* data.map = linear"),
}


@pytest.mark.parametrize(
    ("fault", "kind"), [(fault, kind) for fault, (_, kinds, _) in WRONG_VALUES.items() for kind in kinds]
)
def test_values_that_cannot_be_trained_on_are_refused(fault: str, kind: str, here: Path, capsys: Any) -> None:
    values, _, said = WRONG_VALUES[fault]
    assert re.search(said, refused(written(kind, here, values), kind, capsys))


def truncate(place: Path) -> None:
    for path in files(place):
        if path.name not in METADATA:
            os.truncate(path, path.stat().st_size * 3 // 10)


def empty(place: Path) -> None:
    for path in files(place):
        os.truncate(path, 0)


def scramble(place: Path) -> None:
    """Overwrite the headers of all files, and the metadata of a store."""
    for path in files(place):
        data = path.read_bytes()
        path.write_bytes(np.random.default_rng(1).bytes(min(400, len(data))) + data[400:])


DAMAGE = "truncated|empty|damaged|cannot be read|not an? "


@pytest.mark.parametrize("fault", [truncate, empty, scramble])
@pytest.mark.parametrize("kind", WRITERS)
def test_damaged_files_are_refused(kind: str, fault: Callable[[Path], None], here: Path, capsys: Any) -> None:
    source = written(kind, here)
    fault(here)
    said = refused(source, kind, capsys).rpartition("unfog: ")[2]
    assert re.search(DAMAGE, said)
    assert re.search(r"restore|replace them|give |write it anew", said)


def header_of_npy(shape: tuple[int, ...], content: Any) -> None:
    np.lib.format.write_array_header_1_0(content, {"descr": "<f4", "fortran_order": False, "shape": shape})
    content.write(bytes(1000))


SHAPE = (6, 100_000, 100_000, 3)


def claim(kind: str, place: Path) -> str:
    """Write a file whose header claims images of 100,000 x 100,000, or as many as its format has numbers for."""
    source = written(kind, place)
    (path, *_) = files(place)
    match kind:
        case "npy" | "npy folder":
            for one in files(place):
                with one.open("wb") as file:
                    header_of_npy(SHAPE if kind == "npy" else SHAPE[1:], file)
        case "npz":
            with zipfile.ZipFile(path, "w") as archive, archive.open("images.npy", "w") as file:
                header_of_npy(SHAPE, file)
        case "tiff" | "ome":
            for one in files(place):
                with tifffile.TiffFile(one, mode="r+b") as file:
                    for page in file.pages:
                        page.tags["ImageWidth"].overwrite(100_000)
                        page.tags["ImageLength"].overwrite(100_000)
        case "nifti":
            data = path.read_bytes()
            path.write_bytes(data[:40] + struct.pack("<8h", 4, 30_000, 30_000, 6, 3, 1, 1, 1) + data[56:])
        case "dicom":
            write_dicom(place, VALUES.astype(np.uint16), Rows=65535, Columns=65535)
        case "fits":
            data = path.read_bytes()
            for axis, size in ((1, 12), (2, 10)):
                data = data.replace(*(b"NAXIS%d  = %20d" % (axis, one) for one in (size, 100_000)))
            path.write_bytes(data)
        case "netcdf3":
            data = path.read_bytes()
            for name, size in ((b"y", 10), (b"x", 12)):
                before = struct.pack(">i", 1) + name + bytes(3)
                data = data.replace(before + struct.pack(">i", size), before + struct.pack(">i", 100_000))
            path.write_bytes(data)
        case "hdf5" | "hdf5 chunks" | "netcdf4":
            name = "v" if kind == "netcdf4" else "x"
            with h5py.File(path, "w") as file:
                file.create_dataset(name, SHAPE, "f4", chunks=(1, 100, 100, 3), compression="gzip")[0, :9, :9] = 1
        case _:
            metadata = next(one for one in files(place) if one.name in (".zarray", "zarr.json"))
            metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"shape": SHAPE}))
    return source


CLAIM = r"truncated|cut off|claims|100,000 x 100,000|30,000 x 30,000|65,535 x 65,535|over \d+ megapixels|cannot be read"


@pytest.mark.parametrize("kind", WRITERS)
def test_headers_that_claim_too_much_take_no_memory(kind: str, here: Path, capsys: Any) -> None:
    assert re.search(CLAIM, refused(claim(kind, here), kind, capsys).rpartition("unfog: ")[2])


class Planted:
    """An object whose unpickling leaves a mark."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def hostile(kind: str, place: Path) -> str:
    """Write objects in place of numbers, and return the source."""
    objects = np.full((6, 10, 12), Planted(), object)
    match kind:
        case "npy" | "pickled npy":
            np.save("a.npy", objects, allow_pickle=True)
            if kind == "pickled npy":
                Path("a.npy").write_bytes(pickle.dumps(objects))
        case "npz":
            np.savez("a.npz", images=objects)
        case "npy folder":
            Path("a").mkdir()
            np.save("a/0.npy", objects[0], allow_pickle=True)
            return f"{place}/a"
        case "hdf5":
            with h5py.File("a.h5", "w") as file:
                file.create_dataset("x", (6, 10, 12), h5py.vlen_dtype("i4"))
            return f"{place}/a.h5:x"
        case "zarr":
            store = written("zarr 2", place)
            metadata = json.loads(Path("a.zarr/.zarray").read_text())
            changed = metadata | {"dtype": "|O", "filters": [{"id": "pickle"}], "compressor": None}
            Path("a.zarr/.zarray").write_text(json.dumps(changed))
            for path in files(place / "a.zarr"):
                if path.name not in METADATA:
                    path.write_bytes(pickle.dumps(objects[:1]))
            return store
    return f"{place}/a.{kind[-3:]}"


@pytest.mark.parametrize("kind", ["npy", "pickled npy", "npz", "npy folder", "hdf5", "zarr"])
def test_objects_are_refused_and_never_unpickled(kind: str, here: Path, capsys: Any) -> None:
    said = refused(hostile(kind, here), kind, capsys).rpartition("unfog: ")[2]
    assert re.search("objects|pickles are never opened", said)
    assert "allow_pickle" not in said
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"PixelData": None}, "DICOM without pixels"),
        ({"Rows": None}, "without the sides of its image"),
        ({"NumberOfFrames": 10**6}, "truncated"),
        ({"BitsAllocated": 12}, "12 bits a value"),
    ],
    ids=["pixels", "rows", "frames", "bits"],
)
def test_dicom_that_is_no_image_is_refused(changes: dict[str, Any], said: str, here: Path, capsys: Any) -> None:
    source = write_dicom(here, VALUES.astype(np.uint16), **changes)
    assert said in refused(source, "dicom", capsys)


def test_an_ome_tiff_of_which_one_page_is_left_is_no_picture_in_grey(here: Path, capsys: Any) -> None:
    source = written("ome", here)
    for path in files(here):
        with tifffile.TiffFile(path) as file:
            end = file.pages[1].offset
        os.truncate(path, end)
    assert "6 truncated" in refused(source, "ome", capsys)


@pytest.mark.parametrize("kind", ["zarr 2", "zarr 3", "hdf5 chunks"])
def test_chunks_that_are_missing_are_counted_or_refused(kind: str, here: Path, capsys: Any) -> None:
    source = written(kind, here)
    if kind == "hdf5 chunks":
        with h5py.File("a.h5", "w") as file:
            made = file.create_dataset("x", VALUES.shape, "f4", chunks=(1, 10, 12, 3), fillvalue=np.nan)
            made[:4] = VALUES[:4]
    else:
        chunks = [path for path in files(here) if path.name not in METADATA]
        for path in chunks[4:]:
            path.unlink()
    assert "2 of 6 chunks" in "".join(open_source(source).reading_warnings)
    if kind == "hdf5 chunks":  # whose fill value leaves the images out
        assert (
            prepare(open_source(source), Data(dtype="float32", cache="memory")).report.line().startswith("6 images; 4")
        )
        return
    for path in chunks[:4]:
        path.unlink()
    assert re.search("no value .* is stored.*restore the missing chunks", refused(source, kind, capsys))


@pytest.mark.parametrize("kind", ["npy folder", "tiff", "ome", "nifti", "fits"])
def test_images_of_other_channels_and_sides_are_named(kind: str, here: Path) -> None:
    (here / "all").mkdir()
    for i, values in enumerate((VALUES[:1, ..., :2], VALUES, VALUES[:1, :8])):  # the first is unlike most others
        (place := here / str(i)).mkdir()
        written(kind, place, values)
        for k, path in enumerate(files(place)):
            path.rename(here / f"all/{i}{k}{''.join(path.suffixes)}")
    prepared = prepare(
        open_source(str(here / "all"), axes=AXES.get(kind, "auto")), Data(size="12x10", dtype="float32", cache="memory")
    )
    ((name, reason),) = prepared.report.skipped
    assert name.startswith("00")
    assert reason == "2 channels instead of 3"
    assert prepared.settings.channels == 3
    assert prepared.report.found - len(prepared.report.skipped) == 7  # one is resized
