"""DICOM files through pydicom: frames of all patients and series below a folder, with slope and intercept."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from unfog.data.scans.source import ScanSource, first_files
from unfog.data.scans.stack import ImageStack, check_length, check_shape, native, scaled
from unfog.data.sources.base import DICOM_SUFFIXES, ImageError, SourceLocation
from unfog.files.positions import READ

_MAGIC_AT, _MAGIC = 128, b"DICM"
_DEFLATED = "1.2.840.10008.1.2.1.99"
_INDEX = "DICOMDIR"
_PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")


class DicomSource(ScanSource):
    """Frames of DICOM files. A series is a folder; files may have no suffix, as scanners write them."""

    suffixes = DICOM_SUFFIXES
    mixes_scales = False
    prefix: ClassVar[str] = "dicom"
    kind: ClassVar[str] = "DICOM"
    package: ClassVar[str] = "pydicom"

    @classmethod
    def has_name(cls, name: str) -> bool:
        suffix = os.path.splitext(name)[1]
        return super().has_name(name) or (name != _INDEX and (not suffix or suffix[1:].isdigit()))

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        if location.form == "file" and not _is_dicom(location.resolved):  # any file may have no suffix
            return None
        return super().match(location)

    @classmethod
    def is_folder_of(cls, folder: str) -> bool:
        return any(map(_is_dicom, [path for path in first_files(folder) if cls.has_name(os.path.basename(path))][:16]))

    def open_stack(self, path: Path) -> ImageStack:
        return DicomStack(path)


def _is_dicom(path: str) -> bool:
    """Return True for a file with a suffix of DICOM, or with its magic number."""
    if path.lower().endswith(DicomSource.suffixes):
        return True
    with suppress(OSError):
        descriptor = os.open(path, READ)
        with open(descriptor, "rb") as file:
            return file.read(_MAGIC_AT + 4)[_MAGIC_AT:] == _MAGIC
    return False


class DicomStack(ImageStack):
    """Frames of one file: values in the units of the modality, such as Hounsfield units. The window is not applied."""

    def __init__(self, path: Path) -> None:
        import pydicom
        from pydicom.errors import InvalidDicomError
        from pydicom.uid import UID

        self._path = path
        try:
            syntax = str(pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID", ""))
            if syntax == _DEFLATED:  # pydicom would unpack all of it at once
                raise ImageError("DICOM that is compressed as a whole (deflated), which is not read")
            header = self._header = pydicom.dcmread(path, defer_size=1024)
        except InvalidDicomError:
            raise ImageError("not DICOM") from None
        if not any(name in header for name in _PIXELS):
            raise ImageError("DICOM without pixels")
        self.count = int(header.get("NumberOfFrames") or 1)
        samples = int(header.get("SamplesPerPixel") or 1)
        palette = header.get("PhotometricInterpretation") == "PALETTE COLOR"
        self._palette = palette
        if not (header.get("Rows") and header.get("Columns")):
            raise ImageError("DICOM without the sides of its image")
        self.shape = (int(header.Rows), int(header.Columns), 3 if palette else samples)
        bits = int(header.get("BitsAllocated") or 0)
        check_shape(self.shape, np.dtype(np.float64 if bits > 32 else np.uint32))
        _check_decoder(syntax)
        # Each compressed frame has a header of 8 bytes at least.
        stored = 2 if header.get("PhotometricInterpretation") == "YBR_FULL_422" else samples
        frame = 8 if UID(syntax).is_encapsulated else self.shape[0] * self.shape[1] * stored * bits // 8
        check_length(path, self.count * frame)
        self.dtype = self._type(bits)
        self.note = "; ".join(filter(None, (self._window(), self._padding())))

    def _type(self, bits: int) -> np.dtype[Any]:
        if "PixelData" not in self._header:
            return np.dtype(np.float32 if "FloatPixelData" in self._header else np.float64)
        if self._palette:
            return np.dtype(np.uint16)
        if bits not in (1, 8, 16, 32):
            raise ImageError(f"DICOM of {bits} bits a value")
        sign = "iu"[not self._header.get("PixelRepresentation")]
        return self._in_units(np.zeros((0,), f"{sign}{max(1, bits // 8)}"), 0).dtype

    def _window(self) -> str:
        """Return a note on the window of the file; "" without one."""
        center, width = self._header.get("WindowCenter"), self._header.get("WindowWidth")
        with suppress(TypeError, ValueError, IndexError):
            center, width = (float(one if isinstance(one, int | float) else one[0]) for one in (center, width))
            low, high = center - width / 2, center + width / 2
            if low < high and self.shape[2] == 1:
                return (
                    f"a window of {low:g} to {high:g}, which is not applied; --data.range {low:g} {high:g} "
                    "--data.clip makes pictures of it"
                )
        return ""

    def _padding(self) -> str:
        """Return a note on the value of pixels outside of the scan; "" without one."""
        stored = self._header.get("PixelPaddingValue")
        if not isinstance(stored, int) or self._palette or "PixelData" not in self._header:
            return ""
        value = float(self._in_units(np.array([stored], np.int32), 0)[0])
        return f"{value:.9g} means outside of the scan; --data.unknown={value:.9g} leaves such pixels out"

    def read(self, i: int) -> NDArray[Any]:
        from pydicom.pixels import apply_color_lut, pixel_array

        try:
            values: NDArray[Any] = pixel_array(self._path, index=i)
        except (NotImplementedError, RuntimeError) as error:
            raise ImageError(f"pixels that pydicom cannot decode: {' '.join(str(error).split())[:80]}") from error
        if self._palette:
            values = apply_color_lut(values, self._header)[..., :3].astype(np.uint16)
        else:
            values = self._in_units(native(np.asarray(values)), i)
        return values if values.ndim == 3 else values[..., None]

    def _in_units(self, values: NDArray[Any], frame: int) -> NDArray[Any]:
        """Apply the look-up table or the slope and intercept of a frame."""
        from pydicom.pixels import apply_modality_lut

        if "ModalityLUTSequence" in self._header and values.size:
            return np.asarray(apply_modality_lut(values, self._header))
        slope, intercept = self._rescaling(frame)
        return scaled(values, slope, intercept)

    def _rescaling(self, frame: int) -> tuple[float, float]:
        """Return slope and intercept: of the file, of all its frames, or of this one."""
        places: list[Any] = [self._header]
        for name, number in (("SharedFunctionalGroupsSequence", 0), ("PerFrameFunctionalGroupsSequence", frame)):
            with suppress(KeyError, IndexError, AttributeError, TypeError):
                places.append(getattr(self._header, name)[number].PixelValueTransformationSequence[0])
        for place in reversed(places):
            if place.get("RescaleSlope") is not None or place.get("RescaleIntercept") is not None:
                slope, intercept = place.get("RescaleSlope"), place.get("RescaleIntercept")
                return float(1 if slope is None else slope), float(intercept or 0)
        return 1.0, 0.0


def _check_decoder(syntax: str) -> None:
    """Raise ImageError if the pixels are compressed in a way that no installed package decodes."""
    from pydicom.pixels import get_decoder
    from pydicom.uid import UID

    uid = UID(syntax)
    if not uid.is_transfer_syntax or uid.is_encapsulated is False:
        return
    decoder = get_decoder(uid)
    if not decoder.is_available:
        raise ImageError(f"compressed as {uid.name}, for which pydicom needs one more package, such as pylibjpeg")
