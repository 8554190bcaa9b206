"""A long run takes no more of the machine at its end than at its beginning: memory, files, threads, tensors."""

import gc
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unfog.config.presets import preset
from unfog.config.toml import update
from unfog.runs import session
from unfog.runs.train import train_run

pytestmark = pytest.mark.slow

# Bytes that the memory of the process may differ by, of allocators and of what Python keeps to itself, by the number of
# steps: 200 show 10 kB that are lost at each, and 10,000 half a kB. Without a leak, 200 differ by 0.6 MB.
GROWTH = {200: 1.5e6, 10_000: 4e6}
SMALL = "dit:width=8,depth=1,head_channels=4,patch=8"


def configured(steps, source):
    settings = {
        "network": SMALL,
        "training": {"batch": 2, "images": 2 * steps, "precision": "fp32"},
        "optimizer": {"method": "adamw", "lr": 1e-4, "warmup": 1},
        "data": {"size": 8},
        "sampler": {"steps": 2},
        "log": {"every": 20},
        "preview": {"images": 2, "every": steps // 10},
        "evaluate": {"images": 4, "levels": 2, "every": steps // 10},
        "checkpoint": {"every": steps // 20},
        "averages": {"every": steps // 20},
    }
    return update(replace(preset("default"), source=source), settings, "")


def held():
    """What this process holds, after a collection."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    # By the type: a weak proxy passes a question for its class on, to what may be gone.
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tensors": len(tensors),
        "bytes": sum(tensor.untyped_storage().nbytes() for tensor in tensors),
        "objects": len(gc.get_objects()),
    }


def watch(folder, steps, source):
    """Train, and print what is held at each of some steps, when all that followed the step before is done."""
    torch.set_num_threads(1)
    advance, early, seen = session.Session.on_step_end, steps // 10, {}

    def advanced(self, step):
        advance(self, step)
        if step % early == early // 2 - 1:  # far from a checkpoint that is still being written
            self.saver.wait()
            self.saver._snapshots.wait()
            seen[step] = held()

    session.Session.on_step_end = advanced
    train_run(configured(steps, source), Path(folder))
    print(json.dumps(seen))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_many_steps_hold_no_more_than_the_first_ones(tmp_path, steps):
    from conftest import few_images  # not at the top, as the process below runs this file

    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "run"), str(steps), few_images()],
        capture_output=True,
        text=True,
        check=True,
        timeout=1200,
    )
    rows = list(json.loads(done.stdout.splitlines()[-1]).values())
    early, late = rows[1], rows[-1]
    for what in ("files", "threads", "tensors", "bytes"):
        assert late[what] == early[what], (what, early, late)
    assert late["memory"] - early["memory"] < GROWTH[steps], [row["memory"] for row in rows]


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]), sys.argv[3])
