"""Cores and threads: how many a process may use, and that idle ones sleep soon. Imported before torch."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

# GNU's OpenMP (torch on Linux) spins 300,000 times by default, LLVM's and Intel's for 200 ms. The first value is from
# the benchmark ledger: a step alone takes 4% longer, and two processes no longer stall each other.
_SHORT_SPINNING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_GROUPS, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_SPARE = 3  # threads that are left for others where a limit is near: heartbeat, checkpoints, and what comes later


def _limit_spinning() -> bool:
    """Set how long idle threads spin, unless the user has; return False if torch is loaded, and has read it already."""
    if any(name in os.environ for name in ("OMP_WAIT_POLICY", *_SHORT_SPINNING)):
        return True
    os.environ.update(_SHORT_SPINNING)  # processes started from here inherit it
    return "torch" not in sys.modules


SPINNING_LIMITED = _limit_spinning()


def visible_cores() -> int:
    """Return the cores that this process may run on, which a batch system may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Return the cores that this process can keep busy: the visible ones, or fewer under a CPU quota; 1 at least."""
    quota = cpu_quota()
    return visible_cores() if quota is None else max(1, min(visible_cores(), math.ceil(quota)))


def cpu_quota(root: Path = _GROUPS, me: Path = _OWN_GROUPS) -> float | None:
    """Return the cores that the control groups of this process allow, by the least of all parents; None: no limit."""
    found: list[float] = []
    for group in control_groups("cpu", root, me):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            quota, period = (group / "cpu.max").read_text().split()  # version 2
            found.append(int(quota) / int(period))
        with suppress(OSError, ValueError, ZeroDivisionError):  # version 1, in which -1 means unlimited
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            found.append(int(quota) / int(period))
    return min((one for one in found if one > 0), default=None)


def describe_quota() -> str:
    """Describe the CPU quota, if it is below the number of visible cores; "" otherwise."""
    quota, visible = cpu_quota(), visible_cores()
    if quota is None or quota >= visible:
        return ""
    return f"a CPU quota (cgroup) allows {quota:.3g} of {visible} cores"


def threads_are_given() -> bool:
    """Return whether the environment says how many threads compute."""
    return any(os.environ.get(name) for name in _THREADS)


def control_groups(controller: str, root: Path = _GROUPS, me: Path = _OWN_GROUPS) -> Iterator[Path]:
    """Yield the folders of the control groups of this process and of all their parents, of version 2 and 1."""
    lines: list[str] = []
    with suppress(OSError):
        lines = me.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.strip("/")  # in a container it may not exist; its own group is the root
        for group in [folder, *folder.parents]:
            yield group
            if group == top:
                break


def thread_pool(count: int, name: str = "") -> ThreadPoolExecutor:
    """Return a pool of `count` threads, or of fewer where a limit of processes (pids.max, ulimit -u) allows no more."""
    from concurrent.futures import ThreadPoolExecutor  # only now, as `unfog --help` needs none

    release, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(count):
            thread = threading.Thread(target=release.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # can't start new thread
        count = max(1, len(started) - _SPARE)
    finally:
        release.set()
        for thread in started:
            thread.join()
    return ThreadPoolExecutor(count, thread_name_prefix=name)


def is_thread_limit(error: BaseException) -> bool:
    """Return whether this is how Python reports that the system starts no more threads."""
    return isinstance(error, RuntimeError) and "start new thread" in str(error)
