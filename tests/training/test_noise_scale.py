"""The gradient noise scale: exact where the answer is known, and what a log window keeps of it."""

import itertools
import json
import math

import pytest
import torch
from torch import nn

from unfog.diffusion.objective import Loss
from unfog.training.gradient import _squared_gradient_norm  # compared with its equation
from unfog.training.precision import Precision
from unfog.training.settings import Optimizer, PowerEma
from unfog.training.state import TrainState
from unfog.training.statistics import _NoiseScale, batch_advice, noise_scale  # compared with its equation

CPU = torch.device("cpu")


def fed(steps, part: int, whole: int) -> dict:
    """What a window of steps comes to; a step is the gradient of each image, float64 [whole, D]."""
    window = _NoiseScale(CPU)
    window.sums = window.sums.double()
    for step in steps:
        first = step[:part].sum(0) / whole  # what .grad holds after the first pass
        window.add(first.square().sum(), part, step.mean(0).square().sum(), whole)
    return window.close()


def test_average_over_all_possible_batches_is_exact():
    # Four images with known gradients, batches of 3 with a first pass of 1 or 2: all 64 of them, each once.
    gradients = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0], [-0.5, 1.5]], dtype=torch.float64)
    mean = gradients.mean(0)
    signal, noise = float(mean.square().sum()), float((gradients - mean).square().sum() / 4)
    for part in (1, 2):
        batches = [gradients[list(index)] for index in itertools.product(range(4), repeat=3)]
        found = fed(batches, part, 3)
        assert found["gradient_signal"] == pytest.approx(signal, rel=1e-12)
        assert found["gradient_noise"] == pytest.approx(noise, rel=1e-12)
        assert found["noise_scale"] == pytest.approx(noise / signal, rel=1e-12)


@pytest.mark.slow
def test_known_gradient_and_covariance():
    # G = (1, …, 1) / 2 in 16 dimensions, Sigma = diag(1, …, 16): |G|^2 = 4, tr(Sigma) = 136, ratio 34.
    generator = torch.Generator().manual_seed(0)
    deviation = torch.arange(1.0, 17.0, dtype=torch.float64).sqrt()
    drawn = torch.randn(2000, 12, 16, generator=generator, dtype=torch.float64)
    found = fed(0.5 + deviation * drawn, 4, 12)
    # In 2,000 steps of 12 images the standard error of both parts is below 2%.
    assert found["gradient_signal"] == pytest.approx(4, rel=0.06)
    assert found["gradient_noise"] == pytest.approx(136, rel=0.06)
    assert found["noise_scale"] == pytest.approx(34, rel=0.1)


class Line(nn.Module):
    """A network so small that every image's gradient can be had."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1)).double()

    def forward(self, x):
        return self.body(x)


def line() -> TrainState:
    torch.manual_seed(0)
    return TrainState(Line(), Optimizer(lr=1e-3), PowerEma(), Precision("fp32", CPU))


def losses(state: TrainState, x: torch.Tensor) -> Loss:
    per_image = (state.model(x).squeeze(1) - x.sum(1)).square()
    return Loss(per_image, torch.full_like(per_image, 0.5), torch.ones_like(per_image))


def truth(state: TrainState, images: torch.Tensor) -> tuple[float, float]:
    """|G|^2 and tr(Sigma) from the gradient of each image."""
    rows = []
    for image in images:
        parts = torch.autograd.grad(losses(state, image[None]).per_image.sum(), list(state.model.parameters()))
        rows.append(torch.cat([part.flatten() for part in parts]))
    gradients = torch.stack(rows)
    mean = gradients.mean(0)
    return float(mean.square().sum()), float((gradients - mean).square().sum() / len(images))


def test_accumulated_gradients_of_a_network_agree_with_those_of_each_image():
    state = line()
    images = torch.randn(4, 3, dtype=torch.float64)
    window = _NoiseScale(CPU)
    window.sums = window.sums.double()
    for index in itertools.product(range(4), repeat=3):
        state.optimizer.zero_grad()
        for start, stop in ((0, 2), (2, 3)):  # as the loop does: sums over the whole batch's size
            (losses(state, images[list(index[start:stop])]).per_image.sum() / 3).backward()
            if start == 0:
                part = _squared_gradient_norm(state.optimizer)
        window.add(part, 2, _squared_gradient_norm(state.optimizer), 3)
    found, (signal, noise) = window.close(), truth(state, images)
    assert found["gradient_signal"] == pytest.approx(signal, rel=1e-9)
    assert found["gradient_noise"] == pytest.approx(noise, rel=1e-9)


def test_window_begins_anew_and_survives_a_resume_to_the_bit():
    torch.manual_seed(0)
    squares = torch.rand(6, 2).tolist()
    whole, resumed = _NoiseScale(CPU), _NoiseScale(CPU)
    for i, (part, all_of_it) in enumerate(squares):
        whole.add(torch.tensor(part), 3, torch.tensor(all_of_it), 8)
        if i == 3:
            resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        elif i > 3:
            resumed.add(torch.tensor(part), 3, torch.tensor(all_of_it), 8)
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.close() == whole.close() != {}
    assert whole.close() == {}  # and nothing is said of a window without any step
    for window in (whole, fresh := _NoiseScale(CPU)):
        window.add(torch.tensor(2.0), 3, torch.tensor(5.0), 8)
    assert whole.close() == fresh.close()  # nor is anything left of the one before


def test_gradient_that_drowns_has_no_scale_but_its_parts_are_kept():
    window = _NoiseScale(CPU)
    # The mean gradient of 2 is ten times as long as that of 4: more than noise alone makes it.
    window.add(torch.tensor(25.0), 2, torch.tensor(1.0), 4)
    record = window.close()
    assert record["noise_scale"] is None
    assert record["gradient_signal"] < 0 < record["gradient_noise"]
    # With a window that saw something, it counts for what it is.
    other = {"gradient_signal": 1000.0, "gradient_noise": 500.0}
    pooled = (record["gradient_noise"] + 500) / (record["gradient_signal"] + 1000)
    assert noise_scale([record, {"loss": 1.0}, other]) == pytest.approx(pooled)
    assert noise_scale([]) is None
    assert noise_scale([{"loss": 1.0}]) is None


def test_advice_follows_the_two_laws():
    # At the noise scale itself: twice the fewest steps and twice the fewest images; doubling gives 1.5 and 3.
    text = batch_advice(64, 64)
    assert "teaches 50%" in text
    assert "batch 128 would need 25% fewer steps, and 50% more images" in text
    assert "batch 8 would need 47% fewer images, and 6% more steps" in batch_advice(1.0, 16)
    assert "teaches 98%" in batch_advice(2800.4, 64)
    assert "about 2,800 images" in batch_advice(2800.4, 64)
    assert "would" not in batch_advice(0.5, 1)  # there is no smaller batch
    assert math.isfinite(len(batch_advice(0.0, 64)))
