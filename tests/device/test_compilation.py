"""Compiled runs: how often a run compiles, and where the compiled code is kept."""

from __future__ import annotations

import os
import stat
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

import unfog
from conftest import few_images
from unfog.config.schema import Config
from unfog.device import compilation
from unfog.errors import Interrupted, RunError
from unfog.files.cache_folder import CacheEntry, make_room, release
from unfog.planning import lr_range_test, timing
from unfog.values.conditions import NO_CONDITIONS

NETWORKS = {
    "unet": "unet:channels=8/8,attention=false/true,blocks=1,norm_groups=4,head_channels=8",
    "mpunet": "mpunet:channels=8/8,attention=false/true,blocks=1,head_channels=8",
    "dit": "dit:width=16,depth=1,head_channels=8,patch=7",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "network", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "dit")) for name in NETWORKS]
)
def test_a_run_compiles_twice_at_most_and_each_time_one_graph(network, tmp_path, monkeypatch):
    """Once for the micro-batches and once for what is left of a batch; previews and evaluation compile nothing."""
    graphs, real = [], torch.nn.Module.compile

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def cheap(module, **options):
        real(module, backend=count, fullgraph=True, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", cheap)
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path / "cache"))
    torch._dynamo.reset()
    every = {
        "log": {"every": 1},
        "preview": {"every": 2, "images": 4},
        "evaluate": {"every": 2, "images": 8, "levels": 2},
    }
    training = {"batch": 8, "microbatch": 3, "compile": True, "precision": "bf16"}
    unfog.train(
        few_images(),
        out=tmp_path / "run",
        network=NETWORKS[network],
        steps=4,
        training=training,
        device="cpu",
        sampler={"steps": 2},
        **every,
    )
    assert len(graphs) == 2


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache folder in which nothing is compiled yet."""
    monkeypatch.setenv("UNFOG_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    yield tmp_path
    release(tmp_path / compilation.NAME)


def test_compiled_code_is_an_entry_of_the_cache(home):
    compilation.keep_compiled_code()
    folder = home / "compiled"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "fxgraph" / "ab").mkdir(parents=True)
    (folder / "fxgraph" / "ab" / "graph").write_bytes(bytes(5000))
    [entry] = CacheEntry.all()
    assert (entry.kind, entry.path, entry.in_use()) == ("compiled code", folder, True)
    release(folder)
    make_room(0, limit=0)
    assert not folder.exists()


def test_a_file_of_somebody_keeps_compiled_code_from_being_removed(home):
    compilation.keep_compiled_code()
    (home / "compiled" / "notes.txt").write_text("mine")
    release(home / "compiled")
    make_room(0, limit=0)
    assert (home / "compiled" / "notes.txt").exists()


@pytest.mark.parametrize("why", ["chosen by the user", "no room", "others may write", "a link"])
def test_compiled_code_stays_where_torch_puts_it(why, home, monkeypatch):
    before, folder = "", home / "compiled"
    match why:
        case "chosen by the user":
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before := str(home / "mine"))
        case "no room":
            monkeypatch.setenv("UNFOG_CACHE_LIMIT", "0.1")
        case "others may write":
            folder.mkdir()
            folder.chmod(0o777)
        case "a link":
            (home / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(home / "elsewhere")
    compilation.keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == before


def test_compiled_code_that_has_grown_too_large_is_begun_anew(home, monkeypatch):
    monkeypatch.setattr(compilation, "_MOST", 1000)
    (home / "compiled" / "ab").mkdir(parents=True)
    (home / "compiled" / "ab" / "old.py").write_bytes(bytes(5000))
    compilation.keep_compiled_code()
    assert list((home / "compiled").iterdir()) == []


def test_code_that_is_damaged_is_removed_and_the_remedy_said(home):
    compilation.keep_compiled_code()
    from torch._inductor.exc import CppCompileError  # sets TORCHINDUCTOR_CACHE_DIR, where it is not set

    (home / "compiled" / "ab").mkdir()
    (home / "compiled" / "ab" / "half.so").write_bytes(b"half")
    why = r"removed: resume the run, with --training.no-compile"
    with pytest.raises(RunError, match=why), compilation.compile_errors_explained("resume the run"):
        raise CppCompileError(["g++", "x.cpp"], "file too short")
    assert not (home / "compiled").exists()
    with pytest.raises(ValueError, match="other"), compilation.compile_errors_explained():
        raise ValueError("other")


def test_a_compiler_that_a_stop_has_ended_is_a_stop(home):
    compilation.keep_compiled_code()
    from torch._inductor.exc import CppCompileError

    (home / "compiled" / "ab").mkdir(parents=True)
    answers = iter([False, False, True])  # the signal reaches the compiler first
    explained = compilation.compile_errors_explained("resume the run", lambda: next(answers))
    with pytest.raises(Interrupted), explained:
        raise CppCompileError(["g++", "x.cpp"], "terminated")
    assert (home / "compiled" / "ab").exists()
    with pytest.raises(BrokenProcessPool), compilation.compile_errors_explained():
        raise BrokenProcessPool


def test_plan_and_find_lr_explain_a_failing_compiler_too(home, monkeypatch):
    from torch._inductor.exc import CppCompileError

    def fail(*_):
        raise CppCompileError(["g++", "x.cpp"], "no such compiler")

    nothing = dict.fromkeys(("state", "_settings", "_task"), None)
    monkeypatch.setattr(
        timing.TrialTraining, "__init__", lambda trial, _, __, device: vars(trial).update(nothing, device=device)
    )
    monkeypatch.setattr(timing, "train", fail)
    monkeypatch.setattr(lr_range_test, "_run_ramp", fail)
    probe = lr_range_test.LossProbe.create(torch.zeros(1, 1, 4, 4), NO_CONDITIONS)
    subject = lr_range_test.LrTestSetup(None, None, None, None, None, None, probe, lambda: False)
    for work in (lambda: timing.measure_step(Config(), None, probe.x0.device, lambda: False), subject.run):
        with pytest.raises(RunError, match=r"no such compiler.*--training.no-compile"):
            work()
