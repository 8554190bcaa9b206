"""Run `unfog` as on Windows, as far as Linux can show it: `python tests/no_posix.py COMMAND … [--then COMMAND …]`.

What Windows lacks is taken away: modules, functions of os, signals, /proc, descriptors of folders. What it refuses is
refused: to rename or delete a file that is open or mapped, to open a folder, and names with characters such as ":".
The output is in code page 1252. It is no proof that Unfog works there, but finds what would not.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline", "posix_ipc")
_FUNCTIONS = (
    "fork forkpty getuid geteuid getgid getegid getgroups setsid getpgid killpg mkfifo mknod uname getloadavg sysconf "
    "statvfs fstatvfs sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate pread pwrite preadv pwritev "
    "chown fchown lchown fchmod fchdir nice getpriority setpriority sendfile openpty ttyname ctermid wait3 wait4 sync "
    "memfd_create copy_file_range O_NOFOLLOW O_DIRECTORY O_PATH O_CLOEXEC O_NONBLOCK O_NOCTTY O_SYNC O_DSYNC"
)
_SIGNALS = (
    "SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGKILL SIGCHLD SIGCONT SIGSTOP SIGTSTP SIGWINCH SIGPIPE SIGQUIT SIGXCPU "
    "ITIMER_REAL setitimer getitimer alarm pthread_sigmask pthread_kill sigwait sigpending siginterrupt pause"
)
THEN = "--then"
"""Stands between commands, and between what they say."""
_HIDDEN = ("/proc", "/sys", "/dev/shm")
_FORBIDDEN = set('<>:"|?*')


class Missing:
    """Importer that does not find the modules which Windows lacks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _take(module: Any, names: str) -> None:
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def _name(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""


def _is_hidden(path: Any) -> bool:
    return _name(path).startswith(_HIDDEN)


def _in_use() -> set[str]:
    """Return the files that this process has opened or mapped."""
    found = set()
    for one in _listdir("/proc/self/fd"):
        try:
            found.add(_readlink(f"/proc/self/fd/{one}"))
        except OSError:
            continue
    with _open("/proc/self/maps") as lines:
        found |= {line.split(maxsplit=5)[5].strip() for line in lines if line.count("/") and len(line.split()) > 5}
    return found


def _check_free(path: Any) -> None:
    name = os.path.realpath(_name(path))
    if used := [one for one in _in_use() if one == name or one.startswith(f"{name}/")]:
        raise PermissionError(errno.EACCES, f"[WinError 32] used by this process: {used[0]}", name)


def _check_name(path: Any) -> None:
    parts = Path(_name(path)).parts[1:]
    if bad := [part for part in parts if _FORBIDDEN & set(part) or part[-1] in " ."]:
        raise OSError(errno.EINVAL, "[WinError 123] the name is not valid", bad[0])


def _wrapped(plain: Callable[..., Any], *checks: Callable[[Any], None]) -> Callable[..., Any]:
    def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"):
            if kwargs.get(name) is not None:
                raise NotImplementedError(f"{name} unavailable on this platform")
        if _is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", _name(path))
        for check in checks:
            check(path)
        return plain(path, *args, **kwargs)

    return wrapped


def _os_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", _name(path))
    if flags & os.O_CREAT:
        _check_name(path)
    return int(_plain_os_open(path, flags, *args, **kwargs))


def _file_open(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    if not isinstance(path, int) and set(mode) & set("wax+"):
        _check_name(path)
    return _open(path, mode, *args, **kwargs)


def _replace(source: Any, target: Any, **kwargs: Any) -> None:
    _check_free(source)
    _check_free(target)
    _check_name(target)
    if os.path.isdir(target):
        raise PermissionError(errno.EACCES, "[WinError 5] Access is denied", _name(target))
    _plain_replace(source, target, **kwargs)


def _rename(source: Any, target: Any, **kwargs: Any) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "[WinError 183] the file exists", _name(target))
    _replace(source, target, **kwargs)


def _disk_usage(path: Any) -> Any:
    found = _statvfs(path)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return shutil._ntuple_diskusage(total, total - free, free)  # type: ignore[attr-defined]


_statvfs = os.statvfs
_listdir, _readlink, _open = os.listdir, os.readlink, builtins.open
_plain_os_open, _plain_replace = os.open, os.replace


class _Map(mmap.mmap):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if "prot" in kwargs or "flags" in kwargs:
            raise TypeError("'prot' and 'flags' are invalid keyword arguments for mmap() on Windows")
        return super().__new__(cls, *args, **kwargs)

    @property
    def madvise(self) -> None:
        raise AttributeError("madvise")


def take_away() -> None:
    """Make this process one without POSIX, once the large libraries are imported: they have their own code for it."""
    sys.meta_path.insert(0, Missing())  # type: ignore[arg-type]
    for name in MODULES:
        sys.modules.pop(name, None)
    _take(os, _FUNCTIONS)
    _take(signal, _SIGNALS)
    _take(time, "clock_gettime clock_gettime_ns CLOCK_BOOTTIME CLOCK_MONOTONIC tzset pthread_getcpuclockid")
    _take(socket, "AF_UNIX SO_REUSEPORT socketpair_unix")
    _take(mmap, " ".join(name for name in dir(mmap) if name.startswith(("MADV_", "PROT_", "MAP_"))))
    mmap.mmap = _Map  # type: ignore[misc]
    os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks = set(), set(), set()
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    shutil.disk_usage = _disk_usage
    os.kill = _refused  # type: ignore[assignment]  # where signal 0 is Ctrl-C, and others end the process
    os.symlink = _refused  # type: ignore[assignment]
    for name in ("stat", "lstat", "listdir", "scandir", "readlink", "mkdir"):
        checks = (_check_name,) if name == "mkdir" else ()
        setattr(os, name, _wrapped(getattr(os, name), *checks))
    for name in ("unlink", "remove", "rmdir"):
        setattr(os, name, _wrapped(getattr(os, name), _check_free))
    os.open = _wrapped(_os_open)  # type: ignore[assignment]
    os.replace, os.rename = _wrapped(_replace), _wrapped(_rename)  # type: ignore[assignment]
    builtins.open = io.open = _wrapped(_file_open)  # type: ignore[assignment]


def _refused(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.EPERM, "[WinError 1314] a required privilege is not held by the client")


def main() -> None:
    import asyncio  # noqa: F401
    import multiprocessing.pool  # noqa: F401
    import subprocess  # noqa: F401
    import tempfile  # noqa: F401
    import webbrowser  # noqa: F401

    import safetensors.torch  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    from PIL import Image

    if "doctor" in sys.argv and "--quick" not in sys.argv:  # whose dry run exports
        with suppress(ImportError):
            from diffusers import DDIMScheduler, UNet2DModel  # noqa: F401
    Image.init()
    torch.ones(2).sum()
    take_away()
    sys.platform = "win32"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="cp1252", errors="strict")  # type: ignore[union-attr]
    from unfog.cli.main import main as unfog

    words = sys.argv[1:]
    while THEN in words:
        command, words = words[: words.index(THEN)], words[words.index(THEN) + 1 :]
        try:
            unfog(command)
        except SystemExit as ended:
            if ended.code:
                raise
        print(THEN, flush=True)
    sys.exit(unfog(words))


if __name__ == "__main__":
    main()
