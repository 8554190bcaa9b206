"""Unknown pixels, from files to samples: decoding, statistics, packs, augmentation, runs and what they refuse."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

import unfog
from float_fields import FIELDS, TINY, planes, saved
from unfog.checks.images.image_checks import quick_check_images
from unfog.checks.run.run_checks import check_run
from unfog.config.requests.pack import PackRequest
from unfog.config.schema import Config
from unfog.config.validate import check_request, check_sample_size
from unfog.data.augmentation import Augment
from unfog.data.full_depth.fit import fit_values
from unfog.data.packs.pack import Pack
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.registry import open_source
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import Cosine
from unfog.errors import RequestError
from unfog.evaluation.value_metrics import VALUE_METRICS
from unfog.inference.evaluation_files import Evaluation
from unfog.models.settings import DdpmPytorch
from unfog.pipeline.condition_pictures import conditions_sheet
from unfog.pipeline.generate import samples_show_unknown, view_grid
from unfog.pipeline.load_data import load_images
from unfog.pipeline.pack import pack
from unfog.process.run_folder import RunFolder
from unfog.process.signals import StopSignals
from unfog.values import value_maps
from unfog.values.colour_map import colour_table
from unfog.values.columns import Column
from unfog.values.image_format import ImageFormat, StoredValues
from unfog.values.unknown import find_unknown, mask_from_text, mask_to_text, suspect_unknown

RNG = np.random.default_rng(1)
HIDDEN = RNG.random(FIELDS.shape) < 0.3
HIDDEN[:, :3] = True  # in all images


def with_filler(filler: float) -> np.ndarray:
    return np.where(HIDDEN, np.float32(filler), FIELDS)


@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
@pytest.mark.parametrize("filler", [math.nan, -9999.0, 1e20])
def test_decoded_images_and_packs_have_nan_where_they_are_unknown(tmp_path, filler, cache):
    place = saved(tmp_path, with_filler(filler))
    made = prepare(open_source(place), Data(cache=cache, unknown=f"{filler:g}"))
    assert made.settings.dtype == "float32"
    expected = planes(with_filler(math.nan))
    found = made.train.take(np.arange(24)).pixels
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()
    if cache == "memory":
        pack(PackRequest(str(place), tmp_path / "pack", Data(unknown=f"{filler:g}")))
        again = Pack.open(tmp_path / "pack")
        assert again.settings["unknown"] == f"{filler:g}"
        packed = prepare(open_source(tmp_path / "pack"), Data(unknown=f"{filler:g}")).train
        assert packed.take(np.arange(24)).pixels.tobytes() == found.tobytes()


def test_integers_keep_the_number_and_the_range_of_the_others(tmp_path):
    values = RNG.integers(100, 4000, (8, 16, 16)).astype(np.uint16)
    values[:, 3, 4] = 65535
    made = prepare(open_source(saved(tmp_path, values)), Data(dtype="uint16", unknown="65535"))
    assert made.settings.range == (0, 4095)
    assert np.array_equal(made.train.pixels[:, 0], values)
    format = made.settings.image_format
    x0 = format.to_model(torch.from_numpy(np.ascontiguousarray(made.train.pixels)))
    assert torch.equal(x0.isnan()[:, 0], torch.from_numpy(values == 65535))
    assert torch.equal(format.to_stored(x0), torch.from_numpy(values)[:, None])
    # A known value is never rounded to the number.
    zero = StoredValues("uint16", 0, 4095, unknown="0")
    assert zero.to_stored(torch.tensor([-2.0, -1.0, math.nan])).tolist() == [1, 1, 0]


def test_pictures_say_how_unknown_pixels_look_only_if_they_show_some():
    maps = value_maps.flat(value_maps.fit("minmax", planes(FIELDS)))
    data = Data(size="16x12", channels=4, dtype="float32", map="minmax", map_values=maps, unknown="nan")
    config = Config(data=data).with_view("1")
    holes = FIELDS.copy()
    holes[-1, 2, 3, 1] = math.nan
    plain = view_grid(config, FIELDS, ())
    assert len(view_grid(config, holes, ())) == len(plain) + 20, "one line"
    assert np.array_equal(view_grid(config.with_view("0"), holes, ()), view_grid(config.with_view("0"), FIELDS, ()))
    sheets = [conditions_sheet(config, (), FIELDS[:2], truth[-2:]) for truth in (FIELDS, holes)]
    assert len(sheets[1]) == len(sheets[0]) + 20
    assert not samples_show_unknown(config)
    mask = np.zeros((4, 12, 16), np.bool_)
    mask[1, 5, 5] = True
    masked = replace(config, data=replace(data, unknown_mask=mask_to_text(mask)))
    assert [samples_show_unknown(masked.with_view(view)) for view in ("1", "0")] == [True, False]


def test_a_pixel_with_one_unknown_channel_of_three_is_black_in_colours():
    format = ImageFormat(3, 8, 8, StoredValues("float32", low=0.0, high=1.0, unknown="nan"))
    pictures = np.full((1, 8, 8, 3), 0.9, np.float32)
    pictures[0, 2, 3, 1:] = math.nan
    shown = format.view(pictures)
    assert not shown[0, 2, 3].any()
    assert (np.delete(shown.reshape(-1, 3), 2 * 8 + 3, 0) > 200).all()


def filled(number: float, share: float = 0.1) -> np.ndarray:
    """Sea temperatures and salinities, of which some are hidden by a number."""
    made = np.random.default_rng(0).normal([280, 35], [8, 0.4], (20, 8, 8, 2)).astype(np.float32)
    made[np.random.default_rng(1).random(made.shape) < share] = number
    return made.transpose(0, 3, 1, 2)


@pytest.mark.parametrize(("number", "said"), [(-9999.0, "least"), (1e20, "largest"), (-32768.0, "least")])
def test_a_number_that_stands_far_from_all_others_may_be_unknown(number, said):
    found = suspect_unknown(filled(number))
    assert found is not None
    assert found.end == said
    assert found.share == pytest.approx(0.1, abs=0.02)
    named = float(re.search(r"data.unknown=(\S+)$", str(found))[1])
    assert find_unknown(filled(number), named).mean() == pytest.approx(found.share)  # what it advises finds them


def test_a_channel_with_a_wide_range_does_not_hide_the_number():
    wide = np.random.default_rng(3).uniform(3_000, 29_000, (20, 1, 8, 8))
    wide[np.random.default_rng(4).random(wide.shape) < 0.1] = -9999
    found = suspect_unknown(np.concatenate([filled(-9999.0), wide], 1).astype(np.float32))
    assert (found.value, found.end) == (-9999, "least")


_DRAWN = np.random.default_rng(2)
_BLACK = np.where(_DRAWN.random((20, 3, 8, 8)) < 0.6, 0, _DRAWN.integers(0, 256, (20, 3, 8, 8)))
NO_FILLERS = {
    "black": _BLACK,
    "white": 255 - _BLACK,
    "16 bits with much black": _BLACK * 200,
    "mask": _DRAWN.integers(0, 2, (20, 1, 8, 8)),
    "labels": _DRAWN.integers(0, 12, (20, 1, 8, 8)),
    "far labels": np.where(_DRAWN.random((20, 1, 8, 8)) < 0.5, 0, _DRAWN.integers(250, 256, (20, 1, 8, 8))),
    "clipped at 0": np.maximum(_DRAWN.normal(0, 1, (20, 1, 8, 8)), 0),
    "rain": np.where(_DRAWN.random((20, 1, 8, 8)) < 0.8, 0, _DRAWN.gamma(1, 5, (20, 1, 8, 8)) + 0.1),
    "padding of a scan": np.where(
        _DRAWN.random((20, 1, 8, 8)) < 0.3, -2000, _DRAWN.uniform(-1024, 3000, (20, 1, 8, 8))
    ),
    "one outlier": filled(-9999.0, 0.0005),
    "0 beside values clipped at 0": np.concatenate([filled(0.0), np.maximum(_DRAWN.normal(0, 1, (20, 1, 8, 8)), 0)], 1),
    "of one channel": np.concatenate([filled(-9999.0), _DRAWN.normal(0, 1, (20, 1, 8, 8))], 1),
    "constant": np.full((20, 1, 8, 8), -9999.0),
}


@pytest.mark.parametrize("kind", NO_FILLERS)
def test_usual_images_have_no_number_that_may_be_unknown(kind):
    assert suspect_unknown(NO_FILLERS[kind].astype(np.float32)) is None


def test_a_suspected_number_is_named_by_training_and_by_the_doctor(tmp_path, capsys):
    np.save(tmp_path / "sea.npy", filled(-9999.0).transpose(0, 2, 3, 1))
    config = Config(source=str(tmp_path / "sea.npy"), data=Data(cache="memory"))
    loaded, _ = load_images(config, StopSignals())
    said = "exactly -9999 is the least value of every channel, in "
    assert f"warning: {said}" in capsys.readouterr().err
    (found,) = [one for one in quick_check_images(loaded, config) if one.code == "data.unknown"]
    assert (found.severity, found.evidence[: len(said)]) == ("warning", said)
    assert found.remedy == "if it means unknown, as a background of images does not, give --data.unknown=-9999"
    given = replace(config, data=replace(config.data, range=(-1e4, 1e4)))
    loaded, _ = load_images(given, StopSignals())
    (found,) = [one for one in quick_check_images(loaded, given) if one.code == "data.unknown"]
    assert (found.severity, found.evidence[:29]) == ("fine", "no value is named as unknown,")  # nothing was looked at
    capsys.readouterr()
    load_images(replace(config, data=replace(config.data, unknown="-9999")), StopSignals())
    assert "exactly" not in capsys.readouterr().err


def test_samples_have_the_number_and_views_are_black():
    values = StoredValues("float32", 0.0, 10.0, unknown="-9999")
    stored = values.to_stored(torch.tensor([[[0.0, math.nan]]]))
    assert stored.tolist() == [[[5.0, -9999.0]]]
    assert values.to_model(stored)[0, 0].isnan().tolist() == [False, True]
    assert values.to_bytes(stored.numpy()).tolist() == [[[128, 0]]]


def test_unknown_values_have_a_colour_that_no_map_has():
    values = StoredValues("float32", 0.0, 10.0, unknown="-9999")
    format = ImageFormat(1, 4, 4, values)
    picture = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1) % 11
    whole = format.view(picture, [0], "viridis")
    picture[0, 2, 1:3] = -9999
    shown = format.view(picture, [0], "viridis")
    unknown = picture[..., 0] == -9999
    assert np.array_equal(shown[~unknown], whole[~unknown])
    assert {tuple(one) for one in shown[unknown].tolist()} == {(236,) * 3, (200,) * 3}
    assert not {(236,) * 3, (200,) * 3} & {tuple(one) for one in colour_table("viridis").tolist()}


@pytest.mark.parametrize("kind", ["linear", "minmax", "percentile:5", "standard", "arcsinh"])
def test_maps_are_fitted_to_known_values_as_by_numpy(kind):
    values = planes(with_filler(math.nan)).astype(np.float64)
    fitted = value_maps.fit(kind, values)
    for i, one in enumerate(fitted):
        channel = values[:, i]
        match kind.partition(":")[0]:
            case "linear":
                low, high = np.nanmin(values), np.nanmax(values)
            case "minmax":
                low, high = np.nanmin(channel), np.nanmax(channel)
            case "percentile":
                low, high = np.nanpercentile(channel, [5, 95])
            case "standard":
                low, high = np.nanmean(channel) + np.array([-2, 2]) * np.nanstd(channel)
            case "arcsinh":
                knee = np.nanmedian(np.abs(channel))
                low, high = np.arcsinh(np.nanmin(channel) / knee), np.arcsinh(np.nanmax(channel) / knee)
        assert np.allclose((one.middle, one.half), ((low + high) / 2, (high - low) / 2), rtol=1e-12)
    x0 = value_maps.to_model(fitted, torch.from_numpy(values))
    assert torch.equal(x0.isnan(), torch.from_numpy(np.isnan(values)))


def test_share_and_fixed_mask_are_counted_and_a_dark_channel_is_refused(tmp_path):
    made = prepare(open_source(saved(tmp_path, with_filler(math.nan))), Data(unknown="nan"))
    fitted, lines = fit_values(made)
    assert fitted.settings.unknown_share == HIDDEN.mean()
    assert np.array_equal(~fitted.settings.known_in_samples(), planes(HIDDEN).all(0))
    assert f"{HIDDEN.mean():.2%}" in lines[0]
    assert (
        f"{HIDDEN.all(0).mean():.2%} are unknown in all of them, and in samples: `unfog sample --measure`" in lines[0]
    )
    assert fit_values(fitted) == (fitted, [])
    found = {each.code: each for each in quick_check_images(fitted, Config(data=fitted.settings))}
    assert f"{HIDDEN.mean():.2%}" in found["data.unknown"].evidence
    assert "--flip if mirrored images make sense, --network" in found["data.count"].remedy, "augment is refused"
    columns = {"side": Column("side", "number", np.arange(len(fitted.train), dtype=float))}
    told = replace(fitted, train=replace(fitted.train, columns=columns))
    (count,) = (one for one in quick_check_images(told, Config(data=told.settings)) if one.code == "data.count")
    assert "make sense and no condition depends on left and right, " in count.remedy
    values = with_filler(math.nan)
    values[..., 2] = math.nan
    made = prepare(open_source(saved(tmp_path, values, "y.npy")), Data(unknown="nan"))
    with pytest.raises(RequestError, match="channel 2 is unknown in all"):
        fit_values(made)


def test_masks_are_text_of_a_known_length():
    mask = HIDDEN[0].transpose(2, 0, 1)
    text = mask_to_text(mask)
    assert np.array_equal(mask_from_text(text, mask.shape), mask)
    assert mask_to_text(np.zeros((1, 4, 4), bool)) == ""
    for damaged in ("%%", text[:8], "YWJj"):
        with pytest.raises(RequestError, match=r"unknown_mask is damaged|another size"):
            mask_from_text(damaged, mask.shape)
    with pytest.raises(RequestError, match="another size"):
        mask_from_text(text, (4, 12, 32))
    with pytest.raises(RequestError, match="another size"):
        check_sample_size(Config(data=Data(size=32, channels=4, unknown="nan", dtype="float32", unknown_mask=text)))


def test_flip_and_roll_move_the_mask_with_the_image(tmp_path):
    x = torch.from_numpy(planes(with_filler(math.nan)).copy())
    augment = Augment(flip=True, roll="x", values=StoredValues("float32", -1.0, 1.0, unknown="nan"))
    moved, _ = augment(x)
    for before, after in zip(x, moved):
        turns = (torch.roll(each, k, 2) for each in (before, before.flip(2)) for k in range(16))
        assert any(torch.equal(after.nan_to_num(7e7), each.nan_to_num(7e7)) for each in turns)


def test_what_is_computed_from_an_unknown_pixel_is_unknown(tmp_path):
    x = RNG.normal(size=(4, 48, 48, 2)).astype(np.float32)
    hidden = x.copy()
    hidden[:, 20, 20] = math.nan
    for name, values in (("plain", x), ("hidden", hidden)):
        saved(tmp_path, values, f"{name}.npy")
    for size, cropped in ((24, False), ("24x48", True)):
        settings = Data(size=size, dtype="float32", unknown="nan")
        plain, some = (prepare(open_source(tmp_path / f"{n}.npy"), settings).train.pixels for n in ("plain", "hidden"))
        unknown = np.isnan(some)
        assert np.array_equal(some[~unknown], plain[~unknown])
        assert 0 < unknown[0, 0].sum() <= (1 if cropped else 49)
    whole = hidden.copy()
    whole[3] = math.nan
    made = prepare(open_source(saved(tmp_path, whole, "whole.npy")), Data(unknown="nan"))
    assert [(file.name, file.reason) for file in made.report.skipped] == [("00000003", "unknown as a whole")]


def test_nan_without_the_setting_is_named_with_the_way_on(tmp_path):
    for values in (FIELDS.copy(), RNG.random((24, 12, 16)).astype(np.float32)):
        values[7, 3, 3] = math.nan
        report = prepare(open_source(saved(tmp_path, values)), Data()).report
        assert [file.name for file in report.skipped] == ["00000007"]
        assert "--data.unknown nan" in report.line()
    values[:] = math.nan
    with pytest.raises(RequestError, match=r"--data.unknown nan.*; give that setting, or replace them"):
        prepare(open_source(saved(tmp_path, values, "none.npy")), Data())
    values[:] = 1.0
    values[7, 3, 3] = math.nan
    with pytest.raises(RequestError, match=r"(?s)images 7 of.*NaN.*'unknown': 'nan'"):
        unfog.train(values, out=tmp_path / "run", **TINY)
    infinite = FIELDS.copy()
    infinite[2, 3, 3] = math.inf
    report = prepare(open_source(saved(tmp_path, infinite)), Data(unknown="nan")).report
    assert "infinity" in report.skipped[0].reason


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"unknown": "sea"}, "number that stands"),
        ({"unknown": "inf"}, "number that stands"),
        ({"unknown": "nan", "dtype": "uint8"}, "omit data.dtype"),
        ({"unknown": "nan", "dtype": "uint16"}, "not a value of uint16"),
        ({"unknown": "-1", "dtype": "uint16"}, "not a value of uint16"),
        ({"unknown": "nan", "crop": 0.1}, "omit data.crop"),
        ({"unknown": "nan", "augment": 0.15}, "omit data.augment"),
    ],
)
def test_settings_that_do_not_suit_unknown_pixels_are_refused(settings, said):
    with pytest.raises(RequestError, match=said):
        Data(**settings)


def test_pictures_of_8_bits_keep_their_values_with_a_number(tmp_path):
    pictures = RNG.integers(1, 256, (6, 16, 16)).astype(np.uint8)
    pictures[:, 2] = 0
    for i, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / f"{i}.png")
    made = prepare(open_source(tmp_path), Data(unknown="0"))
    assert made.settings.dtype == "float32"
    assert np.array_equal(np.isnan(made.train.pixels[:, 0]), pictures == 0)


def test_a_run_refuses_networks_without_the_input_and_learned_variances():
    data = Data(unknown="nan")
    with pytest.raises(RequestError, match="needs a network with an input for the mask"):
        check_request(Config(source="fashion", data=data, network=DdpmPytorch()))
    diffusion = Diffusion(schedule=Cosine(steps=1000), learned_variance=True)
    with pytest.raises(RequestError, match="learned variance is of whole images"):
        check_request(Config(source="fashion", data=data, diffusion=diffusion))


def flat(found: Evaluation) -> list[tuple[str, float | None, float | None]]:
    return [(one.metric, one.value, one.real_high) for one in found.measured]


def weights(run: Path) -> dict[str, np.ndarray]:
    return load_file(next((run / "checkpoints").glob("*2/model.safetensors")))


@pytest.mark.slow
def test_runs_do_not_depend_on_the_filler_and_samples_keep_the_fixed_mask(tmp_path):
    runs = [
        unfog.train(
            saved(tmp_path, with_filler(filler), f"{i}.npy"),
            out=tmp_path / f"run{i}",
            data={"unknown": f"{filler:g}"},
            **TINY | {"evaluate": {"every": 2, "metrics": [*VALUE_METRICS], "samples": 10, "metrics_every": 2}},
        )
        for i, filler in enumerate((math.nan, 1e20))
    ]
    first, other = (weights(run.path) for run in runs)
    assert first.keys() == other.keys()
    assert all(np.array_equal(first[name], other[name]) for name in first)
    fixed = HIDDEN.all(0)
    for run, filler in zip(runs, (math.nan, 1e20)):
        samples = np.asarray(run.sample(2, steps=2))
        hidden = np.isnan(samples) if math.isnan(filler) else samples == np.float32(filler)
        assert np.array_equal(hidden, np.broadcast_to(fixed, samples.shape))
        assert np.isfinite(samples[~hidden]).all()
    # Nothing takes holes of samples for damage, and the filler changes no metric.
    logged = [json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1]) for run in runs]
    assert all(logged[0][name] == logged[1][name] > 0 for name in VALUE_METRICS)
    found = [run.evaluate(VALUE_METRICS, n=12, steps=2) for run in runs]
    assert flat(found[0]) == flat(found[1])
    assert found[0].drawn["unknown_share"] == pytest.approx(runs[0].config.data.unknown_share, abs=1e-6)
    assert "samples with unknown values" in found[0].lines()[1]
    assert all(one.value is not None and one.real_high is not None for one in found[0].measured)
    with pytest.raises(RequestError, match="compare pictures"):
        runs[0].evaluate("kid", n=12)
    findings = {one.code: one for one in check_run(RunFolder(runs[0].path), "cpu", samples=12)}
    assert "halves of as many training images" in findings["run.spectrum"].evidence
    again = unfog.resume(tmp_path / "run0", steps=3)
    assert again.config.data.unknown_mask == runs[0].config.data.unknown_mask
    with pytest.raises(RequestError, match=r"data\.unknown"):
        unfog.resume(tmp_path / "run1", steps=3, data={"unknown": "nan"})
    with pytest.raises(RequestError, match="pictures"):  # other formats have these pixels: test_export_conditions
        runs[0].export(tmp_path / "diffusers", format="diffusers")
