"""The loop and what it is made of: exact means, refused steps, averages, precision, schedules."""

import json
import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import advance
from unfog.data.augmentation import Augment
from unfog.device.sharded_rng import seed_generators
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.loss_by_level import LossByLevel
from unfog.diffusion.objective import Loss, Objective
from unfog.errors import Interrupted, RequestError, RunError
from unfog.training.batches import split_range
from unfog.training.ema import Ema
from unfog.training.hooks import Task, TrainingHooks
from unfog.training.loop import Intervals, LoopSettings, train
from unfog.training.precision import Precision
from unfog.training.settings import FixedEma, Optimizer, PowerEma, Training
from unfog.training.stability.divergence import DivergenceGuard
from unfog.training.state import TrainState
from unfog.training.statistics import LogWindow, Stopwatch
from unfog.values.conditions import Conditions
from unfog.values.image_format import BYTES

CPU = torch.device("cpu")
NEVER = Intervals(0, 0, 0, 0)


class Images:
    """A stream of eight fixed images."""

    def __init__(self):
        self.all = torch.randint(0, 256, (8, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    def batch(self, first, size):
        index = torch.arange(first, first + size) % 8
        return type("Batch", (), {"pixels": self.all[index], "conditions": Conditions(index % 3)})


class Diary(TrainingHooks):
    """A run that keeps what the loop says."""

    def __init__(self, stop_at=None):
        self.records, self.refusals, self.roll_backs, self.stop_at, self.step = [], [], [], stop_at, 0
        self.good, self.saved, self.events = None, [], []

    def log(self, step, images, record):
        self.records.append((step, images, record))

    def on_skipped_step(self, state, norm, culprit):
        self.refusals.append((state.seen // 8, norm, culprit))

    def roll_back(self, state, reason):
        self.roll_backs.append(reason)
        state.model.load_state_dict(self.good)
        state.ema = Ema(state.model, state.ema.schedule)
        state.roll_back_to({"seen": 0, "updates": 0, "guard": DivergenceGuard().state_dict(), "keys": {}, "scaler": {}})

    def on_step_end(self, step):
        self.step = step

    def stop_requested(self):
        return self.step == self.stop_at

    def save(self, state, for_best=False):
        self.saved.append(state.seen // 8)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))


def state(model=None, precision="fp32", ema=None, **optimizer):
    return TrainState(model or network(), Optimizer(**optimizer), ema or PowerEma(), Precision(precision, CPU))


def following(into):
    """The same, keeping up the loss by level, as for an objective that follows it."""
    into.levels = LossByLevel(CPU)
    into.register("levels", into.levels, rolled_back=True)
    return into


def linear_state(precision="fp32"):
    torch.manual_seed(0)
    return state(nn.Conv2d(1, 1, 3, padding=1), precision, lr=1e-2)


def reconstruction(model, x0, conditions):
    """Squared error of reproducing the input; no randomness, so it does not depend on how a batch is cut."""
    error = (model(x0) - x0).square().mean((1, 2, 3))
    return Loss(error, torch.full((len(x0),), 0.5), torch.ones(len(x0)))


def denoising(model, x0, conditions):
    u = torch.rand(len(x0))
    noisy = x0 + torch.randn_like(x0) * u[:, None, None, None]
    return Loss((model(noisy) - x0).square().mean((1, 2, 3)), u, torch.ones(len(x0)))


def run(into, loss=denoising, diary=None, every=NEVER, **settings):
    diary = diary or Diary()
    settings = Training(**{"batch": 8, "images": 80, "precision": "fp32"} | settings)
    train(LoopSettings(settings, Optimizer(lr=1e-2), every), into, Task(Images(), Augment(), loss), diary)
    return diary


class Operations(TorchDispatchMode):
    """Counts what is asked of the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **kwargs or {})


def weights(of):
    return torch.cat([p.detach().flatten() for p in of.model.parameters()])


@pytest.mark.parametrize("microbatch", [1, 3, 4, 5, 7])
def test_gradient_is_the_exact_mean_however_the_batch_is_cut(microbatch):
    whole, cut = linear_state(), linear_state()
    run(whole, reconstruction)
    run(cut, reconstruction, microbatch=microbatch)
    torch.testing.assert_close(weights(cut), weights(whole), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [1, 2, 3])
def test_noise_of_the_whole_batch_is_the_same_however_it_is_cut(microbatch):
    objective = Objective(Diffusion(), interleaved=True)
    whole, cut = linear_state(), linear_state()

    def unlabelled(model, x0, conditions):
        return objective(lambda x, level, conditions: model(x) * level[:, None, None, None], x0)

    logs = [run(whole, unlabelled, noise="batch", every=Intervals(1, 0, 0, 0)).records]
    logs += [run(cut, unlabelled, noise="batch", every=Intervals(1, 0, 0, 0), microbatch=microbatch).records]
    torch.testing.assert_close(weights(cut), weights(whole), rtol=1e-5, atol=1e-6)
    for (_, _, one), (_, _, other) in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_micro_batches_cover_the_batch_once():
    assert list(split_range(64, 8, 3)) == [(64, 3), (67, 3), (70, 2)]


@pytest.mark.slow
def test_stopped_and_continued_in_memory_is_bit_identical():
    straight, broken = state(), state()
    run(straight, microbatch=3)
    run(broken, diary=Diary(stop_at=4), microbatch=3)
    assert broken.seen == 32
    run(broken, microbatch=3)
    assert torch.equal(weights(straight), weights(broken))
    for a, b in zip(straight.ema.parameters, broken.ema.parameters):
        assert torch.equal(a, b)


def test_randomness_is_a_function_of_seed_and_position():
    draws = {}
    for seed in range(3):
        for position in (0, 1, 2, 63, 64, 10**12):
            seed_generators(seed, position)
            draws[seed, position] = torch.randn(8)
            torch.rand(5)
            seed_generators(seed, position)
            assert torch.equal(draws[seed, position], torch.randn(8))
    assert len({tuple(d.tolist()) for d in draws.values()}) == len(draws)


def positions():
    """The step that a micro-batch belongs to, by the seed that the loop gives its position."""
    table = {}
    for position in range(1000):
        seed_generators(0, position)
        table[torch.initial_seed()] = position // 8
    return table


STEP = positions()


def scaled_at(steps, factor, inner=denoising):
    """A loss that is multiplied in these steps (0, 1, …) of batch 8; also when such a step is replayed."""

    def loss(model, x0, conditions):
        wrong = STEP[torch.initial_seed()] in steps
        honest = inner(model, x0, conditions)
        return honest._replace(per_image=honest.per_image * factor) if wrong else honest

    return loss


def overflow_at(steps, inner=denoising):
    """A loss that is infinite in these steps."""
    return scaled_at(steps, math.inf, inner)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_refused_step_leaves_everything_but_the_position(precision):
    into = linear_state(precision)
    run(into, images=24)
    before = weights(into).clone(), [e.clone() for e in into.ema.parameters], into.updates
    moments = [s["exp_avg"].clone() for s in into.optimizer.state.values()]
    scale = into.precision.scaler.get_scale()
    diary = run(into, overflow_at([3]), images=32)
    assert into.seen == 32
    assert into.updates == before[2]
    assert torch.equal(weights(into), before[0])
    assert all(torch.equal(a, b) for a, b in zip(into.ema.parameters, before[1]))
    assert all(torch.equal(s["exp_avg"], m) for s, m in zip(into.optimizer.state.values(), moments))
    assert len(diary.refusals) == 1
    assert not math.isfinite(diary.refusals[0][1])
    if precision == "fp16":
        assert into.precision.scaler.get_scale() == scale / 2
    run(into, images=40)
    assert into.updates == before[2] + 1
    assert weights(into).isfinite().all()


def test_losses_of_a_refused_step_are_not_in_the_log():
    into = linear_state()
    diary = run(into, overflow_at([1]), images=32, every=Intervals(4, 0, 0, 0))
    (_, _, record) = diary.records[0]
    assert math.isfinite(record["loss"])
    assert record["refused"] == 1


def with_good_weights(into, **options):
    """A diary that goes back to the weights as they are now."""
    diary = Diary(**options)
    diary.good = {name: tensor.clone() for name, tensor in into.model.state_dict().items()}
    return diary


@pytest.mark.slow
def test_levels_are_those_of_accepted_steps_and_go_back_with_the_weights():
    into = following(linear_state())
    run(into, overflow_at([3, 4]), images=80)
    assert into.levels.seen == 64  # of ten steps, two were refused
    straight, broken = following(state()), following(state())
    run(straight, microbatch=3)
    run(broken, diary=Diary(stop_at=4), microbatch=3)
    saved = json.loads(json.dumps(broken.progress()))
    again = following(state())
    again.load_progress(saved)
    assert again.levels.state_dict() == broken.levels.state_dict()
    run(broken, microbatch=3)
    assert broken.levels.state_dict() == straight.levels.state_dict() != saved["levels"]
    broken.roll_back_to(saved)
    assert broken.levels.state_dict() == saved["levels"]
    del saved["levels"]  # as in checkpoints of before
    again.load_progress(saved)
    assert again.levels.seen == 0


def test_states_with_and_without_levels_take_over_and_go_back_to_each_other():
    plain, followed = state(), following(state())
    for into in (plain, followed):
        run(into)
    saved = [json.loads(json.dumps(into.progress())) for into in (plain, followed)]
    assert saved[0].pop("levels") is None
    assert saved[1].pop("levels")["seen"] == 80
    assert saved[0] == saved[1]  # it is only watched here
    for into in (plain, followed):
        for other in (plain, followed):
            into.load_progress(other.progress())
            into.roll_back_to(other.progress())
            assert into.seen == 80
        into.adopt_settings({"training": "a", "repeat": "a", "measure": "a", "objective": "a"})
    assert plain.levels is None
    assert followed.levels.seen == 0


def test_what_counts_a_step_takes_few_operations_however_many_weights_there_are():
    torch.manual_seed(0)
    deep = nn.Sequential(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(40)))
    for model in (nn.Conv2d(1, 1, 3, padding=1), deep):
        into = state(model)
        run(into, images=8)
        loss = denoising(model, torch.zeros(8, 1, 4, 4), None).detached()
        with Operations() as plain:
            advance(into, 8, True, [loss])
        with Operations() as followed:
            advance(following(into), 8, True, [loss])
        assert plain.count <= 11  # one for the average, ten for the window
        assert plain.count < followed.count <= 30


def test_levels_are_forgotten_where_the_loss_is_another():
    into = following(linear_state())
    into.adopt_settings({"training": "a", "repeat": "a", "measure": "a", "objective": "a"})
    run(into)
    into.adopt_settings(
        {"training": "b", "repeat": "b", "measure": "b", "objective": "a"}
    )  # another learning rate, say
    assert into.levels.seen == 80
    into.adopt_settings({"training": "c", "repeat": "c", "measure": "b", "objective": "b"})  # another weighting
    assert into.levels.seen == 0


def test_log_window_and_guard_measure_the_error_and_not_what_was_made_of_it():
    """Weights by level or importance change what is learned from a step, not what is said of it."""
    weighed, plain = following(linear_state()), following(linear_state())

    def uneven(model, x0, conditions):
        loss = denoising(model, x0, conditions)
        importance = 0.5 + loss.u
        error = loss.per_image.detach()
        return loss._replace(per_image=1e-3 * loss.per_image * importance, error=error, importance=importance)

    cases = ((weighed, uneven), (plain, denoising))
    said = [run(into, loss, every=Intervals(1, 0, 0, 0), images=8) for into, loss in cases]
    assert weighed.guard.recent == plain.guard.recent
    assert torch.equal(weighed.levels.sums, plain.levels.sums)
    records = [diary.records[0][2] for diary in said]
    assert records[0]["loss"] == pytest.approx(records[1]["loss"], rel=0.5)
    assert records[0]["loss"] != records[1]["loss"]  # a mean over even levels, from uneven ones
    for one, other in zip(records[0]["loss_by_level"], records[1]["loss_by_level"]):
        assert (one is None) == (other is None)
    assert records[0]["gradient_norm"] < 0.01 * records[1]["gradient_norm"]


def test_patience_ends_in_a_roll_back_and_roll_backs_in_a_diagnosis():
    into = linear_state()
    diary = with_good_weights(into)
    with pytest.raises(RunError, match=r"diverged 3 times.*step 9.*--lr"):
        run(into, overflow_at(range(100)), diary, patience=3, rollbacks=2)
    assert len(diary.roll_backs) == 3
    assert into.guard.lr_scale == 1 / 8
    assert diary.saved == [9]
    assert torch.equal(weights(into), torch.cat([t.flatten() for t in diary.good.values()]))
    forgiving = linear_state()
    diary = run(forgiving, overflow_at([0, 1, 3, 4, 6, 7]), patience=3)
    assert forgiving.updates == 4
    assert not diary.roll_backs


def test_only_the_first_of_several_refusals_in_a_row_is_looked_into():
    diary = run(linear_state(), scaled_at([2, 3, 4, 6], math.nan), images=64)
    assert [(step, culprit and culprit.phase) for step, _, culprit in diary.refusals] == [
        (3, "loss"),
        (4, None),
        (5, None),
        (7, "loss"),
    ]


def test_weights_that_are_not_finite_get_no_patience():
    into = linear_state()
    diary = with_good_weights(into)
    with torch.no_grad():
        into.model.weight[0, 0, 1, 1] = math.nan
    run(into, diary=diary, images=16)
    assert len(diary.roll_backs) == 1
    assert "weight" in diary.roll_backs[0]
    assert weights(into).isfinite().all()
    assert into.seen == 16


def test_weights_that_an_update_spoils_are_never_saved():
    into = linear_state()
    diary = with_good_weights(into)
    finite = []
    diary.save = lambda state, for_best=False: finite.append(state.non_finite())

    class Exploding(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            if into.updates == 4:
                into.model.weight.data.fill_(math.inf)

    into.optimizer = Exploding(into.model.parameters(), lr=1e-3)
    run(into, diary=diary, images=40, every=NEVER._replace(checkpoint=5))
    assert finite == [None]
    assert len(diary.roll_backs) == 1
    assert "model: weight was not finite" in diary.roll_backs[0]


def test_a_batch_that_weighs_nothing_is_no_trouble():
    into = linear_state()

    def weightless(model, x0, conditions):
        loss = reconstruction(model, x0, conditions)
        return loss._replace(per_image=loss.per_image * 0, null_loss=loss.null_loss * 0)

    diary = run(into, weightless)
    assert not diary.refusals
    assert into.updates == 10


@pytest.mark.slow
def test_a_spike_that_passes_is_chance_and_one_that_stays_is_rolled_back():
    into = linear_state()
    diary = with_good_weights(into)
    run(into, scaled_at(range(20, 24), 1e3), diary, images=240, patience=5)
    assert not diary.roll_backs
    assert into.guard.anomalous == 0
    into = linear_state()
    diary = with_good_weights(into)
    run(into, scaled_at(range(20, 25), 1e3), diary, images=240, patience=5, every=NEVER._replace(log=1))
    assert len(diary.roll_backs) == 1
    assert "all-zero output" in diary.roll_backs[0]
    assert into.seen == 240
    rates = [record["lr"] for _, _, record in diary.records]
    assert rates[24] == pytest.approx(1e-2)
    assert rates[25:] == pytest.approx([5e-3] * 5)


def test_guard_knows_what_is_usual():
    guard = DivergenceGuard()
    assert guard.update(1.9)
    assert not guard.update(2.1), "worse than no answer, whatever came before"
    guard = DivergenceGuard()
    for i in range(64):
        assert guard.update(0.1 + 0.001 * (i % 5))
    assert guard.update(0.149)
    assert not guard.update(0.16)
    assert guard.anomalous == 1
    assert not guard.update(math.nan)
    assert (guard.anomalous, guard.skipped) == (2, 1)
    assert guard.update(0.1)
    assert (guard.anomalous, guard.skipped) == (0, 0)
    noisy = DivergenceGuard()
    for i in range(64):
        noisy.update(0.1 + 0.05 * (i % 5))
    assert noisy.update(0.3), "half as much again is nothing if the loss jumps that much by itself"
    again = DivergenceGuard()
    again.load_state_dict(guard.state_dict())
    assert again == guard


@pytest.mark.parametrize("damage", [{"recent": [math.nan]}, {"recent": None}, {"recent": ["high"]}])
def test_a_damaged_state_leaves_the_guard_as_it_was(damage):
    guard = DivergenceGuard(recent=[0.5], ordinary=1, roll_backs=2)
    before = guard.state_dict()
    with pytest.raises((ValueError, TypeError)):
        guard.load_state_dict(DivergenceGuard(ordinary=7).state_dict() | damage)
    with pytest.raises(KeyError):
        guard.load_state_dict({"recent": [], "strange": 9})
    assert guard.state_dict() == before


def test_overflow_of_the_scale_is_told_apart_from_divergence():
    into = linear_state("fp16")
    diary = run(into, every=NEVER._replace(log=10))
    assert diary.records[-1][2]["overflows"] == 1  # the scale begins too high here
    assert diary.records[-1][2]["refused"] == 0
    assert not diary.refusals
    poisoned = linear_state("fp16")
    diary = run(poisoned, overflow_at([4, 5]), every=NEVER._replace(log=10))
    assert len(diary.refusals) == 2
    assert diary.records[-1][2]["overflows"] == 1


@pytest.mark.parametrize("where", ["evaluate", "preview", "save", "second micro-batch"])
def test_interrupted_anywhere_and_continued_says_and_learns_the_same(where):
    every = Intervals(log=2, preview=3, evaluate=3, checkpoint=3)

    class Hasty(Diary):
        """Leaves once, in the middle of something."""

        interrupted = False

        def leave(self, at):
            self.events.append(at)
            if at == where and not self.interrupted and self.step >= 3:
                self.interrupted = True
                self.events.pop()
                raise Interrupted

        def evaluate(self, state):
            self.leave("evaluate")
            return {"held_out_loss": 1.0}

        def preview(self, state):
            self.leave("preview")

        def save(self, state, for_best=False):
            self.leave("save")

        def stop_requested(self):
            self.polls = getattr(self, "polls", 0) + 1
            if where == "second micro-batch" and self.polls == 17:
                self.interrupted = True
                raise Interrupted
            return False

    straight, broken = linear_state(), linear_state()
    calm, hasty = Diary(), Hasty()
    calm.evaluate = lambda state: calm.events.append("evaluate") or {"held_out_loss": 1.0}
    calm.preview = lambda state: calm.events.append("preview")
    calm.save = lambda state, for_best=False: calm.events.append("save")
    run(straight, diary=calm, every=every, microbatch=3)
    run(broken, diary=hasty, every=every, microbatch=3)
    assert hasty.interrupted
    assert broken.seen < 80
    assert all(p.grad is None for p in broken.model.parameters())
    run(broken, diary=hasty, every=every, microbatch=3)
    assert torch.equal(weights(straight), weights(broken))
    saved = ["save"] if where == "save" else []  # whoever stops in a save, saves
    assert sorted(hasty.events + saved) == sorted(calm.events)
    clock = ("images_per_second", "data_wait")
    said = [[(s, {k: v for k, v in r.items() if k not in clock}) for s, _, r in d.records] for d in (calm, hasty)]
    assert said[0] == said[1]
    assert straight.progress() == broken.progress()


def test_gradient_norm_is_logged_before_clipping_and_clipping_bounds_the_step():
    free, clipped = linear_state(), linear_state()
    logs = [
        run(s, reconstruction, clip=c, images=8, every=Intervals(1, 0, 0, 0)) for s, c in ((free, 0), (clipped, 1e-3))
    ]
    norms = [diary.records[0][2]["gradient_norm"] for diary in logs]
    assert norms[0] == norms[1] > 1e-2
    momentum = [torch.cat([s["exp_avg"].flatten() for s in x.optimizer.state.values()]).norm() for x in (free, clipped)]
    assert momentum[0] == pytest.approx(0.1 * norms[0], rel=1e-3)
    assert momentum[1] == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_log_window_is_the_mean_since_the_last_log_and_by_level():
    into = linear_state()
    seen = []

    def spy(model, x0, conditions):
        loss = denoising(model, x0, conditions)
        seen.append((loss.per_image.detach(), loss.u))
        return loss

    diary = run(into, spy, every=Intervals(5, 0, 0, 0), microbatch=3)
    assert [r[0] for r in diary.records] == [5, 10]
    half = len(seen) // 2
    losses = torch.cat([p for p, _ in seen[:half]]).double()
    levels = torch.cat([u for _, u in seen[:half]])
    record = diary.records[0][2]
    assert record["loss"] == pytest.approx(losses.mean().item())
    for k, value in enumerate(record["loss_by_level"]):
        inside = (levels * 10).long() == k
        assert value == (pytest.approx(losses[inside].mean().item()) if inside.any() else None)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_follows_fp32(precision):
    full, low = linear_state(), linear_state(precision)
    run(full), run(low)
    # fp16 begins with a scale that overflows here, and refuses that first step: the scaler's ordinary business.
    assert low.updates == (10 if precision == "bf16" else 9)
    assert all(p.dtype == torch.float32 for p in low.model.parameters())
    torch.testing.assert_close(weights(low), weights(full), atol=2e-2 if precision == "bf16" else 3e-2, rtol=0)
    assert not torch.equal(weights(low), weights(full))


def test_learning_rate_schedules():
    constant = Optimizer(lr=1.0, warmup=4)
    assert [constant.learning_rate(s, 100) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = replace(constant, schedule="cosine")
    assert cosine.learning_rate(4, 100) == 1.0
    assert cosine.learning_rate(52, 100) == pytest.approx(0.5)
    assert cosine.learning_rate(99, 100) < 1e-3
    root = replace(constant, schedule="inverse-sqrt")
    assert root.learning_rate(3, 100) == 1.0
    assert root.learning_rate(15, 100) == pytest.approx(0.5)


@pytest.mark.parametrize(("width", "gamma"), [(0.05, 16.97), (0.10, 6.94)])
def test_power_ema_has_the_exponents_of_edm2(width, gamma):
    assert PowerEma(width).gamma == pytest.approx(gamma, abs=0.01)


def test_power_ema_weighs_updates_by_a_power_of_their_number():
    # Solved for the weight of each update, the recurrence gives about (k / n)^gamma (EDM2, eq. 124).
    profile, n = PowerEma(0.1), 2000
    weight = torch.zeros(n, dtype=torch.float64)
    for update in range(1, n + 1):
        decay = profile.decay(update)
        weight *= decay
        weight[update - 1] = 1 - decay
    assert weight.sum() == pytest.approx(1)
    position = (torch.arange(n) + 1) / n
    mean = (weight * position).sum()
    assert ((weight * (position - mean) ** 2).sum()).sqrt() == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("profile", [PowerEma(), FixedEma(0.9), FixedEma(0.9999)])
def test_ema_equals_its_recurrence_and_copies_buffers(profile):
    into = state(ema=profile)
    expected = [p.detach().double().clone() for p in into.model.parameters()]
    for update in range(1, 12):
        with torch.no_grad():
            for p in into.model.parameters():
                p += torch.randn_like(p)
            into.model[1].running_mean += 1
        into.ema.update(update)
        decay = profile.decay(update)
        expected = [decay * e + (1 - decay) * p.double() for e, p in zip(expected, into.model.parameters())]
    for mine, reference in zip(into.ema.parameters, expected):
        torch.testing.assert_close(mine.double(), reference, rtol=1e-5, atol=1e-6)
    assert torch.equal(into.ema.buffers[0], into.model[1].running_mean)


def test_fixed_ema_warms_up_and_ends_at_its_decay():
    assert FixedEma(0.9999).decay(1) == pytest.approx(2 / 11)
    assert FixedEma(0.9999).decay(10**6) == 0.9999
    late = 1 - 0.9999**10_000  # what its last 10,000 updates weigh; the last 5,000 do not weigh 63%
    assert late == pytest.approx(1 - 1 / math.e, abs=1e-4)
    assert pytest.approx(0.39, abs=0.01) == 1 - 0.9999**5_000


def test_swapping_the_average_in_always_gives_the_weights_back():
    into = state()
    run(into)
    raw = {k: v.clone() for k, v in into.model.state_dict().items()}
    mine = into.ema.state_dict(into.model)
    with suppress(ZeroDivisionError), into.ema.swapped_into(into.model):
        assert not torch.equal(weights(into), torch.cat([raw[n].flatten() for n, _ in into.model.named_parameters()]))
        for name, tensor in into.model.state_dict().items():
            assert torch.equal(tensor, mine[name])
        _ = 1 / 0
    for name, tensor in into.model.state_dict().items():
        assert torch.equal(tensor, raw[name])
    fresh, model = Ema(network(), PowerEma()), network()
    with fresh.swapped_into(model):
        model.load_state_dict(mine)
    assert all(torch.equal(fresh.state_dict(model)[k], v) for k, v in mine.items())


def test_pixels_reach_the_network_in_minus_one_to_one():
    x = BYTES.to_model(torch.tensor([0, 255, 127, 128], dtype=torch.uint8))
    assert x.dtype == torch.float32
    assert x.tolist() == pytest.approx([-1, 1, -1 / 255, 1 / 255], abs=1e-6)


def test_what_is_due_after_a_step():
    every = Intervals(log=5, preview=0, evaluate=10, checkpoint=4)
    assert every.due(3, last=False) == []
    assert every.due(10, last=False) == ["evaluate", "log"]
    assert every.due(20, last=False) == ["evaluate", "log", "save"]
    assert every.due(21, last=True) == ["evaluate", "log", "preview", "save"]
    assert "evaluate" not in every._replace(evaluate=-1).due(10, last=True)


@pytest.mark.parametrize("wrong", [{"batch": -1}, {"microbatch": 9, "batch": 8}, {"steps": -1}])
def test_settings_that_train_on_nothing_are_refused(wrong):
    with pytest.raises(RequestError):
        Training(**wrong)


@pytest.mark.slow
def test_the_noise_scale_does_not_see_the_loss_scale():
    records = []
    for precision in ("fp32", "fp16"):
        diary = run(linear_state(precision), denoising, Diary(), Intervals(10, 0, 0, 0), microbatch=2)
        records.append(diary.records[0][2])
    for name in ("gradient_signal", "gradient_noise"):
        assert records[1][name] == pytest.approx(records[0][name], rel=0.5)


def test_another_choice_forgets_the_best_so_far():
    into, keys = state(), {"training": "a", "repeat": "a", "measure": "a"}
    into.adopt_settings(keys)
    into.best = 0.3  # of the held-out loss
    into.adopt_settings(keys | {"best": "kid:one"})
    assert into.best is None
    assert into.update_best({"kid": 0.7})
    into.adopt_settings(keys | {"best": "kid:one"})
    assert into.best == 0.7
    into.adopt_settings(keys | {"best": "kid:another"})
    assert into.best is None


def test_what_was_not_measured_is_never_the_best():
    into = state()
    assert not into.update_best({"loss": 1.0})
    assert not into.update_best({"held_out_loss": math.nan})
    assert [into.update_best({"held_out_loss": value}) for value in (0.5, 0.6, math.nan, 0.4)] == [
        True,
        False,
        False,
        True,
    ]
    assert into.best == 0.4


def test_the_log_weighs_uneven_levels_as_even_ones():
    window, u = LogWindow(CPU), torch.tensor([0.05, 0.06, 0.95])
    loss, importance = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([2.0, 0.5, 1.0])
    window.add(loss, u, importance)
    record = window.close()
    assert record["loss"] == pytest.approx((2 * 1 + 0.5 * 2 + 6) / 3.5)
    assert record["loss_by_level"] == [pytest.approx(3 / 2.5), *[None] * 8, 6.0]


def test_the_stopwatch_counts_what_is_training(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watch = Stopwatch()
    for seconds, images in ((3, 60), (2, 20)):
        now[0] += seconds
        with watch.exclude():  # a preview
            now[0] += 50
        now[0] += 1
        watch.images, watch.data_wait = images, 0.5
        assert watch.lap() == {"images_per_second": images / (seconds + 1), "data_wait": 0.5 / (seconds + 1)}


def test_an_overflow_that_no_scale_helps_is_refused():
    """From 65,536 the scale is halved sixteen times; what is infinite after that is so for another reason."""

    def steep(model, x0, conditions):
        per_image = (model(x0) * 0).square().sum((1, 2, 3)).sqrt()  # 0, and its slope is none
        return Loss(per_image + 0.5, torch.full((len(x0),), 0.5), torch.ones(len(x0)))

    into = linear_state("fp16")
    diary = run(into, steep, images=8 * 20, patience=100)
    assert [place for place, _, _ in diary.refusals] == [17, 18, 19, 20]
    assert into.updates == 0


def test_the_guard_remembers_the_last_steps_alone():
    """And a checkpoint stays small: the file that it is in may have a megabyte."""
    guard = DivergenceGuard()
    for i in range(200):
        guard.update(0.1 + 1e-4 * i)
    assert guard.recent == pytest.approx([0.1 + 1e-4 * i for i in range(136, 200)])


def test_twice_the_loss_of_no_answer_is_never_ordinary():
    guard = DivergenceGuard()
    for _ in range(64):
        guard.update(1.5)
    assert guard.update(1.9)
    assert not guard.update(2.1)


def test_refused_steps_are_counted_by_window():
    diary = run(linear_state(), overflow_at([1]), images=64, every=Intervals(4, 0, 0, 0))
    assert [record["refused"] for _, _, record in diary.records] == [1, 0]


def test_what_is_better_than_ever_is_kept_between_checkpoints_too():
    losses, saved, diary = iter([0.9, 0.5, 0.7, 0.4, 0.6, 0.3, 0.35, 0.8]), [], Diary()
    diary.evaluate = lambda state: {"held_out_loss": next(losses)}
    diary.save = lambda state, for_best=False: saved.append((state.seen // 8, for_best))
    run(linear_state(), diary=diary, every=NEVER._replace(evaluate=1, checkpoint=4), images=64)
    assert saved == [(1, True), (2, True), (4, False), (6, True), (8, False)]
