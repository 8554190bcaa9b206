"""The dry run: all that a run does later happens in it, by the code that will do it, and what fails is named."""

import errno
import signal
from dataclasses import replace

import pytest
import torch

from conftest import NETWORK, TRANSFORMER, few_images
from unfog.config.presets import preset
from unfog.config.toml import update
from unfog.config.validate import check_request
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.diffusion.noise import VP, Cosine
from unfog.diffusion.target import V
from unfog.errors import Interrupted
from unfog.evaluation.held_out import HeldOut
from unfog.export.diffusers_unet import Network
from unfog.pipeline.generate import GenerationSettings, sample_calls
from unfog.planning.auto_settings import AutoSettings
from unfog.process.signals import StopSignals
from unfog.reporting.findings import DRY_RUN
from unfog.runs import dry_run_checks as small
from unfog.runs import previews as looks
from unfog.runs import replay, session
from unfog.runs.dry_run_checks import Trial, check_dry_run, failure_finding, shorten

pytestmark = pytest.mark.slow

ATTENTIVE = "unet:channels=8/8,attention=0/1,mid_attention=1,norm_groups=4,head_channels=4"
CPU = torch.device("cpu")
RUN = ["training", "ema", "preview", "evaluation", "checkpoint", "report"]
PARTS = [*RUN, "reload", "repeat", "resume", "sample", "export", "memory"]


@pytest.fixture(scope="module")
def fashion():
    return prepare(open_source(few_images()), Data(cache="memory", size=16))


def settled(prepared, **settings):
    base = preset("default")
    base = replace(base, source=few_images(), data=prepared.settings, classes=prepared.train.classes)
    base = replace(base, training=replace(base.training, budget="", images=100_000, precision="fp32"))
    small = {
        "network": TRANSFORMER,
        "training": {"batch": 8},
        "sampler": {"steps": 2},
        "preview": {"images": 2},
        "evaluate": {"images": 4, "levels": 2},
    }
    auto = AutoSettings(update(update(base, small, ""), settings, ""), prepared.train, CPU, lambda: False)
    auto.resolve_network()
    auto.resolve_learning_rate()
    auto.resolve_length()
    auto.resolve_intervals()
    return auto.config


def findings_of(config, prepared, folder):
    with StopSignals() as stop:
        findings = check_dry_run(Trial(config, 0.0), prepared, CPU, stop, folder)
    assert not list(folder.iterdir()), "something was left behind"
    return {f.code.removeprefix(f"{DRY_RUN}."): f for f in findings}


@pytest.fixture(scope="module")
def sound(fashion, tmp_path_factory):
    before = torch.get_rng_state()
    findings = findings_of(settled(fashion, network=NETWORK), fashion, tmp_path_factory.mktemp("dry-run"))
    assert torch.equal(torch.get_rng_state(), before)
    return findings


def test_every_part_of_a_sound_run_is_fine(sound):
    assert list(sound) == PARTS
    assert {code: f.severity for code, f in sound.items()} == dict.fromkeys(PARTS, "fine"), list(
        map(str, sound.values())
    )


def test_parts_tell_what_they_took(sound):
    assert 0 < sound["training"].facts["seconds_per_step"] < 60
    assert 0 < sound["preview"].facts["seconds"] < 60
    assert sound["checkpoint"].facts["bytes"] > 4 * 4 * 10_000  # weights, average and moments in fp32
    assert sound["ema"].facts["updates"] == 2
    assert 0 < sound["ema"].facts["average_moved"] <= 1.01 * sound["ema"].facts["moved"]
    assert sound["reload"].facts["tensors"] > 100
    assert sound["export"].facts["difference"] < 1e-5
    memory = sound["memory"].facts
    assert 0 < memory["before"] <= memory["peak"]


def test_nothing_is_said_but_progress(fashion, tmp_path, capsys):
    findings_of(settled(fashion, label_dropout=0.0, guidance=1.0), fashion, tmp_path)
    told = capsys.readouterr()
    assert "training" not in told.out + told.err.replace("dry run 0 · training", "")


@pytest.mark.parametrize("part", ["preview", "evaluation", "report", "sample", "export"])
def test_what_fails_is_named_and_what_needs_it_is_left_out(fashion, tmp_path, monkeypatch, part):
    def fail(*args, **kwargs):
        raise RuntimeError("planted\nwith a second line")

    place = {
        "preview": (looks, "generate_images"),
        "evaluation": (HeldOut, "losses"),
        "report": (session, "write_report"),
        "sample": (small.Run, "sample"),
        "export": (Network, "to_unet2d"),
    }
    monkeypatch.setattr(*place[part], fail)
    settings = {"network": NETWORK} if part == "export" else {}  # whose equal diffusers has
    findings = findings_of(settled(fashion, **settings), fashion, tmp_path)
    assert {code for code, f in findings.items() if f.severity == "fatal"} == {part}
    assert f"{part} failed: RuntimeError: planted" in findings[part].evidence
    assert "second" not in findings[part].evidence
    first_of_run = part in ("preview", "evaluation", "report")
    assert list(findings) == ([part, "memory"] if first_of_run else [p for p in PARTS if p != "export" or part == p])


def test_it_is_the_run_in_small_without_trackers(fashion):
    config = settled(fashion, log={"sinks": ["tensorboard"]}, training={"microbatch": 4}, preview={"images": 100})
    short = shorten(config, 2)
    assert short.log.sinks == ()
    assert short.training.images == 2 * config.training.batch
    assert short.preview.images == 4  # one pass as large as those of training
    same = ("network", "diffusion", "optimizer", "ema", "sampler", "guidance", "data", "classes", "label_dropout")
    assert all(getattr(short, name) == getattr(config, name) for name in same)


def test_a_slow_machine_tries_less_of_each_part(fashion):
    sizes = {"training": {"batch": 64}, "preview": {"images": 16}, "sampler": {"steps": 20}, "evaluate": {"images": 64}}
    config = settled(fashion, **sizes)
    quick = Trial.of(config, 13, 64 / 10_000)
    assert quick == (config, quick.seconds, "")
    # 4 steps of 64 images; previews of 16, 4 samples and 4 images by 20 calls; 3 evaluations of 13 images at 2 levels.
    passes = (2 * 16 + 4 + 4) * sample_calls(GenerationSettings.default(config, 1, 1), config.diffusion.schedule)
    assert quick.seconds == pytest.approx((4 * 64 + (passes + 3 * 13 * 2) / 3) / 10_000)
    slow = Trial.of(config, 13, 64 / 10)  # ten images a second, as a core has of 64 pixels
    assert quick.seconds * 1000 > 20 >= slow.seconds > 8
    assert slow.smaller.startswith("16 of 64 images in a batch, ")
    assert slow.config.training.batch == 16
    hopeless = Trial.of(config, 13, 64.0)
    assert hopeless.smaller == (
        "4 of 64 images in a batch, 1 of 16 in a preview, 5 of 20 sampling steps, 3 of 13 held-out images"
    )
    check_request(hopeless.config)


def test_parts_for_which_there_is_no_time_are_named(fashion, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "_MOST_SECONDS", 0.0)
    trial = Trial.of(settled(fashion), 4, 1000.0)  # with less than its shortest time
    with StopSignals() as stop:
        findings = {f.code: f for f in check_dry_run(trial, fashion, CPU, stop, tmp_path)}
    assert [code.removeprefix(f"{DRY_RUN}.") for code in findings] == [*RUN, "time", "shortened", "memory"]
    assert findings[f"{DRY_RUN}.time"].evidence.endswith(": reload, repeat, resume, sample, export")
    assert "4 of 8 images in a batch" in findings[f"{DRY_RUN}.shortened"].evidence


def test_a_request_that_cannot_be_met_is_fatal(fashion, tmp_path):
    config = settled(fashion)
    diffusion = replace(config.diffusion, path=VP(), schedule=Cosine(steps=10), target=V())
    config = replace(config, diffusion=diffusion, sampler=replace(config.sampler, steps=20))
    findings = findings_of(config, fashion, tmp_path)
    assert findings["training"].severity == "fatal"
    assert "10" in findings["training"].evidence


def test_weights_that_do_not_move_are_fatal(fashion, tmp_path):
    config = settled(fashion, network=NETWORK)
    config = replace(config, optimizer=replace(config.optimizer, lr=0.0, weight_decay=0.0))
    findings = findings_of(config, fashion, tmp_path)
    assert {code: f.severity for code, f in findings.items() if f.severity != "fine"} == {"ema": "fatal"}
    assert "did not change" in findings["ema"].evidence


def test_a_checkpoint_that_differs_is_fatal(fashion, tmp_path, monkeypatch):
    real = replay.differing_tensors

    def spoiled(state, saved):
        next(iter(state.tensors()["ema"].values())).add_(1)
        return real(state, saved)

    monkeypatch.setattr(small, "differing_tensors", spoiled)
    monkeypatch.setattr(replay, "differing_tensors", spoiled)
    findings = findings_of(settled(fashion), fashion, tmp_path)
    assert findings["reload"].severity == "fatal"
    assert "ema: " in findings["reload"].evidence
    assert findings["repeat"].severity == "hint"


def test_an_export_that_answers_otherwise_is_fatal(fashion, tmp_path, monkeypatch):
    real = Network.to_unet2d

    def spoiled(network, size):
        config, state = real(network, size)
        return config, {**state, "conv_out.bias": state["conv_out.bias"] + 1}

    monkeypatch.setattr(Network, "to_unet2d", spoiled)
    assert findings_of(settled(fashion, network=NETWORK), fashion, tmp_path)["export"].severity == "fatal"


def test_an_export_is_compared_where_everything_in_the_network_matters(fashion, tmp_path, monkeypatch):
    """Two steps leave most branches as the nothing that they began as, whatever weights of them go where."""
    real = Network.to_unet2d

    def exchanged(one, other):
        def spoiled(network, size):
            settings, state = real(network, size)
            names = [name for name in state if name.endswith(f"{one}.weight")]
            assert names
            swapped = {name: state[name.replace(one, other)] for name in names}
            return settings, state | swapped | {n.replace(one, other): state[n] for n in names}

        return spoiled

    for one, other in (("to_q", "to_v"), ("to_k", "to_v"), ("norm1", "norm2")):
        monkeypatch.setattr(Network, "to_unet2d", exchanged(one, other))
        config = settled(fashion, network=ATTENTIVE, evaluate={"every": -1})
        folder = tmp_path / one
        folder.mkdir()
        assert findings_of(config, fashion, folder)["export"].severity == "fatal", (one, other)


def test_fp16_may_seek_its_scale(fashion, tmp_path):
    """It begins at 65536; where both steps are too much for that, the dry run goes on until one is taken."""
    config = settled(fashion, diffusion={"target": "x0", "weighting": "snr"}, training={"precision": "fp16"})
    findings = findings_of(config, fashion, tmp_path)
    assert {f.severity for f in findings.values()} <= {"fine", "hint"}, list(map(str, findings.values()))
    assert 1 <= findings["ema"].facts["updates"] < 3
    assert "loss scale" in findings["training"].evidence


def test_no_room_for_the_dry_run_is_no_fault_of_the_run(fashion, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "free_bytes", lambda folder: 17 * 10**6)
    findings = findings_of(settled(fashion, network=NETWORK), fashion, tmp_path)
    assert {code: f.severity for code, f in findings.items()} == {"room": "hint", "memory": "fine"}
    assert "17 MB free" in findings["room"].evidence

    full = OSError(errno.ENOSPC, "No space left on device")
    assert failure_finding("checkpoint", full, "").severity == "hint"
    assert failure_finding("checkpoint", OSError(errno.EACCES, "Permission denied"), "").severity == "fatal"


def test_only_what_is_part_of_the_run_is_said_to_fail_in_it():
    said = {part: failure_finding(part, ValueError("it"), "").remedy for part in PARTS if part not in ("ema", "memory")}
    in_run = {part for part, remedy in said.items() if "the run would" in remedy}
    assert in_run == {"training", "preview", "evaluation", "checkpoint", "report"}
    assert "sample RUN" in said["sample"]


def test_without_diffusers_the_export_is_left_open(fashion, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "find_spec", lambda name: None)
    found = findings_of(settled(fashion, evaluate={"every": -1}), fashion, tmp_path)
    assert found["export"].severity == "hint"
    assert "pip install" in found["export"].remedy
    assert "evaluation" not in found  # nobody asked for it


def test_a_request_to_leave_leaves_nothing(fashion, tmp_path):
    with StopSignals() as stop:
        stop.request("the test")
        with pytest.raises(Interrupted):
            check_dry_run(Trial(settled(fashion), 0.0), fashion, CPU, stop, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_signal_in_the_middle_leaves_nothing(fashion, tmp_path, monkeypatch):
    real = looks.generate_images

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        return real(*args, **kwargs)

    monkeypatch.setattr(looks, "generate_images", interrupted)
    with StopSignals() as stop:
        with pytest.raises(Interrupted):
            check_dry_run(Trial(settled(fashion), 0.0), fashion, CPU, stop, tmp_path)
        assert stop.received == "SIGTERM"
    assert not list(tmp_path.iterdir())
