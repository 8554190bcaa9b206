"""TIFF stacks, NIfTI, DICOM and FITS: from files to samples in the same format, and what is wrong with files."""

from __future__ import annotations

import gzip
import os
import resource
import shlex
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import unfog
from conftest import QUIET, TRANSFORMER
from scientific_files import save_dicom
from test_docs import commands
from unfog.cli.main import main
from unfog.data.columns.conditions import with_conditions
from unfog.data.packs.pack import Pack
from unfog.data.prepare import prepare
from unfog.data.scans.write import sample_format
from unfog.data.settings import Data
from unfog.data.sources.base import ImageError, Source
from unfog.data.sources.registry import locate, open_source
from unfog.errors import RequestError

fits = pytest.importorskip("astropy.io.fits")
nibabel = pytest.importorskip("nibabel")
pydicom = pytest.importorskip("pydicom")
tifffile = pytest.importorskip("tifffile")

RNG = np.random.default_rng(0)
VOLUME = RNG.integers(-1000, 3000, (6, 20, 24)).astype(np.int16)  # [z, y, x]
PAGES = RNG.integers(0, 4096, (4, 6, 3, 16, 20)).astype(np.uint16)  # [t, z, c, y, x]


CT = {"BitsStored": 12, "HighBit": 11, "RescaleSlope": "1", "RescaleIntercept": "-1024"}
CT |= {"WindowCenter": "40", "WindowWidth": "400"}


def write_ct(path: Path, values: np.ndarray, **changes: Any) -> Path:
    """Write a CT of 12 bits, stored with an intercept of -1024; `values` are frames [N, H, W] or one [H, W]."""
    frames = values.reshape(-1, *values.shape[-2:], 1)
    return save_dicom(path, frames + 1024, **CT | changes)


def command(*words: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 0


def images(source: Source) -> np.ndarray:
    return np.stack([np.asarray(source.read(i)) for i in range(len(source.names))])


def make(kind: str, folder: Path, files: int = 3) -> Path:
    """Write files of a format that hold `VOLUME`, and return their folder."""
    folder.mkdir()
    for i in range(files):
        match kind:
            case "tiff":
                tifffile.imwrite(folder / f"{i}.tif", VOLUME, photometric="minisblack")
            case "nifti":
                affine = np.diag([2.0, 2, 3, 1])
                nibabel.save(nibabel.Nifti1Image(VOLUME.transpose(2, 1, 0), affine), folder / f"{i}.nii.gz")
            case "dicom":
                write_ct(folder / f"IM{i:04}", VOLUME)
            case "fits":
                fits.writeto(folder / f"{i}.fits", VOLUME)
    return folder


@pytest.mark.parametrize("kind", ["tiff", "nifti", "dicom", "fits"])
def test_a_folder_of_stacks_is_a_source_of_its_images(kind: str, tmp_path: Path) -> None:
    source = open_source(make(kind, tmp_path / "scans"))
    assert len(source.names) == 18
    assert source.names[7].endswith(":1")
    first = images(source)[:6, ..., 0]
    assert np.array_equal(first, VOLUME[:, ::-1] if kind in ("nifti", "fits") else VOLUME)
    assert "18 images, 24x20, 1 channel int" in source.found
    again = open_source(source.resolved)
    assert list(again.names) == list(source.names)
    assert again.stamp() == source.stamp()
    dataset = prepare(source, Data(size="24x20"), lambda done, of: None)
    assert dataset.settings.dtype == "float32"
    assert np.array_equal(np.asarray(dataset.train.pixels)[7, 0], source.read(7)[..., 0].astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tiff", "nifti", "dicom", "fits"])
def test_samples_have_the_format_of_the_source_and_runs_resume(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ["--steps", "2", "--batch", "4", "--device", "cpu", *QUIET]
    place = make(kind, tmp_path / "scans")
    command("train", place, "--out", run, "--network", TRANSFORMER, "--size", 12, *short)
    assert f'source = "{kind}:{place}"' in (run / "config.toml").read_text()
    command("resume", run, "--steps", 3)
    command("sample", run, "-n", 2, "--steps", 2, "--device", "cpu", "--out", tmp_path / "out")
    assert Image.open(tmp_path / "out" / "000001.png").size == (12, 12)
    match kind:
        case "tiff":
            values = tifffile.imread(tmp_path / "out" / "000000.tif")
        case "nifti":
            volume = nibabel.load(tmp_path / "out" / "000000.nii.gz")
            assert np.allclose(np.diag(volume.affine), [20 / 12 * 2, 20 / 12 * 2, 3, 1])
            values = volume.get_fdata()[..., 0]
        case "fits":
            values = fits.getdata(tmp_path / "out" / "000000.fits")
        case _:
            values = np.load(tmp_path / "out" / "000000.npy")[..., 0]
    assert values.shape == (12, 12)
    assert values.std() > 10


def test_the_axes_of_tiff_files_are_those_of_their_headers(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.ome.tif", PAGES, metadata={"axes": "TZCYX"}, compression="zlib")
    tifffile.imwrite(tmp_path / "b.tif", PAGES, imagej=True, metadata={"axes": "TZCYX"})
    tifffile.imwrite(tmp_path / "c.tif", PAGES.astype(">f4"), byteorder=">", photometric="minisblack")
    expected = PAGES.reshape(24, 3, 16, 20).transpose(0, 2, 3, 1)
    for name, axes in (("a.ome.tif", "auto"), ("b.tif", "auto")):
        source = open_source(tmp_path / name, axes=axes)
        assert np.array_equal(images(source), expected), name
        assert source.fill_settings(Data()).dtype == "uint16"
    with pytest.raises(RequestError, match=r"4x6x3x16x20.*NCHW"):
        open_source(tmp_path / "c.tif")
    assert np.array_equal(images(open_source(tmp_path / "c.tif", axes="NCHW")), expected)
    assert images(open_source(tmp_path / "c.tif", axes="NHWC")).shape == (72, 16, 20, 1)
    tifffile.imwrite(tmp_path / "d.tif", PAGES[0, 0], photometric="minisblack")
    source = open_source(tmp_path / "d.tif")
    assert len(source.names) == 3
    assert "--data.axes NCHW" in source.reading_warnings[0]


@pytest.mark.parametrize("kind", ["u2", "i2", "f4"])
@pytest.mark.parametrize("bands", [2, 3, 4])
def test_bands_that_lie_one_after_the_other_are_channels(kind: str, bands: int, tmp_path: Path) -> None:
    values = (RNG.random((bands, 10, 12)) * 1000).astype(kind)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="minisblack", planarconfig="separate")
    source = open_source(tmp_path)
    assert np.array_equal(source.read(0), values.transpose(1, 2, 0))


def test_12_bits_in_16_keep_their_range(tmp_path: Path) -> None:
    for i in range(3):
        write_ct(tmp_path / f"{i}.dcm", VOLUME.clip(0, 3000), RescaleSlope=None, RescaleIntercept=None)
    data = prepare(open_source(tmp_path), Data(), lambda done, of: None).settings
    assert (data.dtype, data.range) == ("uint16", (0, 4095))


def test_the_window_of_a_scan_is_named_and_not_applied(tmp_path: Path) -> None:
    source = open_source(write_ct(tmp_path / "a.dcm", VOLUME))
    (line,) = source.reading_warnings
    assert "--data.range -160 240" in line  # 40 with a width of 400
    assert np.array_equal(images(source)[..., 0], VOLUME)
    colour = RNG.integers(0, 255, (2, 8, 8, 3))
    for path in (
        write_ct(tmp_path / "without.dcm", VOLUME, WindowWidth=None),
        write_ct(tmp_path / "empty.dcm", VOLUME, WindowWidth="0"),
        save_dicom(tmp_path / "colour.dcm", colour, WindowCenter="40", WindowWidth="400"),
    ):
        assert open_source(path).reading_warnings == []


def test_volumes_are_turned_to_the_patient(tmp_path: Path) -> None:
    turned = VOLUME.transpose(0, 2, 1)[:, ::-1]  # [z, x from right to left, y]
    affine = np.array([[0, -2.0, 0, 0], [0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(turned, affine), tmp_path / "a.nii")
    assert np.array_equal(images(open_source(tmp_path / "a.nii"))[..., 0], VOLUME[:, ::-1])
    scaled = nibabel.Nifti1Image(VOLUME.transpose(2, 1, 0), np.eye(4))
    scaled.header.set_slope_inter(0.5, 10)
    nibabel.save(scaled, tmp_path / "b.nii")
    assert open_source(tmp_path / "b.nii").read(0).dtype == np.float32
    several = np.stack([VOLUME.transpose(2, 1, 0)] * 4, -1)
    nibabel.save(nibabel.Nifti1Image(several, np.eye(4)), tmp_path / "c.nii")
    assert len(open_source(tmp_path / "c.nii").names) == 24
    assert open_source(tmp_path / "c.nii", axes="NHWC").read(5).shape == (20, 24, 4)


def test_volumes_are_cut_along_any_axis(tmp_path: Path) -> None:
    turned = VOLUME.transpose(0, 2, 1)[:, ::-1]  # [z, x from right to left, y]
    affine = np.array([[0, -2.0, 0, 0], [0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 1]])
    nibabel.save(nibabel.Nifti1Image(turned, affine), tmp_path / "a.nii")
    expected = {
        "coronal": VOLUME.transpose(1, 0, 2)[:, ::-1],  # head at the top
        "sagittal": VOLUME.transpose(2, 0, 1)[:, ::-1],
        "0": turned,
        "1": turned.transpose(1, 0, 2),
        "2": turned.transpose(2, 0, 1),
    }
    for slices, values in expected.items():
        assert np.array_equal(images(open_source(tmp_path / "a.nii", slices=slices))[..., 0], values), slices
    together = images(open_source(tmp_path / "a.nii", slices="coronal+2"))
    assert together.shape == (16, 6, 24, 5)
    assert np.array_equal(together[3], expected["coronal"][3:8].transpose(1, 2, 0))
    nibabel.save(nibabel.Nifti1Image(np.stack([turned, turned + 1], -1), affine), tmp_path / "b.nii")
    both = open_source(tmp_path / "b.nii", axes="NHWC", slices="axial+1").read(0)
    assert np.array_equal(both[..., 1::2], both[..., ::2] + 1)


def test_cuts_that_are_none_are_refused(tmp_path: Path) -> None:
    nibabel.save(nibabel.Nifti1Image(VOLUME.transpose(2, 1, 0), np.eye(4)), tmp_path / "a.nii")
    nibabel.save(nibabel.Nifti1Image(VOLUME[0], np.eye(4)), tmp_path / "flat.nii")
    for slices in ("oblique", "axial+", "axial+99", "3", "AXIAL", ""):
        with pytest.raises(RequestError, match=r"axial\+1"):
            Data(slices=slices)
    for name, slices, reason in (("a", "axial+3", "6 slices, fewer than the 7"), ("flat", "coronal", "one slice")):
        with pytest.raises(RequestError, match=reason):
            open_source(tmp_path / f"{name}.nii", slices=slices)
    with pytest.raises(RequestError, match="cuts NIfTI volumes"):
        open_source(write_ct(tmp_path / "a.dcm", VOLUME), slices="coronal")
    pack = tmp_path / "pack"
    command("pack", tmp_path / "a.nii", pack, "--data.slices", "coronal+1")
    assert Pack.open(pack).settings["slices"] == "coronal+1"
    for slices in ("axial", "coronal+1"):
        assert prepare(open_source(pack, slices=slices), Data(slices=slices)).settings.slices == "coronal+1"
    with pytest.raises(RequestError, match="pack the originals again"):
        prepare(open_source(pack, slices="sagittal"), Data(slices="sagittal"))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["tiff", "fits", "nifti"])
def test_a_sample_is_read_back_as_it_was(kind: str, channels: int, tmp_path: Path) -> None:
    sample = RNG.normal(0, 100, (10, 14, channels)).astype(np.float32)
    suffix, encode = sample_format(f"{kind}:{tmp_path}")
    (tmp_path / f"a{suffix}").write_bytes(encode(sample))
    axes = {"fits": "NCHW", "nifti": "NHWC"}.get(kind, "auto")
    source = open_source(f"{kind}:{tmp_path}", axes=axes)
    assert np.array_equal(images(source), sample[None])


@pytest.mark.slow
def test_samples_of_other_cuts_lie_in_their_plane(tmp_path: Path) -> None:
    run, place = tmp_path / "run", make("nifti", tmp_path / "scans")
    short = ["--steps", "2", "--batch", "4", "--device", "cpu", *QUIET]
    slices = ["--data.slices", "coronal+1"]
    command("train", place, "--out", run, "--network", TRANSFORMER, "--size", "16x4", *slices, *short)
    command("resume", run, "--steps", 3)
    command("sample", run, "-n", 1, "--steps", 2, "--device", "cpu", "--out", tmp_path / "out")
    volume = nibabel.load(tmp_path / "out" / "000000.nii.gz")
    assert volume.shape == (16, 4, 3)  # columns, rows and three slices
    assert nibabel.aff2axcodes(volume.affine) == ("R", "S", "A")
    assert np.allclose(volume.affine @ [0, 0, 0, 1], [0.5, 0, 0.75, 1])  # of the corner, resized
    assert volume.header.get_zooms() == (3, 4.5, 2)


def test_blank_values_and_unsigned_integers_of_fits(tmp_path: Path) -> None:
    part = fits.PrimaryHDU(VOLUME)
    part.header["BLANK"] = int(VOLUME[0, 0, 0])
    part.writeto(tmp_path / "a.fits")
    assert np.isnan(open_source(tmp_path / "a.fits").read(0)[-1, 0, 0])
    fits.HDUList([fits.PrimaryHDU(), fits.ImageHDU(PAGES[0, :, 0])]).writeto(tmp_path / "b.fits")
    assert np.array_equal(images(open_source(tmp_path / "b.fits"))[..., 0], PAGES[0, :, 0, ::-1])
    assert open_source(tmp_path / "b.fits", axes="NCHW").read(0).shape == (16, 20, 6)


def test_fits_that_is_compressed_is_read(tmp_path: Path) -> None:
    for i in range(3):
        fits.HDUList([fits.PrimaryHDU(), fits.ImageHDU(VOLUME + i)]).writeto(tmp_path / f"{i}.fits")
        packed = gzip.compress((tmp_path / f"{i}.fits").read_bytes())
        (tmp_path / f"{i}.fits").unlink()
        (tmp_path / f"{i}.fits.gz").write_bytes(packed)
    source = open_source(tmp_path)
    assert len(source.names) == 18
    assert np.array_equal(images(source)[6:12, ..., 0], VOLUME[:, ::-1] + 1)
    assert len(open_source(tmp_path / "0.fits.gz").names) == 6
    (tmp_path / "0.fits.gz").write_bytes(packed[: len(packed) // 2])
    cut = open_source(tmp_path)
    assert len(cut.names) == 12
    assert cut.unreadable[0].name == "0.fits.gz"
    (tiles := tmp_path / "tiles").mkdir()
    fits.HDUList([fits.PrimaryHDU(), fits.CompImageHDU(VOLUME)]).writeto(tiles / "a.fits.fz")
    assert np.array_equal(images(open_source(tiles))[..., 0], VOLUME[:, ::-1])


def test_folders_of_pictures_and_older_runs_stay_as_they_were(tmp_path: Path) -> None:
    pages = [Image.fromarray(RNG.integers(0, 256, (16, 16), np.uint8)) for _ in range(3)]
    (single := tmp_path / "single").mkdir()
    pages[0].save(single / "a.tif")
    assert locate(str(single))[0].__name__ == "FolderSource"
    os.mkfifo(single / "0.tif")
    assert locate(str(single))[0].__name__ == "FolderSource"
    (deep := tmp_path / "deep").mkdir()
    tifffile.imwrite(deep / "a.tif", VOLUME[0].astype(np.float64))
    assert locate(str(deep))[0].__name__ == "TiffSource"
    (stacks := tmp_path / "stacks").mkdir()
    pages[0].save(stacks / "a.tif", save_all=True, append_images=pages[1:])
    assert locate(str(stacks))[0].__name__ == "TiffSource"
    assert locate(str(stacks), began=True)[0].__name__ == "FolderSource"
    assert locate(f"tiff:{stacks}", began=True)[0].__name__ == "TiffSource"
    pages[0].save(stacks / "b.png")
    assert locate(str(stacks))[0].__name__ == "FolderSource"


def test_whole_volumes_are_held_out(tmp_path: Path) -> None:
    for i in range(20):
        nibabel.save(nibabel.Nifti1Image(VOLUME.transpose(2, 1, 0) + i, np.eye(4)), tmp_path / f"{i}.nii.gz")
    dataset = prepare(open_source(tmp_path), Data(), lambda done, of: None)
    assert dataset.report.held_out == 6
    held = {int(image.min()) for image in np.asarray(dataset.held_out.pixels)}
    assert len(dataset.train) == 114
    assert held


def test_classes_of_volumes_come_from_a_table_or_from_folders(tmp_path: Path) -> None:
    place = make("nifti", tmp_path / "scans", 4)
    (tmp_path / "labels.csv").write_text("file,label\n" + "".join(f"{i}.nii.gz,{'ab'[i % 2]}\n" for i in range(3)))
    dataset = prepare(open_source(place), Data(labels=str(tmp_path / "labels.csv")), lambda done, of: None)
    assert dataset.report.class_counts == {"a": 12, "b": 6}
    for i in range(4):
        (place / f"c{i % 2}").mkdir(exist_ok=True)
        (place / f"{i}.nii.gz").rename(place / f"c{i % 2}" / f"{i}.nii.gz")
    assert prepare(open_source(place), Data(), lambda done, of: None).report.class_counts == {"c0": 12, "c1": 12}


def test_a_table_inside_a_folder_of_volumes_gives_classes_and_conditions(tmp_path: Path) -> None:
    place = make("nifti", tmp_path / "scans", 4)
    nibabel.save(nibabel.Nifti1Image(VOLUME[:1].transpose(2, 1, 0), np.eye(4)), place / "4.nii.gz")  # one slice
    rows = "".join(f"{i}.nii.gz,{'ab'[i % 2]},{30 + i}\n" for i in range(5))
    (place / "metadata.csv").write_text("file_name,label,age\n" + rows)
    source = with_conditions(open_source(place), "age")
    assert source.columns["age"].values.tolist() == [30.0] * 6 + [31.0] * 6 + [32.0] * 6 + [33.0] * 6 + [34.0]
    assert prepare(open_source(place), Data(), lambda done, of: None).report.class_counts == {"a": 13, "b": 12}
    # A row of one slice goes before that of its file.
    (place / "metadata.csv").write_text("file_name,age\n0.nii.gz:2,99\n" + rows.replace("a,", "").replace("b,", ""))
    assert with_conditions(open_source(place), "age").columns["age"].values[:4].tolist() == [30.0, 30.0, 99.0, 30.0]
    # The table beside a single file is that of the folder.
    assert open_source(place / "0.nii.gz").table("metadata.csv") is None


def damage(folder: Path) -> dict[str, str]:
    """Write damaged and hostile files. Return a part of the reason of each."""
    tifffile.imwrite(folder / "huge.tif", np.zeros((2, 16, 16), np.uint16), photometric="minisblack")
    with tifffile.TiffFile(folder / "huge.tif", mode="r+b") as file:
        file.pages[0].tags["ImageWidth"].overwrite(100_000)
        file.pages[0].tags["ImageLength"].overwrite(100_000)
    tifffile.imwrite(folder / "objects.tif", np.zeros((3, 16, 16), np.complex64), photometric="minisblack")
    (folder / "cut.tif").write_bytes(b"II*\0\x08\0\0\0\x01")
    header = nibabel.Nifti1Image(VOLUME, np.eye(4)).to_bytes()
    (folder / "cut.nii").write_bytes(header[:2000])
    (folder / "sides.nii").write_bytes(
        header[:40] + struct.pack("<8h", 3, 30000, 30000, 30000, 1, 1, 1, 1) + header[56:]
    )
    (folder / "negative.nii").write_bytes(header[:40] + struct.pack("<8h", 3, -5, 20, 20, 1, 1, 1, 1) + header[56:])
    packed = gzip.compress(header[:108] + struct.pack("<f", 2.0**31) + header[112:])
    (folder / "offset.nii.gz").write_bytes(packed)
    (folder / "text.nii").write_bytes(b"no volume" * 100)
    nibabel.save(nibabel.Nifti1Image(VOLUME.astype(np.complex64), np.eye(4)), folder / "complex.nii")
    write_ct(folder / "empty.dcm", VOLUME, PixelData=None)
    write_ct(folder / "frames.dcm", VOLUME, NumberOfFrames=100_000)
    write_ct(folder / "wide.dcm", VOLUME, Rows=65535, Columns=65535)
    (folder / "text.dcm").write_text("no scan")
    part = fits.PrimaryHDU(VOLUME)
    part.writeto(folder / "cut.fits")
    (folder / "cut.fits").write_bytes((folder / "cut.fits").read_bytes()[:4000])
    fits.BinTableHDU.from_columns([fits.Column("x", "E", array=np.zeros(3))]).writeto(folder / "table.fits")
    return {
        "huge.tif": "100,000 x 100,000",
        "objects.tif": "complex64",
        "cut.tif": "",
        "cut.nii": "truncated",
        "sides.nii": "30,000 x 30,000",
        "negative.nii": "shape",
        "offset.nii.gz": "byte 2",
        "text.nii": "not NIfTI",
        "complex.nii": "complex64",
        "empty.dcm": "without pixels",
        "frames.dcm": "truncated",
        "wide.dcm": "65,535 x 65,535",
        "text.dcm": "not DICOM",
        "cut.fits": "truncated",
        "table.fits": "no image",
    }


def test_damaged_files_are_named_and_left_out(tmp_path: Path) -> None:
    reasons = damage(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind in ("tiff", "nifti", "dicom", "fits"):
        with pytest.raises(RequestError, match="found no"):
            open_source(f"{kind}:{tmp_path}")
    tifffile.imwrite(tmp_path / "good.tif", VOLUME, photometric="minisblack")
    nibabel.save(nibabel.Nifti1Image(VOLUME, np.eye(4)), tmp_path / "good.nii")
    write_ct(tmp_path / "good.dcm", VOLUME)
    fits.writeto(tmp_path / "good.fits", VOLUME)
    found = dict(
        left for kind in ("tiff", "nifti", "dicom", "fits") for left in open_source(f"{kind}:{tmp_path}").unreadable
    )
    assert found.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in found[name], (name, found[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # kB
    line = prepare(open_source(f"nifti:{tmp_path}"), Data(), lambda done, of: None).report.line()
    assert "cut.nii" in line
    assert "6 skipped" in line


def test_pages_that_unpack_to_far_more_than_the_image_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("unfog.data.scans.tiff._HARMLESS", 2**16)
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((2, 2000, 1000), np.uint8), compression="zlib", rowsperstrip=2000)
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+b") as file:
        for page in file.pages:
            page.tags["ImageWidth"].overwrite(16)
            page.tags["ImageLength"].overwrite(16)
            page.tags["RowsPerStrip"].overwrite(16)
    source = open_source(tmp_path / "a.tif")
    with pytest.raises(ImageError, match="unpack"):
        source.read(0)


def test_an_ome_tiff_reads_no_other_file(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "b.ome.tif", PAGES[0, :2, 0], metadata={"axes": "ZYX"})
    tifffile.imwrite(tmp_path / "a.ome.tif", PAGES[0, :2, 0] * 0, metadata={"axes": "ZYX"})
    with tifffile.TiffFile(tmp_path / "a.ome.tif", mode="r+b") as file:
        text = file.pages[0].tags["ImageDescription"].value
        data = '<TiffData IFD="{}" FirstZ="{}"><UUID FileName="b.ome.tif">urn:uuid:x</UUID></TiffData>'
        start, end = text.index("<TiffData"), text.index("</Pixels>")
        file.pages[0].tags["ImageDescription"].overwrite(
            text[:start] + "".join(data.format(i, i) for i in range(2)) + text[end:]
        )
    try:
        values = images(open_source(tmp_path / "a.ome.tif"))
    except (RequestError, ImageError):
        return
    assert not values.any()


@pytest.mark.slow
def test_files_larger_than_memory_are_read_in_parts(tmp_path: Path) -> None:
    sides, values = (2000, 2000, 1500), 2000 * 2000 * 1500
    head = nibabel.Nifti1Header()
    head.set_data_shape(sides)
    head.set_data_dtype(np.float32)
    head["vox_offset"], head["magic"] = 352, b"n+1"
    (tmp_path / "a.nii").write_bytes(head.binaryblock + b"\0" * 4)
    with open(tmp_path / "a.nii", "r+b") as file:
        file.truncate(352 + 4 * values)  # 24 GB of zeros that take no space
    fits_head = fits.Header({"SIMPLE": True, "BITPIX": -32, "NAXIS": 3, "NAXIS1": 2000, "NAXIS2": 2000, "NAXIS3": 1500})
    text = fits_head.tostring().encode()
    (tmp_path / "a.fits").write_bytes(text)
    with open(tmp_path / "a.fits", "r+b") as file:
        file.truncate(len(text) + -(-4 * values // 2880) * 2880)
    code = (
        "import sys; from unfog.data.sources.registry import open_source\n"
        "source = open_source(sys.argv[1])\n"
        "for i in (0, 700, 1499): source.read(i)\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(len(source.names), peak.split()[1])"
    )
    for name in ("a.nii", "a.fits"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / name)], capture_output=True, text=True, timeout=120, check=True
        )
        count, kilobytes = map(int, done.stdout.split())
        assert count == 1500
        assert kilobytes < 1_000_000, name


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make("nifti", tmp_path / "scans", 1)
    monkeypatch.setattr("unfog.data.scans.source.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"nibabel.*science"):
        open_source(tmp_path / "scans")


@pytest.mark.slow
def test_the_commands_of_the_page_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, folder in (("nifti", "brains"), ("dicom", "chests"), ("fits", "sky")):
        make(kind, tmp_path / folder)
    (tmp_path / "cells").mkdir()
    tifffile.imwrite(tmp_path / "cells" / "a.ome.tif", PAGES[:, :, :2], metadata={"axes": "TZCYX"})
    page = (Path(unfog.__file__).parents[2] / "docs" / "microscopy-and-medical.md").read_text()
    lines = [shlex.split(line, comments=True)[1:] for line in commands(page)]
    assert len(lines) == 15
    tiny = ["--network", TRANSFORMER, "--size", 12, "--steps", 1, "--batch", 4, "--device", "cpu"]
    tiny += ["--preview.every", "-1", "--sampler.steps", 2, "--evaluate.every", "-1"]
    for i, (verb, place, *rest) in enumerate(lines):
        if verb == "train":
            command("train", place, *rest, *tiny, "--out", f"runs/{i}-{Path(place).name}")
            first = Path(f"runs/{Path(place).name}")
            if not first.exists():
                first.symlink_to(f"{i}-{Path(place).name}")
        else:
            command("sample", place, *rest, "--steps", 1, "--device", "cpu")
    assert len(list(tmp_path.glob("runs/cells/pictures*/*.tif"))) == 32
    assert len(list(tmp_path.glob("runs/sky/pictures*/*.fits"))) == 16


def test_tiles_of_fits_that_unpack_to_far_more_than_their_sides_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unfog.data.scans.fits._HARMLESS", 2**16)
    zeros = fits.CompImageHDU(np.zeros((1024, 1024), np.int32), compression_type="GZIP_1", tile_shape=(1024, 1024))
    zeros.writeto(tmp_path / "a.fits")
    assert not open_source(tmp_path / "a.fits").read(0).any()
    with fits.open(tmp_path / "a.fits", disable_image_compression=True) as file:
        for name in ("ZNAXIS1", "ZNAXIS2", "ZTILE1", "ZTILE2"):
            file[1].header[name] = 24
        file.writeto(tmp_path / "b.fits")
        packed = gzip.compress((tmp_path / "b.fits").read_bytes())
    (tmp_path / "c.fits.gz").write_bytes(packed)
    for name in ("b.fits", "c.fits.gz"):
        with pytest.raises(RequestError, match="unpack to more"):
            open_source(tmp_path / name)
    with fits.open(tmp_path / "a.fits", disable_image_compression=True) as file:
        file[1].header["ZTILE1"] = file[1].header["ZTILE2"] = 10**6
        file.writeto(tmp_path / "d.fits")
    with pytest.raises(RequestError, match="tiles of over"):
        open_source(tmp_path / "d.fits")


def test_files_of_another_depth_are_named(tmp_path: Path) -> None:
    for i in range(3):
        tifffile.imwrite(tmp_path / f"{i}.tif", PAGES[i, :, 0], photometric="minisblack")
    assert not open_source(tmp_path).reading_warnings
    tifffile.imwrite(tmp_path / "b.tif", (PAGES[0, :, 0] >> 4).astype(np.uint8), photometric="minisblack")
    (line,) = open_source(tmp_path).reading_warnings
    assert "16 bits and, among 4 that were looked at, 1 of 8 bits, such as b.tif" in line
    (scans := tmp_path / "scans").mkdir()
    for i, kind in enumerate((np.int16, np.float32)):  # files with slope and intercept have one scale
        nibabel.save(nibabel.Nifti1Image(VOLUME.astype(kind), np.eye(4)), scans / f"{i}.nii")
    assert not open_source(scans).reading_warnings


def test_unknown_values_are_those_after_slope_and_intercept(tmp_path: Path) -> None:
    values = VOLUME[:, :, :].clip(-1023, 3000).astype(np.int32)
    values[:, 0] = -1024
    write_ct(tmp_path / "a.dcm", values, PixelPaddingValue=0)
    source = open_source(tmp_path / "a.dcm")
    assert "--data.unknown=-1024" in "".join(source.reading_warnings)
    pixels = np.asarray(prepare(source, Data(unknown="-1024", held_out=0)).train.pixels)
    assert np.array_equal(np.isnan(pixels[:, 0]), values == -1024)
    part = fits.PrimaryHDU(VOLUME)
    part.header["BLANK"] = int(VOLUME[0, 0, 0])
    part.writeto(tmp_path / "a.fits")
    pixels = np.asarray(prepare(open_source(tmp_path / "a.fits"), Data(unknown="nan", held_out=0)).train.pixels)
    assert np.array_equal(np.isnan(pixels[:, 0]), VOLUME[:, ::-1] == VOLUME[0, 0, 0])
