import math

import numpy as np
import pytest
import torch
from torch import Tensor

from unfog.errors import RequestError
from unfog.evaluation import distances, metrics
from unfog.evaluation.distances import (  # compared with the closed form
    Distance,
    FeatureStatistics,
    _frechet_distance,
    extrapolate_frechet,
)
from unfog.evaluation.feature_networks import INCEPTION_DIGEST
from unfog.evaluation.features import Features, open_features
from unfog.evaluation.metrics import METRICS, check_count, compare_features


def uniform(n: int, width: int, seed: int) -> Tensor:
    """Numbers in [0, 1) that are the same on every machine and with every version of NumPy."""
    return torch.from_numpy((np.random.MT19937(seed).random_raw(n * width) / 2.0**32).reshape(n, width))


def normal(n: int, width: int, seed: int, scale: float = 1.0, place: float = 0.0) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale + place


REAL, FAKE = uniform(300, 16, 1), uniform(250, 16, 2) ** 1.5 * 1.2


def test_figures_equal_those_of_scipy_and_torchmetrics():
    # On the same features: scipy 1.17.1 (`linalg.sqrtm`, `spatial.distance.cdist`), torchmetrics 1.9.0 (`poly_mmd` on
    # the first 250, as it wants sets of one size), in float64.
    value = {one.metric: one.value for one in compare_features(list(METRICS), REAL, FAKE)}
    assert value["fd"] == pytest.approx(0.14857970301236, rel=1e-12)
    assert compare_features(["kid"], REAL[:250], FAKE)[0].value == pytest.approx(0.005224790338732799, rel=1e-12)
    assert value["precision"] == 0.42
    assert value["recall"] == 1.0
    assert value["density"] == pytest.approx(0.2632, rel=1e-12)
    real = REAL[[i * 300 // 250 for i in range(250)]]
    radius = torch.cdist(real, real).topk(6, largest=False).values[:, 5]
    assert value["coverage"] == (torch.cdist(FAKE, real) <= radius).any(0).double().mean()
    assert "of 250 of each" in compare_features(["coverage"], REAL, FAKE)[0].note


def test_coverage_of_two_samples_of_one_distribution_is_naeems_whatever_their_numbers():
    """Naeem et al. 2020, the expectation for k = 5: 1 - prod (n - i) / (2 n - i)."""
    expected = 1 - math.prod((200 - i) / (400 - i) for i in range(1, 6))
    for real, drawn in ((200, 200), (2000, 200), (200, 2000)):
        sets = ((normal(real, 8, i), normal(drawn, 8, 50 + i)) for i in range(8))
        found = [compare_features(["coverage"], *pair)[0].value for pair in sets]
        assert sum(found) / 8 == pytest.approx(expected, abs=0.02)


@pytest.mark.slow
def test_extrapolated_frechet_distances_of_unequal_numbers_are_not_below_the_truth():
    """Gaussians of which one is 0.3 wider and n is 3 times D: D (1.3 - 1)^2."""
    for real in (96, 2000):
        found = [
            compare_features(["fd_infinity"], normal(real, 32, i), normal(96, 32, 50 + i, scale=1.3))[0].value
            for i in range(12)
        ]
        assert sum(found) / 12 == pytest.approx(32 * 0.3**2, abs=0.6), real


def test_frechet_distance_of_gaussians_that_commute_is_the_closed_form():
    rotation = torch.linalg.qr(normal(6, 6, 0))[0]
    a, b = torch.tensor([4.0, 1, 9, 0, 2, 1]).double(), torch.tensor([1.0, 1, 4, 3, 0, 2]).double()
    x, y = FeatureStatistics.of(normal(10, 6, 1)), FeatureStatistics.of(normal(10, 6, 2))
    x = x._replace(mean=torch.zeros(6).double(), covariance=rotation @ a.diag() @ rotation.T)
    y = y._replace(mean=torch.ones(6).double() * 0.5, covariance=rotation @ b.diag() @ rotation.T)
    expected = 6 * 0.25 + (a.sqrt() - b.sqrt()).square().sum().item()
    assert _frechet_distance(x, y) == pytest.approx(expected, rel=1e-6)  # roots of eigenvalues that are 0 but for 1e-16
    assert _frechet_distance(y, x) == pytest.approx(expected, rel=1e-6)


def test_a_set_is_at_no_distance_from_itself():
    x = normal(400, 32, 0)
    value = {one.metric: one.value for one in compare_features(list(METRICS), x, x.flip(0))}
    assert abs(value["fd"]) < 1e-10
    assert value["precision"] == value["recall"] == value["coverage"] == 1.0
    assert value["kid"] < 0  # without the pairs of a picture with itself


def test_statistics_of_blocks_are_those_of_the_whole(monkeypatch):
    x = normal(1000, 5, 0, place=1e4)  # far from 0, where a one-pass covariance loses half of its digits
    monkeypatch.setattr("unfog.evaluation.distances._ROWS", 64)
    found = FeatureStatistics.of(x)
    assert torch.allclose(found.mean, x.mean(0), rtol=1e-14)
    assert torch.allclose(found.covariance, torch.cov(x.T), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "most"), [(1.0, 2.0), (1.3, 1.3)])
def test_the_error_of_a_frechet_distance_is_its_spread(scale, most):
    """Where the sets are alike the first derivative vanishes, and the error is too large rather than too small."""
    found = [Distance.frechet(normal(300, 8, 2 * i), normal(300, 8, 2 * i + 1, scale, scale - 1)) for i in range(150)]
    spread = torch.tensor([one.value for one in found]).std().item()
    error = sum(one.error for one in found) / len(found)
    assert 0.85 < error / spread < most


@pytest.mark.slow
@pytest.mark.parametrize("place", [0.0, 0.3])
def test_the_extrapolated_distance_has_no_bias_where_the_plain_one_does(place):
    true = 16 * (place**2 + (math.exp(place) - 1) ** 2)
    plain, beyond = [], []
    for i in range(40):
        x, y = normal(200, 16, 2 * i), normal(200, 16, 2 * i + 1, math.exp(place), place)
        whole = _frechet_distance(FeatureStatistics.of(x), FeatureStatistics.of(y))
        plain.append(whole - true)
        beyond.append(extrapolate_frechet(x, y, 4, i, whole) - true)
    bias, left = torch.tensor(plain), torch.tensor(beyond)
    assert bias.mean() > 10 * bias.std() / 40**0.5
    assert abs(left.mean()) < 3 * left.std() / 40**0.5 + 0.03 * bias.mean()
    assert left.std() < 1.5 * bias.std()


def test_kernel_distance_is_the_double_sum():
    x, y = normal(12, 4, 0), normal(9, 4, 1, place=0.5)
    k = lambda a, b: (float(a @ b) / 4 + 1) ** 3  # noqa: E731
    xx = sum(k(x[i], x[j]) for i in range(12) for j in range(12) if i != j) / (12 * 11)
    yy = sum(k(y[i], y[j]) for i in range(9) for j in range(9) if i != j) / (9 * 8)
    xy = sum(k(a, b) for a in x for b in y) / (12 * 9)
    assert Distance.kernel(x, y).value == pytest.approx(xx + yy - 2 * xy, rel=1e-12)


def test_the_error_of_a_kernel_distance_is_the_jackknife():
    x, y = normal(20, 4, 0), normal(15, 4, 1, place=0.5)
    value = lambda a, b: Distance.kernel(a, b).value  # noqa: E731
    left = torch.tensor([value(torch.cat([x[:i], x[i + 1 :]]), y) for i in range(20)])
    right = torch.tensor([value(x, torch.cat([y[:i], y[i + 1 :]])) for i in range(15)])
    variance = 19 * left.var(correction=0) + 14 * right.var(correction=0)
    assert Distance.kernel(x, y).error == pytest.approx(variance.sqrt().item(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("block", [5000, 40])
@pytest.mark.parametrize(("place", "most"), [(0.0, 2.0), (0.3, 1.3)])
def test_kernel_distance_has_no_bias_and_an_error_that_holds(block, place, most):
    """In parts as well, which spread more; of like sets the error may be too large."""
    many = Distance.kernel(normal(2000, 8, 1000), normal(2000, 8, 1001, place=place)).value if place else 0.0
    found = [
        Distance.kernel(normal(120, 8, 2 * i), normal(120, 8, 2 * i + 1, place=place), i, block) for i in range(150)
    ]
    values = torch.tensor([one.value for one in found])
    error = sum(one.error**2 for one in found) / len(found)
    assert abs(values.mean() - many) < 3 * values.std() / 150**0.5 + 0.05 * many
    assert 0.85 < math.sqrt(error) / values.std() < most


def test_kernel_rows_in_blocks_are_those_of_the_whole(monkeypatch):
    x, y = normal(50, 4, 0), normal(50, 4, 1)
    whole = Distance.kernel(x, y)
    monkeypatch.setattr(distances, "_KERNEL_ROWS", 7)
    assert Distance.kernel(x, y) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("fake", [REAL, FAKE, REAL[::3]], ids=["copies", "others", "a third"])
def test_density_is_that_of_the_formula_and_of_copies_one(fake: Tensor):
    """Naeem et al. 2020, eq. 4, as their code has it: d(real, fake) < d(real, its fifth neighbour)."""
    between, among = torch.cdist(REAL, fake), torch.cdist(REAL, REAL)
    for matrix in (between, among):  # which is not quite 0 between equal rows
        matrix[matrix < 1e-6] = 0
    radius = among.sort(dim=1).values[:, 5]
    expected = (between < radius[:, None] * (1 - 1e-9)).double().sum(0).mean() / 5
    found = compare_features(["density"], REAL, fake)[0].value
    assert found == pytest.approx(float(expected), rel=1e-12)
    if fake is REAL:
        assert found == 1.0


def test_neighbours_in_blocks_are_those_of_the_whole(monkeypatch):
    names = ["precision", "recall", "density", "coverage"]
    whole = [one.value for one in compare_features(names, REAL, FAKE)]
    monkeypatch.setattr(metrics, "_ENTRIES", 300 * 7)
    assert [one.value for one in compare_features(names, REAL, FAKE)] == whole


def test_neighbours_tell_fidelity_from_diversity():
    """Two heaps of real pictures, of which one is drawn: all that is drawn is good, and half of the real ones are
    not drawn. Then both, and pictures of nothing besides."""
    real = torch.cat([normal(200, 4, 0), normal(200, 4, 1, place=20)])
    names = ["precision", "recall", "density", "coverage"]
    half = [one.value for one in compare_features(names, real, normal(200, 4, 2))]
    assert half[0] > 0.9
    assert 0.4 < half[1] < 0.6
    assert half[2] == pytest.approx(1, abs=0.2)
    assert 0.4 < half[3] < 0.6
    noisy = torch.cat([normal(100, 4, 3), normal(100, 4, 4, place=20), normal(200, 4, 5, place=-40)])
    found = [one.value for one in compare_features(names, real, noisy)]
    assert found[0] == pytest.approx(0.5, abs=0.05)
    assert found[1] > 0.9
    assert found[2] == pytest.approx(0.5, abs=0.1)


def test_doubled_pictures_count_as_neighbours_at_no_distance():
    """Ten copies of each: every ball has radius 0 and holds its copies, whatever the rounding of a distance."""
    x = normal(20, 64, 0, place=100.0).float().repeat(10, 1)
    assert [one.value for one in compare_features(["precision", "coverage"], x, x[:50])] == [1.0, 1.0]


@pytest.mark.slow
def test_the_interval_of_precision_holds():
    real = normal(300, 4, 0)
    true = compare_features(["precision"], real, normal(20_000, 4, 1, 1.5))[0].value
    found = [compare_features(["precision"], real, normal(60, 4, 2 + i, 1.5))[0] for i in range(100)]
    assert 88 <= sum(one.low <= true <= one.high for one in found) <= 100
    lowest = metrics._proportion(torch.zeros(50, dtype=torch.bool))
    assert lowest.low == pytest.approx(0, abs=1e-12)
    assert lowest.high == pytest.approx(0.0713, abs=1e-3)  # Wilson 1927: z^2 / (n + z^2)


def test_a_frechet_distance_of_few_pictures_is_marked_or_refused():
    few = compare_features(["fd", "fd_infinity", "kid"], normal(16, 16, 0), normal(500, 16, 1))
    assert [one.value is None for one in few] == [True, True, False]
    assert "kid holds" in few[0].note
    assert "refused" in str(few[0])
    some = compare_features(["fd", "fd_infinity"], normal(31, 16, 0), normal(500, 16, 1))
    assert some[0].value is not None
    assert "compare only at equal n" in some[0].note
    assert some[1].value is None
    assert compare_features(["fd_infinity"], normal(32, 16, 0), normal(500, 16, 1))[0].value is not None
    many = compare_features(["fd"], normal(10_000, 2, 0), normal(10_000, 2, 1))[0]
    assert "equal n" not in many.note


def test_too_few_pictures_are_refused_beforehand_exactly_where_measuring_would_refuse_them():
    pixels, net = torch.zeros(1, 3, 8, 8, dtype=torch.uint8), open_features("pixels")
    for metric in ("fid", "fd"):
        with pytest.raises(RequestError, match=f"{metric} .*192 images .*192 features.*-m kid"):
            check_count(metric, 192, pixels, net, "-m")
        check_count(metric, 193, pixels, net, "-m")
        measured = [compare_features([metric], normal(n, 192, 0), normal(300, 192, 1))[0].value for n in (192, 193)]
        assert [value is None for value in measured] == [True, False]
    check_count("kid", 10, pixels, net, "-m")
    with pytest.raises(RequestError, match="; give -m kid"):  # a larger -n could not help
        check_count("fid", 60, pixels, net, "-m", most=192)


def test_a_figure_says_what_it_is_of():
    device = torch.device("cpu")
    inception = Features("inception", "TF1 bilinear 299", INCEPTION_DIGEST, device, lambda x: x)
    other = Features("net@12345678", "bicubic antialiased 224", "another", device, lambda x: x)
    fid, infinity = compare_features(["fd", "fd_infinity"], REAL, FAKE, features=inception)
    assert (fid.metric, infinity.metric) == ("fid", "fid_infinity")
    assert compare_features(["fid"], REAL, FAKE, features=other)[0].metric == "fd"
    assert compare_features(["fid_infinity"], REAL, FAKE, features=other)[0].metric == "fd_infinity"
    for word in ("n = 250", "reference 300", "features inception", "resize TF1 bilinear 299"):
        assert word in str(fid)
    assert fid.low < fid.value < fid.high


def test_known_statistics_of_the_reference_change_nothing():
    plain, told = (
        compare_features(["fd"], REAL, FAKE)[0],
        compare_features(["fd"], REAL, FAKE, reference=FeatureStatistics.of(REAL))[0],
    )
    assert plain == told


@pytest.mark.parametrize(
    ("names", "real", "fake", "match"),
    [
        (["fie"], REAL, FAKE, "'fie' is unknown; give one of fid"),
        (["fd"], REAL[:, :4], FAKE, "must be"),
        (["kid"], REAL[:9], FAKE, "at least 10"),
        (["kid"], REAL.flatten(), FAKE, "must be"),
    ],
)
def test_what_cannot_be_compared_is_refused(names, real, fake, match):
    with pytest.raises(RequestError, match=match):
        compare_features(names, real, fake)


def test_parts_are_drawn_from_all_of_a_set_whatever_its_order():
    """Real images come class by class; cut in that order, parts would be of one class each."""
    x = torch.cat([normal(200, 4, 0), normal(200, 4, 1, place=5)])
    y = torch.cat([normal(200, 4, 2, place=5), normal(200, 4, 3)])
    whole, parts = Distance.kernel(x, y), Distance.kernel(x, y, block=100)
    assert abs(parts.value - whole.value) < 4 * parts.error


def test_neighbours_do_not_depend_on_where_features_lie():
    names = ["precision", "recall", "density", "coverage"]
    plain, far = ([one.value for one in compare_features(names, REAL + at, FAKE + at)] for at in (0, 1e6))
    assert far == plain


@pytest.mark.slow
def test_the_error_of_a_frechet_distance_of_lopsided_features_is_the_jackknife():
    """Of normal features the two terms of a picture's influence do not correlate, so a wrong sign would not show."""
    x, y = normal(400, 2, 0).exp(), 1.5 * normal(300, 2, 1).exp()
    value = lambda a, b: _frechet_distance(FeatureStatistics.of(a), FeatureStatistics.of(b))  # noqa: E731
    left = torch.tensor([value(torch.cat([x[:i], x[i + 1 :]]), y) for i in range(len(x))])
    right = torch.tensor([value(x, torch.cat([y[:i], y[i + 1 :]])) for i in range(len(y))])
    variance = (len(x) - 1) * left.var(correction=0) + (len(y) - 1) * right.var(correction=0)
    assert Distance.frechet(x, y).error == pytest.approx(variance.sqrt().item(), rel=0.1)


def test_few_pictures_are_not_cut_into_parts_of_one():
    found = Distance.kernel(normal(200, 4, 0), normal(7, 4, 1), block=40)
    assert math.isfinite(found.value)
    assert 0 < found.error < math.inf


def test_the_line_is_drawn_through_parts_of_all_of_a_set():
    """Real images come class by class; in that order, halves would be of one class each."""
    x = torch.cat([normal(200, 4, 0), normal(200, 4, 1, place=5)])
    y = torch.cat([normal(200, 4, 2, place=5), normal(200, 4, 3)])
    whole = _frechet_distance(FeatureStatistics.of(x), FeatureStatistics.of(y))
    assert abs(extrapolate_frechet(x, y, 2, 0, whole) - whole) < 1
