"""The loop and what it is made of: exact means, refused steps, averages, precision, schedules."""

import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

from unfog.errors import RequestError, RunError
from unfog.training.ema import Ema
from unfog.training.loop import Every, crossed, micro_batches, seed_at, to_model_range, train
from unfog.training.precision import Precision
from unfog.training.settings import FixedEma, Optimizer, PowerEma, Training, learning_rate
from unfog.training.state import TrainState

CPU = torch.device("cpu")
NEVER = Every(0, 0, 0, 0)


class Images:
    """A stream of eight fixed images."""

    def __init__(self):
        self.all = torch.randint(0, 256, (8, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    def batch(self, first, size):
        index = torch.arange(first, first + size) % 8
        return type("Batch", (), {"pixels": self.all[index], "label": index % 3})


class Diary:
    """A run that keeps what the loop says."""

    def __init__(self, stop_at=None):
        self.records, self.refusals, self.stop_at, self.step = [], [], stop_at, 0

    def log(self, step, images, record):
        self.records.append((step, images, record))

    def refused(self, step, images, norm):
        self.refusals.append((step, norm))

    def advance(self, step):
        self.step = step

    def stop_requested(self):
        return self.step == self.stop_at

    def preview(self, state): ...

    def evaluate(self, state):
        return {}

    def save(self, state): ...


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))


def state(model=None, precision="fp32", ema=None, **optimizer):
    return TrainState(model or network(), Optimizer(**optimizer), ema or PowerEma(), Precision(precision, CPU))


def linear_state(precision="fp32"):
    torch.manual_seed(0)
    return state(nn.Conv2d(1, 1, 3, padding=1), precision, lr=1e-2)


def reconstruction(model, x0, label):
    """Squared error of reproducing the input; no randomness, so it does not depend on how a batch is cut."""
    return (model(x0) - x0).square().mean((1, 2, 3)), torch.full((len(x0),), 0.5)


def denoising(model, x0, label):
    u = torch.rand(len(x0))
    noisy = x0 + torch.randn_like(x0) * u[:, None, None, None]
    return (model(noisy) - x0).square().mean((1, 2, 3)), u


def run(into, loss=denoising, diary=None, every=NEVER, **settings):
    diary = diary or Diary()
    settings = Training(**{"batch": 8, "images": 80, "precision": "fp32"} | settings)
    train(settings, Optimizer(lr=1e-2), every, into, Images(), lambda x: x, loss, diary)
    return diary


def weights(of):
    return torch.cat([p.detach().flatten() for p in of.model.parameters()])


@pytest.mark.parametrize("microbatch", [1, 3, 4, 5, 7])
def test_gradient_is_the_exact_mean_however_the_batch_is_cut(microbatch):
    whole, cut = linear_state(), linear_state()
    run(whole, reconstruction)
    run(cut, reconstruction, microbatch=microbatch)
    torch.testing.assert_close(weights(cut), weights(whole), rtol=1e-5, atol=1e-6)


def test_micro_batches_cover_the_batch_once():
    assert list(micro_batches(64, 8, 3)) == [(64, 3), (67, 3), (70, 2)]


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
            seed_at(seed, position)
            draws[seed, position] = torch.randn(8)
            torch.rand(5)
            seed_at(seed, position)
            assert torch.equal(draws[seed, position], torch.randn(8))
    assert len({tuple(d.tolist()) for d in draws.values()}) == len(draws)


def overflow_at(step, inner=denoising):
    """A loss that is infinite in one step of batch 8."""
    calls = iter(range(10**6))

    def loss(model, x0, label):
        per_image, u = inner(model, x0, label)
        return (per_image * math.inf if next(calls) in step else per_image), u

    return loss


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_refused_step_leaves_everything_but_the_position(precision):
    into = linear_state(precision)
    run(into, images=24)
    before = weights(into).clone(), [e.clone() for e in into.ema.parameters], into.updates
    moments = [s["exp_avg"].clone() for s in into.optimizer.state.values()]
    scale = into.precision.scaler.get_scale()
    diary = run(into, overflow_at([0]), images=32)
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
    diary = run(into, overflow_at([1]), images=32, every=Every(4, 0, 0, 0))
    (_, _, record) = diary.records[0]
    assert math.isfinite(record["loss"])
    assert record["refused"] == 1


def test_gives_up_after_patience_refusals_in_a_row():
    into = linear_state()
    with pytest.raises(RunError, match=r"not finite in 3 steps in a row.*--lr"):
        run(into, overflow_at(range(100)), patience=3)
    assert weights(into).isfinite().all()
    forgiving = linear_state()
    run(forgiving, overflow_at([0, 1, 3, 4, 6, 7]), patience=3)
    assert forgiving.updates == 4


def test_gradient_norm_is_logged_before_clipping_and_clipping_bounds_the_step():
    free, clipped = linear_state(), linear_state()
    logs = [run(s, reconstruction, clip=c, images=8, every=Every(1, 0, 0, 0)) for s, c in ((free, 0), (clipped, 1e-3))]
    norms = [diary.records[0][2]["gradient_norm"] for diary in logs]
    assert norms[0] == norms[1] > 1e-2
    momentum = [torch.cat([s["exp_avg"].flatten() for s in x.optimizer.state.values()]).norm() for x in (free, clipped)]
    assert momentum[0] == pytest.approx(0.1 * norms[0], rel=1e-3)
    assert momentum[1] == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_log_window_is_the_mean_since_the_last_log_and_by_level():
    into = linear_state()
    seen = []

    def spy(model, x0, label):
        per_image, u = denoising(model, x0, label)
        seen.append((per_image.detach(), u))
        return per_image, u

    diary = run(into, spy, every=Every(5, 0, 0, 0), microbatch=3)
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
    assert [learning_rate(constant, s, 100) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = replace(constant, schedule="cosine")
    assert learning_rate(cosine, 4, 100) == 1.0
    assert learning_rate(cosine, 52, 100) == pytest.approx(0.5)
    assert learning_rate(cosine, 99, 100) < 1e-3
    root = replace(constant, schedule="inverse-sqrt")
    assert learning_rate(root, 3, 100) == 1.0
    assert learning_rate(root, 15, 100) == pytest.approx(0.5)


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
        into.ema.update(into.model, update)
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
    x = to_model_range(torch.tensor([0, 255, 127, 128], dtype=torch.uint8))
    assert x.dtype == torch.float32
    assert x.tolist() == pytest.approx([-1, 1, -1 / 255, 1 / 255], abs=1e-6)


def test_crossed():
    assert crossed(10, 8, 16)
    assert crossed(10, 9, 10)
    assert not crossed(10, 10, 19)
    assert not crossed(0, 0, 100)
    assert not crossed(-8, 0, 100)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"microbatch": 9, "batch": 8}, {"steps": -1}])
def test_settings_that_train_on_nothing_are_refused(wrong):
    with pytest.raises(RequestError):
        Training(**wrong)
