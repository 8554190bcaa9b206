"""The checks behind the examination of a run, each on its own, against closed forms, brute force, planted numbers."""

import json
import math
import re
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch

from unfog.checks.run.cost_checks import (  # each check is given records that no run has to make
    _check_data_wait,
    _check_memory,
    _check_noise_scale,
    _check_overhead,
    _check_speed,
    _check_unused_images,
    _round_up,
)
from unfog.checks.run.loss_checks import (  # each check is given records that no run has to make
    LossImages,
    _ema_window,
    check_ema,
    check_overfitting,
    held_out_history,
    measure_losses,
)
from unfog.checks.run.run_checks import (  # each check is given records that no run has to make
    _baseline_losses,  # each check is given records that no run has to make
    _check_state,
    check_progress,
)
from unfog.checks.run.run_record import FRESH_START_SETTINGS, RunRecord
from unfog.checks.run.sample_checks import SampleRemedies
from unfog.checks.run.trend_checks import (  # each check is given records that no run has to make
    _check_learning_rate,
    _check_loss,
    _check_stability,
    _loss_trend,
    check_trends,
)
from unfog.config import resume_rules
from unfog.config.presets import preset
from unfog.config.schema import Config, Init
from unfog.config.toml import update
from unfog.config.validate import resolve_sampler
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VE, VP, Cosine, Flow, FlowUniform, LogitNormal, LogNormal
from unfog.diffusion.objective import Objective
from unfog.diffusion.target import EdmF, Eps, FlowVelocity, V
from unfog.models.settings import UNet
from unfog.planning.intervals import round_down_to_125
from unfog.reporting.records import run_state
from unfog.training.settings import FixedEma, PowerEma
from unfog.values.conditions import NO_CONDITIONS

LR = 1e-3


def trends(record, usual_lr, relative, pixelwise):
    found = [*check_progress(record, usual_lr), *check_trends(record, usual_lr, relative, pixelwise, False)]
    return {finding.code: finding for finding in found}


def a_record(path, metrics=(), events=(), steps=1000, lr=LR, **more):
    config = preset("default")
    training = replace(config.training, images=steps * 32, batch=32, steps=0)
    config = replace(config, source="photos", training=training, optimizer=replace(config.optimizer, lr=lr))
    return RunRecord(path, config, metrics, events, **more)


def lines(steps=1000, every=20, **columns):
    """Lines of metrics with these columns, each a function of the step."""
    return [
        {"step": step, "seconds": step * 0.1, **{name: f(step) for name, f in columns.items()}}
        for step in range(every, steps + 1, every)
    ]


def noisy(f, size=0.01):
    return lambda step: f(step) * (1 + size * math.sin(12.9898 * step))


# Trends.


@pytest.mark.parametrize("exponent", [0.05, 0.15, 0.5])
def test_the_fall_with_twice_the_images_is_that_of_the_power_law(tmp_path, exponent):
    record = a_record(tmp_path, lines(loss=noisy(lambda step: 3 * step**-exponent)))
    trend = _loss_trend(record)
    assert trend.fall == pytest.approx(1 - 2**-exponent, abs=0.01)
    assert trend.last == pytest.approx(3 * 1000**-exponent, rel=0.02)


def test_a_falling_loss_says_train_longer_and_what_to_expect(tmp_path):
    rows = lines(2000, 40, loss=noisy(lambda step: step**-0.2))
    record = a_record(tmp_path, rows, steps=2000)
    found = _check_loss(record, 0.3, 0.4)
    assert (found.code, found.severity) == ("run.loss", "hint")
    assert f"unfog resume {tmp_path} --steps 4000" in found.remedy
    assert float(found.remedy.rsplit(" ", 1)[1]) == pytest.approx(4000**-0.2, rel=0.02)
    assert _check_loss(record, 0.3, 0.4, longer_helps=False).severity == "fine"
    assert _check_loss(a_record(tmp_path, rows, steps=4000), 0.3, 0.4).severity == "fine"


def test_no_longer_run_is_advised_while_the_rate_is_too_high(tmp_path):
    rows = lines(loss=noisy(lambda step: step**-0.2), gradient_norm=lambda step: 0.3, lr=lambda step: LR)
    back = [{"kind": "rolled_back", "step": 30, "lr": LR / 2, "reason": "it rose"}]
    for events, rate, loss in (([], "run.lr", "hint"), (back, "run.lr_high", "fine")):
        found = trends(a_record(tmp_path, rows, events), LR / 10, 0.3, 0.4)
        assert rate in found
        assert found["run.loss"].severity == loss


def test_a_run_too_short_for_recognisable_samples_is_told_the_length_and_no_forecast(tmp_path):
    record = a_record(tmp_path, lines(310, 10, loss=noisy(lambda step: step**-0.2)), steps=310)
    remedy = _check_loss(record, 0.3, 0.4).remedy
    assert f"unfog resume {tmp_path} --steps 1563; 9,920 images are seen" in remedy
    assert "50,000" in remedy
    assert "expect" not in remedy
    tuned = replace(record, config=replace(record.config, init=Init("runs/other")))
    assert "--steps 620; expect" in _check_loss(tuned, 0.3, 0.4).remedy


def test_a_loss_that_has_levelled_off_is_fine_and_a_rising_one_is_not(tmp_path):
    flat = _check_loss(a_record(tmp_path, lines(loss=noisy(lambda step: 0.2, 0.03))), 0.3, 0.4)
    assert flat.severity == "fine"
    assert "levelled off" in flat.evidence
    assert ", 0.40 times that of a guess of each pixel alone (" in flat.evidence
    no_better = _check_loss(a_record(tmp_path, lines(loss=noisy(lambda step: 0.2, 0.03))), 0.3, 0.997)
    assert ", no better than a guess of each pixel alone (" in no_better.evidence
    rising = _check_loss(a_record(tmp_path, lines(loss=noisy(lambda step: 0.2 + step / 2000))), 0.3, 0.4)
    assert rising.severity == "warning"
    assert "rises" in rising.evidence


def test_a_loss_no_network_would_need_is_fatal(tmp_path):
    record = a_record(tmp_path, lines(loss=noisy(lambda step: 1.4)))
    assert _check_loss(record, 0.8, 1.3).code == "run.not_learning"
    assert _check_loss(record, 0.99, 0.99).severity == "fatal"
    assert _check_loss(record, 0.8, 1.3).remedy.endswith(f"unfog find-lr photos --config {tmp_path / 'config.toml'}")
    early = a_record(tmp_path, lines(steps=120, loss=noisy(lambda step: 1.4)))
    assert _check_loss(early, 0.8, 1.3).severity == "warning"


def test_a_few_lines_or_none_are_too_early_for_a_trend(tmp_path):
    assert _check_loss(a_record(tmp_path), None, None) is None
    few = _check_loss(a_record(tmp_path, lines(steps=60, loss=lambda step: 1 / step)), None, None)
    assert "too early" in few.evidence
    # Resumed from a record whose beginning is lost: no doubling is left in it.
    late = a_record(tmp_path, lines(loss=lambda step: 0.2)[-8:])
    assert _loss_trend(late) is None


def test_a_rate_is_never_blamed_alone(tmp_path):
    well = lines(loss=noisy(lambda step: step**-0.2), gradient_norm=lambda step: 0.3, lr=lambda step: LR)
    for usual in (LR / 100, LR * 4, LR, None):
        assert _check_learning_rate(a_record(tmp_path, well), usual, 0.3).code == "run.lr"
    assert _check_learning_rate(a_record(tmp_path, well), LR / 100, 1.2).code == "run.lr_high"
    low = _check_learning_rate(a_record(tmp_path, well), LR * 100, 0.3)
    assert (low.code, low.severity) == ("run.lr_low", "warning")
    assert f"--lr {LR * 100:.2g}" in low.remedy
    assert _check_learning_rate(a_record(tmp_path, well), LR * 15, 0.3).severity == "hint"
    done = lines(loss=noisy(lambda step: 0.2), gradient_norm=lambda step: 0.3, lr=lambda step: LR)
    learned = _check_learning_rate(a_record(tmp_path, done), LR * 100, 0.3)
    assert learned.code == "run.lr", "it has learned what there is"


@pytest.mark.parametrize(("ends", "severity"), [(18, "fatal"), (700, "warning"), (970, None)])
def test_a_rate_of_0_for_long_is_what_is_wrong(tmp_path, ends, severity):
    metrics = lines(every=1, lr=lambda step: LR * (step < ends), loss=lambda step: 1.2, gradient_norm=lambda step: 1.0)
    events = [{"kind": "length", "step": 15, "first": 200, "steps": 17}]
    found = trends(a_record(tmp_path, metrics, events), LR, 0.99, 1.2)
    if severity is None:
        assert "run.lr_zero" not in found
        return
    assert found["run.lr_zero"].severity == severity
    assert f"for {1 - (ends - 1) / 1000:.0%} of the run" in found["run.lr_zero"].evidence
    assert found["run.lr_zero"].remedy.endswith("--steps 2000")
    assert "run.lr" not in found
    assert "find-lr" not in found["run.not_learning"].remedy


def test_a_gradient_that_grows_and_is_always_clipped_tells_a_high_rate(tmp_path):
    def grows(step):
        return 2.0 + step / 50

    wild = lines(loss=noisy(lambda step: 0.5 + step / 1000), gradient_norm=grows, lr=lambda step: LR)
    found = trends(a_record(tmp_path, wild), LR / 10, 0.5, 0.6)
    assert found["run.lr_high"].severity == "warning"
    assert f"--lr {LR / 10:.2g}" in found["run.lr_high"].remedy
    assert found["run.gradient"].facts["clipped"] == 1.0


def test_refused_steps_name_the_images_that_did_it(tmp_path):
    events = [
        {
            "kind": "step_refused",
            "step": step,
            "images": ["bad.png", f"{step}.png"],
            "levels": [0.5, 0.25],
            "layer": "x",
        }
        for step in (100, 200, 300)
    ]
    found = _check_stability(a_record(tmp_path, lines(loss=lambda step: 0.5), events))
    assert found.severity == "hint"
    assert found.facts["images"]["bad.png"] == 3
    assert found.remedy.endswith("bad.png")
    assert tuple(found.figures[0].table[1][i] for i in (0, 3, 4)) == ("100", "bad.png, 100.png", "0.50, 0.25")
    for usual, remedy in ((LR / 10, f"--lr {LR / 10:.2g}"), (LR, "--precision fp32"), (None, "--precision fp32")):
        assert remedy in _check_stability(a_record(tmp_path, lines(), [{"kind": "step_refused"}]), usual).remedy
    back = {"kind": "rolled_back", "step": 400, "reason": "it rose", "lr": LR / 4}
    found = _check_stability(a_record(tmp_path, lines(loss=lambda step: 0.5), [back]), usual_lr=LR / 10)
    assert found.severity == "warning"
    assert found.facts["lr_scale"] == pytest.approx(0.25)
    assert f"--lr {LR / 10:.2g}" in found.remedy


def diverging(path, lr, scale=1.0, **more):
    roll_backs = [{"kind": "rolled_back", "step": 900, "reason": "it rose", "lr": lr * scale}] if scale < 1 else []
    failed = {"kind": "failed", "step": 950, "reason": "RunError: training diverged 9 times"}
    return a_record(path, lines(steps=950, loss=lambda step: 0.5), [*roll_backs, failed], lr=lr, **more)


@pytest.mark.parametrize("scale", [1, 1 / 4, 1 / 512])
@pytest.mark.parametrize("times", [1 / 100, 1 / 15, 1 / 6, 1 / 4, 1, 1.3, 2, 20])
def test_a_lower_rate_is_a_lower_one(tmp_path, times, scale):
    record = diverging(tmp_path, LR * times, scale)
    better = record.lower_learning_rate(LR)
    assert better is None or better < record.config.optimizer.lr
    assert better is None or better <= record.config.optimizer.lr * record.lr_scale
    assert (better is None) == (times * scale < 1 / 5)


def test_a_rate_far_below_the_usual_one_is_not_to_blame(tmp_path):
    record = diverging(tmp_path, LR / 15)
    for precision, remedy in (("bf16", f"unfog resume {tmp_path} --precision fp32"), ("fp32", "unfog doctor photos")):
        training = replace(record.config.training, precision=precision)
        found = _check_state(replace(record, config=replace(record.config, training=training)), LR)
        assert found.remedy.endswith(remedy)
        assert "--lr" not in found.remedy


def test_what_a_resume_took_back_did_not_happen(tmp_path):
    refused = {"kind": "step_refused", "step": 910, "images": ["a.png"]}
    back = {"kind": "rolled_back", "step": 930, "lr": LR / 2, "reason": "it rose"}
    failed = {"kind": "failed", "step": 950, "reason": "OSError: x"}
    early = {"kind": "step_refused", "step": 300, "images": ["b.png"]}
    events = [{"kind": "started", "step": 0}, early, refused, back, failed, {"kind": "resumed", "step": 500}]
    for name, rows in (("events", events), ("metrics", lines(steps=500, loss=lambda step: 0.5))):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    beat = {"alive": True, "step": 520, "doing": "training"}
    record = RunRecord.read(tmp_path, a_record(tmp_path).config, beat)
    assert "at step 520" in _check_state(record).evidence
    assert _check_stability(record).facts["refused"] == 1
    with (tmp_path / "events.jsonl").open("a") as file:  # it all comes again
        file.write(f"{json.dumps(refused)}\n{json.dumps(back)}\n")
    again = _check_stability(RunRecord.read(tmp_path, record.config, beat))
    assert (again.facts["refused"], again.facts["rolled_back"]) == (2, 1)
    assert again.facts["images"] == {"a.png": 1, "b.png": 1}


def test_what_was_before_a_change_is_no_sign_of_the_settings_now(tmp_path):
    roll_backs = [
        {"kind": "rolled_back", "step": 390 + i, "lr": 30 * LR / 2**i, "reason": "it rose"} for i in range(1, 9)
    ]
    change = [{"kind": "changed", "step": 400, "setting": "optimizer.lr: 0.03 -> 0.001"}]
    rows = lines(loss=lambda step: 0.5, gradient_norm=lambda step: 0.3, lr=lambda step: LR)
    record = a_record(tmp_path, rows, [*roll_backs, *change, {"kind": "resumed", "step": 400}])
    assert record.lr_scale == 1
    found = trends(record, LR, 0.3, 0.5)
    assert found["run.lr"].severity == found["run.unstable"].severity == "fine"
    assert found["run.unstable"].evidence.startswith("none of 600 steps since settings changed at step 400")
    for setting in ("preview.every: 10 -> 100", "ema_snapshots.every: 0 -> -1"):
        other = [{"kind": "changed", "step": 400, "setting": setting}]
        assert _check_stability(replace(record, events=[*roll_backs, *other])).facts["rolled_back"] == 8


def test_roll_backs_are_forgotten_where_the_run_forgets_them():
    """The settings that a run may change and that its roll-backs depend on."""
    names = tuple(set(FRESH_START_SETTINGS) - {"images"})
    for name, _, rules in resume_rules.walk_settings(replace(Config(), network=UNet())):
        forgets = rules.resume in ("free", "force") and (rules.affects or "loss") in ("loss", "objective")
        listed = any(name == one or name.startswith(f"{one.rstrip('.')}.") for one in names)
        # Other images change both of these, and are named as "images".
        assert listed == (forgets and name not in ("fingerprint", "buckets")), name


# Where it is.


@pytest.mark.parametrize(
    ("kinds", "heartbeat", "state", "severity"),
    [
        ("started finished", None, "finished", "fine"),
        ("started finished resumed", {"alive": True, "doing": "training"}, "running", "fine"),
        ("started finished resumed", {"alive": False, "doing": "training", "age": 9.0}, "killed", "warning"),
        ("started stopped", {"alive": False, "doing": "stopped"}, "stopped", "hint"),
        ("started failed", None, "failed", "warning"),
        ("started", {"alive": False, "doing": "stopped"}, "stopped", "hint"),
        ("started", None, "killed", "warning"),
        ("", None, "not begun", "warning"),
        ("started", {"alive": True, "doing": "waiting for disk space"}, "running", "warning"),
        ("started", {"alive": False, "doing": "failed: RequestError", "age": 9.0}, "killed", "warning"),
        ("started", {"alive": False, "doing": "failed: RunError", "age": 9.0}, "failed", "warning"),
        ("", {"alive": False, "doing": "failed: RequestError", "age": 9.0}, "failed", "warning"),
    ],
)
def test_the_state_is_what_the_last_session_says_or_its_silence(tmp_path, kinds, heartbeat, state, severity):
    events = [{"kind": kind, "step": 40} for kind in kinds.split()]
    record = a_record(tmp_path, lines(steps=40), events, heartbeat=heartbeat)
    assert run_state(record.events, record.heartbeat)[0] == state
    assert _check_state(record).severity == severity
    assert state != "killed" or "RequestError" not in _check_state(record).evidence


def test_a_killed_run_that_saves_rarely_is_told_how_often_to(tmp_path):
    record = a_record(tmp_path, lines(steps=800), [{"kind": "started", "step": 0}])
    for every, better in ((100, 50), (-1, 200)):
        config = replace(record.config, checkpoint=replace(record.config.checkpoint, every=every))
        assert _check_state(replace(record, config=config)).remedy.endswith(f"--checkpoint.every {better}")


@pytest.mark.parametrize(
    ("reason", "severity", "remedy"),
    [
        ("RunError: training diverged 9 times", "fatal", f"--lr {LR / 10:.2g}"),
        ("OSError: No space left on device", "warning", "free some space"),
        ("OutOfMemoryError: CUDA out of memory", "warning", "--microbatch 16"),
        ("OSError: [Errno 28] No space left on device: 'x'", "warning", "free some space"),
        ("RunError: /mnt/disks/data/a.tar cannot be read: Input/output error", "warning", "fix that"),
        ("RunError: out of memory, with one image at a time (CUDA out of memory)", "warning", "train again with"),
        ("KeyError: 'x'", "warning", "--debug"),
    ],
)
def test_a_failure_says_what_to_do(tmp_path, reason, severity, remedy):
    events = [{"kind": "started", "step": 0}, {"kind": "failed", "step": 40, "reason": reason}]
    found = _check_state(a_record(tmp_path, lines(steps=40), events), LR / 10)
    assert found.severity == severity
    assert remedy in found.remedy


def test_where_one_image_is_too_much_checkpointing_is_what_is_left(tmp_path):
    events = [{"kind": "failed", "step": 40, "reason": "OutOfMemoryError: CUDA out of memory"}]
    record = a_record(tmp_path, lines(steps=40), events)
    record = replace(record, config=replace(record.config, training=replace(record.config.training, microbatch=1)))
    assert _check_state(record).remedy.endswith("--training.checkpointing")


# What it costs.


@pytest.mark.parametrize(("share", "severity"), [(0.01, "fine"), (0.07, "hint"), (0.4, "warning")])
def test_waiting_for_data_is_weighed_by_time_and_without_the_start(tmp_path, share, severity):
    rows = lines(data_wait=lambda step: share)
    rows[0]["data_wait"] = 1.0
    found = _check_data_wait(a_record(tmp_path, rows))
    assert found.facts["share"] == pytest.approx(share)
    assert found.severity == severity
    assert severity == "fine" or "unfog pack photos" in found.remedy


def test_a_short_wait_between_two_logs_is_a_short_wait(tmp_path):
    rows = [{"step": step, "data_wait": wait} for step, wait in ((10, 0.0), (20, 0.0), (40, 0.5), (1000, 0.0))]
    assert _check_data_wait(a_record(tmp_path, rows)).facts["share"] == pytest.approx(0.5 * 20 / 990)


def test_an_interval_is_proposed_that_costs_five_percent(tmp_path):
    events = [{"kind": "preview", "step": step, "seconds": 4.0} for step in range(0, 1000, 20)]
    rows = lines(images_per_second=lambda step: 320.0)  # 0.1 s a step
    for row in rows:
        row["seconds"] = row["step"] * 0.3
    record = a_record(tmp_path, rows, events, steps=100_000)
    record = replace(record, config=replace(record.config, preview=replace(record.config.preview, every=20)))
    found = _check_overhead(record)
    assert found.severity == "warning"
    assert found.facts["share"] == pytest.approx(200 / 300)
    assert found.remedy == f"unfog resume {tmp_path} --preview.every 1000"
    assert 4.0 / (1000 * 0.1) <= 0.05


def test_metrics_of_drawn_pictures_are_no_training(tmp_path):
    events = [{"kind": "measured", "step": step, "seconds": 9.0} for step in range(100, 1001, 100)]
    record = a_record(tmp_path, lines(images_per_second=lambda step: 3200.0), events, steps=10_000)
    evaluate = replace(record.config.evaluate, metrics=("kid",), metrics_every=100)
    found = _check_overhead(replace(record, config=replace(record.config, evaluate=evaluate)))
    assert found.facts["share"] == pytest.approx(0.9)
    assert found.remedy == f"unfog resume {tmp_path} --evaluate.metrics-every 2000"


def test_images_are_packed_as_the_run_has_them(tmp_path):
    record = a_record(tmp_path, lines(data_wait=lambda step: 0.4))
    data = replace(record.config.data, size=128, channels=1, background="#000000", flip=True)
    record = replace(record, config=replace(record.config, data=data))
    assert (
        "unfog pack photos OUT --size 128 --data.channels 1 --data.background '#000000',"
        in _check_data_wait(record).remedy
    )


def test_a_run_that_slows_down_is_told(tmp_path):
    assert _check_speed(a_record(tmp_path, lines(images_per_second=noisy(lambda step: 300, 0.1)))).severity == "fine"
    slow = _check_speed(a_record(tmp_path, lines(images_per_second=lambda step: 300 if step < 500 else 100)))
    assert slow.severity == "hint"
    assert (slow.facts["before"], slow.facts["now"]) == (300, 100)


@pytest.mark.parametrize(("scale", "severity"), [(1.5, "hint"), (20, "fine"), (200, "fine"), (5000, "hint")])
def test_a_batch_unlike_the_noise_scale_is_told(tmp_path, scale, severity):
    columns = {"gradient_signal": lambda step: 2.0, "gradient_noise": noisy(lambda step: 2.0 * scale, 0.3)}
    found = _check_noise_scale(a_record(tmp_path, lines(noise_scale=noisy(lambda step: scale, 0.3), **columns)))
    assert found.facts["noise_scale"] == pytest.approx(scale, rel=0.1)
    assert found.severity == severity
    if severity == "hint":
        batch = int(found.remedy.split("--batch ")[1].split()[0].rstrip(","))
        assert abs(math.log(batch / scale)) < abs(math.log(32 / scale))


def test_windows_in_which_the_gradient_drowned_count_as_well(tmp_path):
    """The ratio of means over all windows: those with a negative estimate would else be left out, and it be too low."""
    signal = lambda step: 3.0 if step % 40 else -1.0  # noqa: E731
    columns = {"noise_scale": lambda step: 10 / 3 if step % 40 else None, "gradient_signal": signal}
    found = _check_noise_scale(a_record(tmp_path, lines(**columns, gradient_noise=lambda step: 10.0)))
    assert found.facts["noise_scale"] == pytest.approx(250 / 23)  # of the later half, 12 windows of 3 and 13 of -1


def drowned(signal, noise):
    rows = {"gradient_signal": lambda step: signal, "gradient_noise": lambda step: noise}
    return lines(**rows, noise_scale=lambda step: None if signal <= 0 else max(noise / signal, 0.0))


def test_a_gradient_without_noise_or_without_signal_is_no_accident(tmp_path):
    still = _check_noise_scale(a_record(tmp_path, drowned(1.0, -1e-6)))
    assert (still.severity, still.facts["noise_scale"]) == ("hint", 0.0)
    assert "--batch 2 " in still.remedy.replace(",", " ")
    noise = _check_noise_scale(a_record(tmp_path, drowned(-0.5, 10.0)))
    assert (noise.severity, noise.facts["noise_scale"]) == ("hint", None)
    assert "cannot be measured" in noise.evidence
    assert "--batch 256 --microbatch 32" in noise.remedy
    assert _check_noise_scale(a_record(tmp_path, drowned(-0.5, 10.0)[:2])) is None
    words = [row | {"gradient_noise": "much"} for row in drowned(1.0, 10.0)]
    assert _check_noise_scale(a_record(tmp_path, words)) is None


def test_memory_that_did_not_suffice_is_told(tmp_path):
    assert _check_memory(a_record(tmp_path)) is None
    events = [{"kind": "out_of_memory", "step": 3, "microbatch": n, "checkpointing": False} for n in (16, 8)]
    found = _check_memory(a_record(tmp_path, events=events))
    assert (found.severity, found.facts["times"]) == ("hint", 2)
    assert found.remedy.endswith("--microbatch 8")
    events.append({"kind": "out_of_memory", "step": 3, "microbatch": 1, "checkpointing": True})
    again = _check_memory(a_record(tmp_path, events=events)).remedy
    assert again.endswith("--microbatch 1 --training.checkpointing")


def test_unused_images_are_counted(tmp_path):
    assert _check_unused_images(a_record(tmp_path, data={"found": 100, "used": 100})).severity == "fine"
    assert _check_unused_images(a_record(tmp_path, data={"found": 1000, "used": 990})).severity == "hint"
    assert _check_unused_images(a_record(tmp_path, data={"found": 100, "used": 80})).severity == "warning"
    assert _check_unused_images(a_record(tmp_path, data={"found": "?"})) is None


def test_a_record_is_read_as_it_was_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "loss": null, "loss_by_level": [1, null]}\n{"step": 40, "lo')
    (tmp_path / "events.jsonl").write_text('{"kind": "started", "step": 0}\n\xff\n')
    (tmp_path / "data.json").write_text(json.dumps({"found": 3, "files": [1, 2, 3]}))
    beat = {"step": 55, "time": datetime.now(UTC).isoformat()}
    record = RunRecord.read(tmp_path, preset("default"), beat)
    assert (len(record.metrics), len(record.events), record.step) == (1, 1, 55)
    assert record.data == {"found": 3}
    assert record.seconds == 0


# Losses.

DIFFUSIONS = [
    Diffusion(path=Flow(), schedule=LogitNormal(), target=FlowVelocity()),
    Diffusion(path=VP(), schedule=Cosine(), target=V()),
    Diffusion(path=VP(), schedule=Cosine(steps=1000), target=Eps()),
    Diffusion(path=VE(), schedule=LogNormal(), target=EdmF(), conditioning="logsnr", scale_input=True),
]


@pytest.mark.parametrize("diffusion", DIFFUSIONS)
def test_what_no_learning_loses_is_what_it_is_measured_to(diffusion):
    generator = torch.Generator().manual_seed(0)
    x0 = (torch.randn(4000, 1, 2, 2, generator=generator) * 0.3 - 0.4).clamp(-1, 1)
    noise = torch.randn(x0.shape, generator=generator)
    levels = torch.tensor([0.1, 0.5, 0.9])
    zero, linear = _baseline_losses(diffusion, x0, levels)
    for i, u in enumerate(levels):
        logsnr = diffusion.schedule(u.expand(len(x0)))
        x_t, y = diffusion.add_noise(x0, noise, logsnr), diffusion.network_target(x0, noise, logsnr)
        weight = float(diffusion.weight(logsnr)[0])
        assert weight * float(y.square().mean()) == pytest.approx(zero[i], rel=0.03)
        least = 0.0  # least squares at each pixel, which sees the mean image as its offset
        for row, column in np.ndindex(2, 2):
            a, b = x_t[:, 0, row, column].double(), y[:, 0, row, column].double()
            slope = ((a - a.mean()) * (b - b.mean())).mean() / (a - a.mean()).square().mean()
            least += float((b - b.mean() - slope * (a - a.mean())).square().mean()) / 4
        assert weight * least == pytest.approx(linear[i], rel=0.05)


def test_pixels_that_are_always_the_same_need_no_guessing():
    """Objects centred on white: the best guess of each pixel by itself is right about the border at once."""
    generator, (inside, spread) = torch.Generator().manual_seed(0), (4, 0.3)
    x0 = torch.ones(4000, 1, 16, 16)
    x0[..., 6:10, 6:10] = torch.randn(4000, 1, inside, inside, generator=generator) * spread
    levels = torch.tensor([0.05, 0.5, 0.9])
    alpha, sigma = 1 - levels, levels  # of the flow path, whose target is eps - x0
    diffusion = Diffusion(path=Flow(), schedule=FlowUniform(), target=FlowVelocity())
    expected = spread**2 / (alpha**2 * spread**2 + sigma**2) * (inside / 16) ** 2
    assert _baseline_losses(diffusion, x0, levels)[1] == pytest.approx(expected.numpy(), rel=0.02)
    one = _baseline_losses(diffusion, x0[:1], levels)[1]
    assert (one > 0.1).all(), "one image says nothing about how they vary, which is not that they do not"


def test_one_image_held_out_gives_no_number_of_certainty(tmp_path):
    found = check_overfitting(a_record(tmp_path), np.full((4, 30), 0.3), np.full((4, 1), 0.9))
    assert found.facts["error"] is None
    assert json.dumps(dict(found.facts), allow_nan=False)
    assert found.evidence.startswith("the loss on 1 held-out image is")
    assert found.severity == "fine"
    behind = check_ema(a_record(tmp_path), np.full((4, 1), 0.9), np.full((4, 1), 0.3), 10, "training images")
    assert behind.facts["error"] is None


@pytest.mark.parametrize(("updates", "advice"), [(10**6, "fixed:decay_max=0.9997"), (20, "fixed:decay_max=0.1")])
def test_a_fixed_average_that_lags_is_told_a_shorter_one_of_its_kind(tmp_path, updates, advice):
    record = a_record(tmp_path)
    record = replace(record, config=replace(record.config, ema=FixedEma(0.9999)))  # (1 + 20) / (10 + 20) after 20
    behind = check_ema(record, np.full((4, 9), 0.9), np.full((4, 9), 0.3), updates, "training images")
    assert behind.remedy.endswith(f"--ema {advice}")


def test_a_remedy_does_something_to_a_finished_run(tmp_path):
    half = a_record(tmp_path, lines(steps=500))
    assert half.resume_command("--lr 1") == f"unfog resume {tmp_path} --lr 1"
    assert a_record(tmp_path, lines()).resume_command("--lr 1") == f"unfog resume {tmp_path} --lr 1 --steps 2000"
    rising = _check_loss(a_record(tmp_path, lines(loss=noisy(lambda step: 0.2 + step / 2000))), 0.3, 0.4)
    assert "--steps 2000" in rising.remedy
    refused = [{"kind": "step_refused", "step": 100, "layer": "x"}]
    assert "--precision fp32 --steps 2000" in _check_stability(a_record(tmp_path, lines(), refused)).remedy


def test_an_image_meets_the_same_noise_whatever_the_batch():
    network = torch.nn.Conv2d(1, 1, 3, padding=1)
    objective = Objective(DIFFUSIONS[0])

    def loss_at(x0, conditions, u, noise):
        return objective.at(lambda x, c, conditions: network(x), x0, conditions, DIFFUSIONS[0].schedule(u), noise)

    x0, levels, seen = torch.rand(7, 1, 4, 4) * 2 - 1, torch.tensor([0.2, 0.8]), []
    one = measure_losses(loss_at, LossImages(x0, NO_CONDITIONS), levels, 3, progress=seen.append)
    assert sum(seen) == 14
    assert np.allclose(one, measure_losses(loss_at, LossImages(x0, NO_CONDITIONS), levels, 100), rtol=1e-5)
    assert np.allclose(one[:, :5], measure_losses(loss_at, LossImages(x0[:5], NO_CONDITIONS), levels, 2), rtol=1e-5)
    assert len({round(float(value), 6) for value in one.flat}) == 14


def test_overfitting_needs_a_gap_and_is_grave_when_the_held_out_loss_rises(tmp_path):
    random = np.random.default_rng(0)

    def measured(mean, count=60):
        return mean * (1 + 0.3 * random.normal(size=(4, count)))

    rising = a_record(tmp_path, lines(held_out_loss=lambda step: 0.3 + abs(step - 400) / 4000))
    falling = a_record(tmp_path, lines(held_out_loss=lambda step: 0.5 - step / 4000))
    assert check_overfitting(rising, measured(0.3), measured(0.45)).severity == "warning"
    assert check_overfitting(rising, measured(0.3), measured(0.45)).facts["lowest_at"] == 400
    assert check_overfitting(falling, measured(0.3), measured(0.45)).severity == "hint"
    assert check_overfitting(rising, measured(0.3), measured(0.3)).severity != "warning", "it rises, but not by heart"
    assert check_overfitting(falling, measured(0.3), measured(0.3)).severity == "fine"
    assert "--best" in check_overfitting(rising, measured(0.3), measured(0.45)).remedy
    bumpy = a_record(tmp_path, lines(held_out_loss=noisy(lambda step: 0.5 - step / 4000, 0.005)))
    assert held_out_history(bumpy)[2] < 0.01


def test_a_held_out_loss_of_no_step_is_left_out(tmp_path):
    rows = [{"step": 1, "held_out_loss": 1.0}, {"held_out_loss": 0.9}]
    steps, measured, rose = held_out_history(a_record(tmp_path, rows))
    assert (steps.tolist(), measured.tolist(), rose) == ([1.0], [1.0], 0.0)


def test_the_horizon_of_the_average_is_within_the_run(tmp_path):
    record = a_record(tmp_path)
    for ema, updates, low, high in ((PowerEma(), 1000, 100, 150), (FixedEma(), 300, 25, 40), (FixedEma(), 1, 1, 1)):
        horizon = _ema_window(replace(record, config=replace(record.config, ema=ema)), updates)
        assert low <= horizon <= high


@pytest.mark.parametrize(
    ("x", "down", "up"),
    [(0.3, 1, 1), (1, 1, 1), (3, 2, 5), (7, 5, 10), (1900, 1000, 2000), (2500, 2000, 5000), (4900, 2000, 5000)],
)
def test_intervals_are_round_numbers(x, down, up):
    assert (round_down_to_125(x), _round_up(x)) == (down, up)


@pytest.mark.parametrize(
    ("changes", "finer"),
    [
        ({"sampler": {"kind": "ddim", "steps": 50}}, "--steps 100"),
        ({"sampler": {"kind": "dpmpp", "steps": 20}}, "--steps 40"),
        ({"diffusion": {"path": "vp", "schedule": "cosine:steps=30"}, "sampler": {"steps": 20}}, "--steps 30"),
        ({"diffusion": {"path": "vp", "schedule": "cosine:steps=30"}, "sampler": {"steps": 30}}, ""),
        ({"sampler": {"kind": "adaptive", "tolerance": 0.02}}, "--sampler.tolerance 0.005"),
    ],
)
def test_smaller_sampling_steps_are_smaller_than_those_of_the_run(tmp_path, changes, finer):
    config = update(preset("default"), changes, "")
    found = SampleRemedies.of(RunRecord(tmp_path, config)).finer
    assert (finer in found) if finer else not found
    steps = re.search(r"--steps (\d+)", found)
    if steps:
        assert int(steps[1]) > config.sampler.steps
        resolve_sampler(config, None, int(steps[1]))  # which refuses what cannot be drawn


@pytest.mark.parametrize(
    ("sampler", "advice"),
    [
        ({}, "--sampler.grid karras"),
        ({"grid": "karras"}, ""),
        ({"grid": "logsnr", "last": 0.05}, "--sampler.last 0"),
        ({"last": 0.05}, "--sampler.grid karras --sampler.last 0"),
        ({"last": 0.002}, ""),
        ({"kind": "adaptive"}, ""),
        ({"kind": "adaptive", "last": 0.1}, "--sampler.last 0"),
    ],
)
def test_a_lower_end_of_sampling_is_advised_where_there_is_one(tmp_path, sampler, advice):
    config = update(preset("default"), {"sampler": sampler}, "")
    found = SampleRemedies.of(RunRecord(tmp_path, config)).sharper
    assert (advice in found) if advice else not found


def test_a_remedy_for_tints_names_no_setting_that_the_run_has(tmp_path):
    flow, eps = (SampleRemedies.of(RunRecord(tmp_path, preset(name))).untinted for name in ("default", "ddpm"))
    assert "target" not in flow
    assert "0.1" in flow
    assert "target" in eps
    assert "width" not in eps  # a fixed EMA has none


def test_colours_that_jitter_brings_are_not_trained_away(tmp_path):
    strong, usual = (
        SampleRemedies.of(RunRecord(tmp_path, update(preset("default"), {"data": {"jitter": jitter}}, ""))).untinted
        for jitter in (0.9, 0.1)
    )
    assert "--data.jitter 0.9" in strong
    assert "jitter" not in usual
