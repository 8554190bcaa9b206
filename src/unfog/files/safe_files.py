"""Files in run folders, packs, the cache and output folders: read and written without following links out of them.

Such a folder may come from a stranger, with a link, a pipe or a device under any name. So every write in them goes
through this module, which a test holds, as is every read. `root` is the folder that a person has named: it may be a
link, and no folder or file below it may. It has no default, as a guard that may be left out is left out once. A file
that is not a regular one is refused with OSError.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

_HERE = os.open in os.supports_dir_fd  # Windows has no descriptors of folders, and few links
# Without O_NONBLOCK, opening a pipe would wait for another process.
_CAREFUL = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_PATH", "O_CLOEXEC"))
_FLAGS = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "xb": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
    "a+b": os.O_RDWR | os.O_CREAT,
}
_KINDS = {
    stat.S_IFLNK: "a link, which is not followed",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_LARGE = 2**20  # bytes from which on an error of a full disk gives the size of a file
# Bytes of the largest small file of ours, for `read_file`; larger ones are read by parts, or with their own limit.
LARGEST_TEXT = 2**26
_LARGEST_HEADER, _MOST_TENSORS = 2**24, 50_000  # of a safetensors file
_LEFT_SECONDS = 600  # after which a file that nobody writes to was left by a killed process

Mode = Literal["rb", "r+b", "ab", "xb", "a+b"]


@contextmanager
def _folder_of(path: Path, root: Path, make: bool = False) -> Iterator[tuple[str, int | None]]:
    """Open the folder of a path. Yields the name and the descriptor that it is relative to."""
    if not _HERE:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield str(path), None
        return
    # Folder by folder from descriptors: a path that is checked and then opened could be exchanged in between.
    at, where = os.open(root, _FOLDER), root
    try:
        for part in path.parent.relative_to(root).parts:
            where /= part
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=at)
            try:
                below = os.open(part, _FOLDER | _NO_LINK, dir_fd=at)
            except OSError as error:
                raise _explained(error, where, part, at) from None
            os.close(at)
            at = below
        yield path.name, at
    finally:
        os.close(at)


def _explained(error: OSError, path: Path, name: str, at: int | None) -> OSError:
    """Return an error of the system about `path`, which says what is there if that is the reason."""
    reason = error.strerror
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.EPERM):
        with suppress(OSError):
            reason = _KINDS.get(stat.S_IFMT(os.lstat(name, dir_fd=at).st_mode), reason)
    return OSError(error.errno, reason, str(path))


def open_file(path: Path, mode: Mode, root: Path, follow: bool = False, buffering: int = -1) -> BinaryIO:
    """Open a regular file. OSError if it is another kind, or a link unless `follow` is set.

    "xb" creates a file that must not exist, "ab" appends, and "a+b" reads and writes a file that is created if missing.
    Before "ab" and "r+b", a copy takes the place of a file with other names (hard links), which keep what they had; not
    before "a+b", as a lock must be one file for all processes.
    """
    flags = _FLAGS[mode] | _CAREFUL | (0 if follow else _NO_LINK)
    with _folder_of(path, root) as (name, at):
        try:
            descriptor = os.open(name, flags, 0o666, dir_fd=at)
        except OSError as error:
            raise _explained(error, path, name, at) from None
    # The kind of the open descriptor, which nobody can exchange any more.
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _KINDS.get(stat.S_IFMT(status.st_mode), "no regular file"), str(path))
    if status.st_nlink > 1 and mode in ("ab", "r+b") and not follow:
        os.close(descriptor)
        _copy_in_place(path, root)
        return open_file(path, mode, root, follow, buffering)
    return cast(BinaryIO, open(descriptor, {"a+b": "r+b", "xb": "wb"}.get(mode, mode), buffering))


def _copy_in_place(path: Path, root: Path) -> None:
    """Put a copy in the place of a file, so that writing to it changes nothing under its other names."""
    with open_file(path, "rb", root) as source, replace_file(path, root, shared=True) as copy:
        shutil.copyfileobj(source, copy)
        os.chmod(copy.fileno() if os.chmod in os.supports_fd else path, stat.S_IMODE(os.fstat(source.fileno()).st_mode))


def read_file(path: Path, root: Path, limit: int, follow: bool = False) -> bytes:
    """Return the content of a regular file. OSError if it is another kind or a link; ValueError above `limit` bytes."""
    with open_file(path, "rb", root, follow) as file:
        # A large file is refused unread. read() sets aside all the memory that it is asked for, and a file may grow.
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(limit, max(size, 2**16)) + 1) if size <= limit else b""
    if max(size, len(data)) > limit:
        raise ValueError(f"{path.name} has over {limit:,} bytes")
    return data


def file_digest(path: Path, root: Path) -> str:
    """Return the sha256 of a regular file. OSError as for `open_file`."""
    with open_file(path, "rb", root) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def regular_file(path: Path, root: Path, follow: bool = False) -> Path:
    """Return the path of a regular file, for a library that reads by name. OSError if it is not a file, or a link."""
    open_file(path, "rb", root, follow).close()
    return path


def tensor_file(path: Path, root: Path, follow: bool = False) -> Path:
    """Return the path of a safetensors file, as `regular_file`. OSError also if its header lists too many tensors.

    Each takes kilobytes of memory and microseconds in all libraries, however few bytes of the file it has.
    """
    with open_file(path, "rb", root, follow) as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _LARGEST_HEADER or file.read(size).count(b'"dtype"') > _MOST_TENSORS:
            reason = (
                f"over {_MOST_TENSORS:,} tensors or {_LARGEST_HEADER >> 20} MB of their names; save fewer in a file"
            )
            raise OSError(errno.EINVAL, reason, str(path))
    return path


@contextmanager
def replace_file(
    path: Path, root: Path, private: bool = False, shared: bool = False, durable: bool = True
) -> Iterator[BinaryIO]:
    """Open a file beside `path` that takes its place at the end of the `with`; nothing stays after an exception.

    Args:
        path: the file, which is whole, old or new, at any time.
        root: the folder that may be a link.
        private: the mode is 0600.
        shared: several processes may write it at a time, so each has a file of its own beside it.
        durable: wait until the content is on the disk.
    """
    unique = f".{os.getpid()}-{time.time_ns()}" if shared else ""
    # In the same folder, as a rename is atomic within one file system only.
    partial = f"{path.name}{unique}.partial"
    with _folder_of(path, root) as (name, at):
        aside = partial if at is not None else str(path.with_name(partial))
        try:
            with suppress(FileNotFoundError):
                os.unlink(aside, dir_fd=at)  # of a process that was killed; if it is a link, the link alone goes
            flags = _FLAGS["xb"] | _CAREFUL | _NO_LINK
            descriptor = os.open(aside, flags, 0o600 if private else 0o666, dir_fd=at)
        except OSError as error:
            raise _explained(error, path.with_name(partial), aside, at) from None
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                if durable:  # before the rename, or a power cut could leave an empty file under the name
                    os.fsync(file.fileno())
            try:
                os.replace(aside, name, src_dir_fd=at, dst_dir_fd=at)
            except OSError as error:
                raise _explained(error, path, name, at) from None
        except BaseException as error:
            with suppress(OSError):
                os.unlink(aside, dir_fd=at)
            if isinstance(error, OSError) and error.filename is None:  # as of a full disk, which names no file
                error.filename = str(path)
            raise
    if shared:
        _remove_leftovers(path, root)


def _remove_leftovers(path: Path, root: Path) -> None:
    """Remove what killed processes left of a file that several write: nobody has written to it for minutes."""
    pattern = re.compile(rf"{re.escape(path.name)}\.[0-9]+-[0-9]+\.partial")
    with suppress(OSError):
        for name in filter(pattern.fullmatch, os.listdir(path.parent)):
            if time.time() - path.with_name(name).lstat().st_mtime > _LEFT_SECONDS:
                remove(path.with_name(name), root)


def write_atomic(
    path: Path,
    data: bytes | memoryview,
    root: Path,
    private: bool = False,
    shared: bool = False,
    durable: bool = True,
) -> None:
    """Write a file as a whole or not at all. The arguments are those of `replace_file`.

    OSError if that fails; that of a full disk gives the bytes of a large file.
    """
    try:
        with replace_file(path, root, private, shared, durable) as file:
            file.write(data)
    except OSError as error:
        if error.errno == errno.ENOSPC and len(data) >= _LARGE:
            with suppress(OSError):  # what was written of it is removed by now
                free = shutil.disk_usage(path.parent).free
                needed = f"it needs {len(data) / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free"
                error.strerror = f"{error.strerror}: {needed}"
        raise


def write_once(path: Path, data: bytes, root: Path) -> None:
    """Write a private file unless there is one. Of several processes one wins, and no reader sees a part of it."""
    aside = path.with_name(f"{path.name}.{os.getpid()}-{time.time_ns()}.partial")
    write_atomic(aside, data, root, private=True)
    try:
        with _folder_of(path, root) as (name, at), suppress(FileExistsError):
            beside = aside.name if at is not None else str(aside)
            try:
                os.link(beside, name, src_dir_fd=at, dst_dir_fd=at)
            except FileExistsError:
                raise
            except OSError:  # a file system without hard links
                os.replace(beside, name, src_dir_fd=at, dst_dir_fd=at)
    finally:
        remove(aside, root)


def new_file(path: Path, root: Path) -> Path:
    """Remove what lies at a path, and return it, for a library that writes by name."""
    remove(path, root)
    return path


def copy_into(files: Sequence[Path], folder: Path, root: Path) -> None:
    """Copy files, which may be links, into a folder, which is made if it is missing."""
    make_folder(folder, root)
    for path in files:
        source = open_file(path, "rb", path.parent, follow=True)
        with source, open_file(folder / path.name, "xb", root) as copy:
            shutil.copyfileobj(source, copy)


def make_folder(path: Path, root: Path) -> None:
    """Make a folder below `root`. OSError if it, or one above it, is a link or no folder."""
    with _folder_of(path / "any", root, make=True):
        pass


def check_folder(path: Path, root: Path) -> bool:
    """Return True if there is a folder, False if there is nothing. OSError if it is a link, or no folder."""
    try:
        with _folder_of(path / "any", root):
            return True
    except FileNotFoundError:
        return False


def list_folder(path: Path, root: Path) -> list[Path]:
    """List a folder, in order of names; [] if it is missing, no folder, or a link. OSError otherwise."""
    try:
        with _folder_of(path / "any", root) as (_, at):
            # Opened anew, as a descriptor of O_PATH cannot be listed.
            place = path if at is None else os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
            try:
                return [path / name for name in sorted(os.listdir(place))]
            finally:
                if isinstance(place, int):
                    os.close(place)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []
        raise


def remove(path: Path, root: Path) -> None:
    """Remove a file, a link or a pipe, if it is there. OSError if it is a folder."""
    with suppress(FileNotFoundError), _folder_of(path, root) as (name, at):
        try:
            os.unlink(name, dir_fd=at)
        except OSError as error:
            raise _explained(error, path, name, at) from None


def remove_tree(path: Path, root: Path, ignore_errors: bool = True) -> None:
    """Remove a folder with all in it, or a file or link, as far as that is possible. No link is followed."""
    try:
        with _folder_of(path, root) as (name, at):
            if stat.S_ISDIR(os.lstat(name, dir_fd=at).st_mode):
                shutil.rmtree(name, ignore_errors, dir_fd=at)
            else:
                os.unlink(name, dir_fd=at)
    except OSError:
        if not ignore_errors:
            raise


def discard(path: Path, aside: Path, root: Path) -> None:
    """Remove a file or folder that nobody may find half removed: it is renamed to `aside` first, where that works."""
    with _folder_of(path, root) as (name, at), _folder_of(aside, root) as (new, into):
        try:
            os.replace(name, new, src_dir_fd=at, dst_dir_fd=into)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise _explained(error, path, name, at) from None
            aside = path  # a copy would take room, which may be what is missing
    remove_tree(aside, root)


def move(path: Path, target: Path, root: Path) -> None:
    """Rename a file or folder; a folder is copied where the file system cannot rename it."""
    with _folder_of(path, root) as (name, at), _folder_of(target, root) as (new, into):
        try:
            os.replace(name, new, src_dir_fd=at, dst_dir_fd=into)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise _explained(error, path, name, at) from None
    # overlayfs does not rename a folder that comes from a layer below, such as that of a container's image.
    _copy(path, target, root)
    remove_tree(path, root, ignore_errors=False)


def _copy(path: Path, target: Path, root: Path) -> None:
    """Copy a file, a folder or a link itself. Pipes, devices and sockets are left out: they hold nothing."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        with _folder_of(target, root) as (name, at):
            os.symlink(os.readlink(path), name, dir_fd=at)
    elif stat.S_ISDIR(mode):
        check_folder(path, root)
        make_folder(target, root)
        for name in os.listdir(path):
            _copy(path / name, target / name, root)
        os.chmod(target, stat.S_IMODE(mode))
    elif stat.S_ISREG(mode):
        with open_file(path, "rb", root) as source, open_file(target, "xb", root) as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())  # before the original is removed
        os.chmod(target, stat.S_IMODE(mode))


def disk_usage(path: Path) -> int:
    """Return the bytes on disk of a file or folder, as `du` counts them; 0 without one. Links are not followed."""
    total = 0
    for place, _, names in os.walk(path) if os.path.isdir(path) else [(str(path.parent), [], [path.name])]:
        for name in names:
            with suppress(OSError):  # another process may delete files meanwhile
                found = os.lstat(os.path.join(place, name))
                # Blocks rather than sizes, as a file may have holes.
                total += getattr(found, "st_blocks", -(-found.st_size // 512)) * 512
    return total
