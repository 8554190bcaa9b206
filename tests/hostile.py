"""Makers of hostile files and values: damage of any file, forged headers, pickles that act, JSON of any kind."""

import io
import json
import math
import os
import pickle
import resource
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

# JSON

DEEP = "[" * 100_000
NUMBERS: tuple[Any, ...] = (-1, 0, 2**63, 10**30, 1.5, math.nan, math.inf, -math.inf)
ABSENT = object()
VALUES: tuple[Any, ...] = (None, True, 7, *NUMBERS, "x", "", [], [[]], [None], {}, {"a": 1}, ABSENT)


def places(tree: object, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every place in a JSON value, as keys and indices from its root."""
    found = [above]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += places(value, (*above, key))
    return found


def put(tree: Any, place: Sequence[Any], value: object) -> Any:
    """Return a copy of a JSON value with another value at a place; without that place for `ABSENT`."""
    if not place:
        return tree if value is ABSENT else value
    tree = deepcopy(tree)
    inner = tree
    for key in place[:-1]:
        inner = inner[key]
    if value is ABSENT:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return tree


# Links, pipes, folders and devices in the place of files

KINDS = ["link", "dangling", "pipe", "folder", "device"]


def clear(path: Path) -> None:
    """Remove whatever lies at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def plant(path: Path, kind: str, victim: Path) -> None:
    """Put something else in the place of a file or folder; `victim` is where a link leads."""
    clear(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    match kind:
        case "link":
            path.symlink_to(victim)
        case "dangling":
            path.symlink_to(victim.parent / "made")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero, which never ends


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    """Return inode, size, time of change and mode of a folder and everything below it, links not followed."""
    found = {str(path): path.lstat() for path in (folder, *folder.rglob("*"))}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_mode) for name, stat in found.items()}


def peak_memory() -> float:
    """Return the most bytes of memory that this process has held so far."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# Images


def chunk(name: bytes, data: bytes = b"") -> bytes:
    """Return one chunk of a PNG, with its checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, bits: int, colour: int, rows: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    """Return a PNG of unfiltered rows, which may be fewer than it claims; colour 0 = grey, 2 = RGB."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + before + chunk(b"IDAT", zlib.compress(rows)) + after + chunk(b"IEND")


# Tensors and pickles


def safetensors(table: object, body: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with any header, bytes or JSON, that claims to be so long."""
    text = table if isinstance(table, bytes) else json.dumps(table, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def npy(shape: str, kind: str = "|u1", data: bytes = b"") -> bytes:
    """Return an .npy file that claims any shape and type."""
    return npy_with(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}", data)


def npy_with(header: str, data: bytes = b"") -> bytes:
    """Return an .npy file with any header."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


class Trap:
    """An object whose pickle makes a file when it is loaded: see `sprung`."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._path), "w"))


def _archive(content: bytes, method: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", b"3")
        archive.writestr("x.npy", content)
    return file.getvalue()


def _one(**values: Any) -> dict[str, Any]:
    """The table of a safetensors file with one tensor of four bytes, but for these values."""
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | values}


FORGED_TENSORS: dict[str, bytes] = {
    "cut off length": b"\0" * 7,
    "header of 8 EiB": safetensors({}, length=2**63),
    "header of 1 TiB": safetensors({}, length=2**40),
    "deep header": safetensors(DEEP.encode()),
    "header not of text": safetensors(b"\xff\xfe"),
    "vast tensor": safetensors(_one(shape=[2**62]), b"1234"),
    "tensor whose size overflows": safetensors(_one(shape=[2**32, 2**32]), b"1234"),
    "tensor behind the end": safetensors(_one(data_offsets=[0, 2**50]), b"1234"),
    "tensor that ends before it begins": safetensors(_one(data_offsets=[4, 0]), b"1234"),
    "tensor of a negative side": safetensors(_one(shape=[-1]), b"1234"),
    "tensor of an unknown type": safetensors(_one(dtype="F99"), b"1234"),
    "tensor of another name": safetensors(_one(), b"1234"),
    "number for a tensor": safetensors({"a": 5}),
    "list for a table": safetensors([]),
    "table without tensors": safetensors({}),
}


# Damage of any file: a sound one lies at the path, and what it becomes may create `sprung` when unpickled.

Damage = Callable[[Path, Path], None]


def _written(content: Callable[[bytes, Path], bytes]) -> Damage:
    """Return a damage that writes a file anew, given its sound content and `sprung`."""

    def damage(path: Path, sprung: Path) -> None:
        data = content(path.read_bytes(), sprung)
        path.unlink()
        path.write_bytes(data)

    return damage


def _saved(save: Callable[[io.BytesIO, Trap], object]) -> Damage:
    """Return a damage that saves a trap."""

    def content(sound: bytes, sprung: Path) -> bytes:
        file = io.BytesIO()
        save(file, Trap(sprung))
        return file.getvalue()

    return _written(content)


def _save_torch(file: io.BytesIO, trap: Trap) -> None:
    import torch  # most tests that want a hostile file do without it

    torch.save({"model": trap}, file)


def _planted(kind: str) -> Damage:
    def damage(path: Path, sprung: Path) -> None:
        victim = sprung.with_name(f"a sound {path.name}")
        shutil.copy(path, victim)
        plant(path, kind, victim)

    return damage


_NPY = {
    "npy without a header": b"\x93NUMPY",
    "vast npy": npy("(1000000000, 1000, 1000, 3)"),
    "npy of objects": npy("(2, 4, 4)", "|O", b"x" * 99),
    "npy of a negative side": npy("(-1, 4, 4)"),
    "npy of a shape that is none": npy("nonsense"),
}
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "text": b"a note that somebody named badly\n",
    "control characters": b"\x1b[2J\x07\0\r\n" * 20,
    "not UTF-8": b"\xff\xfe\x80" * 30,
    "deep JSON": DEEP.encode(),
    "deep object": b'{"a":' * 20_000,
    "deep TOML": b"a = " + DEEP.encode(),
    "vast numbers": b'{"step": ' + b"9" * 100_000 + b"}",
    "numbers that are none": b'{"step": NaN, "images": 1e999, "files": -Infinity}',
    "list": b"[]",
    "null": b"null",
    "a line of 4 MB": b"x" * 2**22,
    "a page of HTML": b"<html><script>alert(1)</script></html>",
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>",
    "begin of a GIF": b"GIF89a",
    "vast PNG": png(100_000, 100_000, 8, 2, b""),
    **_NPY,
    **{f"{name}, in an archive": _archive(data, zipfile.ZIP_STORED) for name, data in _NPY.items()},
    "zip bomb": _archive(bytes(2**24), zipfile.ZIP_DEFLATED),
    "zip directory of 4 GB": struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 2, 0, 0),
    **FORGED_TENSORS,
}
PICKLES: dict[str, Damage] = {
    "pickle": _saved(lambda file, trap: file.write(pickle.dumps(trap))),
    "pickle of torch": _saved(_save_torch),
    "pickle in a zip": _saved(lambda file, trap: file.write(_archive(pickle.dumps(trap), zipfile.ZIP_STORED))),
    "pickle in an npy": _saved(lambda file, trap: np.save(file, np.array([trap] * 8), allow_pickle=True)),
    "pickle in an npz": _saved(lambda file, trap: np.savez(file, x=np.zeros((8, 4, 4), "u1"), y=np.array([trap] * 8))),
}
DAMAGES: dict[str, Damage] = {
    **{name: _written(lambda sound, sprung, data=data: data) for name, data in CONTENTS.items()},
    "cut to half": _written(lambda sound, sprung: sound[: len(sound) // 2]),
    "cut by a byte": _written(lambda sound, sprung: sound[:-1]),
    "zeros": _written(lambda sound, sprung: bytes(len(sound))),
    "first byte changed": _written(lambda sound, sprung: bytes(one ^ 0x81 for one in sound[:1]) + sound[1:]),
    "sparse end of 256 GiB": lambda path, sprung: os.truncate(path, 2**38),
    **PICKLES,
    "gone": lambda path, sprung: path.unlink(),
    **{kind: _planted(kind) for kind in KINDS if kind != "device" or os.geteuid() == 0},  # devices are made by root
}
