"""Real file systems that are small, full or read-only: mounted for one test, by root, by sudo, or in a namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

BLOCK = 4096


def allowed(command: list[str]) -> bool:
    """Whether the system lets us do that."""
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    return False


class SmallDisk:
    """A tmpfs of its own with the given options ("size=20m", "nr_inodes=100"), at `path`, until `remove`.

    Where only a user namespace may mount, a process holds one open, and `path` leads through it.
    """

    def __init__(self, at: Path, options: str) -> None:
        at.mkdir(parents=True, exist_ok=True)
        self.path, self._at, self._holder = at, at, None
        mount = ["mount", "-t", "tmpfs", "-o", f"{options},mode=777", "unfog", str(at)]
        # What to put before a command so that it may mount, and sees what is mounted.
        self.inside: list[str] = []
        for self.inside in ([], ["sudo", "-n"]):
            if allowed([*self.inside, *mount]):
                return
        hold = ["unshare", "-rm", "sh", "-c", '"$@" && echo mounted && exec sleep 3600', "sh", *mount]
        with suppress(OSError):
            self._holder = subprocess.Popen(hold, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            pid = self._holder.pid
            if self._holder.stdout.readline() == "mounted\n":
                self.path = Path(f"/proc/{pid}/root{at}")
                self.inside = ["nsenter", "-t", str(pid), "-U", "-m", "--preserve-credentials"]
                return
            self._holder.wait()
        pytest.skip("needs to mount a tmpfs: as root, by sudo, or in a user namespace")

    def remove(self) -> None:
        """Unmount it, once nobody works on it any more."""
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()
        else:
            subprocess.run([*self.inside, "umount", "-l", str(self._at)], check=True)

    def free(self) -> int:
        """Bytes that are left."""
        room = os.statvfs(self.path)
        return room.f_bavail * room.f_frsize

    def fill(self, leave: int = 0) -> Path:
        """Write a file that takes all the room but `leave` bytes; unlink it to make room again."""
        filler = self.path / "filler"
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while self.free() > leave:
                file.write(bytes(BLOCK))
        return filler

    def fill_inodes(self) -> Path:
        """Make empty files until there can be no more; remove the folder to make room again."""
        folder = self.path / "many"
        folder.mkdir()
        with suppress(OSError):
            for i in range(10**6):
                (folder / str(i)).touch()
        return folder

    @contextmanager
    def read_only(self, folder: Path) -> Iterator[None]:
        """Let a folder of it be read-only meanwhile, also to a process that has files open there for writing."""
        # A file system with such files cannot be remounted; a second mount of the folder over itself can.
        lines = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"'
        seen = str(self._at / folder.relative_to(self.path))
        subprocess.run([*self.inside, "sh", "-c", lines, "sh", seen], check=True)
        try:
            yield
        finally:
            subprocess.run([*self.inside, "umount", "-l", seen], check=True)


class Mount:
    """A mount of the folder `real` at `at` that can be taken away: a bind mount, or a FUSE file system that dies."""

    def __init__(self, real: Path, at: Path, fuse: bool = False) -> None:
        self.real, self.at, self.fuse = real, at, fuse
        self._process: subprocess.Popen | None = None
        real.mkdir(parents=True, exist_ok=True)
        at.mkdir(parents=True, exist_ok=True)
        if os.getuid() != 0 or (fuse and (not shutil.which("bindfs") or not os.path.exists("/dev/fuse"))):
            pytest.skip("needs root, and bindfs for FUSE")
        self.attach()

    def attach(self) -> None:
        """Mount it, anew after `detach`."""
        if not self.fuse:
            if not allowed(["mount", "--bind", str(self.real), str(self.at)]):
                pytest.skip("needs to mount a folder")
            return
        self._process = subprocess.Popen(["bindfs", "-f", str(self.real), str(self.at)], stderr=subprocess.DEVNULL)
        end = time.monotonic() + 10
        while not os.path.ismount(self.at):
            if time.monotonic() > end or self._process.poll() is not None:
                pytest.skip("needs to mount by FUSE")
            time.sleep(0.01)

    def break_down(self) -> None:
        """Take it away: the mount point is empty, or every access fails with ENOTCONN."""
        if self._process is None:
            subprocess.run(["umount", "-l", str(self.at)], check=True)
            return
        self._process.kill()
        self._process.wait()

    def detach(self) -> None:
        """Leave the mount point empty."""
        if not self.fuse:
            return
        subprocess.run(["umount", "-l", str(self.at)], check=False, stderr=subprocess.DEVNULL)
        self._process = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let it be out of reach meanwhile."""
        self.break_down()
        try:
            yield
        finally:
            self.detach()
            self.attach()

    def remove(self) -> None:
        """Unmount it for good."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        subprocess.run(["umount", "-l", str(self.at)], check=False, stderr=subprocess.DEVNULL)
