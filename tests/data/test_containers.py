"""Arrays in HDF5, NetCDF and Zarr containers, and xarray from Python: read by parts, by name, and nothing else."""

from __future__ import annotations

import base64
import bz2
import gzip
import json
import lzma
import os
import pickle
import shlex
import shutil
import struct
import sys
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unfog
from conftest import QUIET, TRANSFORMER
from unfog.cli.main import main
from unfog.data.containers import netcdf3
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.base import ImageError
from unfog.data.sources.image_objects import Storing
from unfog.data.sources.registry import open_source
from unfog.data.sources.stored_images import Report, StoredImages
from unfog.errors import RequestError
from unfog.values.arrays.dimensions import layout_of

google_crc32c = pytest.importorskip("google_crc32c")
h5py = pytest.importorskip("h5py")
numcodecs = pytest.importorskip("numcodecs")
zarr = pytest.importorskip("zarr")
xarray = pytest.importorskip("xarray")

RNG = np.random.default_rng(0)
MANUAL = Path(unfog.__file__).parents[2] / "docs" / "arrays.md"
FIELDS = (RNG.normal(size=(24, 12, 16, 4)) * [1, 10, 100, 1000] + [0, 5, 100, -3000]).astype(np.float32)
KEPT = Storing(keeps=True)
TURNED = xarray.DataArray(FIELDS.transpose(3, 2, 0, 1), dims=("band", "lon", "time", "lat"))


def is_fields(source: Any, expected: np.ndarray = FIELDS) -> bool:
    order = [3, 0, 23, *range(24)]
    return len(source.names) == 24 and all(np.array_equal(source.read(i), expected[i]) for i in order)


def written(tmp_path: Path, kind: str) -> str:
    """Write the fields, and something else beside them, and return the SOURCE."""
    match kind:
        case "contiguous" | "chunks" | "big-endian" | "first":
            with h5py.File(tmp_path / "a.h5", "w") as file:
                chunks = {"chunks": (5, 12, 8, 2), "compression": "gzip", "shuffle": True} if kind == "chunks" else {}
                values = {"big-endian": FIELDS.astype(">f4"), "first": FIELDS.transpose(0, 3, 1, 2)}.get(kind, FIELDS)
                file.create_dataset("run/x", data=values, **chunks)
                file["other"] = FIELDS
            return f"{tmp_path}/a.h5:/run/x"
        case "netcdf":
            xarray.Dataset({"v": TURNED, "w": TURNED}).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
            return f"{tmp_path}/a.nc:v"
        case "zarr 2" | "zarr 3":
            group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=int(kind[-1]))
            group.create_array("deep/x", data=FIELDS, chunks=(5, 12, 8, 4))
            group.create_array("other", data=FIELDS)
            return f"{tmp_path}/a.zarr:deep/x"
        case "shards":
            zarr.create_array(tmp_path / "a.zarr", data=FIELDS, shards=(12, 12, 16, 4), chunks=(3, 12, 16, 4))
            return f"{tmp_path}/a.zarr"
    xarray.Dataset({"v": TURNED, "w": TURNED}).to_zarr(tmp_path / "a.zarr", zarr_format=int(kind[-1]))
    return f"{tmp_path}/a.zarr:v"


KINDS = ["contiguous", "chunks", "big-endian", "first", "netcdf", "zarr 2", "zarr 3", "shards", "xarray 2", "xarray 3"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning:zarr", "ignore::zarr.errors.ZarrUserWarning")
def test_the_images_of_an_array_are_read_one_by_one(tmp_path: Path, kind: str) -> None:
    source = open_source(written(tmp_path, kind))
    assert is_fields(source)
    assert source.in_place == (kind in ("contiguous", "big-endian", "first", "netcdf"))
    assert is_fields(open_source(source.resolved))
    made = prepare(source, Data(cache="memory"))
    assert np.array_equal(made.train.take(np.arange(24)).pixels, FIELDS.transpose(0, 3, 1, 2))
    stamp = source.stamp()
    for path in tmp_path.rglob("*"):
        os.utime(path, ns=(1, 1))
    assert source.stamp() != stamp


# t2m [time, lat, lon] is packed in 16 bits, flag has bytes without a sign. All grow by records, in which flag and
# labels are filled up. Written by the package netCDF4.
CLASSIC = {
    "classic": (
        "c-nJzabsj)U|<GfE-"
        "1}Xl9`*z00GQ7i6tPK1<cOR1F>0wm<NbK`dCXcOLCx!nLzyF+{Bz52%j5j9&?FNE(4U!0M*9?H3MvKyjx~YPFP}2Da0U<7~}u%U^"
        "Y*2a$-"
        "(ud|G01Nq!NK&jymSf4~3(T!|?u@%d?K#i?LtLgXC^1z_?ZvowH05g<RL<s_!#a0iIZ86TQgoSB}Nnu72TOGy#fRUmm0Ak_e}BPT"
        "H_HK!PE1~OoVgcaiyupASR&jJiDHU@SE4hBwO2y+8%<7MDu;AaqE5M&Ty5N2TE;1Lj!kWo<4&@nKvuyJtl@Bv!G2((R<L5xA1L4r"
        "Y&L5e||L54w=L5@M5L4iS$L5V?`L4`q;L5)E@AS5CtAtfWHproRvp{1i|!ju_v7#M*1H5fD*v>3D*bQp9Q^ceIR3>XX<j2Mg=Oc+"
        "cV%oxlWEEp^qtQf2pELpK;!<HR;4jegg=E9X5cOE=>@dji+09_DD`v"
    ),
    "64-bit offset": (
        "c-nJzabsd&U|<GfE-"
        "1}Xl9`*z00GQ7i6tPK1<cOR1F>0wm<Na%LF|&uk{qaFkU6ZyxrsSB5I#55JmwOkTm~qc0jiG)Y6jTec(=@)oUp{4QiwqyF~<Mj!E"
        "B!5<iwoR__W02lKdhdpA95u|9}AoxDr!R;`7teic`VPgvdJ-"
        "3c%z+W@$jJO#%5MEhjM@hg(2w&iK&0;>`5C)D(oDSW1e(E(6JnK(+ON?8-"
        "?@O3f*Tn}ZCPp<xD+S^$=30*bK!!;X!Coq>aa6ByduKwEhk_!#&Z1Q-MvgcyVwSU7kDL?mPsR5Wx9Oe}01Ts(Xj7#kRYwu&-"
        "{F^DrrFi0{;F-SAWFvv2<F~~D0Feox8F(@;rFsL%9F{lTGM8qVdWaJc-"
        "RMa%Ibo5M^GGh({15m#PgC>I(gEoT>gD!&}gFb@+gCT<vgE4~%gDHa<gE@l*gC&C%gY|+XE7ok-"
        "vSZJIBPY&WxN_spgC{TEfb0hV7oSTY"
    ),
    "64-bit data": (
        "c-"
        "nJzabsnG0A?WOLSlmeOG##KDg!ED&PgnRv030^`FSugka;{%HX}@|B(o$3Y7i4ltT;C@CkMjjMzfc>#3+{mO^gA}OeQ3IU~0JH-"
        "7<4>!V+^zQ&Gej|9^+;=P6E3%t?(;OH3}wF9Pz}U~23ipxDEen358opO#jf3h^#nokO7jy4y5Ry~e<jmXnxHg8N}&objP~#hK}Os"
        "VS%ivXm5oeFRe{0+oi^%fObCn3S4Rj9~{lU`CBMCL6F?CZISAFy7c0*cmt&IDx5v8|X4#20jLU1_1^^1|bGv1{Mw;0TBrq1r-"
        "e)0}~4y2Nw??2F3<Ppi4v<#2CaGBp4(aq!^?bWEf-_<QU``6c`j4lo*s5R2Wnl)ELwQLLy=kQZjN1N-"
        "Am^S~_|rOqnr<fdQyrgF%x)i$R+~he4M?k3pZofWeT#h{2e_gu#@-jKQ42g29r(iotrpk`-"
        "$<Y}v8rz>yPYE?l{B=fRT~Z$S0~02abY`T"
    ),
}


def classic(tmp_path: Path, kind: str, keep: slice = slice(None)) -> Path:
    (tmp_path / "a.nc").write_bytes(zlib.decompress(base64.b85decode(CLASSIC[kind]))[keep])
    return tmp_path / "a.nc"


@pytest.mark.parametrize("kind", CLASSIC)
def test_netcdf_3_is_read_as_netcdf_4_without_a_package(tmp_path: Path, kind: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    path = classic(tmp_path, kind)
    source, flags = open_source(f"{path}:t2m"), open_source(f"{path}:flag")
    assert "0.5 x the stored numbers + 273" in "".join(source.reading_warnings)
    assert source.classes == ("0", "1")
    assert source.in_place
    for i in (2, 0, 1):
        numbers = np.arange(20 * i, 20 * i + 20).reshape(4, 5, 1)
        assert np.array_equal(source.read(i), numbers * 0.5 + 273)
        assert np.array_equal(flags.read(i), 4 * numbers)
    with pytest.raises(RequestError, match=r"t2m \(3x4x5 >i2\), flag .*name one.* or several as channels"):
        open_source(path)
    with pytest.raises(RequestError, match="has no u; it has t2m, flag, labels"):
        open_source(f"{path}:u")


def test_a_damaged_file_of_netcdf_3_is_refused_in_words(tmp_path: Path) -> None:
    whole = len(classic(tmp_path, "classic").read_bytes())
    for end in (*range(4, whole - 40, 60), whole - 40):
        with pytest.raises(RequestError, match=r"truncated|cannot be read|damaged"):
            open_source(f"{classic(tmp_path, 'classic', slice(end))}:t2m")
    rng, changed = np.random.default_rng(0), bytearray(classic(tmp_path, "classic").read_bytes())
    for _ in range(300):
        data = changed.copy()
        for at in rng.integers(4, 400, 3):
            data[at] = rng.choice([0, 1, 3, 10, 127, 128, 255])
        (tmp_path / "a.nc").write_bytes(data)
        with suppress(RequestError, ImageError):
            source = open_source(f"{tmp_path}/a.nc:t2m")
            source.read(len(source.names) - 1)


def test_a_part_of_a_netcdf_3_variable_is_that_of_numpy(tmp_path: Path, monkeypatch: Any) -> None:
    array, rng = netcdf3.open_netcdf3(str(classic(tmp_path, "64-bit data")), "flag"), np.random.default_rng(0)
    whole = array.read((slice(None),) * 3)
    for pieces in (1024, 2):  # few pieces make it read more than is asked for
        monkeypatch.setattr(netcdf3, "_MOST_PARTS", pieces)
        for _ in range(100):
            ends = [sorted(rng.integers(0, length + 1, 2).tolist()) for length in whole.shape]
            key = tuple(slice(None) if rng.random() < 0.4 else slice(*both) for both in ends)
            assert np.array_equal(array.read(key), whole[key])


@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_without_a_name_the_only_array_is_taken_and_several_are_listed(tmp_path: Path, suffix: str) -> None:
    def write(name: str, values: np.ndarray) -> None:
        if suffix == "h5":
            with h5py.File(tmp_path / "a.h5", "a") as file:
                file[name] = values
        else:
            zarr.open_group(tmp_path / "a.zarr", mode="a").create_array(name, data=values)

    write("x", FIELDS)
    write("times", np.arange(24))
    write("spectrum", FIELDS.astype(np.complex64))
    assert is_fields(open_source(tmp_path / f"a.{suffix}"))
    write("y", FIELDS[..., 0])
    with pytest.raises(RequestError, match=r"x \(24x12x16x4 float32\), y \(24x12x16 float32\).*name one: .*:x"):
        open_source(tmp_path / f"a.{suffix}")
    with pytest.raises(RequestError, match=r"has no (array )?z; it has"):
        open_source(f"{tmp_path}/a.{suffix}:z")
    with pytest.raises(RequestError, match="complex numbers"):
        open_source(f"{tmp_path}/a.{suffix}:spectrum")


def test_packed_values_are_unpacked_and_missing_ones_leave_their_image_out(tmp_path: Path) -> None:
    values = FIELDS[..., 1].copy()
    values[5, 2, 2] = np.nan
    packed = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 5.0, "_FillValue": -32768}
    field = xarray.Dataset({"t2m": (("time", "lat", "lon"), values)})
    field.to_netcdf(tmp_path / "a.nc", engine="h5netcdf", encoding={"t2m": packed})
    source = open_source(tmp_path / "a.nc")
    assert "0.01 x the stored numbers + 5" in "".join(source.reading_warnings)
    assert np.allclose(source.read(3)[..., 0], values[3], atol=0.0051)
    made = prepare(source, Data(cache="memory"))
    assert [(one.name, "NaN" in one.reason) for one in made.report.skipped] == [("00000005", True)]


def test_latitudes_from_south_to_north_are_reported() -> None:
    array = xarray.DataArray(FIELDS, dims=("time", "lat", "lon", "band"), coords={"lat": np.linspace(-80, 80, 12)})
    said = list[str]()
    StoredImages.store(array, report=Report(said.append), storing=KEPT)
    assert ["north is below" in line for line in said] == [True]
    turned = open_source(
        str(StoredImages.store(array.sortby("lat", ascending=False), report=Report(said.append), storing=KEPT))
    )
    assert len(said) == 1
    assert np.array_equal(turned.read(2), FIELDS[2, ::-1])


def test_labels_beside_a_dataset_are_its_classes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train/x"], file["train/labels"] = FIELDS, np.arange(24) % 3
    source = open_source(f"{tmp_path}/a.h5:train/x")
    assert source.classes == ("0", "1", "2")
    assert source.labels is not None
    assert source.labels.tolist() == [i % 3 for i in range(24)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("time y x", ((0,), 1, 2, None)),
        ("time lon lat", ((0,), 2, 1, None)),
        ("channel time y x", ((1,), 2, 3, 0)),
        ("member time y x band", ((0, 1), 2, 3, 4)),
        ("level lat lon", ((0,), 1, 2, None)),
        ("time level lat lon", None),
        ("y x channel", None),
        ("a b c d", None),
        ("time y y x", None),
    ],
)
def test_dimensions_are_found_by_their_names(names: str, expected: tuple[object, ...] | None) -> None:
    assert layout_of(names.split()) == expected


def test_unknown_names_ask_and_axes_answer(tmp_path: Path) -> None:
    levels = xarray.DataArray(FIELDS.transpose(0, 3, 1, 2), dims=("time", "level", "lat", "lon"))
    levels.to_dataset(name="v").to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(RequestError, match=r"time 24, level 4, lat 12, lon 16.*--data\.axes NCHW"):
        open_source(tmp_path / "a.nc")
    assert is_fields(open_source(tmp_path / "a.nc", axes="NCHW"))


def refused_hdf5(file: Any, place: Path) -> dict[str, str]:
    """Write what is refused, and return the key word of each refusal."""
    secret = place / "secret.h5"
    with h5py.File(secret, "w") as other:
        other["x"] = FIELDS
    file["x"] = FIELDS
    file["soft"], file["link"] = h5py.SoftLink("/x"), h5py.ExternalLink(str(secret), "/x")
    file["group/down"] = h5py.ExternalLink(str(secret), "/")
    layout = h5py.VirtualLayout(FIELDS.shape, "f4")
    layout[:] = h5py.VirtualSource(str(secret), "x", shape=FIELDS.shape)
    file.create_virtual_dataset("virtual", layout)
    file.create_dataset("outside", (4, 8, 8), "u1", external=[(str(secret), 0, 256)])
    file["records"] = np.zeros((4, 8, 8), [("a", "f4"), ("b", "i4")])
    file.create_dataset("lists", (4, 8, 8), dtype=h5py.vlen_dtype("i4"))
    file["texts"] = np.full((4, 8, 8), b"a")
    file["zero"], file["flat"] = np.zeros((0, 8, 8)), np.zeros((8, 8))
    file.create_dataset("huge", (10**9, 10**4, 10**4), "f4", chunks=(1, 100, 100))
    file.create_dataset("empty", (4, 8, 8), "f4", chunks=(1, 8, 8))
    return {
        "soft": "give /x",
        "link": "not followed",
        "group/down/x": "not followed",
        "virtual": "not followed",
        "outside": "not followed",
        "records": "records",
        "lists": "varying length",
        "texts": "texts",
        "zero": "no values",
        "flat": "shape 8x8",
        "huge": "claims",
        "empty": "no value .* is stored",
        "group": "is a group",
        "x/y": "has no x/y",
    }


def test_what_is_in_other_files_or_is_no_array_of_numbers_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        expected = refused_hdf5(file, tmp_path)
    for name, word in expected.items():
        with pytest.raises(RequestError, match=word):
            open_source(f"{tmp_path}/a.h5:{name}")
    whole = (tmp_path / "a.h5").read_bytes()
    for content, word in (
        (whole[: len(whole) // 2], "truncated"),
        (b"abc", "restore"),
        (b"CDF\3" + bytes(99), "no version of NetCDF"),
    ):
        (tmp_path / "b.h5").write_bytes(content)
        with pytest.raises(RequestError, match=word):
            open_source(tmp_path / "b.h5")


def test_a_damaged_chunk_costs_its_images_and_an_unknown_filter_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", data=FIELDS, chunks=(2, 12, 16, 4), compression="gzip")
        where, size = made.id.get_chunk_info(4).byte_offset, made.id.get_chunk_info(4).size
    data = bytearray((tmp_path / "a.h5").read_bytes())
    data[where : where + size] = bytes(size)
    (tmp_path / "a.h5").write_bytes(data)
    found = prepare(open_source(tmp_path / "a.h5"), Data(cache="memory"))
    assert [one.name for one in found.report.skipped] == ["00000008", "00000009"]
    assert "damaged" in found.report.skipped[0].reason
    with h5py.File(tmp_path / "b.h5", "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((1, 12, 16, 4))
        properties.set_filter(31999, h5py.h5z.FLAG_OPTIONAL, (1,))
        space = h5py.h5s.create_simple(FIELDS.shape)
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, properties)
    with pytest.raises(RequestError, match=r"filter 31999.*h5repack"):
        open_source(tmp_path / "b.h5")


@pytest.mark.parametrize("version", [2, 3])
def test_chunks_that_are_not_stored_are_said(tmp_path: Path, version: int) -> None:
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=FIELDS.shape, chunks=(1, 12, 16, 4), dtype="f4", fill_value=0, zarr_format=version
    )
    with pytest.raises(RequestError, match=r"no value .* is stored"):
        open_source(tmp_path / "a.zarr")
    array[:20] = FIELDS[:20]
    source = open_source(tmp_path / "a.zarr")
    assert any("4 of 24 chunks" in line for line in source.reading_warnings)
    assert not source.read(21).any()


def test_a_store_that_is_gone_is_not_read_as_its_fill_value(tmp_path: Path) -> None:
    source = open_source(written(tmp_path, "zarr 3"))
    assert source.folder_problem(0) == ""
    (tmp_path / "a.zarr").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        source.read(7)
    assert source.folder_problem(0)
    (tmp_path / "away").rename(tmp_path / "a.zarr")
    assert is_fields(source)


def test_a_chunk_that_is_a_link_costs_its_images(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=FIELDS, chunks=(2, 12, 16, 4))
    chunk = tmp_path / "a.zarr/c/1/0/0/0"
    chunk.rename(tmp_path / "secret")
    chunk.symlink_to(tmp_path / "secret")
    found = prepare(open_source(tmp_path / "a.zarr"), Data(cache="memory"))
    assert [one.name for one in found.report.skipped] == ["00000002", "00000003"]


def test_a_store_in_a_zip_archive_is_read_in_place(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=3)
    group.create_array("x", data=FIELDS, chunks=(1, 12, 16, 4), shards=(4, 12, 16, 4))
    group.create_array("y", data=FIELDS[..., 0], chunks=(2, 12, 16))
    shutil.make_archive(str(tmp_path / "a.zarr"), "zip", tmp_path / "a.zarr")
    shutil.make_archive(str(tmp_path / "inside.zarr"), "zip", tmp_path, "a.zarr")  # all in one folder
    with zipfile.ZipFile(tmp_path / "b.zarr.zip", "w") as archive:  # as zarr writes it
        for path in sorted((tmp_path / "a.zarr").rglob("*")):
            archive.write(path, path.relative_to(tmp_path / "a.zarr"))
    for name in ("a", "b", "inside"):
        source = open_source(f"{tmp_path}/{name}.zarr.zip:x")
        assert is_fields(source), name
        assert is_fields(open_source(source.resolved))
        with pytest.raises(RequestError, match=r"x \(24x12x16x4 float32\), y .*name one"):
            open_source(tmp_path / f"{name}.zarr.zip")
    assert source.stamp() == open_source(source.resolved).stamp()
    whole = (tmp_path / "b.zarr.zip").read_bytes()
    (tmp_path / "cut.zarr.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RequestError, match="not a complete zip archive"):
        open_source(tmp_path / "cut.zarr.zip")
    with zipfile.ZipFile(tmp_path / "b.zarr.zip") as archive:
        member = archive.getinfo("y/c/3/0/0")
        at = member.header_offset + 30 + len(member.filename) + member.compress_size - 4
    (tmp_path / "bad.zarr.zip").write_bytes(whole[:at] + bytes(4) + whole[at + 4 :])
    found = prepare(open_source(f"{tmp_path}/bad.zarr.zip:y"), Data(cache="memory"))
    assert [one.name for one in found.report.skipped] == ["00000006", "00000007"]
    with pytest.raises(RequestError, match="no array z; it has"):
        open_source(f"{tmp_path}/b.zarr.zip:z")
    with zipfile.ZipFile(tmp_path / "b.zarr.zip") as archive:
        header = archive.getinfo("y/zarr.json").header_offset
    at = header + 30 + len("y/zarr.json") + 2
    (tmp_path / "bad.zarr.zip").write_bytes(whole[:at] + bytes(4) + whole[at + 4 :])
    with pytest.raises(RequestError, match=r"Bad CRC|write it anew|no array"):
        open_source(f"{tmp_path}/bad.zarr.zip:y")


def test_a_chunk_of_hdf5_that_unpacks_to_too_much_costs_its_images(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(2**27), 1)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("x", data=FIELDS, chunks=(2, 12, 16, 4), compression="gzip", shuffle=True)
        for first, content in ((2, packed), (8, bytes(2**22))):
            made.id.write_direct_chunk((first, 0, 0, 0), content)
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((1, 12, 16, 4))
        properties.set_deflate(9)
        properties.set_deflate(9)
        h5py.h5d.create(file.id, b"y", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(FIELDS.shape), properties)
    source = open_source(f"{tmp_path}/a.h5:x")
    for i in (2, 8, 2):
        with pytest.raises(ImageError, match="unpacks to over"):
            source.read(i)
    assert np.array_equal(source.read(5), FIELDS[5])
    with pytest.raises(RequestError, match="gzip 2 times"):
        open_source(f"{tmp_path}/a.h5:y")
    noise = RNG.integers(0, 2**32, (2, 2**19), np.uint32)
    with h5py.File(tmp_path / "b.h5", "w") as file:  # large chunks are looked at once, and read
        file.create_dataset("x", data=noise.reshape(2, 512, 1024), chunks=(1, 512, 1024), compression="gzip")
    source = open_source(tmp_path / "b.h5", axes="NHWC")
    assert all(np.array_equal(source.read(i)[..., 0].ravel(), noise[i]) for i in (0, 1, 0))


BOMB = bytes(2**26)
BOMBS = {
    "gzip": gzip.compress(BOMB),
    "zlib": zlib.compress(BOMB),
    "bz2": bz2.compress(BOMB),
    "lzma": lzma.compress(BOMB, preset=0),
    "blosc": bytes([2, 1, 0x21, 4]) + struct.pack("<3I", 2**31 - 1, 2**20, 40) + bytes(24),
    "lz4": struct.pack("<i", 2**31 - 1) + bytes(20),
    "zstd": numcodecs.Zstd().encode(BOMB),
    # Blocks of one byte repeated, in a frame that does not say what it unpacks to.
    "zstd without a size": b"\x28\xb5\x2f\xfd\x00\x58" + bytes([2, 0, 16, 0]) * 999 + bytes([3, 0, 16, 0]),
}


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
@pytest.mark.parametrize("version", ["2", "2 filter", "3", "3 shards"])
@pytest.mark.parametrize("codec", BOMBS)
def test_a_chunk_that_unpacks_to_too_much_costs_its_images(tmp_path: Path, codec: str, version: str) -> None:
    name, place = codec.split()[0], tmp_path / "a.zarr"
    arguments: dict[str, Any] = {"data": FIELDS, "chunks": (2, 12, 16, 4), "zarr_format": int(version[0])}
    match version:
        case "2":
            arguments["compressors"] = numcodecs.get_codec({"id": name})
        case "2 filter":
            arguments |= {"filters": [numcodecs.get_codec({"id": name})], "compressors": None}
        case _:
            usual = {"gzip": zarr.codecs.GzipCodec, "blosc": zarr.codecs.BloscCodec, "zstd": zarr.codecs.ZstdCodec}
            others = {"zlib": "Zlib", "bz2": "BZ2", "lzma": "LZMA", "lz4": "LZ4"}
            made = usual[name] if name in usual else getattr(zarr.codecs.numcodecs, others[name])
            arguments |= {"compressors": made(), "shards": (4, 12, 16, 4) if "shards" in version else None}
    zarr.create_array(place, **arguments)
    assert is_fields(open_source(place))
    if "shards" in version:
        index = struct.pack("<4Q", 0, len(BOMBS[codec]), 2**64 - 1, 2**64 - 1)
        checksum = struct.pack("<I", google_crc32c.value(index))
        (place / "c/1/0/0/0").write_bytes(BOMBS[codec] + index + checksum)
    else:
        (place / ("1.0.0.0" if version[0] == "2" else "c/1/0/0/0")).write_bytes(BOMBS[codec])
    first = 4 if "shards" in version else 2
    with pytest.raises(ImageError, match="unpacks to over"):
        open_source(place).read(first)
    assert np.array_equal(open_source(place).read(first - 1), FIELDS[first - 1])


class Planted:
    """An object whose unpickling leaves a mark."""

    mark = "ran"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (Planted.mark,)


def changed_metadata(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_nothing_in_a_store_is_unpickled_followed_or_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planted, "mark", str(tmp_path / "ran"))
    place = tmp_path / "a.zarr"
    zarr.create_array(place, data=FIELDS, chunks=(24, 12, 16, 4), zarr_format=2)
    good = (place / ".zarray").read_text()
    (place / "0.0.0.0").write_bytes(pickle.dumps(Planted()))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"filters": [{"id": "pickle"}]}, "pickle"),
        ({"compressor": {"id": "pickle"}}, "pickle"),
        ({"compressor": {"id": "zfpy"}}, "zfpy"),
        ({"dtype": "|O", "filters": [{"id": "pickle"}]}, "objects"),
        ({"dtype": [["a", "<f4"]]}, "records"),
        ({"dtype": "nonsense"}, "restore"),
        ({"shape": [10**9, 10**5, 10**5, 4]}, "claims"),
        ({"shape": [0, 12, 16, 4]}, "no values"),
        ({"chunks": [0, 12, 16, 4]}, "restore|cannot be read"),
    ]
    for change, word in changes:
        (place / ".zarray").write_text(good)
        changed_metadata(place / ".zarray", **change)
        with pytest.raises(RequestError, match=word):
            open_source(place)
    (place / ".zarray").write_text(good)
    (tmp_path / "secret").write_bytes(FIELDS.tobytes())
    (place / "0.0.0.0").unlink()
    (place / "0.0.0.0").symlink_to(tmp_path / "secret")
    changed_metadata(place / ".zarray", compressor=None)
    with pytest.raises(RequestError, match="no value"):
        open_source(place)
    assert not (tmp_path / "ran").exists()
    three = tmp_path / "b.zarr"
    zarr.create_array(three, data=FIELDS)
    for change, word in (({"codecs": [{"name": "numcodecs.pickle"}]}, "pickle"), ({"data_type": "string"}, "string")):
        content = (three / "zarr.json").read_text()
        changed_metadata(three / "zarr.json", **change)
        with pytest.raises(RequestError, match=word):
            open_source(three)
        (three / "zarr.json").write_text(content)
    with pytest.raises(RequestError, match="leads out"):
        open_source(f"{three}:../a.zarr")


def test_the_dimensions_of_a_data_array_are_found_by_their_names() -> None:
    assert is_fields(open_source(StoredImages.store(TURNED, storing=Storing.of(Data()))))
    fields = xarray.Dataset({name: TURNED.isel(band=0) for name in "uv"})
    with pytest.raises(RequestError, match=r"variables: u, v; .*all as channels: dataset\.to_array\('variable'\)"):
        StoredImages.store(fields)
    both = open_source(StoredImages.store(fields.to_array("variable"), storing=Storing.of(Data())))
    assert both.read(0).shape[-1] == 2
    with pytest.raises(RequestError, match="rename"):
        StoredImages.store(TURNED.rename(band="a", lat="b"))


@pytest.mark.parametrize(("name", "library"), [("a.h5", "h5py"), ("a.zarr", "zarr")])
def test_a_missing_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str) -> None:
    written(tmp_path, "contiguous" if name == "a.h5" else "shards")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RequestError, match=r"is not installed: pip install .*science"):
        open_source(f"{tmp_path}/{name}:x" if name == "a.h5" else tmp_path / name)


TINY = ["--network", TRANSFORMER, "--batch", "4", "--steps", "2", "--device", "cpu", *QUIET]


@pytest.mark.slow
@pytest.mark.skipif(not MANUAL.exists(), reason="installed without its repository")
@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_the_commands_of_the_manual_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with h5py.File("run42.h5", "w") as file:
        file["fields/density"] = FIELDS
    field = TURNED[0].rename("t2m").to_dataset()
    field.to_netcdf("era5.nc", engine="h5netcdf")
    field.rename(t2m="tas").to_zarr("cmip6.zarr")
    section = MANUAL.read_text("utf-8").partition("## Simulations")[2].partition("```bash\n")[2].partition("```")[0]
    lines = section.splitlines()
    assert len(lines) == 3
    for line in lines:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*shlex.split(line, comments=True)[1:], *TINY])


@pytest.mark.slow
def test_a_run_is_trained_resumed_and_sampled_from_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TURNED.to_dataset(name="v").to_netcdf("a.nc", engine="h5netcdf")
    drawn = ["sample", "run", "-n", "2", "--steps", "2", "--out", "drawn"]
    for words in (["train", "a.nc:v", "--out", "run", *TINY], ["resume", "run", "--steps", "3"], drawn):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(words)
    assert np.load("drawn/000000.npy").shape == (12, 16, 4)
