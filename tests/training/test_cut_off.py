"""A node that is cut off: two nodes in network namespaces of their own, and a cable that is pulled in the middle."""

import sys
import time
from pathlib import Path

import pytest

import unfog
from conftest import few_images
from launches import (
    SETTINGS,
    STARTED,
    ended,  # noqa: F401  a fixture
    largest_difference,
    launched,
    output,
    rows,
    started,
    wait_for_steps,
    weights,
)

sys.path.append(str(Path(unfog.__file__).parents[2] / "benchmarks" / "speed"))
from nodes import Nodes, missing

TIMEOUT = 8
MISSING = missing()
pytestmark = [
    pytest.mark.usefixtures("ended"),
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),
    pytest.mark.may_fail("nodes take each other for lost after 8 s of silence, which a busy machine may cause"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


@pytest.fixture
def nodes():
    with Nodes(2) as two:
        yield two
        for process in STARTED:  # where a test fails; one that waits for a network heeds no signal
            process.kill()


def both(nodes, nnodes, run, steps):
    words = ("-m", "unfog", "train", few_images(), "--out", run, "--steps", steps, *SETTINGS)
    words = [str(word) for word in (*words, "--training.timeout", TIMEOUT)]
    logs = [run.with_name(f"node{node}.log") for node in range(2)]
    return [
        started("sh", "-c", 'exec "$@" > "$0" 2>&1', logs[node], *nodes.torchrun(node, nnodes, words, restarts=3))
        for node in range(2)
    ], logs


def until_said(log, words, seconds):
    """Seconds until a log says so."""
    began = time.monotonic()
    while words not in log.read_text():
        assert time.monotonic() < began + seconds, log.read_text()
        time.sleep(0.1)
    return time.monotonic() - began


def finished(process, log):
    assert process.wait(timeout=400) == 0, log.read_text()


def test_a_cable_that_is_pulled_and_put_back_costs_nothing(nodes, tmp_path):
    calm, run = tmp_path / "calm", tmp_path / "run"
    (first, second), logs = both(nodes, "2", run, 24)
    wait_for_steps(run, 6, first)
    nodes.plug(1, False)
    # Both find out by themselves, as neither can tell the other.
    until_said(logs[0], "rank 1 (node1, process", 2.5 * TIMEOUT)
    until_said(logs[1], "torchrun's store has not answered", 2.5 * TIMEOUT)
    nodes.plug(1, True)
    finished(first, logs[0])
    finished(second, logs[1])
    assert "no sign of life" in logs[0].read_text()
    assert logs[0].read_text().count("resuming") == 1
    output(launched(2, "train", calm, "--steps", 24, *SETTINGS))
    assert largest_difference(weights(calm), weights(run)) == 0
    assert [row["loss"] for row in rows(run)] == [row["loss"] for row in rows(calm)]


def test_a_run_goes_on_with_the_nodes_that_are_left(nodes, tmp_path):
    run = tmp_path / "run"
    (first, second), logs = both(nodes, "1:2", run, 24)
    wait_for_steps(run, 6, first)
    nodes.plug(1, False)
    finished(first, logs[0])
    assert "rank 1 (node1, process" in logs[0].read_text()
    assert [row["step"] for row in rows(run)] == list(range(1, 25))
    assert "torchrun's store has not answered" in logs[1].read_text()
    before = weights(run)
    nodes.plug(1, True)  # too late: nobody is there any more
    assert second.wait(timeout=300) != 0
    assert largest_difference(before, weights(run)) == 0
