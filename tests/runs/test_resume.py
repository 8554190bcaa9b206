"""Interrupted equals uninterrupted: real processes, really killed, compared byte for byte."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import forked
import unfog
from conftest import NETWORK, TRANSFORMER, few_images, without_clock
from forked import Forked
from unfog.errors import RequestError, RunError
from unfog.files.safe_files import file_digest
from unfog.reporting.records import read_events, read_metrics
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints import rotation
from unfog.training.checkpoints.load import read_tensors

pytestmark = pytest.mark.slow
param = partial(pytest.param, marks=pytest.mark.exhaustive)

# Small, and with dropout, whose draws a resume has to repeat.
SMALL = "dit:width=16,depth=1,head_channels=8,patch=7,dropout=0.1"
FLAGS = [
    *("--network", SMALL, "--precision", "fp32", "--device", "cpu", "--batch", "8", "--microbatch", "3"),
    *("--steps", "36", "--data.jitter", "0.1", "--flip", "--log.every", "5", "--preview.images", "4"),
    *("--preview.every", "12", "--evaluate.every", "12", "--evaluate.images", "8", "--evaluate.levels", "2"),
    *("--sampler.steps", "3", "--checkpoint.every", "6", "--checkpoint.keep", "100"),
    *("--ema-snapshots.every", "4"),
]


def changed(**settings: object) -> list[str]:
    """FLAGS with other values."""
    flags = list(FLAGS)
    for name, value in settings.items():
        flags[flags.index(f"--{name}") + 1] = str(value)
    return flags


def command(*words: object) -> Forked:
    return Forked(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: Forked, status: int = 0, wait: float = 560) -> str:
    """Its words and status; the wait is for what hangs, as a busy machine takes long over the seconds of work."""
    out, err = process.communicate(timeout=wait)
    assert process.returncode == status, err
    return out + err


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing disturbed: 36 steps, classes, dropout, flips, jitter, uneven accumulation."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(command("train", few_images(), "--out", folder, *FLAGS))
    return folder


def assert_same(folder: Path, reference: Path) -> None:
    step = "00000036"
    for name in (*checkpoint.FILES, checkpoint.EMA2):
        mine, theirs = ((f / "checkpoints" / step / name).read_bytes() for f in (folder, reference))
        assert mine == theirs, f"{name} differs"
    mine, theirs = ({p.name: p.read_bytes() for p in (f / "averages").iterdir()} for f in (folder, reference))
    assert sorted(theirs) == [f"{n:08d}.safetensors" for n in range(4, 37, 4)]
    assert mine == theirs
    assert state_of(folder)["seen"] == 36 * 8
    assert (folder / "config.toml").read_text() == (reference / "config.toml").read_text()
    assert without_clock(folder / "metrics.jsonl") == without_clock(reference / "metrics.jsonl")
    previews = sorted(p.name for p in (reference / "samples").iterdir())
    assert previews == ["00000000.png", "00000012.png", "00000024.png", "00000036.png"]
    for name in previews:
        assert (folder / "samples" / name).read_bytes() == (reference / "samples" / name).read_bytes(), name


def state_of(folder: Path) -> dict:
    return json.loads((unfog.load(folder).checkpoint.folder / "state.json").read_text())


def steps_logged(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=-1)


@pytest.mark.parametrize("after_step", [param(0), 5, param(15), 25])
def test_killed_and_resumed_equals_undisturbed(whole, tmp_path, after_step):
    folder = tmp_path / "run"
    process = command("train", few_images(), "--out", folder, *FLAGS)
    while steps_logged(folder) < after_step and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    finish(command("resume", folder))
    assert_same(folder, whole)


def test_resumed_in_the_middle_of_a_log_window_and_of_an_interval(whole, tmp_path):
    # The checkpoint of step 18 lies between logs (15, 20), previews (12, 24) and evaluations.
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name) > 18:
            shutil.rmtree(path)
    shutil.rmtree(folder / "samples")
    (folder / "samples").mkdir()
    for name in ("00000000.png", "00000012.png"):
        shutil.copy(whole / "samples" / name, folder / "samples")
    finish(command("resume", folder))
    assert_same(folder, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, param(signal.SIGHUP)])
def test_signal_saves_and_ends_with_status_3_twice_over(whole, tmp_path, number):
    folder = tmp_path / "run"
    process = command("train", few_images(), "--out", folder, *FLAGS)
    for logged in (5, 20):
        while steps_logged(folder) < logged and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(number)
        said = finish(process, status=3)
        assert ("Stopping and saving" if number == signal.SIGINT else number.name) in said
        assert "stopped at step" in said
        assert read_events(folder / "events.jsonl")[-1]["kind"] == "stopped"
        process = command("resume", folder)
    finish(process)
    assert_same(folder, whole)


def test_broken_newest_checkpoint_is_named_and_passed_over(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    newest = folder / "checkpoints/00000036"
    with (newest / "model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x55")
    os.truncate(folder / "checkpoints/00000030/optimizer.safetensors", 1000)
    (folder / "checkpoints/00000024/manifest.json").unlink()
    saved, broken = checkpoint.newest(folder / "checkpoints")
    assert saved.step == 18
    assert [one.folder.name for one in broken] == ["00000024", "00000036", "00000030"]
    said = finish(command("resume", folder))
    assert "00000036 is broken and is passed over: model.safetensors" in said
    passed = [event for event in read_events(folder / "events.jsonl") if event["kind"] == "passed_over"]
    assert [(event["step"], event["checkpoint"]) for event in passed] == [(18, one.name) for one, *_ in broken]
    assert "passed_over" in (folder / "report.html").read_text()
    assert_same(folder, whole)


def test_a_checkpoint_is_found_by_what_it_holds_not_by_its_name(whole, tmp_path):
    for name, copy in (("00000036", "00000002"), ("00000006", "99999999")):
        shutil.copytree(whole / "checkpoints" / name, tmp_path / copy)
    saved, broken = checkpoint.newest(tmp_path)
    assert saved.step == 36
    assert not broken


def test_no_whole_checkpoint_is_said(whole, tmp_path):
    shutil.copytree(whole / "checkpoints/00000006", tmp_path / "checkpoints/00000006")
    os.truncate(tmp_path / "checkpoints/00000006/ema.safetensors", 10)
    with pytest.raises(RunError, match=r"no intact checkpoint.*00000006.*ema\.safetensors"):
        checkpoint.newest(tmp_path / "checkpoints")
    for name in ("00000004", "00000005"):
        shutil.copytree(tmp_path / "checkpoints/00000006", tmp_path / "checkpoints" / name)
    with pytest.raises(RunError, match=r"; and 1 more$"):
        checkpoint.newest(tmp_path / "checkpoints")


def test_going_on_for_longer_and_what_cannot_change(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    said = finish(command("resume", folder, "--steps", "40", "--lr", "1e-5"))
    assert "changed: training.images: 288 -> 320 (40 steps of 8)" in said
    assert "changed: optimizer.lr" in said
    assert unfog.load(folder).checkpoint.step == 40
    assert state_of(folder)["last"]["lr"] < 1e-5
    finish(command("resume", folder, "--steps", "41", "--optimizer.schedule", "constant"))
    assert state_of(folder)["last"]["lr"] == 1e-5
    assert "beyond the" in finish(command("resume", folder, "--steps", "12"), status=2)
    for wrong in (["--size", "35"], ["--batch", "16"], ["--network", "tiny"], ["--target", "eps"]):
        said = finish(command("resume", folder, *wrong), status=2)
        assert "cannot become" in said


def test_what_makes_it_another_run_needs_force(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for change in (["--seed", 5], ["--weighting", "min-snr"], ["--ema", "fixed"], ["--data.held-out", 0.02]):
        said = finish(command("resume", folder, "--steps", 37, *change), status=2)
        assert "--force" in said
    said = finish(command("resume", folder, "--steps", 37, "--seed", 5, "--ema", "fixed", "--force"))
    assert "changed: training.seed: 0 -> 5 (forced)" in said
    settings = [event["setting"] for event in read_events(folder / "events.jsonl") if event["kind"] == "changed"]
    assert [line.split(":")[0] for line in settings] == [
        "training.images",
        "training.seed",
        "ema",
        "ema_snapshots.every",
    ]
    assert "cannot become" in finish(command("resume", folder, "--size", 35, "--force"), status=2)


def test_verify_repeats_a_part_of_the_run(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    said = finish(command("resume", folder, "--verify"))
    assert "steps 30 to 36" in said
    assert "equal to the bit" in said
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    # Weights that are not what training makes of the ones before, but all checksums right.
    newest = folder / "checkpoints/00000036"
    tensors = read_tensors(newest / "model.safetensors", newest)
    tensors["patch_in.weight"][0, 0] += 1e-6
    save_file(tensors, newest / "model.safetensors")
    manifest = json.loads((newest / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"]["model.safetensors"]["sha256"] = file_digest(newest / "model.safetensors", newest)
    (newest / "manifest.json").write_text(json.dumps(manifest | {"sha256": checkpoint.manifest_digest(manifest)}))
    said = finish(command("resume", folder, "--verify"), status=1)
    assert "gave a different result: model: patch_in.weight and 0 other" in said
    assert "and now by the same" in said
    manifest["made_on"] = "torch 0.1 on cpu (slow) with 77 threads"
    (newest / "manifest.json").write_text(json.dumps(manifest | {"sha256": checkpoint.manifest_digest(manifest)}))
    said = " ".join(finish(command("resume", folder, "--verify"), status=1).split())
    assert f"with 77 threads, and now by torch {torch.__version__}" in said
    assert f"with {torch.get_num_threads()} threads" in said
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 1"))
    assert "settings were changed" in finish(command("resume", folder, "--verify"), status=2)
    for path in (folder / "checkpoints").iterdir():
        if path.name != "00000036":
            shutil.rmtree(path)
    assert "--verify needs two" in finish(command("resume", folder, "--verify"), status=2)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("batch = 8", "batch = 16", "training.batch is 8 in this run and cannot become 16"),
        ("seed = 0", "seed = 7", "--force"),
        ('kind = "flow"', 'kind = "v"', "diffusion.target"),
        ("images = 288", "images = 80", "beyond the"),
    ],
)
def test_settings_that_were_edited_are_those_of_the_run_no_more(whole, tmp_path, old, new, said):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints/00000036")
    config = (folder / "config.toml").read_text()
    at = config.index("[diffusion.target]") if "kind" in old else 0
    (folder / "config.toml").write_text(config[:at] + config[at:].replace(old, new, 1))
    before = (folder / "metrics.jsonl").read_bytes()
    assert said in finish(command("resume", folder), status=2)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_change_that_a_kill_kept_from_being_said_is_said_later(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints/00000036")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("every = 5", "every = 4"))
    assert "changed: log.every: 5 -> 4" in finish(command("resume", folder))
    assert read_events(folder / "events.jsonl")[-1]["kind"] == "finished"


def test_asked_again_for_the_length_it_has(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    config = (folder / "config.toml").read_text()
    for more in ([], ["--steps", 36], ["--lr", 0.1]):
        assert "is finished at step" in finish(command("resume", folder, *more))
    assert (folder / "config.toml").read_text() == config
    assert "equal to the bit" in finish(command("resume", folder, "--verify"))


def test_a_run_that_is_ended_where_it_was_saved_logs_and_measures_its_last_steps(whole, tmp_path):
    """Step 18 was saved, but neither logged nor evaluated, as it was not to be the last."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for step in range(24, 37, 6):
        shutil.rmtree(folder / "checkpoints" / f"{step:08d}")
    assert "finished at step 18" in finish(command("resume", folder, "--steps", 18))
    before, last = read_metrics(folder / "metrics.jsonl")[-2:]
    assert (before["step"], last["step"]) == (15, 18)
    assert 0 < last["loss"] < 10
    assert 0 < last["held_out_loss"] < 10
    assert "images_per_second" not in last  # of a session that trained on none
    assert (folder / "samples" / "00000018.png").exists()
    assert read_events(folder / "events.jsonl")[-1]["kind"] == "finished"
    assert "is finished at step" in finish(command("resume", folder))
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")][-2:] == [15, 18]


def test_a_run_that_is_ended_where_it_was_logged_measures_its_held_out_loss(whole, tmp_path):
    """Step 30 was saved and logged, but not evaluated."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints/00000036")
    assert "finished at step 30" in finish(command("resume", folder, "--steps", 30))
    before, logged, last = read_metrics(folder / "metrics.jsonl")[-3:]
    assert (before["step"], logged["step"], last["step"]) == (25, 30, 30)
    assert 0 < logged["loss"] < 10
    assert "loss" not in last
    assert 0 < last["held_out_loss"] < 10
    assert "is finished at step" in finish(command("resume", folder))
    assert read_metrics(folder / "metrics.jsonl")[-1] == last


def test_what_a_finished_run_draws_by_can_be_changed(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    before = unfog.load(folder).config
    said = finish(command("resume", folder, "--sampler.order", 3, "--guidance", 2, "--lr", 0.1))
    assert "changed: sampler.order: 2 -> 3" in said
    assert "is finished at step" in said
    assert re.search(r"not applied, because the run is finished: optimizer.lr: \S+ -> 0.1", said)
    assert said.count("not applied") == 1
    after = unfog.load(folder).config
    assert after == replace(before, sampler=replace(before.sampler, order=3), guidance=2.0)
    events = [row for row in read_events(folder / "events.jsonl") if row["kind"] == "changed"]
    assert [row["setting"].split(":")[0] for row in events] == ["sampler.order", "guidance"]
    said = finish(command("resume", folder, "--steps", 36))
    assert "changed" not in said
    assert "not applied" not in said
    assert "equal to the bit" in finish(command("resume", folder, "--verify"))


def test_two_that_begin_at_once_in_one_place(tmp_path):
    folder = tmp_path / "run"
    first = command("train", few_images(), "--out", folder, *FLAGS)
    while not folder.exists() and first.poll() is None:
        time.sleep(0.002)
    second = command("train", few_images(), "--out", folder, *FLAGS)
    assert finish(second, status=2).count("\n") <= 2
    finish(first)
    assert checkpoint.newest(folder / "checkpoints")[0].step == 36


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system does not tell where an open folder is")
def test_a_run_that_is_moved_is_saved_where_it_is(whole, tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    process = command("train", few_images(), "--out", folder, *FLAGS, "--checkpoint.milestones", 0)
    while steps_logged(folder) < 5 and process.poll() is None:
        time.sleep(0.005)
    folder.rename(moved)
    said = finish(process, status=1)
    assert f"unfog resume {moved}" in said
    finish(command("resume", moved))
    assert not folder.exists()
    for name in checkpoint.FILES - {"config.toml"}:
        mine, theirs = (f / "checkpoints/00000036" / name for f in (moved, whole))
        assert mine.read_bytes() == theirs.read_bytes(), name


def test_resume_of_a_finished_run_changes_nothing(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    finish(command("resume", folder))
    assert_same(folder, whole)


def test_other_images_are_noticed(tmp_path):
    source = tmp_path / "photos"
    source.mkdir()
    from PIL import Image

    for i in range(8):
        Image.new("RGB", (20, 16), (i * 30, 100, 200)).save(source / f"{i}.png")
    settings = {"network": TRANSFORMER, "precision": "fp32", "batch": 4, "size": 16, "device": "cpu"}
    settings |= {"preview": {"images": 1, "every": -1}, "sampler": {"steps": 2}}
    run = unfog.train(source, out=tmp_path / "run", steps=4, **settings)
    Image.new("RGB", (20, 16), (255, 0, 0)).save(source / "3.png")
    with pytest.raises(RequestError, match=r"not those.*--force"):
        unfog.resume(run.path, steps=6)
    assert unfog.resume(run.path, steps=6, force=True).checkpoint.step == 6


@pytest.mark.exhaustive  # takes half a minute of a core where nothing is compiled yet
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="compiling needs C++")
def test_compiled_and_eager_weights_load_into_each_other(tmp_path):
    # Without dropout, which compiled code draws otherwise; the loss of the first step then only rounds otherwise.
    # Previews and held-out losses would compile the network again, for their own sizes.
    once = {"log.every": 1, "preview.every": -1, "evaluate.every": -1}
    flags = changed(steps=2, microbatch=8, network=SMALL.replace("dropout=0.1", "dropout=0"), **once)
    finish(command("train", few_images(), "--out", tmp_path / "eager", *flags))
    finish(command("train", few_images(), "--out", tmp_path / "compiled", *flags, "--compile"))
    mine, theirs = (checkpoint.find_checkpoint(tmp_path / name / "checkpoints", None) for name in ("compiled", "eager"))
    tensors = [read_tensors(saved.folder / "model.safetensors", saved.folder) for saved in (mine, theirs)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensor, tensors[1][name], atol=1e-3, rtol=1e-3, msg=name)
    first = [read_metrics(tmp_path / name / "metrics.jsonl")[0] for name in ("compiled", "eager")]
    assert first[0]["step"] == first[1]["step"] == 1
    assert first[0]["loss"] == pytest.approx(first[1]["loss"], rel=1e-4)
    assert first[0]["gradient_norm"] == pytest.approx(first[1]["gradient_norm"], rel=1e-3)
    finish(command("resume", tmp_path / "compiled", "--steps", 3, "--training.no-compile"))
    assert unfog.load(tmp_path / "compiled").checkpoint.step == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot be told which cores to use")
def test_another_number_of_decoding_threads_changes_nothing(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name) > 24:
            shutil.rmtree(path)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # which the child inherits
    try:
        finish(command("resume", folder))
    finally:
        os.sched_setaffinity(0, cores)
    assert_same(folder, whole)


def test_resumed_in_any_epoch(tmp_path):
    from PIL import Image

    pictures, batch = 19, 8
    for i in range(pictures):
        folder = tmp_path / "photos"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (i * 13, 100, 255 - i * 13)).save(folder / f"{i}.png")
    settings = {"network": TRANSFORMER, "precision": "fp32", "batch": batch, "microbatch": 3, "device": "cpu"}
    settings |= {"preview": {"images": 1, "every": 6}, "sampler": {"steps": 2}}
    settings |= {"evaluate": {"every": 6, "images": 4, "levels": 2}}
    settings |= {"checkpoint": {"every": 1, "keep": 99}}
    whole = unfog.train(tmp_path / "photos", out=tmp_path / "whole", steps=12, **settings).path
    for epoch in (0, 1, 3):
        run, step = tmp_path / str(epoch), epoch * pictures // batch + 1
        assert step * batch // pictures == epoch
        shutil.copytree(whole, run)
        for path in (run / "checkpoints").iterdir():
            if int(path.name) > step:
                shutil.rmtree(path)
        unfog.resume(run)
        for name in checkpoint.FILES:
            mine, theirs = (f / "checkpoints/00000012" / name for f in (run, whole))
            assert mine.read_bytes() == theirs.read_bytes(), (epoch, name)
        assert without_clock(run / "metrics.jsonl") == without_clock(whole / "metrics.jsonl"), epoch


def test_last_few_and_milestones_are_kept(whole, tmp_path):
    from unfog.training.settings import Checkpoint

    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    rotation.remove_old_checkpoints(tmp_path / "checkpoints", Checkpoint(keep=2, milestones=12))
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == ["00000000", "00000012", "00000024", "00000030", "00000036"]


def test_the_best_and_the_one_to_roll_back_to_are_kept(whole, tmp_path):
    from unfog.training.settings import Checkpoint

    shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    changed = {step: {"anchor": step in (0, 24)} for step in (0, 6, 18, 24, 30, 36)}
    changed[12] = {"held_out_loss": 0.0, "value": 0.0}
    for step, changes in changed.items():
        file = tmp_path / f"checkpoints/{step:08d}/manifest.json"
        manifest = json.loads(file.read_text()) | changes
        del manifest["sha256"]
        file.write_text(json.dumps(manifest | {"sha256": checkpoint.manifest_digest(manifest)}))
    rotation.remove_old_checkpoints(tmp_path / "checkpoints", Checkpoint(keep=1))
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == ["00000000", "00000012", "00000024", "00000036"]


CRASH = """
import os, shutil, sys, threading
import unfog.training.checkpoints.format as c, unfog.training.checkpoints.snapshot as s
calls, limit = 0, int(sys.argv[1])
def deadly(function):
    def call(*a, **k):
        global calls
        calls += threading.current_thread().name == "checkpoint"
        if calls == limit:
            os.kill(os.getpid(), 9)
        return function(*a, **k)
    return call
s.save_file, s.sync, s.Snapshot.verify_files = map(deadly, (s.save_file, s.sync, s.Snapshot.verify_files))
c.file_digest, s.file_digest = deadly(c.file_digest), deadly(s.file_digest)
shutil.rmtree, os.replace = deadly(shutil.rmtree), deadly(os.replace)
from unfog.cli.main import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize("call", [8, 17, 58, *(param(call) for call in (1, 4, 13, 15, 20, 25, 31, 37, 44, 70))])
def test_killed_inside_a_save_or_a_rotation(whole, tmp_path, call):
    folder = tmp_path / "run"
    flags = changed(**{"checkpoint.keep": 2})
    done = forked.run([call, "train", few_images(), "--out", folder, *flags], CRASH)
    assert done.returncode == -signal.SIGKILL
    finish(command("resume", folder, "--checkpoint.keep", "100"))
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert not {name for name in left if name.startswith(".")}
    assert_same(folder, whole)


CRASH_IN_AVERAGES = """
import os, sys
import unfog.training.checkpoints.posthoc_ema as a
calls, limit = 0, int(sys.argv[1])
def deadly(function):
    def call(*args):
        global calls
        calls += 1
        if calls == limit:
            if function is save_file:
                args[1].write_bytes(b"half")
            os.kill(os.getpid(), 9)
        return function(*args)
    return call
save_file = a.save_file
a.save_file, a.sync, a._remove_surplus = map(deadly, (a.save_file, a.sync, a._remove_surplus))
from unfog.cli.main import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize("call", [6, param(1), param(11), 16])  # each of the four that a snapshot makes
def test_killed_inside_a_snapshot_of_averages(whole, tmp_path, call):
    folder = tmp_path / "run"
    done = forked.run([call, "train", few_images(), "--out", folder, *FLAGS], CRASH_IN_AVERAGES)
    assert done.returncode == -signal.SIGKILL
    left = [path.name for path in (folder / "averages").iterdir()]
    assert any(name.startswith(".partial") for name in left) == (call in (1, 6))
    finish(command("resume", folder))
    assert_same(folder, whole)


def test_a_save_that_goes_back_behind_broken_ones_is_not_rotated_away(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for name in ("00000024", "00000030", "00000036"):
        os.truncate(folder / "checkpoints" / name / "ema.safetensors", 100)
    said = finish(command("resume", folder, "--checkpoint.keep", "3", "--steps", "20"))
    assert said.count("is broken and is passed over") == 3
    saved, broken = checkpoint.newest(folder / "checkpoints")
    assert saved is not None
    assert (saved.step, broken) == (20, [])


def test_two_processes_do_not_share_a_run(tmp_path):
    folder = tmp_path / "run"
    first = command("train", few_images(), "--out", folder, *changed(steps=3000))  # the signal ends it
    while not (folder / "heartbeat.json").exists() and first.poll() is None:
        time.sleep(0.005)
    assert f"another process ({first.pid} on " in finish(command("resume", folder), status=2)
    first.terminate()
    finish(first, status=3)


def test_a_reader_that_goes_away_stops_nothing(whole, tmp_path):
    folder = tmp_path / "run"
    process = command("train", few_images(), "--out", folder, *FLAGS)
    process.stderr.close()
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert_same(folder, whole)


# A convolution in fp16 takes a CPU a hundred times as long as one in bf16.
@pytest.mark.parametrize(("precision", "network"), [("bf16", NETWORK), ("fp16", SMALL)])
def test_low_precision_and_fixed_ema_resume_too(tmp_path, precision, network):
    flags = [*changed(precision=precision, steps=12, network=network), "--ema", "fixed:decay_max=0.99"]
    finish(command("train", few_images(), "--out", tmp_path / "straight", *flags))
    shutil.copytree(tmp_path / "straight", tmp_path / "broken")
    shutil.rmtree(tmp_path / "broken/checkpoints/00000012")
    finish(command("resume", tmp_path / "broken"))
    for file in checkpoint.FILES:
        mine, theirs = ((tmp_path / n / "checkpoints/00000012" / file).read_bytes() for n in ("broken", "straight"))
        assert mine == theirs


LOSES_ITS_CAPTURE = """
import sys
from unfog.cli.main import main
from unfog.training.updates.captured import CapturedStep, CaptureLost

def lose(step):
    if step._computer.state.seen == 19 * 8:
        raise CaptureLost("operation not permitted when stream is capturing")

CapturedStep.gradient = lose
main(sys.argv[1:])
"""


def test_a_run_that_loses_its_capture_goes_on_without_by_the_command_that_is_said(whole, tmp_path):
    folder = tmp_path / "a run"
    words = ("train", few_images(), "--out", folder, *FLAGS, "--training.capture")
    said = finish(Forked(words, LOSES_ITS_CAPTURE, stdout=subprocess.PIPE, stderr=subprocess.PIPE), status=1)
    assert "not permitted when stream is capturing" in said
    assert "step 19 is saved" in said
    assert (folder / "checkpoints/00000019").is_dir()
    again = shlex.split(re.search(r"`unfog (resume .*?)`", said)[1])
    assert "19 to 36" in finish(command(*again))
    assert_same(folder, whole)
