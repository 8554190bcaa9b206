"""Masked updates, whose verdict the host reads a step late, as on a GPU, here on the CPU: the same bits as at once."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from test_training import CPU, NEVER, Diary, linear_state, reconstruction, run, scaled_at
from unfog.checks.settings import overfit_one_batch as overfitting
from unfog.config.presets import preset
from unfog.errors import Interrupted, RunError
from unfog.models.edm2_unet import MPUNetModel
from unfog.models.settings import MPUNet, UNet
from unfog.pipeline.build import build_state
from unfog.planning.timing import TrialTraining, random_images
from unfog.training.distributed import coordination
from unfog.training.ema import Ema
from unfog.training.loop import Intervals
from unfog.training.optimizers import build_optimizer, set_learning_rate
from unfog.training.precision import Precision
from unfog.training.settings import AdamW, FixedEma, Muon, Optimizer, PowerEma
from unfog.training.stability.divergence import DivergenceGuard
from unfog.training.state import TrainState
from unfog.training.updates import updater
from unfog.values.condition_format import ConditionFormat

STEPS = 9
# Steps, from 0 on, whose loss is NaN: the first, one, two in a row, two with a good one between, many, the last two.
PLANTED = ([0], [4], [4, 5], [4, 6], [2, 3, 4, 5, 6], [7, 8])
CLOCK = ("images_per_second", "data_wait")


@pytest.fixture
def when(monkeypatch):
    """Have the device decide, and the host read its verdict at once, or a step late."""

    def choose(how):
        monkeypatch.setattr(updater, "_LATE_ON", () if how == "usual" else ("cpu",))
        monkeypatch.setattr(updater, "_LAG", int(how == "late"))

    return choose


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU()),
        *(nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)),
    )


def state(method=Muon(), precision="fp32"):  # noqa: B008
    return TrainState(
        network(), Optimizer(lr=1e-2, method=method), PowerEma(), Precision(precision, CPU), second=PowerEma(0.05)
    )


def saved(of):
    """All that a checkpoint holds; without the moments, all zeros, of an optimiser that has yet to take a step."""
    tensors = {f"{file}/{name}": t.clone() for file, part in of.tensors().items() for name, t in part.items()}
    return {n: t for n, t in tensors.items() if not n.startswith("optimizer") or of.updates}, of.progress()


def same(a, b, rounding=0.0):
    assert a[0].keys() == b[0].keys()
    for name, tensor in a[0].items():
        # An EMA on the device is that of the CPU up to rounding; weights and moments are its own.
        near = rounding if name.startswith("ema") else 0.0
        torch.testing.assert_close(tensor, b[0][name], rtol=near, atol=near, msg=name)
    assert json.dumps(a[1]) == json.dumps(b[1])


def said(diary):
    """All that a run told its hooks, but for the time it took."""
    records = [(s, i, {k: v for k, v in r.items() if k not in CLOCK}) for s, i, r in diary.records]
    refusals = [(step, str(norm), report) for step, norm, report in diary.refusals]
    return json.dumps([records, refusals, diary.saved, diary.roll_backs])


@pytest.mark.parametrize(
    ("planted", "method"),
    [
        *((planted, AdamW()) for planted in PLANTED),
        (PLANTED[4], Muon()),
        *(pytest.param(planted, Muon(), marks=pytest.mark.exhaustive) for planted in PLANTED if planted != PLANTED[4]),
    ],
)
@pytest.mark.slow
def test_after_each_step_all_is_as_if_the_verdict_had_been_read_at_once(planted, method, when):
    for length in range(1, STEPS + 1):
        ends = {}
        for how in ("usual", "at once", "late"):
            when(how)
            into = state(method)
            diary = run(into, scaled_at(planted, math.nan), images=8 * length, every=NEVER._replace(log=5))
            ends[how] = (*saved(into), said(diary))
            assert into.updates == length - sum(step < length for step in planted)
        same(ends["late"], ends["at once"])
        same(ends["late"], ends["usual"], 1e-6)
        assert ends["late"][2] == ends["at once"][2] == ends["usual"][2]


@pytest.mark.parametrize(("factor", "microbatch"), [(1e4, 3), (math.nan, 0)])
@pytest.mark.slow
def test_in_fp16_the_loss_scale_is_that_of_a_verdict_read_at_once(factor, microbatch, when):
    """Where it falls after an overflow, grows in the step after, and stays where a step is taken back."""
    for planted in PLANTED:
        for length in (3, 6, STEPS):
            ends = {}
            for how in ("usual", "at once", "late"):
                when(how)
                into = state(precision="fp16")
                into.precision.scaler.load_state_dict(
                    into.precision.scaler.state_dict() | {"scale": 1024.0, "growth_interval": 2}
                )
                diary = run(
                    into,
                    scaled_at(planted, factor),
                    images=8 * length,
                    every=NEVER._replace(log=5),
                    microbatch=microbatch,
                )
                ends[how] = (*saved(into), said(diary))
                bad = sum(step < length for step in planted)
                assert into.updates <= length - bad
                assert (into.precision.scale < 2 ** (10 + (length - bad) // 2)) == bool(bad)
            same(ends["late"], ends["at once"])
            same(ends["late"], ends["usual"], 1e-6)
            assert ends["late"][2] == ends["at once"][2] == ends["usual"][2]


def test_the_verdict_is_read_while_the_next_step_is_on_its_way(when, monkeypatch):
    when("late")
    events = []

    class Noting(updater.Updater):
        def update(self, gradient):
            super().update(gradient)
            events.append("launch")

        def read_verdict(self):
            events.append("read")
            return super().read_verdict()

    monkeypatch.setattr("unfog.training.loop.Updater", Noting)
    run(state(), images=5 * 8)
    assert events == ["launch", *["launch", "read"] * 4, "read"]
    events.clear()
    run(state(), images=5 * 8, every=NEVER._replace(checkpoint=2))  # which waits for the step that it saves
    assert events == [*["launch", "launch", "read", "read"] * 2, "launch", "read"]


@pytest.mark.slow
@pytest.mark.parametrize("planted", [[5], [4, 5], [5, 6]])
def test_a_checkpoint_holds_the_step_that_it_follows(planted, when):
    """The checkpoint after step 5, counted from 0, where the last step, this one or the next one is left out."""
    found = {}
    for how in ("at once", "late"):
        when(how)
        into, diary = state(), Diary()
        diary.taken = []
        diary.save = lambda of, for_best=False, into=diary.taken: into.append(saved(of))
        run(into, scaled_at(planted, math.nan), diary, Intervals(log=2, checkpoint=6), images=8 * STEPS)
        found[how] = diary.taken
    assert len(found["late"]) == 2
    for one, other in zip(found["late"], found["at once"]):
        same(one, other)


def small_config():
    network = UNet(channels=(8,), attention=(False,), mid_attention=False, norm_groups=4)
    config = replace(preset("default"), network=network)
    data, training = replace(config.data, size=8, channels=1), replace(config.training, batch=4, precision="fp32")
    return replace(config, data=data, training=training, optimizer=replace(config.optimizer, lr=1e-2))


def test_a_trial_takes_as_many_steps_as_are_asked_for(when):
    when("late")
    config = small_config()
    trial = TrialTraining(config, random_images(config, 8), CPU)
    for steps in (1, 2):
        before = trial.state.seen
        trial.run(steps)
        assert trial.state.seen - before == 4 * steps


@pytest.mark.slow
def test_learning_a_batch_by_heart_compares_with_the_first_step(when, monkeypatch):
    monkeypatch.setattr(overfitting, "_MOST_STEPS", 6)
    monkeypatch.setattr(overfitting, "_finding", lambda config, state, batch, monitor: monitor.fallen)
    config, fallen = small_config(), {}
    for how in ("usual", "late"):
        when(how)
        images = random_images(config, 8)
        fallen[how] = overfitting.overfit_one_batch(config, build_state(config, CPU), images)
    assert fallen["late"][:6] == fallen["usual"]
    assert fallen["usual"][0] == 1 != fallen["usual"][5]


@pytest.mark.slow
@pytest.mark.parametrize("stop", range(3, 8))
def test_killed_or_stopped_beside_a_bad_step_and_resumed_ends_like_one_that_was_not(stop, when):
    when("late")
    straight, broken, again = state(), state(), state()
    loss = scaled_at([4, 5], math.nan)
    run(straight, loss, images=8 * STEPS)
    run(broken, loss, Diary(stop_at=stop), images=8 * STEPS)
    # Told of the end of a step once the next one is on its way; which is taken back where that step was left out.
    assert broken.seen == 8 * (stop + (stop not in (5, 6)))
    again.load_full(broken.tensors(), json.loads(json.dumps(broken.progress())))
    run(again, loss, images=8 * STEPS)
    same(saved(again), saved(straight))


@pytest.mark.slow
@pytest.mark.parametrize("poll", range(1, 30, 2))
def test_interrupted_anywhere(poll, when):
    when("late")

    class Hasty(Diary):
        polls = 0

        def stop_requested(self):
            self.polls += 1
            if self.polls == poll:
                raise Interrupted
            return False

    loss = scaled_at([3, 4, 7], math.nan)
    straight, broken = state(), state()
    run(straight, loss, images=8 * STEPS)
    hasty = Hasty()
    run(broken, loss, hasty, images=8 * STEPS)
    run(broken, loss, hasty, images=8 * STEPS)
    same(saved(broken), saved(straight))


def rolling_back(into):
    diary = Diary()
    first = {file: {name: t.clone() for name, t in part.items()} for file, part in into.tensors().items()}

    def roll_back(of, reason):
        diary.roll_backs.append(f"{of.seen // 8}: {reason}")
        of.model.load_state_dict(first["model"])
        for ema, file in ((of.ema, "ema"), (of.second_ema, "ema2")):
            ema.load_state_dict(of.model, first[file])
        of.load_optimizer({}, {"method": of.method, "optimizer": {}})
        of.roll_back_to({"seen": 0, "updates": 0, "guard": DivergenceGuard().state_dict(), "keys": {}, "scaler": {}})

    diary.roll_back = roll_back
    return diary


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e4, math.nan])
def test_a_roll_back_undoes_what_was_launched_before_it_was_known(factor, when):
    ends = {}
    for how in ("at once", "late"):
        when(how)
        into = state()
        diary = rolling_back(into)
        run(into, scaled_at(range(20, 24), factor), diary, NEVER._replace(log=9), images=30 * 8, patience=3)
        assert len(diary.roll_backs) == 1
        ends[how] = (*saved(into), said(diary))
    same(ends["late"], ends["at once"])
    assert ends["late"][2] == ends["at once"][2]


@pytest.mark.slow
def test_roll_backs_end_in_the_same_diagnosis(when):
    messages = []
    for how in ("at once", "late"):
        when(how)
        into = linear_state()
        diary = rolling_back(state())
        diary.roll_back = lambda of, reason: of.guard.record_roll_back(DivergenceGuard().state_dict(), 0)
        with pytest.raises(RunError) as error:
            run(into, scaled_at(range(100), math.inf), diary, patience=3, rollbacks=2)
        messages.append((str(error.value), diary.saved))
    assert messages[0] == messages[1]


def test_weights_that_are_not_finite_are_found(when):
    when("late")
    into = state()
    diary = rolling_back(into)
    with torch.no_grad():
        into.model[0].weight[0, 0, 1, 1] = math.nan
    run(into, reconstruction, diary, images=16)
    assert diary.roll_backs == ["1: weights were not finite (0.weight)"]
    assert into.seen == 16
    assert into.updates == 1


def test_what_cannot_be_masked_is_decided_at_once(when, monkeypatch):
    when("late")
    world = type("World", (), {"size": 1})()
    why = updater.why_not_masked
    assert why(state(), world) is None
    assert "several processes" in why(state(), type("World", (), {"size": 2})())
    buffered = TrainState(
        nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)), Optimizer(), PowerEma(), Precision("fp32", CPU)
    )
    assert "buffers" in why(buffered, world)
    assert why(linear_state("fp16"), world) is None
    foreign = state()
    foreign.optimizer = torch.optim.SGD(foreign.model.parameters(), lr=1e-3)
    assert "SGD" in why(foreign, world)
    foreign = state()
    foreign.model.project = lambda: None
    assert "project" in why(foreign, world)
    foreign.levels = object()
    assert "follow the losses" in why(foreign, world)
    monkeypatch.setattr(updater, "_LATE_ON", ("cuda",))
    assert "cpu" in why(state(), world)


def bits(tensors):
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("method", [AdamW(), Muon()])
def test_an_optimiser_leaves_each_bit_as_it_is(method, on_device):
    """Also the sign of a zero; with a learning rate on the device, as on CUDA, and on the host."""
    ends = []
    for planted in ((), (2, 3)):
        model = network()
        model[0].weight.data[0] = model[2].weight.data[0] = -0.0
        optimizer = build_optimizer(model, Optimizer(lr=1e-2, method=method, weight_decay=0.1))
        if on_device:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(1e-2)
        taken = 0
        while taken < 4:
            skip, before = len(ends) and taken in planted, bits(all_of(optimizer, model))
            torch.manual_seed(taken)
            for p in model.parameters():
                p.grad = torch.full_like(p, math.nan) if skip else torch.randn_like(p)
            set_learning_rate(optimizer, 1e-2 / (1 + taken))
            optimizer.found_inf = torch.tensor(float(bool(skip)))
            optimizer.step()
            assert (bits(all_of(optimizer, model)) == before) == bool(skip)
            planted, taken = (planted[1:], taken) if skip else (planted, taken + 1)
        ends.append(all_of(optimizer, model))
    assert bits(ends[0]) == bits(ends[1])


def all_of(optimizer, model):
    return [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]


@pytest.mark.parametrize("method", [AdamW(), Muon()])
def test_a_masked_step_is_the_usual_one(method):
    """With the learning rate on the device up to rounding, and with that of the host to the bit."""
    ends = {}
    for how in ("usual", "masked", "on the device"):
        model = network()
        optimizer = build_optimizer(model, Optimizer(lr=1e-2, method=method, weight_decay=0.1))
        if how == "on the device":
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(1e-2)
        for step in range(3):
            torch.manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            set_learning_rate(optimizer, 1e-2 / (1 + step))
            if how != "usual":
                optimizer.found_inf = torch.zeros(())
            optimizer.step()
        ends[how] = all_of(optimizer, model)
    torch.testing.assert_close(ends["masked"], ends["usual"], rtol=0, atol=0)
    torch.testing.assert_close(ends["on the device"], ends["usual"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", [PowerEma(), FixedEma()])
def test_a_masked_ema_is_the_usual_one_or_stays_as_it_is(schedule):
    model = network()
    usual, masked = Ema(model, schedule), Ema(model, schedule)
    for update in range(1, 8):
        for p in model.parameters():
            p.data += 0.1 * torch.randn_like(p)
        usual.update(update)
        masked.prepare(update)
        masked.update_unless(torch.zeros(()))
        torch.testing.assert_close(masked.parameters, usual.parameters, rtol=1e-5, atol=1e-6)
        masked.parameters[0][0] = -0.0
        usual.parameters[0][0] = -0.0
        before = bits(masked.parameters)
        masked.update_unless(torch.ones(()))
        assert bits(masked.parameters) == before


def test_a_masked_projection_is_the_usual_one_or_stays_as_it_is():
    settings = MPUNet(channels=(8, 16), attention=(False, True), blocks=1)
    torch.manual_seed(0)
    usual, masked = MPUNetModel(settings, 1, ConditionFormat()), MPUNetModel(settings, 1, ConditionFormat())
    for p in usual.parameters():
        p.data = torch.randn_like(p)
    masked.load_state_dict(usual.state_dict())
    before = bits(masked.parameters())
    masked.project(torch.ones(()))
    assert bits(masked.parameters()) == before
    usual.project()
    masked.project(torch.zeros(()))
    assert bits(masked.parameters()) == bits(usual.parameters())


def test_the_device_judges_as_the_host_does():
    values = [0.0, 1.0, 1e-38, 3e38, math.inf, -math.inf, math.nan]
    for norm in values:
        for loss in values:
            for null_loss in values:
                numbers = torch.tensor([norm, loss, null_loss])
                result = updater.StepResult.of([], tuple(numbers.tolist()), numbers[0], 1, None)
                assert (result.outcome == "accepted") == (coordination._is_bad(numbers).item() == 0), numbers
