"""The Kubernetes recipe of the page: its shell as process 1, as in a container, gets SIGTERM at any moment."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launches import SETTINGS, TORCHRUN, ended, output, rows, started, wait_for_steps  # noqa: F401  a fixture

DOCS = Path(__file__).parents[2] / "docs" / "distributed.md"
# In a namespace of its own the command is process 1, and sees no process outside.
PROCESS_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")

TWO = " ".join([*TORCHRUN, "2"])
UNFOG = f"{sys.executable} -m unfog"


def permitted():
    found = shutil.which("unshare")
    return bool(found) and subprocess.run([*PROCESS_1, "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.skipif(not permitted(), reason="no pid namespaces: needs unshare, and root or user namespaces"),
    pytest.mark.usefixtures("ended"),
]


def recipe(run, words, torchrun=TWO, unfog=UNFOG):
    """Return the shell of the page with these commands, and a run of this machine."""
    block = re.search(r"command: \[sh, -c\]\n    args:\n      - \|\n((?:        .*\n)+)", DOCS.read_text())
    replaced = {
        "/shared/photos": str(run),
        "train /data/photos": "train fashion",
        "--batch 1024": " ".join(str(word) for word in words),
        "torchrun -m": f"{torchrun} -m",
        "unfog runs": f"{unfog} runs",
    }
    text = re.sub(r"^        ", "", block[1], flags=re.MULTILINE)
    for before, after in replaced.items():
        assert before in text
        text = text.replace(before, after)
    return text


def evict(process):
    """Send SIGTERM to process 1, from outside its namespace as a kubelet does."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 1
    subprocess.run(["kill", f"-{int(signal.SIGTERM)}", children[0]], check=True)


def wait_for(condition, process):
    deadline = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, output(process)
        assert time.monotonic() < deadline
        time.sleep(0.05)


WAITS = """
touch $1.begun
test -f $1/config.toml || exec sleep 60
for time in 1 2; do  # a start removes the file of an earlier stop
    while ! test -f $1/STOP; do sleep 0.05; done
    rm $1/STOP
done
"""
"""Stands for torchrun: without a run it lets a signal end it, and a run ends at the second file STOP."""


@pytest.mark.slow
@pytest.mark.parametrize(("begun", "status"), [(True, 3), (False, 128 + signal.SIGTERM)])
def test_the_shell_stops_the_run_or_else_torchrun(tmp_path, begun, status):
    run, launcher = tmp_path / "run", tmp_path / "launcher"
    run.mkdir()
    if begun:
        (run / "config.toml").touch()
    launcher.write_text(WAITS)
    process = started(*PROCESS_1, "sh", "-c", recipe(run, (), f"sh {launcher} {run}", "exit 3 #"))
    wait_for(Path(f"{run}.begun").exists, process)
    evict(process)
    output(process, status)
    assert begun or not any(run.iterdir())  # nothing is in the way of the next start


@pytest.mark.exhaustive
def test_an_evicted_pod_saves_whether_it_trains_or_starts(tmp_path):
    run = tmp_path / "run"
    pod = [*PROCESS_1, "sh", "-c", recipe(run, ("--steps", 4000, *SETTINGS))]
    process = started(*pod)
    wait_for(run.is_dir, process)  # no run yet: nothing to save, and nothing in the way of the next start
    evict(process)
    assert process.wait(200) not in (0, 3)
    assert not (run / "config.toml").exists()
    process = started(*pod)
    wait_for_steps(run, 2, process)
    evict(process)
    said = output(process, 3)  # a job manager starts it again
    assert "Traceback" not in said
    saved = max(int(one.name) for one in (run / "checkpoints").glob("[0-9]*"))
    assert saved - len(rows(run)) in (0, 1)
    process = started(*pod)
    time.sleep(1)  # a file STOP of now is taken for that of an earlier stop, and removed
    evict(process)
    assert process.wait(200) not in (0, None)  # 1 before the first step, as torchrun calls it a failure
    end = max(int(one.name) for one in (run / "checkpoints").glob("[0-9]*"))
    assert saved <= end < 4000
    check = subprocess.run([sys.executable, "-m", "unfog", "runs", str(run), "--json"], capture_output=True, text=True)
    (state,) = json.loads(check.stdout)
    assert (state["step"], state["broken_checkpoints"]) == (end, [])
    assert state["state"] in ("stopped", "interrupted")
