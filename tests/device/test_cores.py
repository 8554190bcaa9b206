"""Cores and threads under the limits of control groups: of made folders, and of the kernel where tests may make one."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from unfog.device import cores

V1 = Path("/sys/fs/cgroup/cpu")


def groups(tmp_path, lines, files):
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "me").write_text("\n".join(lines))
    return tmp_path / "cgroup", tmp_path / "me"


@pytest.mark.parametrize(
    ("lines", "files", "quota"),
    [
        (["0::/a/b"], {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        (["0::/a/b"], {"a/b/cpu.max": "25000 100000", "a/cpu.max": "400000 100000"}, 0.25),
        (["0::/a"], {"a/cpu.max": "max 100000"}, None),
        (["0::/docker/of-the-host"], {"cpu.max": "200000 100000"}, 2.0),
        (["4:cpu,cpuacct:/a/b"], {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        (["4:cpu:/a"], {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, None),
        (["4:cpuset:/a", "0::/"], {"cpuset/a/cpu.cfs_quota_us": "1", "cpuset/a/cpu.cfs_period_us": "9"}, None),
        (["0::/a"], {"a/cpu.max": "nonsense"}, None),
        ([], {}, None),
    ],
)
def test_the_quota_is_the_least_of_the_group_and_its_parents(tmp_path, lines, files, quota):
    assert cores.cpu_quota(*groups(tmp_path, lines, files)) == quota


@pytest.mark.parametrize(("quota", "visible", "usable"), [(None, 8, 8), (0.25, 8, 1), (1.5, 8, 2), (16.0, 8, 8)])
def test_usable_cores_are_those_that_can_be_kept_busy(monkeypatch, quota, visible, usable):
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cores, "visible_cores", lambda: visible)
    assert cores.usable_cores() == usable
    assert bool(cores.describe_quota()) == (quota is not None and quota < visible)


def test_a_pool_has_the_threads_that_the_system_starts(monkeypatch):
    begun, start = [], threading.Thread.start

    def limited(thread):
        if len(begun) >= 6:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        pool = cores.thread_pool(16)
    with pool:
        assert pool._max_workers == 3
        assert list(pool.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
    with cores.thread_pool(5) as pool:
        assert pool._max_workers == 5


SCRIPT = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w") as file: file.write(str(os.getpid()))
import torch
from unfog.process.device import choose_device
before = torch.get_num_threads()
choose_device("cpu")
from unfog.device.cores import usable_cores
print(before, torch.get_num_threads(), usable_cores())
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access(V1 / "cgroup.procs", os.W_OK), reason="needs a cgroup v1 that can be written")
@pytest.mark.parametrize("given", ["", "2"])
def test_torch_has_the_threads_of_a_real_quota_unless_they_are_given(given):
    group = V1 / f"unfog-test-{os.getpid()}"
    (group / "inner").mkdir(parents=True)
    try:
        (group / "cpu.cfs_quota_us").write_text("70000")
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        environment |= {"OMP_NUM_THREADS": given} if given else {}
        command = [sys.executable, "-c", SCRIPT, str(group / "inner")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        before, after, usable = map(int, done.stdout.split())
        assert usable == 1
        assert after == (before if given else 1)
    finally:
        (group / "inner").rmdir()
        group.rmdir()
