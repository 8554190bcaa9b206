"""The verdict of an evaluation, its table, and the texts in files of samples."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from unfog.config.schema import Config
from unfog.data.dataset import ImageSet
from unfog.evaluation.metrics import MetricResult
from unfog.inference import compare_images  # counts its calls
from unfog.inference.compare_images import Comparison, real_baseline, verdict
from unfog.inference.evaluation_files import Evaluation
from unfog.pipeline.sample_folder import SampleFolder
from unfog.runs.sample import write_grid


def result(metric, value, real, note=""):
    return MetricResult(metric, value, None, None, None, 100, 200, "texture", "none", note, real=real)


@pytest.mark.parametrize(
    ("precision", "recall", "said"),
    [
        (
            0.80,
            0.70,
            "The samples look like real images and are as varied: precision 0.8 (real images 0.82), recall 0.7",
        ),
        (0.80, 0.30, "The samples look like real images, but are less varied: "),
        (0.40, 0.70, "The samples are as varied as real images, but many do not look like them: "),
        (0.40, 0.30, "Many samples do not look like real images, and they are less varied: "),
        (
            1.00,
            0.00,
            "The samples lack almost all variety of real images, so precision means nothing: ",
        ),
    ],
)
def test_precision_and_recall_are_judged_by_what_real_images_reach(precision, recall, said):
    measured = [result("kid", 0.02, 0.0001), result("precision", precision, 0.82), result("recall", recall, 0.75)]
    text = verdict(measured)
    assert text.startswith(said)
    assert text.endswith("kid 0.02 (real images 0.0001).")
    copied = verdict(measured, [{"severity": "warning"}])
    assert copied.endswith("; some are nearly copies of training images.")


def test_a_distance_alone_gives_a_verdict_and_losses_give_none():
    assert verdict([result("sliced", 12.0, 11.5)]).startswith("The samples are as close to real images")
    assert verdict([result("sliced", 30.0, 11.5)]).startswith("The samples are farther from real images")
    assert verdict([result("held_out", 0.1, None)]) == ""


@pytest.mark.parametrize(
    ("value", "high", "said"),
    [
        (60.0, 62.0, "The samples are as close to real images"),
        (60.0, 70.0, "There are too few images to tell"),
        (69.0, 70.0, "There are too few images to tell"),
        (50.0, 70.0, "The samples are as close to real images"),
        (90.0, 70.0, "The samples are farther from real images"),
    ],
)
def test_a_distance_is_judged_by_the_range_of_halves(value, high, said):
    one = replace(result("sliced", value, 60.0), real_low=55.0, real_high=high)
    assert verdict([one]).startswith(said)


def test_a_verdict_on_values_names_those_that_exceed_their_range_and_then_the_others():
    ranges = {"spectrum": (0.539, 0.155, 0.438), "histogram": (0.203, 0.0585, 0.315), "correlation": (0.03, 0.05, 0.13)}
    all_of = [replace(result(name, x, low), real_low=low, real_high=high) for name, (x, low, high) in ranges.items()]
    far = "each other: spectrum 0.539 (real images 0.155 to 0.438); within: histogram, correlation."
    assert verdict(all_of).endswith(far)
    near = "histogram 0.203 (real images 0.0585 to 0.315), correlation 0.03 (real images 0.05 to 0.13)."
    assert verdict(all_of[1:]).endswith(near)


def test_an_evaluation_shows_the_intervals_of_its_metrics():
    shown = repr(Evaluation(7, {}, [replace(result("kid", 0.02, 0.01), low=0.015, high=0.025), result("x", 1.0, 1.0)]))
    assert shown == "<evaluation of step 7: kid 0.02 [0.015, 0.025], x 1>"


def test_halves_have_as_many_real_images_as_there_are_samples():
    generator = np.random.default_rng(0)
    real = ImageSet(generator.integers(0, 256, (200, 1, 16, 16), np.uint8), [str(i) for i in range(200)])
    few, more = (
        Comparison(["sliced"], None, real, np.arange(200)).measure(
            generator.integers(0, 256, (n, 1, 16, 16), np.uint8), None, baseline=True
        )["sliced"][0]
        for n in (20, 100)
    )
    for one in (few, more):  # noise is as near to noise as noise is
        assert one.real_low <= one.real <= one.real_high
        assert one.value == pytest.approx(one.real, rel=0.15)
    assert few.real > 1.5 * more.real  # the distance falls with the square root of the number: 2.2 times


@pytest.mark.parametrize(("count", "side", "draws"), [(20, 16, 20), (20, 48, 10), (100, 40, 3), (150, 40, 1)])
def test_halves_are_drawn_as_often_as_their_pixels_allow(monkeypatch, count, side, draws):
    def compare(names, one, other):
        sizes.append((len(one), len(other)))
        return [result("sliced", float(len(sizes)), None)]

    sizes = []
    monkeypatch.setattr(compare_images, "compare_pixels", compare)
    real = ImageSet(np.zeros((2 * count, 1, side, side), np.uint8), list(map(str, range(2 * count))))
    compared = Comparison(["sliced"], None, real, np.arange(len(real)))
    (one,) = compared.measure(real.pixels[:count], None, baseline=True)["sliced"]
    assert sizes == [(count, count)] * (1 + draws)
    assert one.real == np.mean(range(2, draws + 2))
    assert (one.real_low is None) == (draws == 1)  # one draw does not show how far halves differ


@pytest.mark.slow
def test_the_range_of_halves_holds_nine_of_ten_further_ones_however_many_there_are():
    drawn = 50 + np.random.default_rng(0).standard_normal((1000, 21))
    for draws in (3, 5, 10, 20):
        found = [compare_images._with_halves(result("sliced", 1.0, None), each[:draws].tolist()) for each in drawn]
        inside = np.mean([one.real_low <= each[-1] <= one.real_high for one, each in zip(found, drawn)])
        assert inside == pytest.approx(0.9, abs=0.03)  # three deviations of such a share


@pytest.mark.slow
def test_a_band_that_is_refused_leaves_the_others_their_halves():
    images = np.full((60, 1, 16, 16), 100, np.uint8)
    images += (np.arange(16) // 8 * np.random.default_rng(0).integers(0, 100, (60, 1, 1, 1))).astype(np.uint8)
    images[:, :, :, 1::2] += 1  # less than rounding in the finest bands
    real = ImageSet(images, list(map(str, range(60))))
    compared = Comparison(["detail"], None, real, np.arange(60))
    found = compared.measure(images[:30], None, baseline=True)["detail"]
    assert {one.real is None for one in found} == {True, False}
    assert all((one.real is None) == (one.value is None) for one in found)


def test_another_reference_is_measured_anew_and_samples_are_not_held():
    generator = np.random.default_rng(0)
    names = list(map(str, range(24)))
    wide, tall = (
        ImageSet(generator.integers(0, 256, (24, 1, *shape), np.uint8), names) for shape in ((8, 12), (12, 8))
    )
    compared = Comparison(["histogram"], None, wide, np.arange(24))
    compared.measure(wide.pixels[:10], None, baseline=True)
    found = replace(compared, reference=tall).measure(tall.pixels[:10], None, baseline=True)
    expected = Comparison(["histogram"], None, tall, np.arange(24)).measure(tall.pixels[:10], None, baseline=True)
    assert found == expected
    samples = wide.pixels[:10].copy()
    held = weakref.ref(samples)
    values = compared.measure_values(samples)
    assert compared.measure(samples, None, True, values) == compared.measure(samples, None, True)
    assert compared.curves(samples, values)
    del samples
    assert held() is None


def test_real_images_are_compared_with_other_real_images():
    real = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    found = real_baseline(["kid", "precision", "fid_infinity"], real, 100, None)
    assert set(found) == {"kid", "precision"}
    assert abs(found["kid"]) < 0.01
    assert 0.8 < found["precision"] <= 1
    assert real_baseline(["kid"], real[:15], 100, None) == {}


def test_the_table_has_the_verdict_first_and_each_note_once():
    notes = [result("sliced", 3.0, 2.0, "biased"), result("sliced_8", 3.0, 2.0, "biased")]
    lines = replace(Evaluation(7, {"seed": 0}, notes), verdict="It is good.").lines()
    assert lines[0] == "It is good."
    assert lines[2].split("  ")[0] == "metric"
    assert "real images" in lines[2]
    assert lines[-1] == "sliced, sliced_8: biased"


def test_files_carry_their_class_and_settings_and_the_grid_its_captions(tmp_path):
    samples = np.zeros((4, 8, 8, 3), np.uint8)
    folder = SampleFolder(tmp_path, "digest", 4, ["T-shirt/top", "été"], ("photos", "step 1,200", "seed 0"))
    folder.write(range(4), samples)
    assert SampleFolder.is_unfinished(tmp_path)
    write_grid(folder, Config())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["000000-T-shirt_top.png", "000001-été.png", "000002-T-shirt_top.png", "000003-été.png", "grid.png"]
    with Image.open(tmp_path / names[2]) as image:
        settings = "photos, step 1,200, seed 0, sample 2"
        assert image.text == {"Software": "Unfog", "Class": "T-shirt/top", "Settings": settings}
    with Image.open(tmp_path / "grid.png") as image:
        assert image.height > 2 * 128 + 2 + 2 * 12  # two rows, below the names of the classes and the settings
