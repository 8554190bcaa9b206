"""Arrays in files, whose rows are read by plain reads.

A read of a mapped file on a network or FUSE file system that is gone ends the process with SIGBUS, without a message.
A plain read is an OSError instead, after which the file can be waited for.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.outages import Outage
from unfog.errors import RunError
from unfog.files.positions import fill
from unfog.files.safe_files import open_file, regular_file
from unfog.text import sanitize

# Types of file systems that other processes or machines serve; fuseblk is a disk.
_SERVED = re.compile(
    r"fuse(?!blk$|ctl$).*|nfs[34]?|cifs|smb.*|9p|virtiofs|ceph|lustre|afs|beegfs|gpfs|pvfs2|orangefs|davfs|coda|glusterfs"
)
_WHOLE = slice(None)
_MOST_HEADER = 1000  # characters of a .npy header; parsing thousands of nested ones is a MemoryError

# A part of an error of NumPy -> what is wrong with the file.
_REASONS = {
    "Object arrays": "Python objects, which are never unpickled: save an array of numbers",
    "Python objects": "Python objects, which are never unpickled: save an array of numbers",
    "pickled": "not a .npy file; pickles are never opened: save the array with numpy.save",
    "mmap length": "truncated",
    "No data left": "empty",
}


def is_local(path: Path) -> bool:
    """Return False if a file is on a network or FUSE file system; True also where that is unknown."""
    with suppress(OSError, ValueError, IndexError):
        device = os.stat(path).st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:  # Linux alone has it
            for line in mounts:
                if line.split()[2] == name:
                    return not _SERVED.fullmatch(line.rpartition(" - ")[2].split()[0])
    return True


def map_array(file: Path) -> Any:
    """Map the array in a .npy file, of which the header alone is read. ValueError or OSError if it is not one."""
    try:
        return np.load(file, mmap_mode="r", allow_pickle=False, max_header_size=_MOST_HEADER)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # NumPy parses headers as Python, which raises errors of many types
        raise ValueError(_reason(str(error)) or type(error).__name__) from error


def _reason(said: str) -> str:
    """Return the fault of a .npy file by the text of an error of NumPy, without its advice to unpickle."""
    for key, reason in _REASONS.items():
        if key in said:
            return reason
    return said


def load_rows(path: Path, root: Path, waits: Outage | None = None) -> NDArray[Any] | FileRows:
    """Return the array in a .npy file as `FileRows`.

    In column-major order, in which a row is not contiguous, it is mapped instead, or read as a whole if its file
    system is not local. ValueError or OSError if it is not one. `waits` as in `FileRows`.
    """
    array = map_array(regular_file(path, root, follow=True))
    if not isinstance(array, np.memmap):
        return array  # type: ignore[no-any-return]
    if not array.flags.c_contiguous or array.ndim == 0 or not array.size:
        if is_local(path):
            return array
        return np.load(regular_file(path, root, follow=True), allow_pickle=False)  # type: ignore[no-any-return]
    # Plain reads also on a local disk: the pages of a mapped file count as memory of the process, up to all of it.
    return FileRows(path, root, array.dtype, array.shape, array.offset, waits)


class FileRows:
    """Rows of an array in a file, [N, ...], read when they are asked for. What it returns are copies. Safe in threads.

    Args:
        path: a regular file.
        root: folder below which no folder on the way to the file may be a link; the file itself may be one.
        waits: waits for a file that cannot be reached, as long as its patience; None to raise OSError at once.
    """

    def __init__(
        self,
        path: Path,
        root: Path,
        dtype: Any,
        shape: tuple[int, ...],
        offset: int = 0,
        waits: Outage | None = None,
    ) -> None:
        self.dtype, self.shape, self.waits = np.dtype(dtype), tuple(shape), waits
        self._path, self._root, self._offset = path, root, offset
        self._row_bytes: int = self.dtype.itemsize * math.prod(self.shape[1:])
        self._file = open_file(path, "rb", root, follow=True, buffering=0)
        self._state = _state(self._file.fileno())
        self._never = threading.Event()

    @property
    def nbytes(self) -> int:
        return self._row_bytes * len(self)

    def __len__(self) -> int:
        return int(self.shape[0])

    def rows(self, part: slice) -> FileRows:
        """Return consecutive rows, without reading them."""
        first, last, step = part.indices(len(self))
        if step != 1:
            raise ValueError("rows are consecutive")
        count, offset = max(0, last - first), self._offset + first * self._row_bytes
        found = FileRows(self._path, self._root, self.dtype, (count, *self.shape[1:]), offset, self.waits)
        found._state = self._state
        return found

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Read a row, a slice of rows, those that an array of integers or booleans selects, or parts, as NumPy does."""
        if isinstance(key, tuple):
            first, *rest = key
            if first is None or first is Ellipsis:
                return self[:][key]
            if isinstance(first, slice):
                return self[first][(_WHOLE, *rest)]
            wanted = np.arange(len(self))[first]
            rows, places = np.unique(wanted, return_inverse=True)
            # The indices of the rows are passed on, as NumPy combines the arrays of one key.
            found: NDArray[Any] = self.take(rows)[(places.reshape(np.shape(wanted)), *rest)]
            return found
        if isinstance(key, slice):
            first, last, step = key.indices(len(self))
            return self._read(first, last - first) if step == 1 else self.take(np.arange(first, last, step))
        # An index of all rows would cost memory for each image that is read.
        return self.take(key if isinstance(key, int | np.integer) else np.arange(len(self))[key])

    def take(self, indices: Any, axis: int = 0) -> NDArray[Any]:
        """Read the rows at these indices: integers of any shape [...] -> [..., *shape[1:]]."""
        if axis != 0:
            raise ValueError("rows are taken along axis 0")
        wanted = np.asarray(indices, np.int64)
        if wanted.size and not -len(self) <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"row {wanted.max()} of {len(self)}")
        flat = wanted.ravel() % max(1, len(self))
        out = np.empty((len(flat), *self.shape[1:]), self.dtype)
        for place, row in enumerate(flat.tolist()):
            self._fill_or_wait(out[place : place + 1], row)
        return out.reshape(*wanted.shape, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype)

    def _read(self, first: int, count: int) -> NDArray[Any]:
        out = np.empty((max(0, count), *self.shape[1:]), self.dtype)
        self._fill_or_wait(out, first)
        return out

    def _fill_or_wait(self, out: NDArray[Any], first: int) -> None:
        """Read rows into `out`. RunError if the file changed meanwhile, or cannot be reached for too long."""
        began, again, waited = time.monotonic(), False, False
        while True:
            try:
                if again:
                    self._open_again()
                self._fill(out.reshape(-1).view(np.uint8).data, self._offset + first * self._row_bytes)
                break
            except OSError as error:
                if not again:
                    again = True
                    continue
                if self.waits is None:
                    raise
                waited, reason = True, f"{self._path}: {error.strerror}"
                self.waits.on_wait(reason)
                self.waits.wait(str(self._path), reason, began, self._never)
        if waited and self.waits is not None:
            self.waits.end()
            self.waits.on_wait("")

    def _fill(self, out: memoryview, offset: int) -> None:
        file = self._file  # kept open meanwhile
        if not fill(file.fileno(), out, offset):
            raise RunError(f"{sanitize(str(self._path))} is cut off; restore it, then repeat the command")

    def _open_again(self) -> None:
        """Open the file anew, as the descriptor of a mount that was gone is of no use."""
        file = open_file(self._path, "rb", self._root, follow=True, buffering=0)
        if _state(file.fileno()) != self._state:
            file.close()
            raise RunError(f"{sanitize(str(self._path))} has changed while it was read; repeat the command")
        self._file = file  # the other one is closed once no thread reads from it


def _state(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns
