"""Write one sample in the format of the files that a run was trained on: TIFF, NIfTI or FITS."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.text import MARK
from unfog.values.arrays.slices import AXIAL, Slices


class SampleFormat(NamedTuple):
    """A format of files of samples."""

    suffix: str
    encode: Callable[[NDArray[Any]], bytes]
    """Returns the content of a file of one sample [H, W, C]."""


def sample_format(source: str, slices: str = AXIAL) -> SampleFormat | None:
    """Return the format of the samples of a run on this source; None for .npy. `slices` is `data.slices`.

    Also None if the package of the format is missing.
    """
    prefix, _, place = source.partition(":")
    match prefix:
        case "tiff" if find_spec("tifffile"):
            return SampleFormat(".tif", _tiff)
        case "fits" if find_spec("astropy"):
            return SampleFormat(".fits", _fits)
        case "nifti" if find_spec("nibabel"):
            cut = Slices.of(slices)
            first = _first_volume(place, cut.plane)
            return SampleFormat(".nii.gz", lambda sample: _nifti(sample, first, cut.thickness))
    return None


def _tiff(sample: NDArray[Any]) -> bytes:
    """Return a TIFF of one page for each channel, which ImageJ and Fiji open as a stack of channels."""
    import tifffile

    file, planes = BytesIO(), np.ascontiguousarray(sample.transpose(2, 0, 1))
    tifffile.imwrite(file, planes, imagej=True, metadata={"axes": "CYX"}, photometric="minisblack")
    return file.getvalue()


def _fits(sample: NDArray[Any]) -> bytes:
    """Return a FITS file of an image, or of a cube of the channels; the first row of a FITS image is at the bottom."""
    from astropy.io import fits

    file, planes = BytesIO(), sample.transpose(2, 0, 1)[:, ::-1]
    part = fits.PrimaryHDU(np.ascontiguousarray(planes if len(planes) > 1 else planes[0]))
    part.header["ORIGIN"] = MARK
    part.writeto(file)
    return file.getvalue()


def _nifti(sample: NDArray[Any], first: tuple[NDArray[Any], tuple[int, int]] | None, together: int) -> bytes:
    """Return a NIfTI file of slices [columns, rows, together], or [columns, rows, together, C], of the same image.

    They are in the place of the first slices of a volume. `first` is the affine of that volume, turned to columns, rows
    from the lowest and slices, and the sides (columns, rows) of its slices.
    """
    import nibabel

    height, width, channels = sample.shape
    values = sample[::-1].transpose(1, 0, 2).reshape(width, height, together, channels // together)
    values = np.ascontiguousarray(values)
    affine = np.eye(4)
    if first is not None:
        turned, sides = first
        across, along = values.shape[:2]
        scale = min(sides[0] / across, sides[1] / along)  # the largest part at the centre was resized to the sample
        place = np.diag([scale, scale, 1.0, 1.0])
        place[:2, 3] = [(side - n * scale) / 2 + scale / 2 - 0.5 for side, n in zip(sides, (across, along))]
        affine = turned @ place
    image = nibabel.Nifti1Image(values[..., 0] if values.shape[3] == 1 else values, affine)
    image.header["descrip"] = MARK
    image.header.set_xyzt_units("mm")
    return gzip.compress(image.to_bytes(), mtime=0)  # without the time, so that the same sample is the same file


def _first_volume(place: str, plane: str) -> tuple[NDArray[Any], tuple[int, int]] | None:
    """Return the turned affine and the sides of the first volume at a place; None if there is no readable one."""
    import nibabel

    from unfog.data.scans.nifti import NiftiSource, cut_axes
    from unfog.data.sources.folder import list_files

    path = Path(place)
    with suppress(Exception):  # the files may have been moved since, and samples are wanted all the same
        files = list_files(path, NiftiSource.has_name)[0] if path.is_dir() else [""]
        for name in files:
            with suppress(Exception):
                image = nibabel.load(os.path.join(path, name) if name else path)
                turn, cut, shape = np.zeros((4, 4)), cut_axes(image.shape, image.affine, plane), (*image.shape, 1)[:3]
                turn[3, 3] = 1
                for column, (axis, sign) in enumerate(cut):
                    turn[axis, column] = sign
                    turn[axis, 3] = 0 if sign > 0 else shape[axis] - 1
                return image.affine @ turn, (shape[cut[0][0]], shape[cut[1][0]])
    return None
