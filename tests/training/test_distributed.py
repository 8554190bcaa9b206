"""Training on several processes: what one does, to rounding; the same bits each time; and what may befall one."""

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import unfog
from launches import (
    AGENT,
    SETTINGS,
    alone,
    cases,
    ended,  # noqa: F401  a fixture
    forked,
    largest_difference,
    launched,
    output,
    rows,
    started,
    wait_for_steps,
    weights,
    workers,
)
from unfog.data.augmentation import Augment
from unfog.device.sharded_rng import rows_of, seed_generators, with_own_seed
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.objective import Objective
from unfog.errors import LostProcess, RequestError
from unfog.files.locks import Owner, started_at
from unfog.process.heartbeat import Heartbeat
from unfog.process.run_folder import AUTOENCODER_FOLDER, RunFolder
from unfog.process.run_status import RunStatus
from unfog.runs.train import _lost_process_explained  # no process has to be lost
from unfog.training.batches import split_batch
from unfog.training.distributed.coordination import CoordinatedHooks, _RankStatus  # the ranks are in one process
from unfog.training.distributed.process_group import local_device
from unfog.training.distributed.watchdog import (  # the ranks are in one process
    AWAITING_IMAGES,
    Watchdog,
    _find_failed_rank,
    _Heartbeat,
)
from unfog.training.distributed.world import World
from unfog.training.hooks import TrainingHooks
from unfog.values.conditions import Conditions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ended")]

# Weights move by 1e-3 a step; rounding by 1e-7.
CLOSE = {"plain": 1e-6, "uneven": 1e-6, "few": 1e-6, "adaptive": 1e-6, "accumulated": 1e-6, "dropout": 1e-6}


def check_equal(found, names):
    for name in names:
        case = found[name]
        assert case["weights"] < CLOSE[name], name
        assert case["logged"] < 2e-5, name
        assert case["same"], name  # on all processes, to the bit
        assert case["repeated"], name  # and from one time to the next


def test_two_processes_do_what_one_does_and_decide_alike(tmp_path):
    found = cases(tmp_path, 2, [*CLOSE, "compressed", "stops", "abandons", "refuses", "diverges", "memory", "previews"])
    check_equal(found, CLOSE)
    compressed = found["compressed"]
    assert (compressed["types"], compressed["bytes"]) == (["torch.bfloat16"], 2)
    assert compressed["same"]
    assert compressed["repeated"]
    assert 1e-6 < compressed["weights"] < 5e-4  # gradients are rounded to three digits; four steps move by 4e-3
    assert compressed["logged"] < 2e-3
    # The last process was asked to stop before the fourth step, which all took, and no other.
    assert found["stops"] == {"seen": 32, "same": 32}
    assert found["abandons"] == {"seen": 24, "updates": 3, "same": True}
    refused = found["refuses"]
    assert (refused["refusals"], refused["updates"], refused["same"]) == ([["loss", [15]]], 3, 32)
    assert found["diverges"].startswith("training diverged 3 times")
    assert found["memory"] == {"microbatch": 1, "shrinks": 1, "same": 32, "rows": 4}
    failed = "rank 1 failed: ValueError: no luck with seven"
    assert found["previews"] == {"apart": 0, "losses": True, "jobs": 3, "failed": failed}


@pytest.mark.exhaustive
def test_four_processes_do_what_one_does(tmp_path):
    names = ["plain", "uneven", "few", "accumulated"]
    check_equal(cases(tmp_path, 4, names), names)


@pytest.mark.parametrize(("batch", "size"), [(8, 4), (10, 4), (3, 4), (1, 2), (64, 7)])
def test_shares_and_passes_cover_each_batch_once(batch, size):
    for drawn, most in ((batch, batch), (3, 3), (batch, 2), (5, 2)):
        everything = []
        for rank in range(size):
            share = World(rank, size).batch_range(100, batch)
            passes = list(split_batch(100, batch, drawn, share, most))
            everything += [place for one in passes for place in range(one.first, one.first + one.images)]
            assert len(share) in (batch // size, batch // size + 1)
            assert all(one.images <= most for one in passes)
            assert all(one.rng_first <= one.first for one in passes)
            assert all(one.first + one.images <= one.rng_first + one.rng_count for one in passes)
        assert everything == list(range(100, 100 + batch))


def test_the_randomness_of_a_part_is_that_of_its_rows():
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8)
    label = torch.arange(12) % 3
    augment, objective = Augment(flip=True, jitter=0.3, crop=0.4, augment=0.5), Objective(Diffusion(), 0.5)
    seen = []

    def network(x, level, conditions):
        seen.append((x, level, *(each for each in conditions if each is not None)))
        return torch.zeros_like(x)

    def looked_at(start, stop):
        seed_generators(3, 0)
        x0, condition = augment(images[start:stop])
        return objective(network, x0, Conditions(label[start:stop], condition))

    whole = looked_at(0, 12)
    for start, stop in ((0, 12), (0, 5), (5, 6), (6, 12)):
        with rows_of(start, 12):
            part = looked_at(start, stop)
        assert torch.equal(part.u, whole.u[start:stop])
        for mine, of_whole in zip(seen[-1], seen[0], strict=True):
            torch.testing.assert_close(mine, of_whole[start:stop], rtol=1e-5, atol=1e-6)  # a warp is a product
    assert len({tuple(row) for row in seen[0][0].flatten(1).tolist()}) == 12


def test_parts_of_what_is_drawn_together_have_dropout_of_their_own():
    dropout, x = torch.nn.Dropout(0.5), torch.ones(2, 64)
    first, again, other = (with_own_seed(dropout, 3, place)(x) for place in (8, 8, 12))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    seed_generators(3, 8)
    assert not torch.equal(first, dropout(x))  # nor that of what began at the same place


def sign(rank, step, phase, seconds):
    return _Heartbeat(rank, 1, step, phase, seconds, f"host, process {rank}")


def test_who_hangs_is_named_with_what_it_was_at():
    waiting = [sign(0, 7, "agreeing", 61.0), sign(1, 7, "backward", 61.5), sign(2, 7, "data", 62.0)]
    assert (
        _find_failed_rank(waiting, {}, 60.0) == "rank 2 (host, process 2) has been in phase 'data' of step 7 for 62 s"
    )
    assert _find_failed_rank(waiting, {}, 90.0) is None
    behind = [sign(0, 8, "data", 61.0), sign(1, 7, "agreeing", 61.0)]
    assert _find_failed_rank(behind, {}, 60.0).startswith("rank 1 ")
    frozen = [sign(0, 7, "agreeing", 61.0), sign(1, 6, "forward", 0.1)]
    assert "rank 1 (host, process 1) has given no sign of life for 25 s" in _find_failed_rank(
        frozen, {0: 0.5, 1: 25.0}, 60.0
    )
    # What the first one does alone may take long, as long as it gives signs.
    alone = [sign(0, -1, "evaluation (rank 0 alone)", 5000.0), sign(1, -1, "waiting for rank 0: evaluation", 5000.0)]
    assert _find_failed_rank(alone, {0: 3.0, 1: 3.0}, 60.0) is None
    assert "rank 0" in _find_failed_rank(alone, {0: 61.0, 1: 3.0}, 60.0)
    # A rank that waits for its images ends by itself, and those that wait for it are not to blame.
    away = [sign(0, 7, "agreeing", 61.0), sign(1, -1, AWAITING_IMAGES, 61.0)]
    assert _find_failed_rank(away, {0: 3.0, 1: 3.0}, 60.0) is None
    assert "rank 1" in _find_failed_rank(away, {0: 3.0, 1: 61.0}, 60.0)


STATUS = _RankStatus(1.0, first_square=0, first_images=0, stop=0, save=0, preview=0, plan=0, microbatch=0)


def test_all_ranks_do_what_the_first_was_asked_for():
    """Its folder is that of the run; a stop that any of them is asked for counts."""
    for wish in ("save", "preview", "plan", "stop"):
        for rank in (0, 1):
            hooks, state = CoordinatedHooks(TrainingHooks(), World(1, 2)), SimpleNamespace(microbatch=0)
            statuses = torch.tensor([STATUS._replace(**{wish: float(rank == asked)}) for asked in (0, 1)])
            hooks.apply_statuses(statuses.flatten().tolist(), statuses, state)
            decided = {"save": hooks.save_requested(), "preview": hooks.preview_requested()}
            decided |= {"plan": hooks.plan_due(), "stop": hooks.stop_requested()}
            assert decided == {name: name == wish and (rank == 0 or wish == "stop") for name in decided}


@pytest.mark.parametrize("own", [0, 2, 3, 4])
def test_ranks_agree_on_the_smallest_micro_batch_of_those_that_ran_out_of_memory(own):
    hooks, state = CoordinatedHooks(TrainingHooks(), World(0, 3)), SimpleNamespace(microbatch=own)
    statuses = torch.tensor([STATUS._replace(microbatch=float(images)) for images in (own, 0, 2)])
    hooks.apply_statuses(statuses.flatten().tolist(), statuses, state)
    assert state.microbatch == 2


CUT_OFF = """
import time
from itertools import pairwise
from types import SimpleNamespace
from unfog.training.distributed.watchdog import Watchdog

class Silence:
    def set(self, key, value): pass
    def multi_get(self, keys): time.sleep(60)

with Watchdog(1, 2, Silence(), timeout=1.0) as watchdog:
    watchdog.set_phase("backward", 3)
    time.sleep(60)
"""


def test_a_process_that_is_cut_off_ends_by_itself():
    began = time.monotonic()
    said = output(started(sys.executable, "-c", CUT_OFF), status=1)
    assert "torchrun's store has not answered" in said
    assert time.monotonic() - began < 40


def test_only_a_restart_goes_on_and_only_with_its_own_run(tmp_path, monkeypatch):
    mine, other = RunFolder(tmp_path / "photos"), RunFolder(tmp_path / "photos-2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 1")
    for folder, job in ((mine, "job 1"), (other, "job 2")):
        folder.path.mkdir()
        folder.config_file.write_text("")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        folder.write_launch_file()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 1")
    assert (
        RunFolder.find_earlier_attempt("photos", mine.path) == mine
    )  # a node has joined, which torchrun does not count
    assert RunFolder.find_earlier_attempt("photos", other.path) is None
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert RunFolder.find_earlier_attempt("photos", other.path) is None
    assert (
        RunFolder.find_earlier_attempt("photos", mine.path) is None
    )  # an earlier launch by the same name, forgotten from here on
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert RunFolder.find_earlier_attempt("photos", mine.path) is None
    mine.write_launch_file()
    assert RunFolder.find_earlier_attempt("photos", mine.path) == mine
    assert RunFolder.find_earlier_attempt("photos", other.path) is None
    assert RunFolder.find_earlier_attempt("photos", tmp_path / "none") is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("unfog.process.run_folder.next_folder", lambda source: tmp_path / "photos-3")
    assert RunFolder.find_earlier_attempt("photos", None) == mine


def test_what_an_attempt_left_that_was_killed_before_its_run_began_is_not_in_the_way(tmp_path, monkeypatch):
    begun, another = RunFolder(tmp_path / "begun"), RunFolder(tmp_path / "another")
    for folder, job in ((another, "job 2"), (begun, "job 1")):
        (folder.path / AUTOENCODER_FOLDER).mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        folder.write_launch_file()
    with pytest.raises(RequestError, match="not empty"), begun.create_locked("photos"):
        pass
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert RunFolder.find_earlier_attempt("photos", another.path) is None
    assert (another.path / AUTOENCODER_FOLDER).is_dir()
    assert RunFolder.find_earlier_attempt("photos", begun.path) is None
    with begun.create_locked("photos"):
        assert [one.name for one in begun.path.iterdir()] == [".lock"]
    assert not begun.path.exists() or not list(begun.path.iterdir())


def test_a_device_is_given_to_each_process_of_a_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("auto") == "auto"
    monkeypatch.setenv("WORLD_SIZE", "4")
    for local, device in (("0", "cuda:0"), ("1", "cuda:1"), ("3", "cuda:1")):
        monkeypatch.setenv("LOCAL_RANK", local)
        assert local_device("auto") == local_device("cuda:0") == device
        assert local_device("cpu") == "cpu"


def test_a_script_that_torchrun_starts_is_told_the_command_that_joins_ranks(tmp_path, monkeypatch):
    """Each rank would take itself for rank 0, and all but one would find the folder locked."""
    out = tmp_path / "run"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call, command in (
        (lambda: unfog.train([], out=out), "-m unfog train SOURCE"),
        (lambda: unfog.train_autoencoder([], out=out), "-m unfog train-autoencoder SOURCE"),
        (lambda: unfog.train_codec([], out=out), "-m unfog train-autoencoder SOURCE"),
        (lambda: unfog.resume(out), "-m unfog resume RUN"),
    ):
        with pytest.raises(RequestError, match=command):
            call()
    assert not out.exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(RequestError, match="not a run"):
        unfog.resume(out)


AWAY = """
import os, sys
from pathlib import Path
from unfog.data import decode_pool

away, decode = Path(sys.argv.pop(1)), decode_pool.decode

def decode_unless_away(*args):
    if away.exists():
        raise decode_pool.MissingImageError("is gone")
    return decode(*args)

if os.environ["RANK"] == "1":
    decode_pool.decode = decode_unless_away
    decode_pool._outage_reason = lambda source, i, error: "its mount is gone" if away.exists() else ""
from unfog.cli.main import main
main()
"""


@pytest.mark.parametrize("stop", ["signal", pytest.param("file", marks=pytest.mark.exhaustive)])
def test_a_stop_while_one_process_waits_for_its_images_loses_no_step(tmp_path, stop):
    images, run, away, script = (tmp_path / name for name in ("images", "run", "away", "script.py"))
    images.mkdir()
    for i in range(40):
        Image.new("L", (8, 8), 6 * i).save(images / f"{i:02}.png")
    script.write_text(AWAY)
    given = [1000 if before == "--checkpoint.every" else word for before, word in pairwise(("", *SETTINGS))]
    words = ["train", images, "--out", run, "--steps", 4000, *given, "--data.cache", "none"]
    process = forked([2, 0, script, away, *words], AGENT)
    wait_for_steps(run, 4, process)
    away.touch()
    logged = -1
    while logged != len(rows(run)):  # until what was read ahead is used up
        logged = len(rows(run))
        time.sleep(2)
    if stop == "signal":
        for number in workers(process).values():
            os.kill(number, signal.SIGTERM)
    else:
        (run / "STOP").touch()
    output(process)
    assert max(int(one.name) for one in (run / "checkpoints").glob("[0-9]*")) - logged in (0, 1)


@pytest.mark.exhaustive
def test_a_run_stopped_at_one_process_goes_on_with_any_number_of_them(tmp_path):
    alone("train", tmp_path / "one", "--steps", 24, *SETTINGS)
    several = tmp_path / "several"
    process = launched(2, "train", several, "--steps", 24, *SETTINGS)
    wait_for_steps(several, 4, process)
    os.kill(workers(process)[1], signal.SIGTERM)
    said = output(process)  # 0, as torchrun would start anew what ends with anything else
    assert f"unfog resume {several}" in said
    stopped = max(int(one.name) for one in (several / "checkpoints").glob("[0-9]*"))
    assert stopped - len(rows(several)) in (0, 1)  # the last log may be due
    assert 4 <= stopped < 24
    output(launched(3, "resume", several))
    assert largest_difference(weights(tmp_path / "one"), weights(several)) < 1e-4
    for a, b in zip(rows(tmp_path / "one"), rows(several), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_a_lost_process_is_told_without_torchs_own_paths():
    lost = pytest.raises(LostProcess, match="rank 1 has lost another rank")
    with lost as told, _lost_process_explained(SimpleNamespace(size=2, rank=1)):
        raise RuntimeError("[/__w/pytorch/pytorch/third_party/gloo/pair.cc:534] Connection closed by peer")
    assert "pytorch" not in str(told.value)
    assert "pytorch" in str(told.value.__cause__)


@pytest.mark.exhaustive
def test_processes_that_are_killed_and_that_hang_cost_nothing(tmp_path):
    calm, hit = tmp_path / "calm", tmp_path / "hit"
    output(launched(2, "train", calm, "--steps", 24, *SETTINGS))
    process = launched(2, "train", hit, "--steps", 24, *SETTINGS, "--training.timeout", 8, restarts=2)
    wait_for_steps(hit, 6, process)
    killed = workers(process)
    os.kill(killed[1], signal.SIGKILL)
    while not set(workers(process).values()).isdisjoint(killed.values()) or len(workers(process)) < 2:
        time.sleep(0.1)
    wait_for_steps(hit, 10, process)
    os.kill(workers(process)[1], signal.SIGSTOP)
    said = output(process)
    assert said.count("resuming") == 2
    assert "rank 0 has lost another rank" in said
    assert "rank 1 (" in said
    assert "no sign of life" in said
    assert largest_difference(weights(calm), weights(hit)) == 0
    assert [row["step"] for row in rows(hit)] == list(range(1, 25))
    assert [row["loss"] for row in rows(hit)] == [row["loss"] for row in rows(calm)]


def test_ranks_that_have_left_are_waited_for_no_more_and_those_that_have_ended_are_named(monkeypatch):
    monkeypatch.setattr("unfog.training.distributed.process_group._LOST_SECONDS", 0.0)
    with started("sleep", 60) as process:
        store = torch.distributed.HashStore()
        owner = replace(Owner.this_process(), pid=process.pid, start=started_at(process.pid))
        store.set("owner/1", str(owner))
        with Watchdog(0, 2, store, timeout=60) as watchdog:
            world = World(0, 2, store, watchdog)
            assert world.lost_rank() == ""
            process.kill()
            process.wait()
            for wait in (world.barrier, world.leave):
                with pytest.raises(LostProcess, match=rf"^rank 1 \({owner.host}, process {process.pid}\) has ended; "):
                    wait()
            done = iter([False, True])  # it said why it fails, and ended, while this rank was busy for long
            with monkeypatch.context() as patch:
                patch.setattr(world, "_store", SimpleNamespace(check=lambda keys: next(done)))
                world._wait(["said/1"])

            def gone(keys):
                raise torch.distributed.DistNetworkError("the store is gone")

            with monkeypatch.context() as patch:
                patch.setattr(world, "_store", SimpleNamespace(check=gone))
                assert world.lost_rank() == ""
            store.set("left/1", "")  # it ended as it should
            assert world.lost_rank() == ""
            world.leave()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("step", "state"), [(0, "failed"), (2, "stopped")])
def test_a_process_that_is_killed_during_a_preview_is_named_and_not_waited_for(tmp_path, step, state):
    run = tmp_path / "run"
    replaced = {"--preview.every": 2, "--preview.images": 2, "--sampler.steps": 1000}
    given = [replaced.get(before, word) for before, word in pairwise(("", *SETTINGS))]
    process = launched(2, "train", run, "--steps", 400, "--size", 8, *given)
    beat = {}
    while (beat.get("doing"), beat.get("step")) != ("preview", step):
        assert process.poll() is None
        time.sleep(0.05)
        beat = Heartbeat.read(run) or {}
    killed = workers(process)[1]
    os.kill(killed, signal.SIGKILL)
    began, name = time.monotonic(), f"rank 1 ({socket.gethostname()}, process {killed}) has ended"
    said = output(process, status=1)
    assert name in said
    assert "forcefully" not in said, "torchrun kills what has not ended after 30 s"
    assert time.monotonic() - began < 28
    status = RunStatus.read(run)
    assert status.state == state
    assert name in status.detail
    if step:  # of a stop, nothing is lost
        assert max(int(one.name) for one in (run / "checkpoints").glob("[0-9]*")) == step
