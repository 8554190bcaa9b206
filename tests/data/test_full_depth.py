"""Arrays that are no pictures: stored types, channels, axes and value maps, from files to samples in their units."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import unfog
from float_fields import FIELDS, TINY, planes, saved
from hostile import npy_with
from unfog.checks.run.run_checks import check_run
from unfog.cli.main import main
from unfog.config.requests.pack import PackRequest
from unfog.config.schema import Config
from unfog.data.full_depth.choice import choose_kept
from unfog.data.packs.pack import Pack
from unfog.data.prepare import prepare
from unfog.data.settings import Data
from unfog.data.sources.image_objects import Storing
from unfog.data.sources.registry import open_source
from unfog.data.sources.stored_images import StoredImages
from unfog.errors import RequestError
from unfog.evaluation.value_metrics import VALUE_METRICS
from unfog.inference.compare_images import Comparison
from unfog.pipeline.generate import sample_grid, view_grid
from unfog.pipeline.load_data import _warn_of_no_effect  # else each case makes a cache
from unfog.pipeline.pack import pack
from unfog.process.run_folder import RunFolder
from unfog.reporting.report import write_report
from unfog.values import value_maps
from unfog.values.colour_map import colour_table
from unfog.values.image_format import ImageFormat, StoredValues

RNG = np.random.default_rng(1)


@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
@pytest.mark.parametrize("kind", ["last", "first", "folder", "python", "list"])
def test_floats_of_four_channels_keep_their_values(tmp_path: Path, kind: str, cache: str) -> None:
    place: Path = tmp_path / "x.npy"
    match kind:
        case "last":
            saved(tmp_path, FIELDS)
        case "first":
            saved(tmp_path, planes(FIELDS))
        case "folder":
            (place := tmp_path / "images").mkdir()
            for i, image in enumerate(FIELDS):
                np.save(place / f"{i:03}.npy", image)
        case "python":
            place = StoredImages.store(FIELDS, storing=Storing.of(Data()))
        case "list":
            place = StoredImages.store(list(FIELDS), storing=Storing.of(Data()))
    made = prepare(open_source(place), Data(cache=cache))
    assert (made.settings.dtype, made.settings.channels, made.settings.size) == ("float32", 4, "16x12")
    assert np.array_equal(made.train.take(np.arange(24)).pixels, planes(FIELDS))


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((6, 8, 12, 5), np.uint8, None),
        ((6, 8, 40, 2), np.uint8, ("uint8", 2, "40x8")),
        ((6, 64, 272, 64), np.uint8, None),
        ((6, 7, 40, 32), np.int16, ("float32", 7, "32x40")),
        ((6, 12, 16), np.int16, ("float32", 1, "16x12")),
        ((6, 12, 16, 3), np.uint8, ("auto", 3, "16x12")),
        ((6, 4, 12, 16), np.uint8, ("auto", 3, "16x12")),
        ((6, 12, 16), np.uint16, ("auto", 1, "16x12")),
    ],
)
def test_types_and_channels_are_chosen_by_the_array(
    tmp_path: Path, shape: tuple[int, ...], dtype: type, expected: tuple[str, int, object] | None
) -> None:
    low = -1024 if dtype == np.int16 else 0
    place = saved(tmp_path, RNG.integers(low, 250, shape).astype(dtype))
    if expected is None:
        with pytest.raises(RequestError, match=r"--data\.axes NCHW"):
            open_source(place)
        assert open_source(place, axes="NHWC").read(0).shape == shape[1:]
        return
    made = prepare(open_source(place), Data(cache="memory")).settings
    assert (made.dtype, made.channels, made.size) == expected


def test_axes_decide_and_more_than_64_channels_are_refused(tmp_path: Path) -> None:
    place = saved(tmp_path, np.zeros((6, 8, 8, 8), np.uint8))
    with pytest.raises(RequestError, match=r"--data\.axes"):
        open_source(place)
    x = RNG.integers(0, 255, (3, 8, 8, 6)).astype(np.uint8)
    place = saved(tmp_path, x)
    assert np.array_equal(open_source(place, axes="NCHW").read(1), x[1].transpose(1, 2, 0))
    with pytest.raises(RequestError, match="at most 64"):
        open_source(saved(tmp_path, np.zeros((2, 8, 8, 65))), axes="NHWC")
    # A stored array has its axes with it, whatever is asked for later.
    stored = StoredImages.store(x, storing=Storing(axes="NCHW", keeps=True))
    for axes in ("auto", "NCHW", "NHWC"):
        assert np.array_equal(open_source(stored, axes=axes).read(1), x[1].transpose(1, 2, 0))


def test_four_channels_of_a_usual_range_are_kept_if_asked_for(tmp_path: Path) -> None:
    x = RNG.random((6, 12, 16, 4)).astype(np.float32)
    place = saved(tmp_path, x)
    assert prepare(open_source(place), Data(cache="memory")).settings.channels == 3  # with transparency, as before
    for asked in (Data(channels=4), Data(dtype="float32"), Data(map="standard")):
        made = prepare(open_source(place), asked)
        assert np.array_equal(made.train.pixels, planes(x))
    with pytest.raises(RequestError, match=r"data\.clip"):
        prepare(open_source(place), Data(dtype="float32", clip=True))
    with pytest.raises(RequestError, match=r"channels = 5.* 4 channels"):
        prepare(open_source(place), Data(channels=5))


def test_nan_and_what_a_type_does_not_hold_are_named(tmp_path: Path) -> None:
    x = FIELDS.copy()
    x[3, 0, 0, 1], x[17, 2, 2, 0] = np.nan, np.inf
    made = prepare(open_source(saved(tmp_path, x)), Data(cache="memory"))
    assert [(file.name, "NaN" in file.reason or "infinity" in file.reason) for file in made.report.skipped] == [
        ("00000003", True),
        ("00000017", True),
    ]
    assert "4 channels float32" in made.report.line()
    x = RNG.integers(0, 4096, (6, 12, 16)).astype(np.int32)
    x[2, 0, 0] = 70000
    made = prepare(open_source(saved(tmp_path, x)), Data(dtype="uint16", cache="memory", range=(0, 4095)))
    assert [file.name for file in made.report.skipped] == ["00000002"]
    assert made.train.pixels.dtype == np.uint16


HEADERS = (
    "{'descr': '<f4', 'fortran_order': False, 'shape': (12,16,4",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,16,4)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-12,16,4)}",
    "\0\1'''{'descr'",
    "{'descr': 3, 'fortran_order': False, 'shape': (12,16,4)}",
    "{'descr': '|O', 'fortran_order': False, 'shape': (12,16,4)}",
    "-" * 9000 + "1",
)


def test_files_of_a_folder_with_damaged_headers_are_left_out(tmp_path: Path) -> None:
    for i, header in enumerate(HEADERS):
        (tmp_path / f"0{i}.npy").write_bytes(npy_with(f"{header}\n", bytes(64)))
    for i, image in enumerate(FIELDS):
        np.save(tmp_path / f"1{i:02}.npy", image)
    made = prepare(open_source(tmp_path), Data(cache="memory"))
    assert [file.name for file in made.report.skipped] == [f"0{i}.npy" for i in range(len(HEADERS))]
    assert np.array_equal(made.train.pixels, planes(FIELDS))


def test_a_damaged_header_in_a_pack_is_said_in_words(tmp_path: Path) -> None:
    pack(PackRequest(str(saved(tmp_path, FIELDS)), tmp_path / "pack", Data()))
    for file in tmp_path.glob("pack/*.npy"):
        file.write_bytes(file.read_bytes().replace(b"}", b" ", 1))
    with pytest.raises(RequestError, match="damaged"):
        open_source(tmp_path / "pack")


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_scans_of_sixteen_bits_keep_all_levels(tmp_path: Path, suffix: str) -> None:
    x = RNG.integers(0, 4096, (6, 12, 16)).astype(np.uint16)
    x[0, 0, 0] = 4095
    (tmp_path / "scans").mkdir()
    for i, image in enumerate(x):
        Image.fromarray(image).save(tmp_path / "scans" / f"{i}.{suffix}")
    made = prepare(open_source(tmp_path / "scans"), Data(dtype="uint16", cache="memory"))
    assert made.settings.range == (0, 4095), "the bits of the sensor are the range"
    assert np.array_equal(made.train.pixels[:, 0], x)
    small = prepare(open_source(tmp_path / "scans"), Data(dtype="float32", size="8x6", cache="memory"))
    assert abs(small.train.pixels.mean() - x.mean()) < 100


def test_a_pack_of_floats_is_read_back(tmp_path: Path) -> None:
    place = saved(tmp_path, FIELDS)
    made = pack(PackRequest(str(place), tmp_path / "pack", Data()))
    assert Pack.verify(made) == []
    again = prepare(open_source(made), Data())
    assert np.array_equal(again.train.pixels, planes(FIELDS))
    assert Pack.open(made).manifest["statistics"]["mean"] == pytest.approx(FIELDS.mean((0, 1, 2)), abs=0.01)
    smaller = prepare(open_source(made), Data(size="8x6", dtype="float32", cache="memory"))
    assert smaller.train.pixels.shape == (24, 4, 6, 8)


KINDS = ["linear", "minmax", "percentile", "percentile:5", "standard", "log", "arcsinh", "log,standard,minmax,arcsinh"]


@pytest.mark.parametrize("text", KINDS)
def test_every_map_has_an_exact_inverse_also_far_outside(text: str) -> None:
    positive = np.abs(planes(FIELDS)) + 0.5
    maps = value_maps.fit(text, positive)
    values = StoredValues("float32", maps=maps)
    for scale in (1, 100):
        x = torch.from_numpy(positive * scale)
        assert torch.allclose(values.to_stored(values.to_model(x)), x, rtol=2e-4, atol=1e-3 * scale)
    below = torch.from_numpy(-positive)
    assert torch.allclose(values.to_stored(values.to_model(below)), below, rtol=1e-3, atol=1e-2)
    assert value_maps.maps_of(text, value_maps.flat(maps)) == maps, "settings hold all of a map"


def test_maps_are_what_their_names_say() -> None:
    x = torch.from_numpy(planes(FIELDS))
    for text, expected in [("standard", 0.5), ("minmax", 1.0)]:
        seen = StoredValues("float32", maps=value_maps.fit(text, x.numpy())).to_model(x)
        found = seen.std((0, 2, 3)) if text == "standard" else seen.abs().amax((0, 2, 3))
        assert torch.allclose(found, torch.full((4,), expected), atol=2e-3)
    linear = StoredValues("float32", maps=value_maps.fit("linear", x.numpy())).to_model(x)
    assert (linear.min(), linear.max()) == (pytest.approx(-1), pytest.approx(1))
    ranged = Data(dtype="float32", channels=4, size="16x12", map="linear", range=(-1000, 1000)).image_format
    assert torch.allclose(ranged.to_model(x), x / 1000)
    assert torch.allclose(ranged.to_stored(ranged.to_model(x)), x, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "said"),
    [("cubic", "linear, minmax"), ("percentile:60", "0 to 50"), ("log,log", "2 maps"), ("log", "arcsinh")],
)
def test_maps_that_do_not_fit_are_refused_with_a_remedy(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        value_maps.fit(text, planes(FIELDS))


def test_a_constant_channel_is_named() -> None:
    x = planes(FIELDS).copy()
    x[:, 2] = 7
    with pytest.raises(RequestError, match="channel 2 has the value 7"):
        value_maps.fit("standard", x)


@pytest.mark.parametrize("text", ["linear", "minmax", "standard"])
def test_values_that_are_all_equal_are_refused_without_another_map(text: str) -> None:
    with pytest.raises(RequestError, match="nothing to learn"):
        value_maps.fit(text, np.full((4, 2, 8, 8), -3, np.float32))


@pytest.mark.parametrize(
    ("text", "ends", "said"),
    [
        ("standard", (-3.4e38, 3.4e38), "missing values, store NaN"),
        ("minmax", (0, 3.4e38), "missing values, store NaN"),
        ("linear", (0, 3.4e38), "missing values, store NaN"),
        ("standard", (-9e29, 9e29), "another unit"),
        ("minmax", (0, 1e-44), "another unit"),
        ("arcsinh", (3.3e38, 3.4e38), "missing values, store NaN"),
        ("arcsinh", (1e-42, 1e3), "minmax"),
    ],
)
def test_a_map_that_neither_float32_nor_settings_hold_is_refused_before_training(
    text: str, ends: tuple[float, float], said: str
) -> None:
    """Settings that cannot be read back would lose a run."""
    values = np.where(np.arange(256).reshape(2, 2, 8, 8) % 3 > 0, *map(np.float32, ends))
    with pytest.raises(RequestError, match=said):
        value_maps.fit(text, values)


def test_types_that_do_not_hold_the_values_are_refused(tmp_path: Path) -> None:
    place = saved(tmp_path, np.concatenate([FIELDS, FIELDS[..., :1]], axis=3))
    for dtype, said in [("uint8", "5 channels; omit"), ("uint16", "give float32")]:
        with pytest.raises(RequestError, match=said):
            prepare(open_source(place, axes="NHWC"), Data(dtype=dtype))
    bytes_of_two = saved(tmp_path, RNG.integers(0, 255, (6, 8, 40, 2)).astype(np.uint8))
    assert prepare(open_source(bytes_of_two), Data(dtype="uint8")).settings.dtype == "uint8"


def test_a_range_is_said_to_change_nothing_only_where_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = open_source(saved(tmp_path, FIELDS))
    for settings, said in [
        (Data(dtype="float32", range=(-1000, 1000)), ""),
        (Data(map="arcsinh", range=(-1000, 1000)), "data.map = arcsinh"),
    ]:
        _warn_of_no_effect(settings, prepare(source, settings), from_python=False)
        found = capsys.readouterr().err
        assert said in found if said else not found


def test_one_channel_has_a_colour_map_and_a_bar_of_its_values() -> None:
    table = colour_table("viridis")
    published = {0: (68, 1, 84), 64: (59, 82, 139), 128: (33, 145, 140), 192: (94, 201, 98), 255: (253, 231, 37)}
    assert all(np.abs(table[i] - np.array(colour)).max() <= 2 for i, colour in published.items())
    assert np.array_equal(colour_table("grey")[:, 0], np.arange(256))
    maps = value_maps.fit("minmax", planes(FIELDS))
    config = Config(
        data=Data(size="16x12", channels=4, dtype="float32", map="minmax", map_values=value_maps.flat(maps))
    )
    grey, coloured = (config.with_view(view).view(FIELDS) for view in ("2", "2:viridis"))
    assert np.array_equal(table[grey[..., 0]], coloured)
    grid = sample_grid(coloured, ())
    with_bar = view_grid(config.with_view("2:viridis"), FIELDS, ())
    height = len(grid)
    assert np.array_equal(with_bar[:height], grid)
    bar = with_bar[height + 8]
    assert np.array_equal(bar[[0, -1]], table[[0, 255]])
    assert config.image_format.stored_value(2, 1.0) == pytest.approx(FIELDS[..., 2].max())
    assert len(view_grid(config.with_view("3,2,1"), FIELDS, ())) > height, "a line with the values of the colours"
    for wrong in ("0:jet", "3,2,1:viridis", "viridis", "0:"):
        with pytest.raises(RequestError, match="give such as"):
            config.with_view(wrong)
    pictures = RNG.integers(0, 255, (4, 16, 16, 3)).astype(np.uint8)
    of_pictures = Config(data=Data(size=16, channels=3))
    assert np.array_equal(view_grid(of_pictures, pictures, ()), sample_grid(pictures, ()))


def test_views_show_one_channel_or_three() -> None:
    maps = value_maps.fit("minmax", planes(FIELDS))
    format = ImageFormat(4, 12, 16, StoredValues("float32", maps=maps))
    grey = format.view(FIELDS, (2,))
    assert grey.shape == (24, 12, 16, 3)
    assert np.array_equal(grey[..., 0], grey[..., 1])
    assert (grey.min(), grey.max()) == (0, 255)
    colours = format.view(FIELDS, (3, 2, 1))
    assert np.array_equal(colours[..., 1], grey[..., 0])
    assert np.array_equal(format.view(FIELDS), format.view(FIELDS, (0, 1, 2)))
    with pytest.raises(RequestError, match="channels 0 to 3"):
        format.view(FIELDS, (4,))


@pytest.mark.slow
def test_a_run_trains_and_samples_in_the_units_of_its_source(tmp_path: Path) -> None:
    run = unfog.train(saved(tmp_path, FIELDS), out=tmp_path / "run", **TINY)
    samples = np.asarray(run.sample(3, steps=3))
    assert (samples.dtype, samples.shape) == (np.float32, (3, 12, 16, 4))
    assert samples[..., 3].mean() < -500, "the units of the source"
    assert run.view(samples, "3,2,1").shape == (3, 12, 16, 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path, dtype: str) -> None:
    place = saved(tmp_path, RNG.integers(0, 4096, (24, 12, 16)).astype(np.uint16))
    settings = TINY | {"steps": 4, "flip": True, "data": {"dtype": dtype}}
    whole = unfog.train(place, out=tmp_path / "whole", **settings, checkpoint={"every": 2})
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "00000004")
    again = unfog.resume(tmp_path / "half")
    assert again.step == 4
    assert np.array_equal(np.asarray(again.sample(3, steps=3)), np.asarray(whole.sample(3, steps=3)))


@pytest.mark.slow
def test_pictures_of_samples_are_beside_their_values(tmp_path: Path) -> None:
    run = unfog.train(saved(tmp_path, FIELDS), out=tmp_path / "run", **TINY)
    out = tmp_path / "samples"
    with pytest.raises(SystemExit) as ended:
        main(["sample", str(run.path), "-n", "2", "--steps", "2", "--view", "0", "--out", str(out)])
    assert ended.value.code == 0
    values = np.load(out / "000001.npy")
    assert (values.dtype, values.shape) == (np.float32, (12, 16, 4))
    assert np.array_equal(np.asarray(Image.open(out / "000001.png").convert("RGB")), run.view(values[None], "0")[0])
    assert (out / "grid.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data": {"jitter": 0.1}}, r"data\.jitter"),
        ({"evaluate": {"metrics": "kid"}}, r"evaluate\.metrics"),
        ({"data": {"aspect": "keep"}}, r"data\.aspect"),
    ],
)
def test_what_is_for_pictures_alone_is_refused(tmp_path: Path, settings: dict[str, object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        unfog.train(saved(tmp_path, FIELDS), out=tmp_path / "run", **TINY | settings)


@pytest.mark.slow
def test_pipelines_edits_and_metrics_of_pictures_are_refused(tmp_path: Path) -> None:
    run = unfog.train(saved(tmp_path, FIELDS), out=tmp_path / "run", **TINY)
    with pytest.raises(RequestError, match=r"pipelines of diffusers make pictures.*--format denoiser"):
        run.export(tmp_path / "model", format="diffusers")
    with pytest.raises(RequestError, match="images to edit are pictures"):
        run.sample(1, image=np.zeros((12, 16), np.uint8))
    with pytest.raises(RequestError, match="compare pictures"):
        run.evaluate("kid", n=10)


@pytest.mark.slow
def test_values_are_measured_in_training_by_evaluate_by_the_doctor_and_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = ",".join(VALUE_METRICS)
    evaluate = {"every": 2, "metrics": [*VALUE_METRICS], "samples": 10, "metrics_every": 2}
    run = unfog.train(saved(tmp_path, FIELDS), out=tmp_path / "run", **TINY | {"evaluate": evaluate})
    last = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])
    assert all(last[name] > 0 and last[f"{name}_real"] > 0 for name in VALUE_METRICS)
    assert run.evaluate(values, n=10)["correlation"].real_high < 1

    with pytest.raises(RequestError, match=r"inception.*mean nothing"):
        run.evaluate(n=10, features="inception")
    found = run.evaluate(n=10)
    parts = [f"{name}_{c}" for name in VALUE_METRICS[:2] for c in range(4)]
    assert {one.metric for one in found.measured} == {*VALUE_METRICS, *parts}
    assert found.verdict.startswith("The samples are farther from real images")
    folder = next(path for path in (run.path / "evaluations").iterdir() if (path / "spectrum-3.svg").is_file())
    assert (folder / "histogram-0.svg").read_text().startswith("<svg xmlns")
    assert run.evaluate(n=10).measured == found.measured
    assert "measured before" in capsys.readouterr().err

    report = write_report(run.path).read_text()
    assert "histogram of channel 3" in report
    codes = {finding.code: finding for finding in check_run(RunFolder(run.path), "cpu", samples=12)}
    assert {f"run.{name}" for name in VALUE_METRICS} <= {*codes}
    assert "halves of as many training images" in codes["run.spectrum"].evidence


@pytest.mark.slow
def test_arrays_are_compared_without_a_run(tmp_path: Path) -> None:
    found = unfog.evaluate(FIELDS[:12], saved(tmp_path, FIELDS), device="cpu")
    assert {*VALUE_METRICS} <= {one.metric for one in found.measured}
    assert len(found.curves) == 8
    shifted = unfog.evaluate(FIELDS[:12] / 2, FIELDS, "histogram,correlation", device="cpu")
    assert shifted["histogram"].value > shifted["histogram"].real_high
    with pytest.raises(RequestError, match=r"4 channels.*2 channels"):
        unfog.evaluate(FIELDS[:12], FIELDS[..., :2], device="cpu")
    pictures = RNG.integers(0, 255, (24, 8, 8, 3)).astype(np.uint8)
    assert unfog.evaluate(pictures[:12], pictures, "spectrum", device="cpu")["spectrum_2"].features == "blue"


def test_metrics_of_pictures_are_refused_for_any_set_of_other_values(tmp_path: Path) -> None:
    made = prepare(open_source(saved(tmp_path, FIELDS)), Data(cache="memory"))
    with pytest.raises(RequestError, match=r"4 channels of float32.*spectrum"):
        Comparison(("sliced",), None, made.train, np.arange(10))
    assert Comparison(("held_out",), None, made.train, np.arange(10)).real_features is None


def test_arrays_in_sub_folders_have_these_as_classes(tmp_path: Path) -> None:
    for i, image in enumerate(FIELDS):
        (tmp_path / "x" / ("ice", "sea")[i % 2]).mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "x" / ("ice", "sea")[i % 2] / f"{i:03}.npy", image)
    (tmp_path / "x/readme.txt").write_text("fields")
    (tmp_path / "x/linked").symlink_to(tmp_path / "x/ice")
    source = open_source(tmp_path / "x")
    made = prepare(source, Data(cache="memory"))
    assert (made.train.classes, len(made.train), made.settings.channels) == (("ice", "sea"), 24, 4)
    assert np.array_equal(made.train.pixels, planes(np.concatenate([FIELDS[::2], FIELDS[1::2]])))
    assert [one.name for one in source.unreadable] == ["linked/"]
    # One picture makes it a folder of pictures, as before.
    Image.new("RGB", (8, 8)).save(tmp_path / "x/ice/a.png")
    assert list(open_source(tmp_path / "x").names) == ["ice/a.png"]


@pytest.mark.slow
def test_half_precision_keeps_eleven_bits_in_half_of_the_space(tmp_path: Path) -> None:
    x = FIELDS.copy()
    x[3, 0, 0, 3] = 70_000  # beyond float16
    made = pack(PackRequest(str(saved(tmp_path, x)), tmp_path / "pack", Data(dtype="float16", held_out=0)))
    opened = Pack.open(made)
    assert [one.name for one in opened.report.skipped] == ["00000003"]
    expected = planes(np.delete(x, 3, 0)).astype(np.float16)
    assert np.array_equal(np.asarray(opened.images.pixels), expected)
    assert opened.images.pixels.dtype == np.float16
    data = {"flip": True, "held_out": 0}
    run = unfog.train(made, out=tmp_path / "run", data=data, **TINY)
    assert run.sample(2, steps=2).dtype == np.float32
    direct = {"dtype": "float16", "range": (-5000, 5000), "cache": "none"}
    again = unfog.train(tmp_path / "x.npy", out=tmp_path / "again", data=direct, **TINY)
    assert np.isfinite(again.sample(2, steps=2)).all()


def test_the_file_of_the_first_image_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    source, looked_at = open_source(tmp_path), list[Image.Image]()
    read = source.read
    monkeypatch.setattr(source, "read", lambda i: looked_at.append(read(i)) or looked_at[-1])
    assert choose_kept(source, Data()) is None
    assert [image.fp for image in looked_at] == [None]


@pytest.mark.parametrize("suffix", [".png", ".npy"])
def test_images_of_another_depth_are_named_where_values_are_kept(tmp_path: Path, suffix: str) -> None:
    for i in range(4):
        values = np.random.default_rng(i).integers(0, 4096, (8, 8)).astype(np.uint16)
        values = values if i else (values >> 4).astype(np.uint8)
        if suffix == ".npy":
            np.save(tmp_path / f"{i}.npy", values)
        else:
            Image.fromarray(values).save(tmp_path / f"{i}.png")
    warnings = prepare(open_source(tmp_path), Data(dtype="float32")).warnings
    assert f"1 of 8 bits, such as 0{suffix}" in "".join(warnings)
    assert not prepare(open_source(tmp_path), Data(dtype="uint8")).warnings
    (tmp_path / "labels.csv").write_text("file,label\n" + "".join(f"{i}{suffix},{'ab'[i % 2]}\n" for i in range(4)))
    labelled = prepare(open_source(tmp_path), Data(dtype="float32", labels="labels.csv"))
    assert labelled.train.classes == ("a", "b")
    assert f"1 of 8 bits, such as 0{suffix}" in "".join(labelled.warnings)
    (tmp_path / "labels.csv").unlink()
    (tmp_path / f"0{suffix}").unlink()
    assert not prepare(open_source(tmp_path), Data(dtype="float32")).warnings
