"""Guidance with a weight for each condition, against conditional Gaussians that are known in closed form."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from gaussians import LinearGaussian
from unfog.diffusion.denoiser import Denoiser, Guided, GuidedInTurn
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VE, LogNormal
from unfog.diffusion.sampler import Sampler
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.condition_requests import passes
from unfog.values.conditions import Conditions

NAN = float("nan")
FORMAT = ConditionFormat(columns=tuple(ColumnFacts(name, "number", statistics=(0.0, 1.0, -3.0, 3.0)) for name in "abc"))
PATTERNS = torch.tensor([[1.0, 0.5, 0.0, 0.2], [0.3, -1.0, 0.4, 0.0], [0.0, 0.2, 0.6, -0.7]], dtype=torch.float64)
CORRELATED = torch.tensor([[1.0, 0.6, 0.1], [0.6, 1.0, -0.3], [0.1, -0.3, 1.0]], dtype=torch.float64)
EXACT = LinearGaussian(PATTERNS, CORRELATED, 0.3)
TOLD = Conditions(numbers=torch.tensor([[0.7, -1.1, 0.4], [1.5, 0.2, NAN]], dtype=torch.float64))
LEVELS = torch.tensor([-1.0, 1.5], dtype=torch.float64)


def noisy() -> Tensor:
    return torch.randn(2, 1, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def guided(exact, told=TOLD, **weights: float) -> Tensor:
    scale = FORMAT.guidance(tuple(weights.items()))
    if not isinstance(scale, tuple):
        return (Guided(exact, scale) if scale != 1 else exact)(noisy(), LEVELS, told)
    return GuidedInTurn(exact, FORMAT.turns(scale))(noisy(), LEVELS, told)


def hidden(*names: str) -> Conditions:
    numbers = TOLD.numbers.clone()
    numbers[:, ["abc".index(name) for name in names]] = NAN
    return TOLD._replace(numbers=numbers)


def test_weights_of_one_and_zero_and_equal_weights_are_what_they_say():
    x = noisy()
    plain = EXACT(x, LEVELS, TOLD)
    assert torch.equal(guided(EXACT, a=1, b=1, c=1), plain)
    assert torch.equal(guided(EXACT, a=2, b=2, c=2), Guided(EXACT, 2.0)(x, LEVELS, TOLD))
    assert torch.equal(guided(EXACT, a=2, b=1), guided(EXACT, a=2)), "a condition without a weight has 1"
    assert torch.equal(guided(EXACT, a=2, b=3), guided(EXACT, b=3, a=2)), "their order has no effect"
    torch.testing.assert_close(guided(EXACT, a=0), EXACT(x, LEVELS, hidden("a")))
    torch.testing.assert_close(guided(EXACT, a=0, b=0, c=0), EXACT(x, LEVELS, hidden("a", "b", "c")))
    # 0 is as if it were not told.
    torch.testing.assert_close(guided(EXACT, a=2, b=0), guided(EXACT, hidden("b"), a=2))
    part = EXACT(x, LEVELS, hidden("a"))
    torch.testing.assert_close(guided(EXACT, a=3), part + 3 * (plain - part))
    # The second image is not told c, so that a weight of it changes the first one alone.
    assert not torch.allclose(guided(EXACT, c=5)[0], plain[0])
    torch.testing.assert_close(guided(EXACT, c=5)[1], plain[1])


def test_weights_that_meet_change_the_output_continuously():
    for one, other in ((2.0, 2.0), (0.5, 0.5)):
        below, above = (guided(EXACT, a=one, b=other + change) for change in (-1e-9, 1e-9))
        torch.testing.assert_close(below, above, atol=1e-7, rtol=0)


def log_density(x: Tensor, level: Tensor, told: list[float], of: int | None = None) -> Tensor:
    """Log of p(x | told) of a noisy image [4], or with `of`, of p(z_of | x, the others told), by Bayes' rule alone."""
    noise = (EXACT.std**2 + (-level).exp()) * torch.eye(4, dtype=torch.float64)
    cross = CORRELATED @ PATTERNS
    joint = torch.cat([torch.cat([CORRELATED, cross], 1), torch.cat([cross.T, PATTERNS.T @ cross + noise], 1)])
    values = torch.cat([torch.tensor(told, dtype=torch.float64), x])
    known = [i for i, value in enumerate(told) if i != of and not math.isnan(value)]

    def log(*places: int) -> Tensor:
        index = list(places)
        part = joint[index][:, index]
        return MultivariateNormal(torch.zeros(len(index), dtype=torch.float64), part).log_prob(values[index])

    pixels = [3, 4, 5, 6]
    if of is None:
        return log(*known, *pixels) - (log(*known) if known else 0)
    return log(of, *known, *pixels) - log(*known, *pixels)


@pytest.mark.parametrize(("weights", "order"), [({"a": 2.0, "b": 5.0}, "ab"), ({"b": 4.0, "a": 0.5}, "ba")])
def test_it_is_the_score_of_the_density_with_weights_as_exponents(weights, order):
    """D = x + sigma^2 grad log p(x | c) p(first | x, c)^w p(second | x, c, first)^w, of conditions that correlate."""
    found = guided(EXACT, **weights)
    for i, x in enumerate(noisy().flatten(1)):
        x.requires_grad_()
        told = [NAN, NAN, float(TOLD.numbers[i, 2])]
        log = log_density(x, LEVELS[i], told)
        for name in order:
            place = "abc".index(name)
            told[place] = float(TOLD.numbers[i, place])
            log = log + weights[name] * log_density(x, LEVELS[i], told, of=place)
        (score,) = torch.autograd.grad(log, x)
        torch.testing.assert_close(found[i].flatten(), x.detach() + (-LEVELS[i]).exp() * score)


def test_samples_of_independent_conditions_have_the_mean_in_closed_form():
    """Two numbers, each of one pixel: S1 = std^2 with a number, S0 = 1 + std^2 without.

    In each pixel the ODE is 2 dx/du = w (x - m) / (S1 + u) + (1 - w) x / (S0 + u), u = sigma^2. For odd w = 2 k + 1
    its integral is elementary: with f = (S1 + u)^(w / 2) (S0 + u)^((1 - w) / 2), x / f at 0 and U differ by w m / 2
    times the integral of (S0 + u)^k (S1 + u)^(-k - 3 / 2).
    """
    std, first = 0.4, 80.0**2
    told, order = (0.8, -1.3), {"a": 3.0, "b": 5.0}
    exact = LinearGaussian(torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64), std)
    format = ConditionFormat(columns=FORMAT.columns[:2])
    conditions = Conditions(numbers=torch.tensor([told] * 3, dtype=torch.float64))
    denoise = GuidedInTurn(exact, format.turns(tuple(order.items())))
    noise = torch.randn(3, 1, 1, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sampler = Sampler("unipc", 300, "logsnr", clip=False)
    x = sampler(lambda x, logsnr: denoise(x, logsnr, conditions), VE(), LogNormal(), lambda: noise)
    few, many = std**2, 1 + std**2
    for pixel, (mean, weight) in enumerate(zip(told, order.values(), strict=True)):
        k = round((weight - 1) / 2)

        def f(u: float, w: float = weight) -> float:
            return (few + u) ** (w / 2) * (many + u) ** ((1 - w) / 2)

        def integral(u: float, k: int = k) -> float:
            terms = (math.comb(k, j) * (many - few) ** j * (few + u) ** (-j - 0.5) / (-j - 0.5) for j in range(k + 1))
            return sum(terms)

        shift = weight * mean / 2 * (integral(first) - integral(0.0))
        expected = f(0) * (math.sqrt(first) * noise[:, 0, 0, pixel] / f(first) + shift)
        torch.testing.assert_close(x[:, 0, 0, pixel], expected, rtol=3e-3, atol=1e-3)
        assert abs(f(0) * shift) > abs(mean), "guidance moves the mean beyond that of the images"


def test_a_call_of_the_network_has_as_many_images_as_there_are_weights():
    asked = []

    def count(x: Tensor, logsnr: Tensor, conditions: Conditions) -> Tensor:
        asked.append(len(x))
        return torch.zeros_like(x)

    for weights, estimates in (
        ({"a": 2.0}, 2),
        ({"a": 2.0, "b": 3.0}, 3),
        ({"a": 2.0, "b": 2.0}, 2),
        ({"a": 2.0, "b": 1.0}, 2),
        ({"a": 0.0}, 1),
        ({"a": 2.0, "b": 0.0, "c": 3.0}, 3),
    ):
        asked.clear()
        guided(count, **weights)
        assert asked == [2 * estimates]
        assert passes(FORMAT.guidance(tuple(weights.items()))) == estimates


def test_a_learned_variance_is_that_of_what_is_told_most():
    diffusion = Diffusion(learned_variance=True)

    def network(x: Tensor, noise: Tensor, conditions: Conditions) -> Tensor:
        return torch.cat([x, conditions.numbers.nansum(1)[:, None, None, None].expand_as(x).to(x.dtype)], 1)

    denoiser = Denoiser(network, diffusion, variance=True)
    x, levels = noisy().float(), LEVELS.float()
    told = TOLD._replace(numbers=TOLD.numbers.float())
    plain = denoiser(x, levels, told)
    found = GuidedInTurn(denoiser, FORMAT.turns((("a", 2.0), ("b", 3.0))))(x, levels, told)
    torch.testing.assert_close(found[:, 1:], plain[:, 1:])
