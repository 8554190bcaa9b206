"""Sets of images [N, H, W, C] in every format of arrays that is read, written for tests."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

h5py = pytest.importorskip("h5py")
nibabel = pytest.importorskip("nibabel")
tifffile = pytest.importorskip("tifffile")
xarray = pytest.importorskip("xarray")
zarr = pytest.importorskip("zarr")
fits = pytest.importorskip("astropy.io.fits")
pydicom = pytest.importorskip("pydicom")

DIMENSIONS = ("time", "y", "x", "band")
AXES = {"nifti": "NHWC", "fits": "NCHW"}
"""`data.axes` of formats whose channels have no name; auto for the others."""


def write_npy_folder(place: Path, values: np.ndarray) -> str:
    (place / "a").mkdir()
    for i, image in enumerate(values):
        np.save(place / f"a/{i:02}.npy", image)
    return f"{place}/a"


def write_npy(place: Path, values: np.ndarray) -> str:
    np.save(place / "a.npy", values)
    return f"{place}/a.npy"


def write_npz(place: Path, values: np.ndarray) -> str:
    np.savez(place / "a.npz", images=values)
    return f"{place}/a.npz"


def write_tiff(place: Path, values: np.ndarray) -> str:
    (place / "a").mkdir()
    for i, image in enumerate(values):
        tifffile.imwrite(place / f"a/{i:02}.tif", image, photometric="minisblack", planarconfig="contig")
    return f"{place}/a"


def write_ome(place: Path, values: np.ndarray) -> str:
    (place / "a").mkdir()
    for i, image in enumerate(values.transpose(0, 3, 1, 2)):
        tifffile.imwrite(place / f"a/{i:02}.ome.tif", image, photometric="minisblack", metadata={"axes": "CYX"})
    return f"{place}/a"


def write_nifti(place: Path, values: np.ndarray) -> str:
    """Write one volume, whose slices have the front of the patient at the top."""
    nibabel.save(nibabel.Nifti1Image(values[:, ::-1].transpose(2, 1, 0, 3), np.diag([2.0, 2, 3, 1])), place / "a.nii")
    return f"{place}/a.nii"


def write_fits(place: Path, values: np.ndarray) -> str:
    fits.writeto(place / "a.fits", values[:, ::-1].transpose(0, 3, 1, 2))
    return f"{place}/a.fits"


def save_dicom(path: Path, values: np.ndarray, **changes: Any) -> Path:
    """Save frames [N, H, W, C] of one channel or of red, green and blue, integers of 16 bits.

    `changes` are attributes of the header; None leaves one out.
    """
    header = pydicom.Dataset()
    header.file_meta = pydicom.dataset.FileMetaDataset()
    header.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    header.SOPClassUID = header.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
    header.SOPInstanceUID = header.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    header.NumberOfFrames, header.Rows, header.Columns, header.SamplesPerPixel = values.shape
    header.PhotometricInterpretation = "RGB" if values.shape[3] == 3 else "MONOCHROME2"
    header.PlanarConfiguration, header.PixelRepresentation = 0, 0
    header.BitsAllocated, header.BitsStored, header.HighBit = 16, 16, 15
    header.PixelData = values.astype("<u2").tobytes()
    for name, value in changes.items():
        if value is None:
            header.pop(name, None)
        else:
            setattr(header, name, value)
    header.save_as(path, enforce_file_format=True)
    return path


def write_dicom(place: Path, values: np.ndarray, **changes: Any) -> str:
    return str(save_dicom(place / "a.dcm", values, **changes))


def write_hdf5(place: Path, values: np.ndarray) -> str:
    with h5py.File(place / "a.h5", "w") as file:
        file["x"] = values
    return f"{place}/a.h5:x"


def write_chunks(place: Path, values: np.ndarray) -> str:
    """Write HDF5 with a compressed chunk for each image."""
    with h5py.File(place / "a.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(1, *values.shape[1:]), compression="gzip")
    return f"{place}/a.h5:x"


def write_netcdf3(place: Path, values: np.ndarray) -> str:
    """Write NetCDF of version 3 (classic), as the library netCDF-C does."""
    code = {"i1": 1, "i2": 3, "i4": 4, "f4": 5, "f8": 6}[values.dtype.str[1:]]

    def name(text: str) -> bytes:
        return struct.pack(">i", len(text)) + text.encode() + bytes(-len(text) % 4)

    sizes = b"".join(name(one) + struct.pack(">i", size) for one, size in zip(DIMENSIONS, values.shape))
    header = b"CDF\1" + struct.pack(">3i", 0, 10, 4) + sizes + struct.pack(">4i", 0, 0, 11, 1)
    header += name("v") + struct.pack(">9i", 4, 0, 1, 2, 3, 0, 0, code, -(-values.nbytes // 4) * 4)
    content = header + struct.pack(">i", len(header) + 4) + values.astype(values.dtype.newbyteorder(">")).tobytes()
    (place / "a.nc").write_bytes(content + bytes(-len(content) % 4))
    return f"{place}/a.nc:v"


def write_netcdf4(place: Path, values: np.ndarray) -> str:
    xarray.Dataset({"v": (DIMENSIONS, values)}).to_netcdf(place / "a.nc", engine="h5netcdf")
    return f"{place}/a.nc:v"


def write_zarr2(place: Path, values: np.ndarray, version: int = 2) -> str:
    """Write a store with a chunk for each image."""
    zarr.create_array(place / "a.zarr", data=values, chunks=(1, *values.shape[1:]), zarr_format=version)
    return f"{place}/a.zarr"


def write_zarr3(place: Path, values: np.ndarray) -> str:
    return write_zarr2(place, values, 3)


WRITERS: dict[str, Callable[[Path, np.ndarray], str]] = {
    "npy": write_npy,
    "npz": write_npz,
    "npy folder": write_npy_folder,
    "tiff": write_tiff,
    "ome": write_ome,
    "nifti": write_nifti,
    "dicom": write_dicom,
    "fits": write_fits,
    "hdf5": write_hdf5,
    "hdf5 chunks": write_chunks,
    "netcdf3": write_netcdf3,
    "netcdf4": write_netcdf4,
    "zarr 2": write_zarr2,
    "zarr 3": write_zarr3,
}
