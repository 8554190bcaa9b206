"""Samples that are written as they come: a real kill, the same command again, and what stays as it is."""

import json
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import unfog
from command import exit_status
from conftest import TRANSFORMER
from forked import Forked
from unfog.errors import RequestError
from unfog.files.locks import lock_of
from unfog.files.seals import seal_of
from unfog.inference.run import Run
from unfog.pipeline.generate import named_grid, sample_grid
from unfog.pipeline.sample_folder import UNFINISHED, SampleFolder
from unfog.process.machine_key import machine_key
from unfog.process.run_folder import new_folder
from waiting import wait_until


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    random = np.random.default_rng(0)
    for i in range(12):
        (folder / "data" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "data" / "ab"[i % 2] / f"{i}.png")
    settings = {"size": 8, "network": TRANSFORMER, "batch": 4, "lr": 1e-3, "device": "cpu", "precision": "fp32"}
    unfog.train(folder / "data", out=folder / "run", steps=2, sampler={"steps": 3}, data={"held_out": 0.0}, **settings)
    return folder / "run"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sample(run: Path, *arguments: object) -> int:
    return exit_status("sample", run, *arguments, "--device", "cpu")


def killed_after(run: Path, count: int, *arguments: object) -> None:
    """Start `unfog sample`, and kill it with SIGKILL once so many files are there."""
    words = ("sample", run, *arguments, "--device", "cpu")
    process = Forked(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    where = Path(str(arguments[arguments.index("--out") + 1]))
    wait_until(lambda: len(list(where.glob("0*.png"))) >= count or process.poll() is not None, every=0.005)
    assert process.poll() is None, "it ended before it was killed"
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_killed_command_goes_on_where_it_was_and_ends_like_an_undisturbed_one(run, tmp_path, capsys):
    arguments = ("-n", 3000, "--batch", 16, "--steps", 2)
    killed_after(run, 40, *arguments, "--out", tmp_path / "killed")
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("0*.png")}
    assert 40 <= len(done) < 3000
    assert SampleFolder.is_unfinished(tmp_path / "killed")
    assert not (tmp_path / "killed" / "grid.png").exists()
    # Of other settings, nothing is mixed in.
    assert sample(run, *arguments, "--seed", 1, "--out", tmp_path / "killed") == 2
    assert "other settings" in capsys.readouterr().err
    short = ("-n", 200, *arguments[2:])
    killed_after(run, 20, *short, "--out", tmp_path / "short")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "short").glob("0*.png")}
    assert sample(run, *short, "--out", tmp_path / "short") == 0
    assert "going on in" in capsys.readouterr().err
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    assert sample(run, *short, "--out", tmp_path / "whole") == 0
    assert files(tmp_path / "short") == files(tmp_path / "whole")
    assert len(files(tmp_path / "whole")) == 201
    # Image i of the longer command is the same.
    for path in done:
        if (other := tmp_path / "whole" / path.name).exists():
            assert other.read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_without_a_folder_the_unfinished_one_of_these_settings_is_found(run, capsys):
    assert sample(run, "-n", 6, "--batch", 2) == 0
    first = Path(capsys.readouterr().out.strip())
    assert sample(run, "-n", 6, "--batch", 2) == 0  # a finished one is left alone
    second = Path(capsys.readouterr().out.strip())
    assert first != second
    assert files(first) == files(second)
    # As a kill would have left it after the second batch.
    prepared = unfog.load(run).prepare(6, batch=2)
    digest = seal_of(machine_key(), "samples", unfog.load(run).digest(prepared).encode()).hex()
    (second / UNFINISHED).write_text(json.dumps({"digest": digest}))
    for gone in ("grid.png", "000004-a.png", "000005-b.png"):
        (second / gone).unlink()
    (second / "000001-b.png.partial").write_bytes(b"half")
    assert sample(run, "-n", 6, "--batch", 2) == 0
    assert Path(capsys.readouterr().out.strip()) == second
    (second / "000001-b.png.partial").unlink()
    assert files(first) == files(second)
    assert sample(run, "-n", 6, "--batch", 2, "--seed", 5) == 0
    assert Path(capsys.readouterr().out.strip()) not in (first, second)


@pytest.mark.slow
def test_a_strip_is_of_the_first_batch_also_when_that_is_there(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert sample(run, "-n", 4, "--batch", 2, "--out", out) == 0
    loaded = unfog.load(run)
    (out / UNFINISHED).write_text(json.dumps({"digest": loaded.digest(loaded.prepare(4, batch=2))}))
    (out / "000003-b.png").unlink()
    assert sample(run, "-n", 4, "--batch", 2, "--out", out, "--strip") == 0
    assert (out / "strip.png").exists()
    assert (out / "000003-b.png").exists()


def test_the_digest_is_of_all_that_samples_depend_on(run):
    loaded = unfog.load(run)
    image = np.zeros((8, 8, 3), np.uint8)
    asked = [{}, {"n": 5}, {"seed": 1}, {"steps": 4}, {"sampler": "ddim"}, {"label": "a"}, {"guidance": 2.0}]
    asked += [
        {"batch": 8},
        {"precision": "bf16"},
        {"image": image},
        {"image": image + 1},
        {"image": image, "strength": 0.5},
    ]
    digests = [loaded.digest(loaded.prepare(**settings)) for settings in asked]
    assert len(set(digests)) == len(asked)
    assert digests[0] == unfog.load(run).digest(loaded.prepare())
    raw = Run(run, "raw")
    assert raw.digest(raw.prepare()) != digests[0]


def test_a_folder_is_of_one_process_at_a_time(tmp_path):
    usual = tmp_path / "pictures"
    with SampleFolder.reserve(None, usual, "x") as first:
        SampleFolder(first, "x", 2).write(range(1), np.zeros((1, 4, 4, 3), np.uint8))
        with SampleFolder.reserve(None, usual, "x") as second:
            assert (first.name, second.name) == ("pictures", "pictures-2")
        assert not second.exists(), "an empty folder is not left behind"
        with pytest.raises(RequestError, match="another process"), SampleFolder.reserve(first, usual, "x"):
            pass
    with SampleFolder.reserve(None, usual, "x") as again:
        assert again == first
    with lock_of(first):
        pass


def test_a_folder_that_another_process_finished_meanwhile_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "000000.png").touch()  # as if it had begun and finished after the first look at the folder
    with pytest.raises(RequestError, match="another process has written"), SampleFolder.reserve(out, tmp_path, "x"):
        pass


def test_after_an_error_before_the_first_sample_no_folder_is_left(run, tmp_path):
    with pytest.raises(ZeroDivisionError), SampleFolder.reserve(tmp_path / "out", tmp_path, "x"):
        raise ZeroDivisionError
    assert not (tmp_path / "out").exists()


def test_processes_that_sample_at_once_get_a_folder_each(tmp_path):
    (tmp_path / "pictures").symlink_to(tmp_path / "nothing")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_folder(tmp_path / "pictures"), range(40)))
    assert sorted(path.name for path in made) == sorted(f"pictures-{n}" for n in range(2, 42))
    assert not (tmp_path / "nothing").exists()


def test_a_stop_says_that_the_same_command_continues(tmp_path, capsys):
    def stopped():
        with SampleFolder.reserve(None, tmp_path / "pictures", "x") as folder:
            SampleFolder(folder, "x", 2).write(range(1), np.zeros((1, 4, 4, 1), np.uint8))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert f"{tmp_path / 'pictures'}; the same command continues" in capsys.readouterr().err


def test_unfinished_samples_that_came_with_a_run_are_not_gone_on_with(run, tmp_path, monkeypatch, capsys):
    received, arguments = tmp_path / "received", ("-n", 2, "--steps", 1)
    shutil.copytree(run, received)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("unfog.runs.sample.machine_key", lambda: b"another key")
        elsewhere.setattr(SampleFolder, "finish", lambda self: None)
        assert sample(received, *arguments) == 0
    first = Path(capsys.readouterr().out.strip())
    assert SampleFolder.is_unfinished(first)
    for file in first.glob("0*.png"):
        Image.new("RGB", (8, 8), "white").save(file)
    assert sample(received, *arguments) == 0
    said = capsys.readouterr()
    assert "going on in" not in said.err
    assert all(np.asarray(Image.open(file)).min() < 255 for file in Path(said.out.strip()).glob("0*.png"))


def test_samples_that_are_not_whole_cycles_have_their_names_below():
    samples = np.full((3, 16, 16, 1), 128, np.uint8)
    names = [f"class {k}" for k in range(10)]
    named, plain = named_grid(samples, names), sample_grid(samples, names)
    assert (named < 255).sum() > (plain < 255).sum()
    assert not np.array_equal(named, named_grid(samples, names[::-1]))
    for cycles, all_names in ((samples, names[:3]), (samples, ["one"]), (np.repeat(samples, 34, 0), names)):
        assert np.array_equal(named_grid(cycles, all_names), sample_grid(cycles, all_names))
